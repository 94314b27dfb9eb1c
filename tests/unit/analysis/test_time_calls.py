"""Law: the results of a call on microbatches match the labels that are derived for them, for all
labels of the operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar import ops
from autopar.analysis.microbatch_calls import MEAN, TERM, WHOLE, Label, Way, find_way
from autopar.rules.call import call_on

aten = torch.ops.aten
NUM, SAMPLES, WIDTH = 3, 6, 4
BATCH, ROW, SCALAR = (SAMPLES, WIDTH), (WIDTH,), ()
POWERS = (-1, 0, 1)


@dataclass(frozen=True)
class Case:
    """A call of an op on operands of given shapes. `further` returns arguments that depend on the
    number of samples."""

    target: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    further: Callable[[int], tuple[Any, ...]] = lambda num: ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    before: tuple[Any, ...] = ()


CASES: dict[str, Case] = {
    "add": Case(aten.add.Tensor, (BATCH, BATCH)),
    "add a row": Case(aten.add.Tensor, (BATCH, ROW)),
    "add scalars": Case(aten.add.Tensor, (SCALAR, SCALAR)),
    "sub": Case(aten.sub.Tensor, (ROW, ROW)),
    "mul": Case(aten.mul.Tensor, (BATCH, SCALAR)),
    "mul rows": Case(aten.mul.Tensor, (ROW, ROW)),
    "div": Case(aten.div.Tensor, (BATCH, SCALAR)),
    "div scalars": Case(aten.div.Tensor, (SCALAR, SCALAR)),
    "neg": Case(aten.neg.default, (BATCH,)),
    "exp": Case(aten.exp.default, (ROW,)),
    "square": Case(aten.pow.Tensor_Scalar, (BATCH,), lambda num: (2,)),
    "clamp": Case(aten.clamp.default, (SCALAR,), lambda num: (0.5,)),
    "sum": Case(aten.sum.default, (BATCH,)),
    "sum over samples": Case(aten.sum.dim_IntList, (BATCH,), lambda num: ([0],)),
    "sum over features": Case(aten.sum.dim_IntList, (BATCH,), lambda num: ([1],)),
    "mean": Case(aten.mean.default, (BATCH,)),
    "mean over samples": Case(aten.mean.dim, (BATCH,), lambda num: ([0],)),
    "mean over features": Case(aten.mean.dim, (BATCH,), lambda num: ([1],)),
    "variance": Case(aten.var.correction, (BATCH,), lambda num: ([0],)),
    "largest": Case(aten.amax.default, (BATCH,), lambda num: ([0],)),
    "mean loss": Case(aten.mse_loss.default, (BATCH, BATCH)),
    "summed loss": Case(aten.mse_loss.default, (BATCH, BATCH), lambda num: (2,)),
    "loss": Case(aten.mse_loss.default, (BATCH, BATCH), lambda num: (0,)),
    "gradient of a mean loss": Case(
        aten.mse_loss_backward.default, (SCALAR, BATCH, BATCH), lambda num: (1,)
    ),
    "gradient of a summed loss": Case(
        aten.mse_loss_backward.default, (SCALAR, BATCH, BATCH), lambda num: (2,)
    ),
    "product": Case(ops.dot, (BATCH, (5, WIDTH)), before=("sk,nk->sn",)),
    "product with a bias": Case(ops.dot, (BATCH, (5, WIDTH), (5,)), before=("sk,nk->sn",)),
    "gradient of a weight": Case(ops.dot, (BATCH, (SAMPLES, 5)), before=("sk,sn->nk",)),
    "scores": Case(ops.dot, (BATCH, BATCH), before=("sk,tk->st",)),
    "softmax": Case(aten._softmax.default, (BATCH,), lambda num: (1, False)),
    "softmax over samples": Case(aten._softmax.default, (BATCH,), lambda num: (0, False)),
    "expanded": Case(aten.expand.default, ((1, WIDTH),), lambda num: ([num, WIDTH],)),
    "a view": Case(aten.view.default, (BATCH,), lambda num: ([num * WIDTH],)),
    "a view of a row": Case(aten.view.default, (ROW,), lambda num: ([2, 2],)),
    "turned": Case(aten.permute.default, (BATCH,), lambda num: ([1, 0],)),
    "flipped": Case(aten.flip.default, (BATCH,), lambda num: ([0],)),
    "and a number": Case(aten.add.Scalar, (SCALAR,), lambda num: (3.0,)),
    "a number less": Case(aten.rsub.Scalar, (ROW,), lambda num: (1.0,)),
    "the number of samples less": Case(aten.rsub.Scalar, (SCALAR,), lambda num: (num,)),
    "over the number of samples": Case(aten.div.Tensor, (BATCH,), lambda num: (num,)),
    "times the number of samples": Case(aten.mul.Tensor, (SCALAR,), lambda num: (num,)),
    "over a number": Case(aten.div.Tensor, (BATCH,), lambda num: (7,)),
    "to integers": Case(aten._to_copy.default, (BATCH,), kwargs={"dtype": torch.int64}),
}


def labels_of(shape: tuple[int, ...]) -> list[Label]:
    """Return all labels that a tensor of a shape can have."""
    dims = [dim for dim, size in enumerate(shape) if size == SAMPLES]
    kinds = [("whole", -1), ("term", -1)] if not dims else [("split", dim) for dim in dims]
    return [Label(kind, dim, power) for kind, dim in kinds for power in POWERS]  # type: ignore[arg-type]


def parts_of(whole: Tensor, label: Label, seed: int) -> list[Tensor]:
    """Return the values of microbatches for a tensor of the full batch with a label."""
    if label.kind == "split":
        parts = list(whole.chunk(NUM, label.dim))
    elif label.kind == "whole":
        parts = [whole] * NUM
    else:
        torch.manual_seed(seed)
        parts = [torch.randn_like(whole) for _ in range(NUM - 1)]
        parts.append(whole - sum(parts))
    return [part * float(NUM) ** label.power for part in parts]


def has_label(parts: Sequence[Tensor], whole: Tensor, label: Label) -> bool:
    """Return whether the results of microbatches relate to the full result as a label states."""
    parts = [part * float(NUM) ** -label.power for part in parts]
    if label.kind == "split":
        joined = torch.cat(list(parts), label.dim)
        return joined.shape == whole.shape and torch.allclose(joined, whole.to(joined.dtype))
    if label.kind == "term":
        return torch.allclose(torch.stack(list(parts)).sum(0), whole)
    assert label.kind == "whole"
    return all(torch.allclose(part, whole) for part in parts)


def run(case: Case, operands: Sequence[Tensor], samples: int) -> tuple[Any, list[Tensor]]:
    args = (*case.before, *operands, *case.further(samples))
    result = case.target(*args, **case.kwargs)
    return call_on(case.target, args, case.kwargs, result)[0], [result]


def find_and_check(case: Case, labels: Sequence[Label]) -> tuple[Way | None, bool]:
    """Return the derived way of a call, and whether the results of microbatches match its
    labels."""
    torch.manual_seed(0)
    wholes = [torch.rand(shape, dtype=torch.float64) + 0.5 for shape in case.shapes]
    whole, expected = run(case, wholes, SAMPLES)
    parts = [parts_of(x, label, n) for n, (x, label) in enumerate(zip(wholes, labels, strict=True))]
    part, _ = run(case, [p[0] for p in parts], SAMPLES // NUM)
    way = find_way(whole, part, labels, NUM)
    if way is None:
        return None, True
    raises = way.raises or (0,) * len(labels)
    assert all(power >= 0 for power in raises)
    outputs = [
        run(
            case,
            [p[m] * float(NUM) ** power for p, power in zip(parts, raises, strict=True)],
            SAMPLES // NUM,
        )[1]
        for m in range(NUM)
    ]
    results = [list(results) for results in zip(*outputs, strict=True)]
    pairs = zip(results, expected, way.results, strict=True)
    return way, all(has_label(x, y, label) for x, y, label in pairs)


@pytest.mark.parametrize("name", CASES)
def test_results_of_raised_operands_match_their_labels(name: str) -> None:
    case = CASES[name]
    for labels in itertools.product(*map(labels_of, case.shapes)):
        way, right = find_and_check(case, labels)
        assert right, f"{name} of {labels}: {way}"


@pytest.mark.parametrize("name", ["mul", "mean over samples", "div", "product"])
def test_check_detects_a_wrong_power(name: str) -> None:
    case = CASES[name]
    labels = [next(x for x in labels_of(shape) if not x.power) for shape in case.shapes]
    way, right = find_and_check(case, labels)
    assert way is not None and right
    wholes = [torch.ones(shape, dtype=torch.float64) for shape in case.shapes]
    _, (expected,) = run(case, wholes, SAMPLES)
    parts = [parts_of(x, label, 0) for x, label in zip(wholes, labels, strict=True)]
    outputs = [run(case, [p[m] for p in parts], SAMPLES // NUM)[1][0] for m in range(NUM)]
    assert not has_label(outputs, expected, way.results[0].raise_by(1))


SPLIT = Label("split", 0)
FOUND: tuple[tuple[str, tuple[Label, ...], Label], ...] = (
    ("add", (SPLIT, SPLIT), SPLIT),
    ("add scalars", (TERM, WHOLE.raise_by(-1)), TERM),
    ("add scalars", (MEAN, WHOLE), MEAN),
    ("mul", (SPLIT.raise_by(-1), WHOLE.raise_by(1)), SPLIT),
    ("mul rows", (MEAN, WHOLE.raise_by(-1)), TERM),
    ("div scalars", (TERM, WHOLE), TERM),
    ("mean", (SPLIT,), MEAN),
    ("mean over samples", (SPLIT.raise_by(-1),), TERM),
    ("sum over features", (SPLIT,), SPLIT),
    ("mean loss", (SPLIT, SPLIT), MEAN),
    ("gradient of a mean loss", (WHOLE.raise_by(-1), SPLIT, SPLIT), SPLIT),
    ("gradient of a summed loss", (WHOLE, SPLIT, SPLIT), SPLIT),
    ("product with a bias", (SPLIT, WHOLE, WHOLE), SPLIT),
    ("gradient of a weight", (SPLIT, SPLIT.raise_by(-1)), TERM.raise_by(-1)),
    ("expanded", (WHOLE.raise_by(-1),), SPLIT.raise_by(-1)),
    ("a number less", (MEAN,), MEAN),
    ("the number of samples less", (TERM,), TERM),
    ("over the number of samples", (SPLIT,), SPLIT.raise_by(1)),
    ("times the number of samples", (TERM,), TERM.raise_by(-1)),
)


@pytest.mark.parametrize(
    ("name", "labels", "result"), FOUND, ids=lambda x: x if isinstance(x, str) else ""
)
def test_operands_that_need_no_raising(name: str, labels: tuple[Label, ...], result: Label) -> None:
    way, _ = find_and_check(CASES[name], labels)
    assert way is not None and way.is_free and way.results == (result,)


RAISED: tuple[tuple[str, tuple[Label, ...], tuple[int, ...]], ...] = (
    ("add scalars", (TERM, MEAN), (1, 0)),
    ("add scalars", (WHOLE, TERM), (0, 1)),
    ("add", (SPLIT, SPLIT.raise_by(-1)), (0, 1)),
    ("and a number", (TERM,), (1,)),
    ("square", (SPLIT.raise_by(-1),), (1,)),
)


@pytest.mark.parametrize(
    ("name", "labels", "raises"), RAISED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_operands_are_raised_to_the_power_of_the_other_operands(
    name: str, labels: tuple[Label, ...], raises: tuple[int, ...]
) -> None:
    way, _ = find_and_check(CASES[name], labels)
    assert way is not None and way.raises == raises


COUPLED: tuple[tuple[str, tuple[Label, ...]], ...] = (
    ("mul rows", (TERM, TERM)),
    ("div scalars", (WHOLE, TERM)),
    ("exp", (MEAN,)),
    ("square", (SPLIT.raise_by(1),)),
    ("clamp", (TERM,)),
    ("variance", (SPLIT,)),
    ("largest", (SPLIT,)),
    ("scores", (SPLIT, SPLIT)),
    ("softmax over samples", (SPLIT,)),
    ("flipped", (SPLIT,)),
    ("a number less", (MEAN.raise_by(1),)),
)


@pytest.mark.parametrize(("name", "labels"), COUPLED)
def test_calls_that_couple_samples_are_not_supported(name: str, labels: tuple[Label, ...]) -> None:
    way, _ = find_and_check(CASES[name], labels)
    assert way is None


ZEROS: dict[str, tuple[Any, tuple[Any, ...], Label]] = {
    "a number": (aten.scalar_tensor.default, (0.0,), Label("zero")),
    "filled": (aten.full.default, ([WIDTH], 0.0), Label("zero")),
    "ones": (aten.ones.default, ([WIDTH],), WHOLE),
    "another number": (aten.scalar_tensor.default, (2.0,), WHOLE),
}


@pytest.mark.parametrize("name", ZEROS)
def test_constant_zeros_have_the_label_zero(name: str) -> None:
    target, args, label = ZEROS[name]
    call = call_on(target, args, {}, target(*args))[0]
    way = find_way(call, call, (), NUM)
    assert way is not None and way.results == (label,)


def test_zeros_keep_their_label_in_selections_and_views() -> None:
    zero, row, mask = torch.zeros(()), torch.ones(WIDTH), torch.tensor([True, False] * 2)
    where = aten.where.self
    call = call_on(where, (mask, zero, row), {}, where(mask, zero, row))[0]
    way = find_way(call, call, (WHOLE, Label("zero"), TERM.raise_by(-1)), NUM)
    assert way is not None and way.is_free and way.results == (TERM.raise_by(-1),)
    whole, part = (
        call_on(aten.expand.default, (zero, [n]), {}, zero.expand(n))[0]
        for n in (SAMPLES, SAMPLES // NUM)
    )
    way = find_way(whole, part, (Label("zero"),), NUM)
    assert way is not None and way.results == (Label("zero", 0),)


def test_quotients_of_integers_are_not_split_into_terms() -> None:
    right, num = torch.tensor(5), torch.tensor(8)
    call = call_on(aten.div.Tensor, (right, num), {}, right / num)[0]
    assert find_way(call, call, (TERM, WHOLE), NUM) is None
