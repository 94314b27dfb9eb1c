"""A `Program`: what a plan is emitted into. Local shapes, explicit collectives, forward and backward apart.

The forward graph takes the local parameters, buffers and inputs, and returns one flat tuple: the outputs, the new values of
mutated buffers, then the saved values. The backward graph takes the saved values and a tangent per output that has one (the
loss; what crosses to the stage after) and returns one gradient per parameter that has one, each in the parameter's storage
layout, then one per input that has one (what crosses from the stage before), as the input lies.

Nodes are aten ops, the functions of `autopar.ops`, and the steps of `autopar.kernels.collectives`, which name mesh axes
by index; `autopar.run` binds these to process groups, the lockstep interpreter runs them over a list of virtual ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.layout import Layout
from autopar.mesh import Mesh


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """A tensor at the border of the program.

    Attributes:
        name: parameter or buffer name, input path or output path.
        shape: global shape as the user knows it.
        view: global shape in the graph (see `autopar.capture.trace.Parameter.view`); equal to `shape` for inputs and outputs.
        layout: layout over the dims of `view`. For parameters this is the storage layout.
        has_gradient: whether the backward graph returns its gradient; for outputs, whether it takes its tangent.
        is_loss: outputs only.
        crosses: whether it comes from the stage before, or goes to the stage after; always local.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    aliases: tuple[str, ...] = ()
    requires_grad: bool = False
    has_gradient: bool = False
    is_loss: bool = False
    crosses: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """The emitted program of one stage.

    Attributes:
        forward: placeholders in the order parameters, buffers, inputs.
        backward: placeholders in the order saved values, tangents.
        num_saved: how many of the forward's last results are saved for backward.
        mutated: names of the buffers whose new values follow the outputs, in order.
        in_spec, out_spec, constants, settings: as in `autopar.capture.trace.Trace`.
        collectives: every emitted collective with the node it feeds: (phase, node key, Collective) tuples.
    """

    mesh: Mesh
    forward: fx.GraphModule
    backward: fx.GraphModule
    parameters: tuple[ProgramTensor, ...]
    buffers: tuple[ProgramTensor, ...]
    inputs: tuple[ProgramTensor, ...]
    outputs: tuple[ProgramTensor, ...]
    num_saved: int
    mutated: tuple[str, ...]
    in_spec: Any
    out_spec: Any
    constants: Mapping[int, Any]
    collectives: tuple[tuple[str, str, Any], ...]
    plan_hash: str = ""
    settings: Mapping[int, Any] = field(default_factory=dict)
