"""Programs for the remedies of given plans (for another model, mesh, profile or call, or with
manual changes) and of rules."""

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
    """Return the plan of a small MLP."""
    settings = {"hardware": "cpu-gloo", **options}
    return autopar.plan(MODEL, mesh, example_inputs=BATCH, **settings)


@cache
def data() -> Plan:
    """Return a plan with an axis `data`."""
    return made(Mesh({"data": 2}), constraints=(constraints.ddp("data"),))


@cache
def traced() -> Trace:
    return capture(MODEL, (), BATCH)


def _with_wrong_strategy(plan: Plan) -> Plan:
    """Return the plan with a strategy that does not fit its op."""
    position, entry = next((i, e) for i, e in enumerate(plan.entries) if e.op == "dot")
    nodes = tuple(
        replace(n, strategy=replace(n.strategy, inputs=n.strategy.outputs)) for n in entry.nodes
    )
    changed_entry = replace(entry, nodes=nodes)
    return replace(
        plan, entries=(*plan.entries[:position], changed_entry, *plan.entries[position + 1 :])
    )


def _what_if(
    plan: Callable[[], Plan], model: nn.Module = MODEL, **change: Any
) -> Callable[[], object]:
    """Run `what_if` with other settings."""
    return lambda: autopar.what_if(plan(), model, BATCH, **{"hardware": "cpu-gloo", **change})


class Sized(nn.Module):
    """Splits its rows by `sizes`, whose values forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        parts = self.layer(x).split(sizes.prod(1).tolist())
        return torch.stack([part.square().sum() for part in parts]).sum() / len(x)


_SIZES = torch.tensor([[2, 2], [2, 2]])


class Locked(nn.Module):
    """A model that can or cannot be copied."""

    def __init__(self, locked: bool) -> None:
        super().__init__()
        self.layer, self.lock = nn.Linear(4, 4), threading.Lock() if locked else None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def _compile_and_call(model: nn.Module, example: Tensor) -> Callable[[], object]:
    """Compile a model for an example and call it with eight samples."""

    def program() -> object:
        module = autopar.compile(model, 1, example_inputs=(example,), hardware="cpu-gloo")
        module.load_state_dict(model.state_dict())
        return module(X)

    return program


def _roots(layer: nn.Module, x: Tensor) -> Tensor:
    """Compute another function for a single sample, which is not visible in the graph."""
    return layer(x).square().mean() if x.shape[0] > 1 else layer(x).square().sum().div(4).sqrt()


def _alone(layer: nn.Module, x: Tensor) -> Tensor:
    """Compute another mean for a single sample than for several samples."""
    picked, squares = (x > 0).float(), layer(x).square()
    return (squares * picked).sum() / picked.sum() if x.shape[0] > 1 else squares.mean()


def _find_device_type(second: str) -> Callable[[], object]:
    """Find the device type of a model whose second parameter claims to be on another type of
    device."""

    class Elsewhere(nn.Parameter):
        device = torch.device(second)

    model = nn.Module()
    model.first = nn.Parameter(torch.ones(1))
    model.second = Elsewhere(torch.ones(1))
    return lambda: _device_type(model, ())


_GATHER = Collective("all_gather", 0, 0, -1, "", "float32", 64)


def _time(link: str) -> Callable[[], object]:
    return lambda: collective_time(_GATHER, 2, link, HardwareProfile.load("cpu-gloo"))


def _check_file(place: Callable[[Path], Path]) -> Callable[[], object]:
    """Check that a file in a folder can be written."""

    def program() -> None:
        with tempfile.TemporaryDirectory() as folder:
            check_writable(place(Path(folder)))

    return program


def _write_program(place: Callable[[Path], Path]) -> Callable[[], object]:
    """Plan a small MLP, and write its integer program to a file in a folder."""

    def program() -> None:
        with tempfile.TemporaryDirectory() as folder:
            planned(write_lp=place(Path(folder)))()

    return program


def _with_folder(folder: Path) -> Path:
    (folder / "plans").mkdir()
    return folder / "plans" / "plan.json"


_SQUARE = Mesh({"a": 2, "b": 2})
_GRID = constraints.tensor_parallel("2d", axes=("a", "b"))


def _rewrite(axes: dict[str, int], *asked: Any) -> Callable[[], object]:
    """Rewrite constraints of a plan for a square mesh to a mesh with other axes."""
    return lambda: rewrite_for_mesh(asked, _SQUARE, Mesh(axes), "")


@cache
def long() -> tuple[Plan, nn.Module, dict[str, Tensor]]:
    """Return a plan that shards a long batch on the meta device, and the call."""
    model, batch = Mlp(256, 1024, 1), {"x": torch.empty(2**16, 256, device="meta")}
    mesh = Mesh({"data": 2})
    return autopar.plan(model, mesh, example_inputs=batch, hardware="h100-sxm"), model, batch


def _what_if_devices(size: int) -> Callable[[], object]:
    """Run `what_if` for this plan on another number of devices."""
    return lambda: autopar.what_if(*long(), mesh={"data": size}, hardware="h100-sxm")


PROGRAMS: dict[str, Program] = {
    "errors.py ChangedPlanError.__init__ 0": Program(
        lambda: emit_stage(traced(), _with_wrong_strategy(data())),
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
        _find_device_type("cuda"), "move the model to one type of device", _find_device_type("cpu")
    ),
    "api/building.py Structure.as_called 0": Program(
        lambda: Structure.of(Locked(True)).as_called(True, {}),
        "compile the model for that call and load its state with load_state_dict",
        _compile_and_call(Locked(True), X),
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
        _what_if(made, hardware="h100-sxm"),
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
        _what_if_devices(2**17), "use smaller axes", _what_if_devices(4)
    ),
    "planner/reprice.py _refusal 1": Program(
        _what_if(lambda: _with_wrong_strategy(data())),
        "plan again for this model and mesh",
        _what_if(data),
    ),
    "constraints/together.py _named 0": Program(
        _rewrite({"a": 2, "c": 2}, _GRID),
        "use these axis names in the other mesh",
        _rewrite({"a": 2, "b": 2}, _GRID),
    ),
    "constraints/together.py _named 0 | without": Program(
        _rewrite({"a": 2, "c": 2}, _GRID),
        "plan for it without this constraint",
        _rewrite({"a": 2, "c": 2}),
    ),
    "core/layout.py read_layout 1": Program(
        lambda: Layout.parse("S(0)#1 S(0)"),
        "number all axes that split dim 0 from 0",
        lambda: Layout.parse("S(0)#1 S(0)#0"),
    ),
    "core/collective.py collective_time 0": Program(
        _time("moon"), "links are intra", _time("intra")
    ),
    "core/terminal.py check_writable 0": Program(
        _check_file(lambda folder: folder),
        "name a file in it",
        _check_file(lambda folder: folder / "plan.json"),
    ),
    "core/terminal.py check_writable 1": Program(
        _check_file(lambda folder: folder / "plans" / "plan.json"),
        "check the path, or create the folder",
        _check_file(_with_folder),
    ),
    "core/terminal.py check_writable 1 | integer program": Program(
        _write_program(lambda folder: folder / "plans" / "plan.lp"),
        "check the path",
        _write_program(lambda folder: folder / "plan.lp"),
    ),
    "core/terminal.py parse_size 0": Program(
        lambda: parse_size("80 gigs"), "72GiB", lambda: parse_size("72GiB")
    ),
}
