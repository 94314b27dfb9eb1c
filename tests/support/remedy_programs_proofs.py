"""Programs for the remedies of validation, verification and certificates: changed programs, models
and plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar import Mesh, Plan
from autopar.api.tracing import staged_trace
from autopar.capture import capture
from autopar.core.hardware import HardwareProfile
from autopar.emit import emit
from autopar.planner import PlanOptions, make_plan
from autopar.validation import validate
from autopar.validation.microbatch_graphs import validate_microbatches
from autopar.verification import verify_program
from tests.support.mlp import Mlp
from tests.support.remedy_programs import Program

_X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)
_HARDWARE = HardwareProfile.load("cpu-gloo")


class Scaled(nn.Module):
    """A linear layer times a Python number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)).square().mean() * self.scale


class Drawing(Scaled):
    """Draws random numbers, some of which are not read (`unread`) or have another distribution."""

    def __init__(self, unread: bool = False, kind: str = "normal") -> None:
        super().__init__()
        self.unread, self.kind = unread, kind

    def forward(self, x: Tensor) -> Tensor:
        if self.unread:
            torch.randn(3)
        noise = (
            torch.randn_like(x) if self.kind == "normal" else torch.empty_like(x).geometric_(0.5)
        )
        return self.layer(x * noise).square().mean()


def _verify(
    kind: Callable[[], nn.Module] = Scaled,
    *,
    model: Callable[[Any], object] = lambda model: None,
    program: Callable[[Any], object] = lambda program: None,
    **how: Any,
) -> Callable[[], object]:
    """Verify a program after changes of the model or of the program."""

    def work() -> object:
        plain = kind()
        trace = capture(plain, (_X,))
        result = make_plan(trace, Mesh(2), _HARDWARE, PlanOptions())
        emitted_program = emit(trace, result.plan)
        other = model(plain)
        program(emitted_program)
        return verify_program(
            trace,
            emitted_program,
            other if isinstance(other, nn.Module) else plain,
            (_X,),
            {},
            **how,
        )

    return work


def _validate(change: Callable[[Any], Any]) -> Callable[[], object]:
    """Validate a changed program."""

    def work() -> object:
        trace = capture(Scaled(), (_X,))
        plan = make_plan(trace, Mesh(2), _HARDWARE, PlanOptions()).plan
        return validate(trace, plan, change(emit(trace, plan)))

    return work


def _wrong_node(program: Any) -> None:
    """Double the result of a node of the forward graph."""
    forward = program.stages[0].forward
    graph = forward.graph
    node = next(n for n in graph.nodes if "tanh" in str(n.target))
    with graph.inserting_after(node):
        doubled = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
    node.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    doubled.meta = dict(node.meta)
    forward.recompile()


def _in_microbatches(wrong: bool) -> Callable[[], object]:
    """Validate microbatches as planned, or with an input that is not split."""

    def work() -> object:
        model = Mlp(4, 8, 1)
        plan = autopar.plan(model, 2, example_inputs=(_X,), hardware="cpu-gloo", num_microbatches=2)
        trace = capture(model, (_X,))
        part, how, stages = staged_trace(plan, model, trace, (_X,), {})
        program = emit(part, plan, how, stages)
        microbatches = replace(program.microbatches, inputs={}) if wrong else program.microbatches
        return validate_microbatches(trace, program.trace, microbatches)

    return work


def _in_one(model: Callable[[], nn.Module] = lambda: Mlp(4, 8, 1)) -> object:
    """Plan the same model with one microbatch."""
    return autopar.plan(model(), 2, example_inputs=(_X,), hardware="cpu-gloo", num_microbatches=1)


class Masked(Scaled):
    """Drops the same features of all samples, and ignores samples without a label in its loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones(4), 0.5, self.training)
        return nn.functional.cross_entropy(self.layer(x * mask), y)


def _verify_masked(train: bool = True, num: int = 2) -> Callable[[], object]:
    """Verify a plan with microbatches that draw random numbers."""

    def work() -> object:
        model = Masked().train(train)
        batch = _X, torch.tensor([0, 1, 2, 3, 0, 1, -100, 2])
        plan = autopar.plan(
            model, 1, example_inputs=batch, hardware="cpu-gloo", num_microbatches=num
        )
        return autopar.verify(plan, model, batch)

    return work


def _in_precision(dtype: torch.dtype | None) -> Callable[[], object]:
    """Verify a plan in bf16 of a model with statistics in float32."""

    def work() -> object:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        plan = autopar.plan(model, 1, example_inputs=(_X,), hardware="cpu-gloo", precision="bf16")
        return autopar.verify(plan, model, (_X,), dtype=dtype)

    return work


class _Picks(nn.Module):
    """Picks the tokens with the largest norms, which the weights may make equal."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.down(self.up(x).relu())
        h = nn.functional.normalize(h, dim=-1) + self.scale * x
        indices = h.square().sum(-1).topk(3, 1).indices
        return h.gather(1, indices.unsqueeze(-1).expand(-1, -1, 8)).square()[..., :2].mean()


