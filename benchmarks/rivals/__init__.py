"""Memory and recomputation on one process: autopar's plans compared with the alternatives of a
user.

Terms. A *variant* is one way to run forward and backward of one model. Its *activation peak* is the
peak of live tensor bytes without parameters, buffers, inputs and gradients. A gradient is a storage
that is some parameter's `.grad` at the end of backward. *Flops* are those of the executed ops, in
torch's graphs and in autopar's.
"""
