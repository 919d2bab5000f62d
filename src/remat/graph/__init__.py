"""Chen's analysis on PyTorch's own training graph: forward and backward together, as AOTAutograd hands them over.

graphs      the value type: nodes, storages, what may be run again                                (no torch)
liveness    exact bytes over time of any order of (re)computations                               (no torch)
capture     the joint graph of AOTAutograd as such a value
op_costs    seconds and workspace of each operator, measured once per signature
"""
