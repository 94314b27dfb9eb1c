"""A mutation test of the law: each option of each row with one changed placement is refused, or is
also correct.

An op may write out of bounds on parts with inconsistent shapes, so each op runs in a child process.
The end of the child counts as a refusal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from further_cases import FURTHER_CASES
from rule_cases import CASES as COMMON_CASES
from rule_cases import aten
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar import ops
from autopar.rules import AxisOption, axis_options, call_on, discovery
from autopar.rules.call import NO_TENSOR, Call, TensorInfo, op_name
from autopar.rules.discovery import _in_child
from autopar.rules.law import check_option
from autopar.rules.small_calls import RECIPES, tensors_for
from autopar.rules.trial import run

CASES = {op: cases for op, cases in {**COMMON_CASES, **FURTHER_CASES}.items() if cases}
SIZES = SimpleNamespace(a=4, b=6, c=8, d=10, before=[4, 6], after=[24])
ENDED = ("", discovery._TOO_LONG)  # the reports of a child that ends or hangs
FEW = (aten.mm.default, aten.sum.dim_IntList, aten._softmax.default, aten.where.self, ops.embedding)

# Ops with correct mutants, and the reason.
RIGHT: Mapping[str, tuple[Any, ...]] = {
    "an operand's values are not looked at": (
        aten.convolution_backward.default,
        aten.native_layer_norm_backward.default,
        aten.max_pool3d_with_indices_backward.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.adaptive_max_pool2d_backward.default,
        aten.avg_pool2d_backward.default,
        aten.avg_pool3d_backward.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten._adaptive_avg_pool3d_backward.default,
        aten.reflection_pad1d_backward.default,
        aten.reflection_pad2d_backward.default,
        aten.replication_pad2d_backward.default,
        aten.copy.default,
        aten.fill.Scalar,
        aten.fill.Tensor,
        aten.index_copy.default,
        aten.nll_loss_backward.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    ),
    "zeros add up to zeros": (
        aten.zeros.default,
        aten.zero.default,
        aten.nll_loss_forward.default,
        aten.linalg_inv_ex.default,
    ),
    "an extreme of what all ranks have is what they have": (
        aten.max.default,
        aten.min.default,
        aten.amax.default,
        aten.amin.default,
    ),
    "without NaNs it is a sum": (aten.nansum.default,),
    "indices into a captured tensor that is not split count in the full tensor": (
        ops.flex_attention,
        ops.flex_attention_backward,
    ),
}


def mutants(call: Call) -> Iterator[AxisOption]:
    """Return all options with one changed placement that are not options themselves. The maximum of
    a value that all ranks have is that value."""
    infos, count, seen = (*call.inputs, *call.outputs), len(call.inputs), set(axis_options(call))
    for option in axis_options(call):
        placements = (*option.inputs, *option.outputs)
        for i, before in enumerate(placements):
            for after in _others(infos[i], is_result=i >= count, before=before):
                changed = (*placements[:i], after, *placements[i + 1 :])
                mutant = AxisOption(changed[:count], changed[count:])
                if mutant not in seen:
                    seen.add(mutant)
                    yield mutant


def _others(info: TensorInfo, is_result: bool, before: Placement) -> list[Placement]:
    if info == NO_TENSOR:
        return []
    shards = [Shard(d) for d, size in enumerate(info.shape) if size > 1]
    adds = info.dtype != torch.bool if is_result else info.dtype.is_floating_point
    extremes = (
        [Partial("max"), Partial("min")] if is_result and adds and before == Partial("sum") else []
    )
    return [
        p
        for p in (Replicate(), *shards, *([Partial("sum")] if adds else []), *extremes)
        if p != before
    ]


def numbers(call: Call, tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Iterate over operands: those of the case, and others that the op accepts, including zeros, a
    single zero among ones, and a single one among zeros."""
    yield tensors
    lone = [_lone(t) if t.is_floating_point() else t for t in tensors]
    made = [tensors_for(call.inputs, recipe, 2) for recipe in RECIPES]
    made += [
        [a + b * t if t.is_floating_point() else t for t in lone]
        for a, b in ((0, 0), (0, 1), (1, -1))
    ]
    for other in (
        [m if t.is_floating_point() else t for m, t in zip(ms, tensors, strict=True)] for ms in made
    ):
        try:
            results = run(call.target, call.args, call.kwargs, other, (), ())
        except RuntimeError:  # the op requires a range of values
            continue
        if all(bool(torch.isfinite(r).all()) for r in results if isinstance(r, torch.Tensor)):
            yield other


def _lone(like: torch.Tensor) -> torch.Tensor:
    """Return zeros with a one at the end."""
    x = torch.zeros(like.numel(), dtype=like.dtype)
    x[-1:] = 1
    return x.view(like.shape)


def survivors(op: Any, number: int, progress: Path) -> str:
    """Return the mutants of a case that the law accepts, as JSON. Continue after the mutant at
    which a previous child ended or hung.

    A write out of bounds may end the child only at a later mutant. Therefore, the end counts as a
    refusal only for the first mutant of a child. Otherwise, the next child starts with that mutant.
    """
    torch.manual_seed(0)
    case = CASES[op][number] if isinstance(CASES[op], list) else CASES[op]
    args, kwargs = case(SIZES)
    call, tensors = call_on(op, args, kwargs, op(*args, **kwargs))
    trials = list(numbers(call, tensors))
    every = list(mutants(call))
    if progress.exists() and (seen := progress.read_bytes()).endswith(b"?"):
        progress.write_bytes(seen[:-1])
    with progress.open("a+b", buffering=0) as file:
        for position, mutant in enumerate(every[progress.stat().st_size :]):
            file.write(b"?" if position else b"0")  # remains in the file if the op ends the process
            found = b"1" if all(_passes(call, trial, mutant) for trial in trials) else b"0"
            file.truncate(progress.stat().st_size - 1)
            file.write(found)
    passed = progress.read_bytes()
    return json.dumps(
        [str(m) for m, p in zip(every, passed, strict=True) if p == ord("1")] + [len(every)]
    )


def _passes(call: Call, tensors: list[torch.Tensor], option: AxisOption) -> bool:
    try:
        check_option(call, tensors, option, 2)
    except Exception:  # RuleError, or an error of localization for an option that no row gives
        return False
    return True


def tried(op: Any, folder: Path) -> tuple[list[str], int]:
    """Return the surviving mutants of an op and the number of mutants."""
    found, count = [], 0
    for number in range(len(CASES[op]) if isinstance(CASES[op], list) else 1):
        progress = folder / f"{number}.json"
        progress.unlink(missing_ok=True)
        while (
            text := _in_child(
                lambda number=number, progress=progress: survivors(op, number, progress)
            )
        ) in ENDED:  # type: ignore[misc]
            assert progress.exists(), f"{op} dies before any mutant"
        *passed, total = json.loads(text)
        found, count = found + passed, count + total
    return found, count


@pytest.mark.parametrize("op", FEW, ids=op_name)
def test_every_mutant_is_refused(op: Any, tmp_path: Path) -> None:
    found, count = tried(op, tmp_path)
    assert found == [] and count > 10


@pytest.mark.slow
def test_a_mutant_that_is_not_refused_is_correct(tmp_path: Path) -> None:
    results = {op: tried(op, tmp_path) for op in CASES}
    assert {str(op) for op, (found, _) in results.items() if found} == {
        str(op) for group in RIGHT.values() for op in group
    }
    assert sum(count for _, count in results.values()) > 10_000
