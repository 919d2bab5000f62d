"""A step as a graph: traced once, split into forward and backward, lowered, and run in place of the step.

tracing      the step and its derivative as one functional graph over aten operators, or a reason why not
layouts      channels last, where a step convolves
convolutions taken apart: those of 1×1 as products, gradients of biases as sums
graphs       small tools on such graphs: what depends on what, simplification, copying of parts
splitting    what is kept between forward and backward, by cut
products     matrix products by oneDNN, where that is faster
deferring    gradients of parameters as a few products over many steps
programs     the graphs that are run: advance, record, backward, finish
lowering     a graph as a Python function over aten operators
fusing       a graph through Inductor
stages       the loop's stages over these programs
passes       tapes of ranges consumed, and what is summed on the way
ranges       the loop's recorder
"""
