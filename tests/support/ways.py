"""Ways to plan a small model: one plan of each kind that the planner makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hosts import quick_hosts
from overlapping import NORMING, overlapping
from torch import nn

import autopar
from autopar.constraints import (
    context_parallel,
    ddp,
    expert_parallel,
    fsdp,
    layout,
    megatron,
    offload,
    pipeline,
    tensor_parallel,
)
from autopar.core.hardware import Hardware, HardwareProfile, Mixed
from autopar.core.mesh import Mesh
from autopar.plans import Plan
from benchmarks.random_plans import prepare, random_plan

LINE, THREE = {"gpu": 2}, {"gpu": 3}
SQUARE, CUBE = {"data": 2, "tensor": 2}, {"a": 2, "b": 2, "c": 2}


_H100 = partial(HardwareProfile.load, "h100-sxm")
_GLOO = partial(HardwareProfile.load, "cpu-gloo")


@dataclass(frozen=True)
class Way:
    """The settings of a plan.

    Attributes:
        mesh: number of devices by axis.
        options: options of `autopar.plan`.
        hardware: returns one profile or several.
        seed: seed of a random legal plan, which the planner would not choose; None for the plan of
            the planner.
    """

    mesh: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    hardware: Callable[[], Hardware] = _H100
    seed: int | None = None

    def plan(self, model: nn.Module, batch: Mapping[str, Any]) -> Plan:
        """Return the plan of a model and its batch."""
        mesh, hardware = Mesh(dict(self.mesh)), self.hardware()
        if self.seed is not None:
            assert isinstance(hardware, HardwareProfile), "random plans need equal devices"
            prepared = prepare(model, batch, mesh, hardware)
            return random_plan(prepared, self.seed, in_order=bool(self.seed % 2))[0]
        how = dict(self.options)
        return autopar.plan(model, mesh, example_inputs=dict(batch), hardware=hardware, **how)


def forced(mesh: Mapping[str, int], *constraints: Any, **options: Any) -> Way:
    """Return a way with constraints."""
    return Way(mesh, {"constraints": constraints, **options})


def _mixed(axis: str) -> Hardware:
    names = ("h100-sxm", "a100-sxm-80gb")
    return Mixed(axis, tuple(map(HardwareProfile.load, names)))


_STAGES = partial(pipeline, "data", microbatches=2)

WAYS: Mapping[str, Way] = {
    "free": Way(SQUARE),
    "alone": Way({"gpu": 1}),
    "one axis of one": Way({"node": 1, "gpu": 2}),
    "cpu": Way(SQUARE, hardware=_GLOO),
    "ddp": forced(LINE, ddp()),
    "fsdp": forced(LINE, fsdp()),
    "fsdp of three": forced(THREE, fsdp()),
    "fsdp on cpu": Way(SQUARE, {"constraints": (fsdp(),)}, _GLOO),
    "zero 1": forced(LINE, megatron(dp=2, zero=1, microbatches=2)),
    "zero 2": forced(LINE, megatron(dp=2, zero=2)),
    "tensor": forced(LINE, tensor_parallel("1d", axes="gpu")),
    "tensor and sequence": forced(LINE, tensor_parallel("1d", axes="gpu", sequence=True)),
    "tensor 2d": forced(SQUARE, tensor_parallel("2d", axes=("data", "tensor"))),
    "tensor 2.5d": forced(CUBE, tensor_parallel("2.5d", axes=("a", "b", "c"))),
    "tensor 3d": forced(CUBE, tensor_parallel("3d", axes=("c", "b", "a"))),
    "context": forced(LINE, context_parallel("gpu")),
    "megatron": forced(SQUARE, megatron(tp=2, dp=2, zero=3, recompute="full")),
    "experts dispatched": forced(SQUARE, expert_parallel("tensor", "dispatched"), ddp("data")),
    "experts gathered": forced(LINE, expert_parallel("gpu", "gathered")),
    "stages": forced(SQUARE, _STAGES()),
    "gpipe": forced(SQUARE, _STAGES(schedule="gpipe")),
    "interleaved": forced(SQUARE, _STAGES(schedule="interleaved_1f1b")),
    "stages alone": forced({"data": 2}, _STAGES(microbatches=1)),
    "stages of fsdp": Way(SQUARE, {"constraints": (_STAGES(), fsdp("tensor"))}, _GLOO),
    "microbatches": Way(LINE, {"num_microbatches": 2}),
    "microbatches of fsdp": Way(LINE, {"num_microbatches": 2, "constraints": (fsdp(),)}, _GLOO),
    "inference": Way(SQUARE, {"inference": True}),
    "inference in stages": forced(SQUARE, _STAGES(), inference=True),
    "inference of fsdp": forced(LINE, fsdp(), inference=True),
    "loss alone": Way(LINE, {"outputs": "loss"}),
    "outputs in parts": Way(LINE, {"outputs": "dtensor"}),
    "bf16": Way(LINE, {"precision": "bf16"}),
    "sgd": Way(LINE, {"optimizer": "sgd"}),
    "offload": Way(LINE, {"constraints": (offload(),)}, quick_hosts),
    "on the hosts": Way(LINE, {"constraints": (layout("*", storage="S(0) host"),)}, quick_hosts),
    "kernels": Way(
        LINE,
        {"constraints": (megatron(tp=2, sequence=True),)},
        partial(overlapping, kernels=NORMING),
    ),
    "kernels in stages": Way(
        {"data": 2, "tensor": 2},
        {"constraints": (megatron(tp=2, pp=2, microbatches=2, sequence=True),)},
        overlapping,
    ),
    "mixed in lockstep": Way(SQUARE, {}, partial(_mixed, "data")),
    "mixed stages": Way(SQUARE, {"constraints": (_STAGES(),)}, partial(_mixed, "data")),
    "mixed stages, interleaved": Way(
        SQUARE,
        {"constraints": (_STAGES(schedule="interleaved_1f1b"),)},
        partial(_mixed, "data"),
    ),
    "random": Way(SQUARE, seed=0),
    "random on cpu": Way(SQUARE, hardware=_GLOO, seed=1),
    "random of three": Way(THREE, seed=2),
}
