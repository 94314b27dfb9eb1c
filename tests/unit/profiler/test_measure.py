"""Measuring a machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.core.hardware import FLOP_KINDS, MEMORY_KINDS, HardwareProfile
from autopar.errors import HardwareError
from autopar.profiler.measure import (
    COLLECTIVES,
    Json,
    Machine,
    dumps,
    measure,
    measured_links,
    profile_json,
)
from autopar.profiler.worker import CPU, Sizes, compute_measurements

HERE = Machine(
    "cpu", "a machine, 4 processes", "measure(world_size=4)", "2026-11-22", 2**33, "of a test"
)


def points_of(sizes: Sizes) -> dict[str, list[dict[str, Any]]]:
    """A time for all that is run, longer from one to the next."""
    points: dict[str, list[dict[str, Any]]] = {}
    for number, (kind, point, _) in enumerate(compute_measurements(sizes)):
        points.setdefault(kind, []).append({**point, "time_s": 1e-6 * (number + 1)})
    return points


def _data() -> Json:
    points = points_of(CPU)
    for kind in COLLECTIVES:
        points[kind] = [
            {"num_devices": n, "bytes": b, "time_s": 1e-4 * n + b * 1e-9}
            for n in (2, 4)
            for b in (1024, 2**20)
        ]
    return profile_json(points, HERE, "local", measured_links(points, HERE, 4))


def test_everything_measured_becomes_a_profile_that_loads() -> None:
    profile = HardwareProfile.from_json(_data())
    assert (profile.device_type, profile.device_memory_bytes) == ("cpu", 2**33)
    assert {kind for kind, _ in profile.curves} == {*FLOP_KINDS, *MEMORY_KINDS}
    assert "4 processes" in profile.description
    for link in profile.links.values():
        assert set(link.curves) == set(COLLECTIVES)
        assert link.curves["all_reduce"][4].time_s(1024) == pytest.approx(4e-4 + 1.024e-6)
        assert link.latency_s == pytest.approx((4e-4 + 1.024e-6) / 4, rel=1e-3)


def test_the_file_is_what_was_measured() -> None:
    import json

    data = _data()
    assert json.loads(dumps(data)) == data


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "abacus"}, "'abacus' cannot be measured"),
        ({"device": "cuda:1"}, "CUDA_VISIBLE_DEVICES"),
        ({"world_size": 1}, "world_size=1"),
        ({"links": "h100-sxm"}, "links of CPUs are measured"),
        ({"device": "cuda", "world_size": 2}, "omit world_size"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        measure(**arguments)


def test_a_process_that_fails_ends_the_measurement_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 fails and the others would wait for it for ever."""
    script = tmp_path / "python"
    script.write_text(
        '#!/bin/sh\nif [ "$3" = 1 ]; then echo "no memory left" >&2; exit 3; fi\nexec sleep 1000\n'
    )
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
