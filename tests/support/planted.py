"""Subjects of planted faults: small models with their plans, and the three checks that should
detect a fault.

A fault changes autopar at one place while the plan is emitted, validated and run. The plan, the
captured model and its batch are unchanged. A fault of planning itself (for example, of a price) is
also active during planning.
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
    """Clear the caches of validation."""
    for each in _REMEMBERED:
        each.cache_clear()


def nodes(graph: fx.Graph, name: str) -> list[fx.Node]:
    """Return the nodes of a graph that call a function with a name such as ``all_reduce`` or
    ``add.Tensor``."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    matches = [n for n in calls if str(getattr(n.target, "__name__", "")) == name]
    assert matches, f"the graph calls no {name}: {sorted({n.target.__name__ for n in calls})}"
    return matches


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders of a graph."""
    return [n for n in graph.nodes if n.op == "placeholder"]


def results(graph: fx.Graph) -> list[fx.Node]:
    """Return the results of a graph."""
    return list(next(iter(reversed(graph.nodes))).args[0])


def returns(graph: fx.Graph, values: Sequence[fx.Node]) -> None:
    """Replace the results of a graph."""
    next(iter(reversed(graph.nodes))).args = (tuple(values),)


def stage(program: Program, number: int = 0) -> StageProgram:
    """Return the program of a stage."""
    return program.stages[number]


def with_stage(program: Program, number: int = 0, **changes: Any) -> Program:
    """Return a program in which one stage program is changed."""
    stages = list(program.stages)
    stages[number] = replace(stages[number], **changes)
    return replace(program, stages=tuple(stages))


@dataclass
class Subject:
    """A model with a plan.

    Attributes:
        build: returns the model and its batch.
        options: options of `autopar.plan`.
        hardware: a profile or its name.
    """

    build: Callable[[], Call]
    mesh: Mesh
    constraints: Sequence[Any] = ()
    hardware: str | HardwareProfile = "h100-sxm"
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def call(self) -> Call:
        """The model, with reproducible weights, and its batch."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return self.build()

    @property
    def profile(self) -> HardwareProfile:
        """The hardware profile."""
        return (
            self.hardware
            if isinstance(self.hardware, HardwareProfile)
            else HardwareProfile.load(self.hardware)
        )

    def plan_again(self) -> tuple[Trace, Plan]:
        """Return the captured call and a new plan."""
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
        """The captured call and the plan without a fault."""
        return self.plan_again()

    @property
    def trace(self) -> Trace:
        """The trace that the plan belongs to."""
        return as_planned(*self.planned)

    @cached_property
    def staged(self) -> tuple[Any, ...]:
        """The trace of a microbatch, the microbatching, and the stages."""
        model, batch = self.call
        return staged_trace(self.planned[1], model, self.planned[0], (), batch)

    def emit(self) -> Program:
        """Emit the program of the plan."""
        part, how, stages = self.staged
        return emit(part, self.planned[1], how, stages)

    def validate(self, program: Program) -> Validation:
        """Validate a program."""
        return validate(self.trace, self.planned[1], program)

    def verify(self, program: Program, dtype: torch.dtype | None = torch.float64) -> Verification:
        """Compare a program with the plain model."""
        model, batch = self.call
        return verify_program(self.trace, program, model, (), batch, dtype=dtype)

    def check(self, plan: Plan) -> Any:
        """Check the certificate of a plan."""
        model, batch = self.call
        return autopar.check(plan, model, batch, hardware=self.profile)
