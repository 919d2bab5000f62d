"""Chen's analysis on PyTorch's own training graph: forward and backward together, as AOTAutograd hands them over.

graphs      the value type: nodes, storages, what may be run again                                (no torch)
liveness    exact bytes over time of any order of (re)computations                               (no torch)
arena       offsets of all blocks in one arena, close to what is alive                           (no torch)
blocks      the lifetimes of all blocks of a program                                             (no torch)
inplace     which results take the storage of a dead input                                       (no torch)
inplace_ops the operators that can, and how they are called
cuts        the forward as positions, and where little crosses                                   (no torch)
replay      what is kept, as a program                                                           (no torch)
strategies/ Chen's: drop-cheap, √n, algorithm 3, the recursion                                   (no torch)
reduced     the graph without what is free                                                       (no torch)
optimum     the true optimum of a small graph, a mixed-integer program: the yardstick            (no torch)
reuse       Chen's sharing of whole buffers, its baseline                                        (no torch)
pictures    the arena, time × address
capture     the joint graph of AOTAutograd as such a value
op_costs    seconds and workspace of each operator, measured once per signature
segments    the forward as a chain, cut where little is alive                                    (no torch)
menus       what a segment may keep for its backward                                             (no torch)
programs    from a chain's schedule to an order of executions                                    (no torch)
refinement  an order made faster within its budget, by single nodes and exact bytes              (no torch)
planning    the fastest order found within a budget                                              (no torch)
dropout     dropout to eager's bits, its mask in bytes
emission    an order as two FX graphs
lowering    an FX graph as straight-line Python that frees as it goes
fusing      the same in pieces that Inductor compiles, so that what is run again stays run again
gates       gradients handed to autograd as early as it would make them
tracing     the joint graph of a model, nothing run
table       Chen's table: bytes and time of every way to run the step                            (no torch)
compilation one graph as AOTAutograd compiles it
weighing    what a call really takes, counted piece by piece
sharing     one budget for the calls of several graphs                                           (no torch)
parts       the graphs of one model: compiled, weighed, compiled anew for their share of the budget
backend     `torch.compile(model, backend="remat")`
"""
