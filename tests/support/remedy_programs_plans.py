"""Programs for the remedies of plans that are given: for another model, mesh, profile or call,
or changed by hand; and of rules."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar import Mesh, Plan, constraints
from autopar.api.building import Structure, _device_type
from autopar.api.tracing import refuse_parts
from autopar.capture import Trace, capture
from autopar.constraints.together import rewrite_for_mesh
from autopar.core.collective import Collective, collective_time
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout
from autopar.core.terminal import check_writable, parse_size
from autopar.emit import emit_stage
from autopar.planner.transfer_plan import stages_on
from tests.support.made_plan import made_staged_plan
from tests.support.mlp import Mlp
from tests.support.remedy_programs import Called, Program, planned

X = torch.ones(8, 4)
MODEL, BATCH = Mlp(4, 8, 2), {"x": X}


@cache
def made(mesh: Any = 2, **options: Any) -> Plan:
    """The plan of a small MLP."""
    settings = {"hardware": "cpu-gloo", **options}
    return autopar.plan(MODEL, mesh, example_inputs=BATCH, **settings)


@cache
def data() -> Plan:
    """A plan over an axis `data`."""
    return made(Mesh({"data": 2}), constraints=(constraints.ddp("data"),))


@cache
def traced() -> Trace:
    return capture(MODEL, (), BATCH)


def _by_hand(plan: Plan) -> Plan:
    """The plan with a decision of another's."""
    position, entry = next((i, e) for i, e in enumerate(plan.entries) if e.op == "dot")
    nodes = tuple(
        replace(n, strategy=replace(n.strategy, inputs=n.strategy.outputs)) for n in entry.nodes
    )
    changed = replace(entry, nodes=nodes)
    return replace(plan, entries=(*plan.entries[:position], changed, *plan.entries[position + 1 :]))


def _asked(
    plan: Callable[[], Plan], model: nn.Module = MODEL, **change: Any
) -> Callable[[], object]:
    """What a plan would take elsewhere."""
    return lambda: autopar.what_if(plan(), model, BATCH, **{"hardware": "cpu-gloo", **change})


