"""Constraints on plans. They are hard: strategies that do not meet a constraint are not considered.

`layout` forces layouts by module pattern. `ddp`, `fsdp`, `tensor_parallel`, `context_parallel`,
`expert_parallel` and `megatron` are named plans on some mesh axes, for any model; the planner
decides on the other axes. `pipeline` cuts the model into stages along an axis. `offload` allows the
planner to use the hosts' memory. `rests_as` forces the storage layouts of another plan.
"""

from __future__ import annotations

from autopar.constraints.layouts import KINDS, LayoutConstraint, Resting, layout, rests_as
from autopar.constraints.megatron import Megatron, Recompute, megatron
from autopar.constraints.parallel import (
    Parallelism,
    axes_of,
    context_parallel,
    ddp,
    expert_parallel,
    fsdp,
    tensor_parallel,
)
from autopar.constraints.resources import Offloaded, Pipelined, offload, pipeline
from autopar.constraints.text import read_constraint
from autopar.constraints.together import (
    Constraint,
    check,
    check_number,
    parallelisms,
    pipeline_in,
    speak_of,
)

__all__ = [
    "KINDS",
    "Constraint",
    "LayoutConstraint",
    "Megatron",
    "Offloaded",
    "Parallelism",
    "Pipelined",
    "Recompute",
    "Resting",
    "axes_of",
    "check",
    "check_number",
    "context_parallel",
    "ddp",
    "expert_parallel",
    "fsdp",
    "layout",
    "megatron",
    "offload",
    "parallelisms",
    "pipeline",
    "pipeline_in",
    "read_constraint",
    "rests_as",
    "speak_of",
    "tensor_parallel",
]


def __dir__() -> list[str]:
    """List the functions that users call."""
    called = (
        context_parallel,
        ddp,
        expert_parallel,
        fsdp,
        layout,
        megatron,
        offload,
        pipeline,
        read_constraint,
        rests_as,
        tensor_parallel,
    )
    return [function.__name__ for function in called]