def _verify_picks(scale: float) -> Callable[[], object]:
    """Verify a plan with partial sums. With a scale of 0, all norms are equal."""

    def work() -> object:
        torch.manual_seed(0)
        model, x = _Picks(scale), torch.randn(12, 6, 8)
        plan = autopar.plan(
            model,
            Mesh(gpu=4),
            example_inputs=(x,),
            hardware="cpu-gloo",
            constraints=[autopar.constraints.tensor_parallel("1d", axes="gpu")],
        )
        return autopar.verify(plan, model, (x,))

    return work


def _fill_weight(value: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.layer.weight.data.fill_(value)

    return change


def _staged_plan(change: Callable[[Any], None]) -> Plan:
    """Return a plan of two stages after a change of its JSON form."""
    model = Mlp(4, 8, 2)
    options: dict[str, Any] = {
        "num_microbatches": 2,
        "constraints": [autopar.constraints.pipeline("stage")],
    }
    plan = autopar.plan(model, {"stage": 2}, example_inputs=(_X,), hardware="cpu-gloo", **options)
    data = json.loads(plan.dumps())
    change(data)
    return Plan.loads(json.dumps(data))


def _crosses(data: Any) -> None:
    """Let another node cross the stages."""
    for each in data["pipeline"]["crossings"][0]:
        each["node"] = "another"


def _explain(change: Callable[[Any], None] = lambda data: None) -> Callable[[], object]:
    return lambda: str(autopar.explain(_staged_plan(change)))


PROGRAMS: dict[str, Program] = {
    "validation/states.py invalid 0": Program(
        _validate(
            lambda program: replace(program, stages=(replace(program.stages[0], mutated=("x",)),))
        ),
        "validate it as `emit` creates it from the plan",
        _validate(lambda program: program),
    ),
    "validation/microbatch_graphs.py _InTime._error 0": Program(
        _in_microbatches(True), "pass num_microbatches=1 and no pipeline", _in_one
    ),
    "verification/case.py Case.of 0": Program(
        _verify(model=lambda model: model.to("meta")),
        "verify a model and a batch with values",
        _verify(),
    ),
    "verification/case.py Case._run_plain 0": Program(
        _verify(lambda: Drawing(unread=True)),
        "remove random numbers that are never read",
        _verify(Drawing),
    ),
    "verification/case.py Case._refused_by_kernels 0": Program(
        _in_precision(None), "pass dtype=torch.float64", _in_precision(torch.float64)
    ),
    "verification/case.py Case.run_plain 0": Program(
        _verify_masked(), "verify in eval mode", _verify_masked(train=False)
    ),
    "verification/case.py Case.run_plain 0 | one": Program(
        _verify_masked(), "or use a plan with one microbatch", _verify_masked(num=1)
    ),
    "verification/check.py _plain 0": Program(
        _verify(model=_fill_weight(float("nan"))),
        "with a batch and weights that give a finite loss",
        _verify(model=_fill_weight(0.5)),
    ),
    "verification/check.py _compare_case 0": Program(
        _verify(model=lambda model: setattr(model, "scale", 2.0)),
        "the capture is wrong",
        _verify(),
    ),
    "verification/check.py _refuse_undetermined 0": Program(
        _verify_picks(0.0),
        "does not choose between nearly equal numbers",
        _verify_picks(1.0),
    ),
    "verification/check.py diagnose.check 0": Program(
        _verify(program=_wrong_node), "check this node and its operands", _verify()
    ),
    "verification/drawing.py PositionalDraws.__torch_dispatch__ 0": Program(
        _verify(Drawing, model=lambda model: setattr(model, "kind", "geometric")),
        "draw with rand, randn or dropout",
        _verify(Drawing),
    ),
    "explanation/link_prices.py _seconds_received 0": Program(
        _explain(_crosses), "plan again", _explain()
    ),
}
