"""Memory against recomputation on one process: autopar's plans beside what a user would pick
instead.

Terms. A *variant* is one way to run forward and backward of one model. Its *activation peak* is the
peak of live tensor bytes without parameters, buffers, inputs and gradients; a gradient is a storage
that is some parameter's `.grad` when backward ends. *Flops* are those of the ops that ran, counted
as they ran, in torch's graphs as in autopar's.
"""
