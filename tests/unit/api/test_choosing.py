"""Which pipelines are tried, and which are not, since bounds say enough."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.api import tries
from autopar.api.choosing import Chooser
from autopar.constraints import Pipelined, pipeline
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.planning import PlanOptions, TooSlow
from autopar.units import seconds

ALONE_S = 1.0  # what is found without stages


@pytest.mark.parametrize(("bound_s", "tried"), [(1.3, [4]), (1.2, [4, 8])])
def test_more_microbatches_are_tried_as_long_as_waiting_less_may_help(
    bound_s: float, tried: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two stages: a bound of M microbatches says that M/(M + 1) of it remain, however many they are; fewer wait for more."""
    seen: list[int] = []

    def too_slow(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        assert limit_s == ALONE_S
        raise TooSlow(bound_s if len(seen) == 1 else 10.0)

    found = SimpleNamespace(plan=SimpleNamespace(prediction=SimpleNamespace(step_s=ALONE_S), pipeline=None))
    monkeypatch.setattr(Chooser, "_without", lambda self, limit_s: found)
    monkeypatch.setattr(Chooser, "_scheduled", too_slow)
    monkeypatch.setattr(tries, "covering", lambda found, line: covered.append(line) or found)
    covered: list[str] = []
    options = PlanOptions(constraints=(pipeline(),))
    batch = {"x": torch.zeros(16, 2)}
    chooser = Chooser(torch.nn.Identity(), None, (), batch, Mesh({"stage": 2}), HardwareProfile.load("h100-sxm"), options)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "autopar"):
        assert chooser._pipelines(float("inf")) is found
    assert seen == tried, "4/5 of 1.3 s are too slow, of 1.2 s are not; 8/9 of 10 s are"
    assert "with nothing to wait for" in caplog.text
    bounds = [bound_s, *[10.0] * (len(tried) - 1)]
    told = [f"{num} microbatches in stages along stage (at least {seconds(s)})" for num, s in zip(tried, bounds, strict=True)]
    assert covered[0].endswith(f"tried, with the step found for each: no microbatches ({seconds(ALONE_S)}); {'; '.join(told)}")


def test_the_numbers_of_a_batch_are_one_and_those_that_fill_the_stages() -> None:
    assert tries.numbers_of((1, 2, 3, 4, 6, 8, 12, 24), 2) == (1, 2, 3, 4, 6, 8, 12)
    assert tries.numbers_of((1, 2, 4), 8) == (1, 4), "too few for the stages: as many as there are"
    assert tries.numbers_of((1,), 4) == (1,)
    assert tries.first_of((1, 4)) == (4,) and tries.first_of((1,)) == (1,) and tries.first_of((1, 2, 4, 8, 16)) == (4, 8, 16)


@pytest.mark.parametrize("overhead_s", [0.0, 0.01, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_the_walk_finds_the_best_number_where_the_step_falls_and_then_rises(overhead_s: float, num_stages: int) -> None:
    """t(M) = overhead + 1/M: every such step has one valley among the numbers."""
    numbers = tries.numbers_of(tuple(n for n in range(1, 97) if 96 % n == 0), num_stages)
    steps = {num: (num + num_stages - 1) * (overhead_s + 1 / num) / num_stages for num in numbers}
    found: dict[int, float] = {}
    for num in tries.walk(numbers, found):
        found[num] = steps[num]
    assert min(found.values()) == min(steps.values())
    assert len(found) < len(numbers) or overhead_s > 0.01, "where waiting is all, the first numbers are enough"


def test_where_the_first_numbers_do_not_fit_fewer_are_not_tried() -> None:
    found: dict[int, float] = {}
    for num in tries.walk((1, 2, 4, 8, 16), found):
        found[num] = math.inf
    assert list(found) == [4, 8, 16]
