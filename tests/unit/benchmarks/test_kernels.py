"""The benchmark of kernels: a row per world and dtype, not ok where a kernel is wrong; without a
device nothing is claimed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.kernels import library
from benchmarks import kernels
from benchmarks.kernels import CASES, DTYPES, WORLDS, Case, Numerics, row


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_has_a_row_per_world_and_dtype_and_all_are_ok(name: str) -> None:
    rows, worlds = row({"name": name}, ""), WORLDS if CASES[name].numerics is not None else ()
    assert [(r["mesh"], r["dtype"]) for r in rows if r["on"] == "cpu"] == [
        (f"world={world}", d) for world in worlds for d in DTYPES
    ]
    assert [(r["mesh"], r["dtype"]) for r in rows if r["on"] == "cuda"] == [
        ("one device", d) for d in DTYPES
    ]
    assert all(r["ok"] and r["error"] is None for r in rows), rows
    assert all(
        r["bitwise"] == (True if library.host() is not None else None)
        for r in rows
        if r["on"] == "cpu"
    )


def test_without_a_device_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = [r for r in row({"name": "pack"}, "") if r["on"] == "cuda"]
    assert len(rows) == len(DTYPES)
    assert all(r["skipped"] == "there is no CUDA device" and "time_s" not in r for r in rows)


def spoiled(case: Case, what: str) -> Case:
    """The case with one bit wrong in the last element of what is compared with the reference, or
    with its first result far off."""

    def numerics(world: int, dtype: torch.dtype) -> Numerics:
        assert case.numerics is not None
        found = case.numerics(world, dtype)
        first = (found.alike[0][0] if what == "alike" else found.made[0]).clone()
        if what == "alike":
            first.view(torch.int32 if dtype == torch.float32 else torch.int16)[..., -1] ^= 1
            return replace(found, alike=[(first, found.alike[0][1]), *found.alike[1:]])
        first[..., -1] += 1 + first.abs().max()
        return replace(found, made=[first, *found.made[1:]])

    return replace(case, numerics=numerics)


@pytest.mark.parametrize("name", ["reduce_add_rmsnorm", "matmul_reduce_scatter"])
@pytest.mark.parametrize(("what", "message"), (("alike", "differ"), ("made", "largest error")))
def test_a_wrong_result_is_a_row_that_is_not_ok(
    what: str, message: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernels.CASES, "wrong", spoiled(CASES[name], what))
    rows = [r for r in row({"name": "wrong"}, "") if r["on"] == "cpu"]
    assert not any(r["ok"] for r in rows)
    assert all(message in r["error"] for r in rows)
