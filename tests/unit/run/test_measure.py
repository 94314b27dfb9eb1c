"""Measuring a machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import HardwareError
from autopar.hardware import FLOP_KINDS, MEMORY_KINDS, HardwareProfile
from autopar.run.measure import _dumps, _profile, measure
from autopar.run.measure_worker import COLLECTIVES, compute_measurements


def _points() -> dict[str, list[dict[str, Any]]]:
    points: dict[str, list[dict[str, Any]]] = {}
    for number, (kind, point, _) in enumerate(compute_measurements()):
        points.setdefault(kind, []).append({**point, "time_s": 1e-6 * (number + 1)})
    for kind in COLLECTIVES:
        points[kind] = [{"num_devices": n, "bytes": b, "time_s": 1e-4 * n + b * 1e-9} for n in (2, 4) for b in (1024, 2**20)]
    return points


def test_everything_measured_becomes_a_profile_that_loads() -> None:
    profile = HardwareProfile.from_json(_profile(_points(), "local", 4))
    assert {kind for kind, _ in profile.curves} == {*FLOP_KINDS, *MEMORY_KINDS}
    assert "4 processes" in profile.description
    for link in profile.links.values():
        assert set(link.curves) == set(COLLECTIVES)
        assert link.curves["all_reduce"][4].time_s(1024) == pytest.approx(4e-4 + 1.024e-6)
        assert link.latency_s == pytest.approx((4e-4 + 1.024e-6) / 4, rel=1e-3)


def test_the_file_is_what_was_measured() -> None:
    import json

    data = _profile(_points(), "local", 4)
    assert json.loads(_dumps(data)) == data


@pytest.mark.parametrize(("device", "world_size", "message"), [("cuda", 4, "'cuda' cannot be measured"), ("cpu", 1, "world_size=1")])
def test_what_cannot_be_measured_is_refused(device: str, world_size: int, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        measure(device, world_size)


def test_a_process_that_fails_ends_the_measurement_with_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 fails and the others would wait for it for ever."""
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\nif [ "$3" = 1 ]; then echo "no memory left" >&2; exit 3; fi\nexec sleep 1000\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(HardwareError, match=r"process 1 ended with code 3:\nno memory left"):
        measure(world_size=3, out=tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.slow
@pytest.mark.multiproc
def test_this_machine_can_be_measured(tmp_path: Path) -> None:
    profile = measure(world_size=2, out=tmp_path / "local.json")
    assert HardwareProfile.load(tmp_path / "local.json") == profile
