"""What faults are planted in: small models with their plans, and the three judges that a fault has
to get past.

A fault breaks autopar at one place while the plan is emitted, validated and run again; the plan,
the captured model and its batch are those of before. One that changes what a plan is made of (a
price) is there while it is planned, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

import autopar
from autopar.api.planning import plan_model
from autopar.api.tracing import as_planned, staged_trace
from autopar.capture import Trace
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.emit import emit
from autopar.plans import Plan
from autopar.program.program import Program, StageProgram
from autopar.validation import Validation, microbatch_graphs, op_law, validate
from autopar.verification import Verification, verify_program

Call = tuple[nn.Module, dict[str, torch.Tensor]]
_REMEMBERED = (op_law._judge, op_law._on_one_axis, op_law._trials, microbatch_graphs._place_results)


def forget() -> None:
    """Let validation look anew at what it has looked at before."""
    for each in _REMEMBERED:
        each.cache_clear()


def nodes(graph: fx.Graph, name: str) -> list[fx.Node]:
    """The nodes of a graph that call a function of this name, such as ``all_reduce`` or
    ``add.Tensor``."""
    called = [n for n in graph.nodes if n.op == "call_function"]
    found = [n for n in called if str(getattr(n.target, "__name__", "")) == name]
    assert found, f"the graph calls no {name}: {sorted({n.target.__name__ for n in called})}"
    return found


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """What a graph is given."""
    return [n for n in graph.nodes if n.op == "placeholder"]


def results(graph: fx.Graph) -> list[fx.Node]:
    """What a graph returns."""
    return list(next(iter(reversed(graph.nodes))).args[0])


def returns(graph: fx.Graph, made: Sequence[fx.Node]) -> None:
    """Let a graph return something else."""
    next(iter(reversed(graph.nodes))).args = (tuple(made),)


def stage(program: Program, number: int = 0) -> StageProgram:
    """The program of a stage."""
    return program.stages[number]


def with_stage(program: Program, number: int = 0, **changes: Any) -> Program:
    """A program with the program of one of its stages changed."""
    stages = list(program.stages)
    stages[number] = replace(stages[number], **changes)
    return replace(program, stages=tuple(stages))


@dataclass
class Subject:
    """A model with a plan of it.

    Attributes:
        build: makes the model and its batch. options: of `autopar.plan`. hardware: a profile or its
            name.
    """

    build: Callable[[], Call]
    mesh: Mesh
    constraints: Sequence[Any] = ()
    hardware: str | HardwareProfile = "h100-sxm"
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def call(self) -> Call:
        """The model, with weights that are the same each time, and its batch."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return self.build()

    @property
    def profile(self) -> HardwareProfile:
        """The hardware."""
        return (
            self.hardware
            if isinstance(self.hardware, HardwareProfile)
            else HardwareProfile.load(self.hardware)
        )

    def plan_again(self) -> tuple[Trace, Plan]:
        """The captured call, and the plan as it is made now."""
        model, batch = self.call
        trace, planned = plan_model(
            model,
            self.mesh,
            example_inputs=batch,
            hardware=self.profile,
            constraints=self.constraints,
            **self.options,
        )
        return trace, planned.plan

    @cached_property
    def planned(self) -> tuple[Trace, Plan]:
        """The captured call, and the plan without a fault."""
        return self.plan_again()

    @property
    def trace(self) -> Trace:
        """What the plan is for."""
        return as_planned(*self.planned)

    @cached_property
    def staged(self) -> tuple[Any, ...]:
        """The microbatch's trace, how microbatches make the batch, and the stages."""
        model, batch = self.call
        return staged_trace(self.planned[1], model, self.planned[0], (), batch)

    def emit(self) -> Program:
        """The program of the plan, as it is emitted now."""
        part, how, made = self.staged
        return emit(part, self.planned[1], how, made)

    def validate(self, program: Program) -> Validation:
        """Validation of a program."""
        return validate(self.trace, self.planned[1], program)

    def verify(self, program: Program, dtype: torch.dtype | None = torch.float64) -> Verification:
        """The program against the plain model."""
        model, batch = self.call
        return verify_program(self.trace, program, model, (), batch, dtype=dtype)

    def check(self, plan: Plan) -> Any:
        """The certificate of a plan."""
        model, batch = self.call
        return autopar.check(plan, model, batch, hardware=self.profile)
