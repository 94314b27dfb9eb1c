"""Capture a prepared model as a raw joint graph with Dynamo and AOTAutograd.

Of the modules of `autopar.capture`, only these depend on private modules of torch. `prepare_call`
replaces the tensors of the model and its arguments with fake tensors. `raw_joint` captures with
Dynamo, detaches the results that are not differentiated (`autopar.capture.dynamo.outputs`), and
runs AOTAutograd to trace forward and backward together, or only forward if no result requires a
gradient. All tensors are FakeTensors on the CPU, regardless of the device of the weights: with fake
``meta`` tensors, the backward would be missing without an error, and fake ``cuda`` tensors need a
CUDA build of torch.
"""
