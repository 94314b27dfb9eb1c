"""The benchmark of kernels: one row per world and dtype. Wrong kernels are not ok, and rows of a
missing device are skipped."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.kernels import library
from benchmarks import kernels
from benchmarks.kernels import CASES, DTYPES, WORLDS, Case, Numerics, row


@pytest.mark.parametrize("name", CASES)
def test_each_kernel_has_a_correct_row_per_world_and_dtype(name: str) -> None:
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


def test_rows_without_a_device_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = [r for r in row({"name": "pack"}, "") if r["on"] == "cuda"]
    assert len(rows) == len(DTYPES)
    assert all(r["skipped"] == "there is no CUDA device" and "time_s" not in r for r in rows)


def with_error(case: Case, what: str) -> Case:
    """Return the case with one wrong bit in the last element of a tensor that is compared with the
    reference, or with a large error in its first result."""

    def numerics(world: int, dtype: torch.dtype) -> Numerics:
        assert case.numerics is not None
        correct = case.numerics(world, dtype)
        first = (correct.alike[0][0] if what == "alike" else correct.made[0]).clone()
        if what == "alike":
            first.view(torch.int32 if dtype == torch.float32 else torch.int16)[..., -1] ^= 1
            return replace(correct, alike=[(first, correct.alike[0][1]), *correct.alike[1:]])
        first[..., -1] += 1 + first.abs().max()
        return replace(correct, made=[first, *correct.made[1:]])

    return replace(case, numerics=numerics)


@pytest.mark.parametrize("name", ["reduce_add_rmsnorm", "matmul_reduce_scatter"])
@pytest.mark.parametrize(("what", "message"), (("alike", "differ"), ("made", "largest error")))
def test_row_of_a_wrong_result_is_not_ok(
    what: str, message: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernels.CASES, "wrong", with_error(CASES[name], what))
    rows = [r for r in row({"name": "wrong"}, "") if r["on"] == "cpu"]
    assert not any(r["ok"] for r in rows)
    assert all(message in r["error"] for r in rows)
