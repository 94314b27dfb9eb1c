"""The benchmark of kernels: a row per world and dtype, not ok where a kernel is wrong; without a device nothing is claimed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.kernels import library
from benchmarks import kernels
from benchmarks.kernels import CASES, DTYPES, WORLDS, Case, Numerics, row


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_has_a_row_per_world_and_dtype_and_all_are_ok(name: str) -> None:
    rows = row({"name": name}, "")
    assert [(r["mesh"], r["dtype"]) for r in rows if r["on"] == "cpu"] == [(f"world={world}", d) for world in WORLDS for d in DTYPES]
    assert all(r["ok"] and r["error"] is None for r in rows), rows
    assert {r["bitwise"] for r in rows if r["on"] == "cpu"} == {True if library.host() is not None else None}


def test_without_a_device_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = [r for r in row({"name": "pack"}, "") if r["on"] == "cuda"]
    assert len(rows) == len(DTYPES)
    assert all(r["skipped"] == "there is no CUDA device" and "time_s" not in r for r in rows)


def spoiled(case: Case, what: str) -> Case:
    """The case with one bit wrong in the last element of its first result, or with that of the result and the reference alike far off."""

    def numerics(world: int, dtype: torch.dtype) -> Numerics:
        found = case.numerics(world, dtype)
        first = found.made[0].clone()
        if what == "made":
            first.view(torch.int32 if dtype == torch.float32 else torch.int16)[..., -1] ^= 1
        else:
            first[..., -1] += 1
        return replace(found, **{field: [first, *getattr(found, field)[1:]] for field in what.split()})

    return replace(case, numerics=numerics)


@pytest.mark.parametrize(("what", "message"), (("made", "differ"), ("made reference", "largest error")))
def test_a_wrong_result_is_a_row_that_is_not_ok(what: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.CASES, "wrong", spoiled(CASES["reduce_add_rmsnorm"], what))
    rows = [r for r in row({"name": "wrong"}, "") if r["on"] == "cpu"]
    assert not any(r["ok"] for r in rows)
    assert all(message in r["error"] for r in rows)
