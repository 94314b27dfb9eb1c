"""Which pipelines are tried, and which are not, since bounds say enough."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.api.choosing import Chooser
from autopar.constraints import Pipelined, pipeline
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.planning import PlanOptions, TooSlow

ALONE_S = 1.0  # what is found without stages


@pytest.mark.parametrize(("bound_s", "tried"), [(1.3, [4]), (1.2, [4, 8])])
def test_more_microbatches_are_tried_as_long_as_waiting_less_may_help(
    bound_s: float, tried: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two stages: a bound of M microbatches says that M/(M + 1) of it remain, however many they are."""
    seen: list[int] = []

    def too_slow(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        assert limit_s == ALONE_S
        raise TooSlow(bound_s if len(seen) == 1 else 10.0)

    found = SimpleNamespace(plan=SimpleNamespace(prediction=SimpleNamespace(step_s=ALONE_S)))
    monkeypatch.setattr(Chooser, "_without", lambda self, limit_s: found)
    monkeypatch.setattr(Chooser, "_scheduled", too_slow)
    options = PlanOptions(constraints=(pipeline(),))
    batch = {"x": torch.zeros(16, 2)}
    chooser = Chooser(torch.nn.Identity(), None, (), batch, Mesh({"stage": 2}), HardwareProfile.load("h100-sxm"), options)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO, "autopar"):
        assert chooser._pipelines(float("inf")) is found
    assert seen == tried, "4/5 of 1.3 s are too slow, of 1.2 s are not; 8/9 of 10 s are"
    assert "with nothing to wait for" in caplog.text
