"""The mesh shapes of a device count. The fastest shape is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo_small
from made_plan import made_plan

import autopar
from autopar.api.alternatives import WorkBudget
from autopar.api.arguments import is_shape_of
from autopar.api.mesh_search import ShapeSearch, shapes, shapes_in_three
from autopar.api.planning import plan_model
from autopar.constraints import layout, megatron, pipeline
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError, InfeasibleError, MeshError
from autopar.planner import Planned, TooSlow
from autopar.program.program import Program


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (1, ["gpu=1"]),
        (2, ["gpu=2"]),
        (4, ["gpu=4", "gpu0=2,gpu1=2"]),
        (8, ["gpu=8", "gpu0=2,gpu1=4", "gpu0=4,gpu1=2"]),
        (16, ["node=2,gpu=8", "node=2,gpu0=2,gpu1=4", "node=2,gpu0=4,gpu1=2"]),
        (
            32,
            [
                "node=4,gpu=8",
                "node0=2,node1=2,gpu=8",
                "node=4,gpu0=2,gpu1=4",
                "node=4,gpu0=4,gpu1=2",
            ],
        ),
        ((1, 4), ["gpu=4", "gpu0=2,gpu1=2"]),
        ((2, 4), ["node=2,gpu=4", "node=2,gpu0=2,gpu1=2"]),
        ((4, 4), ["node=4,gpu=4", "node0=2,node1=2,gpu=4", "node=4,gpu0=2,gpu1=2"]),
        ((4, 1), ["node=4", "node0=2,node1=2"]),
        ((3, 4), ["node=3,gpu=4", "node=3,gpu0=2,gpu1=2"]),
        ((1, 16), ["gpu=16", "gpu0=2,gpu1=8", "gpu0=4,gpu1=4", "gpu0=8,gpu1=2"]),
    ],
)
def test_the_shapes_of_a_device_count(devices: int | tuple[int, int], expected: list[str]) -> None:
    found = shapes(devices)
    nodes, here = devices if isinstance(devices, tuple) else (max(devices // 8, 1), min(devices, 8))
    assert [str(mesh) for mesh in found] == expected
    for mesh in found:
        assert mesh.num_devices == nodes * here and mesh.devices_per_node == here
        inside = [axis for axis, name in enumerate(mesh.names) if name.startswith("gpu")]
        assert all(
            mesh.link(axis) == ("intra" if axis in inside else "inter")
            for axis in range(len(mesh.axes))
        )


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (4, []),
        (8, ["gpu0=2,gpu1=2,gpu2=2"]),
        ((1, 12), ["gpu0=2,gpu1=2,gpu2=3", "gpu0=2,gpu1=3,gpu2=2", "gpu0=3,gpu1=2,gpu2=2"]),
        ((8, 1), ["node0=2,node1=2,node2=2"]),
        (16, []),
    ],
)
def test_shapes_with_one_axis_split_in_three(
    devices: int | tuple[int, int], expected: list[str]
) -> None:
    assert sorted(map(str, shapes_in_three(devices))) == expected


@pytest.mark.parametrize("devices", [0, -8, 12, (0, 4), (4, -1)])
def test_device_counts_without_a_shape_are_refused(devices: int | tuple[int, int]) -> None:
    with pytest.raises(MeshError):
        shapes(devices)


def test_a_count_that_is_not_a_multiple_of_eight_is_refused_with_the_form_for_nodes() -> None:
    with pytest.raises(MeshError, match=r"12 devices is not a multiple of 8(.|\n)*\(3, 4\)"):
        shapes(12)


def best_shape(
    meshes: Sequence[Mesh],
    plan: Callable[[Mesh, float], Planned],
    *,
    further: Sequence[Mesh] = (),
    holds: Callable[[Mesh], bool] = lambda _: True,
    work: float = math.inf,
) -> Planned:
    search = ShapeSearch(WorkBudget(work), holds)
    for mesh in search.shapes_to_try(meshes, further):
        with search.attempt(mesh):
            search.add(mesh, plan(mesh, search.best_s))
    if search.best is None:
        raise search.refusal
    return search.note(search.best)


def test_shapes_that_the_work_budget_skips_are_listed() -> None:
    tried: list[Mesh] = []

    def plan(mesh: Mesh, limit_s: float) -> Any:
        tried.append(mesh)
        return made(mesh, 3.0 - len(tried))

    best = best_shape(shapes((2, 4)), plan, work=0.0)
    assert tried == [shapes((2, 4))[0]], "the first shape is always tried"
    assert (
        'node=2,gpu0=2,gpu1=2 (not tried: effort="thorough" tries it)' in best.plan.proof.covers[-1]
    )


def test_each_shape_has_the_best_step_so_far_as_its_limit() -> None:
    limits: list[float] = []
    times = {"gpu=8": 3.0, "gpu0=2,gpu1=4": 2.0, "gpu0=4,gpu1=2": 4.0}

    def plan(mesh: Mesh, limit_s: float) -> Any:
        limits.append(limit_s)
        if times[str(mesh)] >= limit_s:
            raise TooSlow(times[str(mesh)])
        return made(mesh, times[str(mesh)])

    best = best_shape(shapes(8), plan)
    assert limits == [math.inf, 3.0, 2.0] and str(best.plan.mesh) == "gpu0=2,gpu1=4"
    assert (
        "gpu=8 (3.00 s)" in best.plan.proof.covers[-1]
        and "gpu0=4,gpu1=2 (at least 4.00 s)" in best.plan.proof.covers[-1]
    )


@pytest.mark.parametrize(
    ("refusals", "lacking", "expected"),
    [
        ([ConstraintError("a"), ConstraintError("b"), ConstraintError("c")], 0, "a"),
        ([ConstraintError("a"), ConstraintError("b"), ConstraintError("c")], 1, "b"),
        ([ConstraintError("a"), ConstraintError("b"), ConstraintError("c")], 4, "d"),
        (
            [
                ConstraintError("a"),
                InfeasibleError("b", needed_bytes=8),
                InfeasibleError("c", needed_bytes=7),
            ],
            1,
            "c",
        ),
    ],
)
def test_if_no_shape_has_a_plan_the_most_informative_error_is_raised(
    refusals: list[Exception], lacking: int, expected: str
) -> None:
    every = (*shapes(8), *shapes_in_three(8))
    said = dict(zip(every, [*refusals, ConstraintError("d")], strict=True))

    def plan(mesh: Mesh, limit_s: float) -> Any:
        raise said[mesh]

    with pytest.raises(
        type(next(error for error in said.values() if str(error) == expected)),
        match=f"^{expected}$",
    ):
        best_shape(
            every[:-1], plan, further=every[-1:], holds=lambda mesh: every.index(mesh) >= lacking
        )


def test_further_shapes_are_tried_if_constraints_fail_but_not_if_memory_is_short() -> None:
    tried: list[Mesh] = []

    def best(refusal: Exception | None) -> Planned:
        def plan(mesh: Mesh, limit_s: float) -> Any:
            tried.append(mesh)
            if refusal is not None and mesh not in shapes_in_three(8):
                raise refusal
            return made(mesh, 1.0)

        tried.clear()
        return best_shape(shapes(8), plan, further=shapes_in_three(8))

    assert best(None).plan.mesh == shapes(8)[0] and tried == [*shapes(8)]
    assert best(ConstraintError("no")).plan.mesh == shapes_in_three(8)[0] and len(tried) == 4
    with pytest.raises(InfeasibleError):
        best(InfeasibleError("no"))


def made(mesh: Mesh, step_s: float) -> Planned:
    whole = made_plan()
    plan = replace(whole, mesh=mesh, prediction=replace(whole.prediction, step_s=step_s))
    return Planned(plan, Program(mesh, "", None, (), None, "1f1b", {}), {})  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_plan_of_a_device_count_is_the_fastest_of_its_shapes_and_is_verified() -> None:
    model, batch = zoo_small.gpt2()
    found = autopar.plan(model, 4, example_inputs=batch, hardware="h100-sxm")
    each = [
        autopar.plan(model, mesh, example_inputs=batch, hardware="h100-sxm") for mesh in shapes(4)
    ]
    assert found.prediction.step_s == min(p.prediction.step_s for p in each)
    assert found.mesh in shapes(4) and "gpu=4" in found.proof.covers[-1]
    assert autopar.verify(found, model, batch).ok and autopar.check(found, model, batch).ok


@pytest.mark.slow
def test_a_pair_of_nodes_and_devices_gives_shapes_with_the_links_of_the_nodes() -> None:
    model, batch = zoo_small.gpt2()
    found = autopar.plan(model, (2, 2), example_inputs=batch, hardware="h100-sxm")
    alike = autopar.plan(
        model, autopar.Mesh({"node": 2, "gpu": 2}), example_inputs=batch, hardware="h100-sxm"
    )
    assert found.dumps() == alike.dumps() and [found.mesh.link(axis) for axis in (0, 1)] == [
        "inter",
        "intra",
    ]
    one = autopar.plan(model, (1, 4), example_inputs=batch, hardware="h100-sxm")
    assert (
        "gpu=4" in one.proof.covers[-1]
        and "gpu0=2,gpu1=2" in one.proof.covers[-1]
        and one.mesh.devices_per_node == 4
    )
    assert autopar.verify(one, model, batch).ok


def test_compile_accepts_nodes_and_devices_and_a_plan_of_any_of_their_shapes() -> None:
    model, batch = zoo_small.gpt2()
    plan = autopar.plan(model, (1, 1), example_inputs=batch, hardware="cpu-gloo")
    for mesh in ((1, 1), 1):
        module = autopar.compile(model, mesh, example_inputs=batch, plan=plan)
        assert torch.allclose(module(**batch).loss, model(**batch).loss)
    apart = autopar.Mesh({"a": 2, "b": 2}, devices_per_node=2)
    assert [is_shape_of(apart, asked) for asked in (4, (2, 2), (1, 4), (4, 1), 2)] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_with_a_device_count_stages_are_tried_on_its_shapes() -> None:
    model, batch = zoo_small.gpt2()
    found = autopar.plan(
        model, 4, example_inputs=batch, hardware="h100-sxm", constraints=(pipeline(),)
    )
    assert found.proof.covers[-1].count("gpu") >= 3 and autopar.check(found, model, batch).ok


def test_shapes_that_cannot_satisfy_a_constraint_are_skipped() -> None:
    model, batch = zoo_small.llama()
    found = autopar.plan(
        model, 4, example_inputs=batch, hardware="h100-sxm", constraints=(megatron(tp=2, dp=2),)
    )
    assert str(found.mesh) == "gpu0=2,gpu1=2" and "gpu=4 (no plan)" in found.proof.covers[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        megatron(tp=2, pp=2, dp=2, microbatches=2),
        pytest.param(layout("lm_head", output="S(0) S(1) R"), marks=pytest.mark.slow),
    ],
)
def test_constraints_on_three_axes_are_planned_on_one_node(asked: Any) -> None:
    model, batch = of_eight_samples()
    found = autopar.plan(model, 8, example_inputs=batch, hardware="h100-sxm", constraints=(asked,))
    assert str(found.mesh) == "gpu0=2,gpu1=2,gpu2=2" and "gpu=8 (no plan)" in found.proof.covers[-1]
    assert autopar.verify(found, model, batch).ok


def test_constraints_that_no_shape_satisfies_raise_the_error_of_the_closest_shape() -> None:
    model, batch = of_eight_samples()
    for asked, said in (
        (
            megatron(tp=2, pp=2, dp=3, microbatches=2),
            r"does not fill mesh .*gpu.=2,gpu.=2: 2 devices remain besides the tensor axes",
        ),
        (
            pipeline("gpu", microbatches=2, cuts=["transformer.h.1"]),
            "fewer than the stages along 'gpu'",
        ),
    ):
        with pytest.raises(ConstraintError, match=said):
            autopar.plan(model, 8, example_inputs=batch, hardware="h100-sxm", constraints=(asked,))


def of_eight_samples() -> Any:
    model, batch = zoo_small.gpt2()
    return model, {name: tensor.repeat(2, 1) for name, tensor in batch.items()}


@pytest.mark.slow
def test_if_nothing_fits_the_batch_is_split_into_microbatches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, batch = zoo_small.gpt2()
    batch = {name: tensor.repeat(4, 1) for name, tensor in batch.items()}
    smallest = smallest_of(model, batch)
    made = plan_model(model, 1, example_inputs=batch, hardware="h100-sxm", memory_bytes=smallest)[
        1
    ].plan
    assert (
        made.pipeline is not None
        and made.pipeline.num_microbatches > 1
        and made.prediction.peak_bytes <= smallest
    )
    assert any("microbatches" in record.message for record in caplog.records)
    assert autopar.verify(made, model, batch).ok
    with pytest.raises(InfeasibleError):
        plan_model(
            model,
            1,
            example_inputs=batch,
            hardware="h100-sxm",
            memory_bytes=smallest,
            num_microbatches=1,
        )


def smallest_of(model: Any, batch: Any) -> int:
    """Return a memory budget that fits a smaller microbatch but not the whole batch, in bytes."""
    parts = plan_model(
        model,
        1,
        example_inputs=batch,
        hardware="h100-sxm",
        num_microbatches=len(batch["input_ids"]),
    )[1].plan
    return int(parts.prediction.peak_bytes * 1.02)
