"""The bound over all cuts with stages on unequal devices, each with its own prices and
multipliers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

import autopar
from autopar.certificate.over_cuts import least_over_cuts
from autopar.core.hardware import Mixed
from autopar.cost.priced import Crossing, wire
from autopar.planner.pipeline.cuts import least_step
from autopar.planner.pipeline.step_schedule import step_time
from autopar.stages import cut_trace
from tests.laws.test_bound_over_cuts import (
    MICROBATCHES,
    Model,
    chain,
    parameters_decide_for_themselves,
)
from tests.laws.test_unequal_devices import A100, H100, SLOW

# the bound is compared with plans in which equal layers may differ
apart = parameters_decide_for_themselves


@pytest.mark.parametrize("seed", range(3))
def test_no_cut_over_unequal_devices_is_faster_than_the_bound_of_search_and_certificate(
    seed: int,
) -> None:
    rng, trace = random.Random(seed), chain(seed)
    along = [(H100, SLOW), (SLOW, H100, A100), (A100, SLOW)][seed]
    num = len(along)
    hardware, mesh = Mixed("stage", along), autopar.Mesh({"stage": num, "a0": 2})
    models = []
    for stage, profile in enumerate(along):
        model = Model(trace, (2,), num, profile)
        model.crossing = Crossing.links_along("stage", mesh, hardware, stage)
        models.append(model)
    wires = [wire("stage", mesh, hardware, stage, stage + 1) for stage in range(num - 1)]
    partings = [model.parting(model.multipliers) for model in models]
    behind = [
        *zip(partings, partings[1:], wires, strict=False),
        (partings[-1], partings[-1], wires[-1]),
    ]
    parts = [mine.parts(other, link) for mine, other, link in behind]
    checked = [model.checked(model.multipliers) for model in models]
    units = [each.units for each in checked]
    borders = [
        mine.borders_to(other, link)
        for mine, other, link in zip(checked, checked[1:], wires, strict=False)
    ]
    best = float("inf")
    for cuts in itertools.combinations(range(1, len(models[0].points) + 1), num - 1):
        fastest = min(_steps(models, cuts, rng))
        found = least_step(parts, num, MICROBATCHES, cuts).step_s
        assert found <= fastest * (1 + 1e-9)
        assert least_over_cuts(units, borders, MICROBATCHES, cuts) == pytest.approx(found, rel=1e-9)
        best = min(best, fastest)
    bound = least_step(parts, num, MICROBATCHES).step_s
    assert 0.8 * best <= bound <= best * (1 + 1e-9)


def _steps(models: Sequence[Model], cuts: Sequence[int], rng: random.Random) -> list[float]:
    """Return the step times of the best plans for these cuts, with each stage solved on its own
    devices, for all layouts of the crossing tensors, or for a random sample of them."""
    made = cut_trace(models[0].trace, [models[0].points[c - 1].position for c in cuts])
    each = [models[0]._layouts(boundary.values) for boundary in made.boundaries]
    ways = [*itertools.product(*each)]
    steps = []
    for layouts in ways if len(ways) <= 24 else rng.sample(ways, 24):
        times = [
            model._time(made, tuple(cuts), s, layouts[max(s - 1, 0) : s + 1])
            for s, model in enumerate(models)
        ]
        steps.append(step_time(times, MICROBATCHES))
    return steps
