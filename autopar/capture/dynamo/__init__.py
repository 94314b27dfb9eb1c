"""Capture a prepared model as a raw joint graph with Dynamo and AOTAutograd.

Only these modules of `autopar.capture` depend on torch's private modules. `prepare_call` makes the
model and its arguments fake. `raw_joint` captures with Dynamo, detaches the results that are not
differentiated (`autopar.capture.dynamo.outputs`), and lets AOTAutograd trace forward and backward
together, or forward alone if nothing has a gradient. All tensors are FakeTensors on the CPU,
whatever device the weights are on: a fake ``meta`` model silently loses its backward, and fake
``cuda`` tensors need a CUDA build.
"""
