"""The only modules of capture that lean on torch's private modules: a model in, a raw joint graph
out.

`prepared` makes the model and its arguments fake. `raw_joint` captures with Dynamo, detaches the
results that no backward goes through (`autopar.capture.dynamo.outputs`), and lets AOTAutograd trace
forward and backward together, or forward alone where nothing has a gradient. Everything runs on
FakeTensors on the cpu, whatever device the weights are on: a fake ``meta`` model silently loses its
backward, and fake ``cuda`` tensors need a CUDA build.
"""
