"""Inputs that forward changes in place: the caller's tensors, of which a rank has parts or copies."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput

from autopar.capture.labels import recorded_module
from autopar.capture.refusals import user_line
from autopar.capture.trees import argument_name
from autopar.errors import CaptureError, Where


def refuse_changed_inputs(graph: fx.Graph, leaves: Sequence[tuple[str, Any]], model: nn.Module) -> None:
    """Raise CaptureError at the first input that forward changes in place; `leaves` are the call's, by path."""
    output = next(iter(reversed(graph.nodes)))
    returned: Any = output.args[0]
    for desc, node in zip(output.meta["desc"], returned, strict=True):
        if isinstance(desc, InputMutationAOTOutput) and isinstance(desc.mutated_input, PlainAOTInput):
            name = argument_name(leaves[desc.mutated_input.idx][0], list(inspect.signature(model.forward).parameters))
            held = "x" if "." in name else name
            raise CaptureError(
                f"forward changes its input {name!r} in place: the caller's tensor, which no program writes to",
                where=Where(module=recorded_module(node.meta), source=user_line(node.meta.get("stack_trace") or "")),
                remedy=f"let forward change a copy (`{held} = {held}.clone()` before), or compute a new tensor: x.masked_fill(...) in "
                "place of x.masked_fill_(...), a module with `inplace=False`",
            )