class Sized(nn.Module):
    """Splits its rows as `sizes` says, whose values forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        parts = self.layer(x).split(sizes.prod(1).tolist())
        return torch.stack([part.square().sum() for part in parts]).sum() / len(x)


_SIZES = torch.tensor([[2, 2], [2, 2]])


class Locked(nn.Module):
    """A model that cannot be copied, or can."""

    def __init__(self, locked: bool) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(4, 4), threading.Lock() if locked else None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def _called(model: nn.Module, example: Tensor) -> Callable[[], object]:
    """A call of eight samples, where the model was compiled for such, or for others."""

    def program() -> object:
        compiled = autopar.compile(model, 1, example_inputs=(example,), hardware="cpu-gloo")
        compiled.load_state_dict(model.state_dict())
        return compiled(X)

    return program


def _roots(layer: nn.Module, x: Tensor) -> Tensor:
    """Of a sample alone the loss is another function, which its graph does not tell."""
    return layer(x).square().mean() if x.shape[0] > 1 else layer(x).square().sum().div(4).sqrt()


def _alone(layer: nn.Module, x: Tensor) -> Tensor:
    """Of a sample alone the loss is another mean than of several."""
    picked, squares = (x > 0).float(), layer(x).square()
    return (squares * picked).sum() / picked.sum() if x.shape[0] > 1 else squares.mean()


def _placed(second: str) -> Callable[[], object]:
    """Where a model of two parameters is: the second is of another kind of device, as far as its
    class says."""

    class Elsewhere(nn.Parameter):
        device = torch.device(second)

    model = nn.Module()
    model.first = nn.Parameter(torch.ones(1))
    model.second = Elsewhere(torch.ones(1))
    return lambda: _device_type(model, ())


_GATHER = Collective("all_gather", 0, 0, -1, "", "float32", 64)


def _timed(link: str) -> Callable[[], object]:
    return lambda: collective_time(_GATHER, 2, link, HardwareProfile.load("cpu-gloo"))


def _written(place: Callable[[Path], Path]) -> Callable[[], object]:
    """A file somewhere in a folder."""

    def program() -> None:
        with tempfile.TemporaryDirectory() as folder:
            check_writable(place(Path(folder)))

    return program


def _with_folder(folder: Path) -> Path:
    (folder / "plans").mkdir()
    return folder / "plans" / "plan.json"


_SQUARE = Mesh({"a": 2, "b": 2})
_GRID = constraints.tensor_parallel("2d", axes=("a", "b"))


def _there(axes: dict[str, int], *asked: Any) -> Callable[[], object]:
    """What a plan for a square has to obey on a mesh of these axes."""
    return lambda: rewrite_for_mesh(asked, _SQUARE, Mesh(axes), "")


@cache
def long() -> tuple[Plan, nn.Module, dict[str, Tensor]]:
    """A plan that splits a long batch, which is on meta, with the call."""
    model, batch = Mlp(256, 1024, 1), {"x": torch.empty(2**16, 256, device="meta")}
    mesh = Mesh({"data": 2})
    return autopar.plan(model, mesh, example_inputs=batch, hardware="h100-sxm"), model, batch


def _wider(size: int) -> Callable[[], object]:
    """The same on more devices."""
    return lambda: autopar.what_if(*long(), mesh={"data": size}, hardware="h100-sxm")


PROGRAMS: dict[str, Program] = {
    "errors.py ChangedPlanError.__init__ 0": Program(
        lambda: emit_stage(traced(), _by_hand(data())),
        "plan again",
        lambda: emit_stage(traced(), data()),
    ),
    "emit/context.py PlanIndex.check 0": Program(
        lambda: emit_stage(capture(Mlp(4, 8, 3), (), BATCH), data()),
        "plan again for this model",
        lambda: emit_stage(traced(), data()),
    ),
    "api/plan_options.py check_fits 0": Program(
        lambda: autopar.compile(nn.Linear(4, 4), 1, plan=made(1), example_inputs=(X,)),
        "pass the plan of this model and mesh",
        lambda: autopar.compile(MODEL, 1, plan=made(1), example_inputs=BATCH),
    ),
    "api/building.py _check_outputs 0": Program(
        lambda: autopar.compile(MODEL, 1, plan=made(1), example_inputs=BATCH, outputs="loss"),
        "pass outputs='dtensor'",
        lambda: autopar.compile(MODEL, 1, plan=made(1), example_inputs=BATCH, outputs="dtensor"),
    ),
    "api/building.py _check_outputs 0 | plan": Program(
        lambda: autopar.compile(MODEL, 1, plan=made(1), example_inputs=BATCH, outputs="loss"),
        "or plan again",
        lambda: autopar.compile(
            MODEL, 1, plan=made(1, outputs="loss"), example_inputs=BATCH, outputs="loss"
        ),
    ),
    "api/building.py _device_type 0": Program(
        _placed("cuda"), "move the model to one type of device", _placed("cpu")
    ),
    "api/building.py Structure.as_called 0": Program(
        lambda: Structure.of(Locked(True)).as_called(True, {}),
        "compile the model for that call and load its state with load_state_dict",
        _called(Locked(True), X),
    ),
    "api/planning.py verify 0": Program(
        lambda: autopar.verify(made(), MODEL, BATCH, dtype=torch.float16),
        "pass torch.float64",
        lambda: autopar.verify(made(), MODEL, BATCH, dtype=torch.float64),
    ),
    "api/tracing.py refuse_parts 0": Program(
        lambda: refuse_parts(capture(Sized(), (X, _SIZES)), "local"),
        'pass batch="global"',
        lambda: refuse_parts(capture(Sized(), (X, _SIZES)), "global"),
    ),
    "api/tracing.py trace_part 1": Program(
        planned(Sized(), (X, _SIZES), num_microbatches=2),
        "pass num_microbatches=1",
        planned(Sized(), (X, _SIZES), num_microbatches=1),
    ),
    "analysis/microbatches.py _otherwise 0": Program(
        planned(Called(_alone), (X,), num_microbatches=8),
        "use microbatches of two or more samples",
        planned(Called(_alone), (X,), num_microbatches=4),
    ),
    "api/tracing.py refuse_unproven 0": Program(
        planned(Called(_roots), (X,), num_microbatches=8),
        "fewer microbatches with more samples each",
        planned(Called(_roots), (X,), num_microbatches=4),
    ),
    "api/what_if.py flips 0": Program(
        lambda: autopar.flips(made(), MODEL, BATCH, hardware="h100-sxm"),
        "pass the profile that it was made for as hardware=",
        lambda: autopar.flips(made(), MODEL, BATCH, hardware="cpu-gloo"),
    ),
    "api/what_if.py flips 0 | elsewhere": Program(
        lambda: autopar.flips(made(), MODEL, BATCH, hardware="h100-sxm"),
        "call autopar.what_if with this one",
        _asked(made, hardware="h100-sxm"),
    ),
    "planner/transfer_plan.py _check 0": Program(
        lambda: stages_on(data(), Mesh({"rows": 2})),
        "name the axes as in the plan, data",
        lambda: stages_on(data(), Mesh({"data": 4})),
    ),
    "planner/transfer_plan.py _check 1": Program(
        lambda: stages_on(made_staged_plan(), Mesh({"stage": 2, "data": 2})),
        "a mesh with stage=4 and any other axes",
        lambda: stages_on(made_staged_plan(), Mesh({"stage": 4, "data": 2})),
    ),
    "planner/transfer_plan.py _check_inputs 0": Program(
        _wider(2**17), "use smaller axes", _wider(4)
    ),
    "planner/reprice.py _refusal 1": Program(
        _asked(lambda: _by_hand(data())), "plan again for this model and mesh", _asked(data)
    ),
    "constraints/together.py _named 0": Program(
        _there({"a": 2, "c": 2}, _GRID),
        "use these axis names in the other mesh",
        _there({"a": 2, "b": 2}, _GRID),
    ),
    "constraints/together.py _named 0 | without": Program(
        _there({"a": 2, "c": 2}, _GRID),
        "plan for it without this constraint",
        _there({"a": 2, "c": 2}),
    ),
    "core/layout.py read_layout 1": Program(
        lambda: Layout.parse("S(0)#1 S(0)"),
        "number all axes that split dim 0 from 0",
        lambda: Layout.parse("S(0)#1 S(0)#0"),
    ),
    "core/collective.py collective_time 0": Program(
        _timed("moon"), "links are intra", _timed("intra")
    ),
    "core/terminal.py check_writable 0": Program(
        _written(lambda folder: folder),
        "name a file in it",
        _written(lambda folder: folder / "plan.json"),
    ),
    "core/terminal.py check_writable 1": Program(
        _written(lambda folder: folder / "plans" / "plan.json"),
        "check the path, or create the folder",
        _written(_with_folder),
    ),
    "core/terminal.py parse_size 0": Program(
        lambda: parse_size("80 gigs"), "72GiB", lambda: parse_size("72GiB")
    ),
}
