"""Programs for the remedies of constraints: their arguments and the meshes that they apply to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar import Mesh
from autopar.constraints import (
    ddp,
    expert_parallel,
    fsdp,
    layout,
    megatron,
    offload,
    pipeline,
    tensor_parallel,
)
from autopar.constraints.text import parse_constraint, read_constraint
from autopar.constraints.together import check, check_number, parallelisms, pipeline_in
from autopar.planner.pipeline.stage_units import check_parts
from autopar.planner.pipeline.step_schedule import in_order
from tests.support.remedy_programs import Program

MESH = Mesh({"node": 2, "gpu": 4})
ONE = Mesh({"one": 1, "node": 2, "gpu": 4})
WIDE = Mesh({"stage": 4, "node": 2, "gpu": 4})


def _parallelisms(*constraints: Any, mesh: Mesh = MESH) -> Callable[[], object]:
    """Return the presets of a mesh."""
    return lambda: list(parallelisms(constraints, mesh))


def _stages(*constraints: Any, mesh: Mesh = MESH) -> Callable[[], object]:
    return lambda: pipeline_in(constraints, mesh)


def _order(num: int, waits: bool = False, **options: Any) -> Callable[[], object]:
    """Order the microbatches of a pipeline over an axis."""
    constraint: Any = pipeline(**{"axis": "node", **options})
    return lambda: in_order(constraint, ONE, num, waits=waits, trained=True)


def _load_changed(change: dict[str, Any]) -> Callable[[], object]:
    """Load a record from its JSON form after a change."""
    return lambda: read_constraint({**fsdp(axes="gpu").to_json(), **change})


PROGRAMS: dict[str, Program] = {
    "constraints/resources.py pipeline 0": Program(
        lambda: pipeline("pp", schedule="zigzag"), "1f1b", lambda: pipeline("pp", schedule="1f1b")
    ),
    "constraints/resources.py pipeline 1": Program(
        lambda: pipeline("pp", microbatches=0),
        "a positive number",
        lambda: pipeline("pp", microbatches=1),
    ),
    "constraints/resources.py pipeline 2": Program(
        lambda: pipeline("pp", chunks=2),
        "schedule='interleaved_1f1b'",
        lambda: pipeline("pp", chunks=2, schedule="interleaved_1f1b"),
    ),
    "constraints/resources.py pipeline 3": Program(
        lambda: pipeline(cuts=["layers.1"], schedule="auto"),
        'schedule="1f1b"',
        lambda: pipeline(cuts=["layers.1"], schedule="1f1b"),
    ),
    "planner/pipeline/stage_units.py check_parts 0": Program(
        lambda: check_parts(3, 4), "at most 3 stages", lambda: check_parts(3, 3)
    ),
    "planner/pipeline/step_schedule.py in_order 0": Program(
        _order(2, axis="gpu"), "use more microbatches", _order(4, axis="gpu")
    ),
    "planner/pipeline/step_schedule.py in_order 0 | schedule": Program(
        _order(2, axis="gpu"), 'schedule="gpipe"', _order(2, axis="gpu", schedule="gpipe")
    ),
    "planner/pipeline/step_schedule.py _check_rounds 0": Program(
        _order(2, axis="one", chunks=2, schedule="interleaved_1f1b"),
        "an axis of two or more devices",
        _order(2, chunks=2, schedule="interleaved_1f1b"),
    ),
    "planner/pipeline/step_schedule.py _check_rounds 1": Program(
        _order(9, axis="gpu", chunks=2, schedule="interleaved_1f1b"),
        "a multiple of 4 microbatches",
        _order(8, axis="gpu", chunks=2, schedule="interleaved_1f1b"),
    ),
    "planner/pipeline/step_schedule.py _all_forwards_first 0": Program(
        _order(2, True, chunks=2, schedule="interleaved_1f1b"),
        "remove the schedule",
        _order(2, True),
    ),
    "constraints/layouts.py layout 0": Program(
        lambda: layout("*.up"), "pass weight=", lambda: layout("*.up", weight="R S(0)")
    ),
    "constraints/layouts.py check_layouts 0": Program(
        lambda: check(layout("*.up", weight="S(0)"), MESH),
        "one placement per mesh axis",
        lambda: check(layout("*.up", weight="R S(0)"), MESH),
    ),
    "constraints/megatron.py megatron 0": Program(
        lambda: megatron(tp=2, zero=4), "stages 1, 2 and 3", lambda: megatron(tp=2, zero=3)
    ),
    "constraints/megatron.py megatron 1": Program(
        lambda: megatron(tp=2, recompute="some"),
        '"selective"',
        lambda: megatron(tp=2, recompute="selective"),
    ),
    "constraints/megatron.py megatron 2": Program(
        lambda: megatron(tp=2, pp=0), "the name of an axis", lambda: megatron(tp=2, pp="node")
    ),
    "constraints/megatron.py megatron 3": Program(
        lambda: megatron(tp=2, chunks=2), "pass pp too", lambda: megatron(tp=2, chunks=2, pp=2)
    ),
    "constraints/megatron.py stage_axis 0": Program(
        _stages(megatron(tp=4, pp=3)), "pp='node'", _stages(megatron(tp=4, pp="node"))
    ),
    "constraints/megatron.py stage_axis 0 | mesh": Program(
        _stages(megatron(tp=4, pp=3)),
        "use a mesh with an axis of that size",
        _stages(megatron(tp=4, pp=3), mesh=Mesh({"node": 3, "gpu": 4})),
    ),
    "constraints/megatron.py _expert_axes 0": Program(
        _parallelisms(megatron(tp="gpu", ep="gpu")),
        "not used by tp, cp or pp: node",
        _parallelisms(megatron(tp="gpu", ep="node")),
    ),
    "constraints/megatron.py _data_axes 0": Program(
        _parallelisms(megatron(tp=4, dp=4)), "pass dp=2", _parallelisms(megatron(tp=4, dp=2))
    ),
    "constraints/megatron.py _data_axes 0 | left out": Program(
        _parallelisms(megatron(tp=4, dp=4)), "or omit it", _parallelisms(megatron(tp=4))
    ),
    "constraints/megatron.py _last_axes 0": Program(
        _parallelisms(megatron(tp=3)), "tp='gpu'", _parallelisms(megatron(tp="gpu"))
    ),
    "constraints/megatron.py _degree 0": Program(
        lambda: megatron(tp=0), "a positive number", lambda: megatron(tp=1)
    ),
    "constraints/resources.py offload 0": Program(
        lambda: _parallelisms(offload(parameters=False, activations=False))(),
        "omit the constraint",
        _parallelisms(),
    ),
    "constraints/resources.py offload 1": Program(
        lambda: offload(host_bytes="128 GiB"),  # type: ignore[arg-type]
        "128 * 2**30",
        lambda: offload(host_bytes=128 * 2**30),
    ),
    "constraints/parallel.py expert_parallel 0": Program(
        lambda: expert_parallel("gpu", tokens="sent"),  # type: ignore[arg-type]
        '"dispatched" or "gathered"',
        lambda: expert_parallel("gpu", tokens="dispatched"),
    ),
    "constraints/parallel.py tensor_parallel 0": Program(
        lambda: tensor_parallel("4d", axes="gpu"),  # type: ignore[arg-type]
        '"1d", "2d", "2.5d" or "3d"',
        lambda: tensor_parallel("1d", axes="gpu"),
    ),
    "constraints/parallel.py tensor_parallel 1": Program(
        lambda: tensor_parallel("2d", axes=("a", "b"), sequence=True),
        "omit sequence",
        lambda: tensor_parallel("2d", axes=("a", "b")),
    ),
    "constraints/parallel.py tensor_parallel 2": Program(
        lambda: tensor_parallel("2d", axes="a"),
        "tensor_parallel('2d', axes=('a', 'b'))",
        lambda: tensor_parallel("2d", axes=("a", "b")),
    ),
    "constraints/parallel.py axes_of 0": Program(
        _parallelisms(fsdp(axes="dp")), "its axes are node, gpu", _parallelisms(fsdp(axes="gpu"))
    ),
    "constraints/parallel.py names_of 0": Program(
        lambda: fsdp(axes=[0]),  # type: ignore[list-item]
        'axes=("gpu",)',
        lambda: fsdp(axes=("gpu",)),
    ),
    "constraints/parallel.py check_grid 0": Program(
        _parallelisms(tensor_parallel("2d", axes=("node", "gpu"))),
        "name axes of equal size",
        _parallelisms(tensor_parallel("2d", axes=("stage", "gpu")), mesh=WIDE),
    ),
    "constraints/together.py pipeline_in 0": Program(
        _stages(pipeline("node"), pipeline("gpu")), "pass one of them", _stages(pipeline("node"))
    ),
    "constraints/together.py check_number 0": Program(
        lambda: check_number([pipeline("node", microbatches=2)], 4),
        "the same number in both",
        lambda: check_number([pipeline("node", microbatches=4)], 4),
    ),
    "constraints/together.py _same_axis_error 0": Program(
        _parallelisms(ddp(), fsdp(axes="gpu")),
        "ddp(axes='node')",
        _parallelisms(ddp(axes="node"), fsdp(axes="gpu")),
    ),
    "constraints/text.py parse_constraint 0": Program(
        lambda: parse_constraint("zero3"), "fsdp", lambda: parse_constraint("fsdp")
    ),
    "constraints/text.py parse_constraint 1": Program(
        lambda: parse_constraint("megatron(tensor=2)"),
        "it takes tp",
        lambda: parse_constraint("megatron(tp=2)"),
    ),
    "constraints/text.py _parts 0": Program(
        lambda: parse_constraint("megatron(tp=n)"),
        "megatron(tp=8)",
        lambda: parse_constraint("megatron(tp=8)"),
    ),
    "constraints/text.py read_constraint 0": Program(
        _load_changed({"plan": "zero"}), "plan again", _load_changed({})
    ),
}
