"""All rows of the rule table satisfy the law: shard → run → join equals run. The law detects wrong
rules."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from further_cases import FURTHER_CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_cases import CASES as COMMON_CASES
from rule_cases import (
    DIMS,
    Built,
    Case,
    aten,
    attended,
    attended_backward,
    convolved,
    convolved_backward,
    cube,
    last,
    nll,
    normed,
    on,
    pair,
    real,
    reshaped,
    softmax,
)
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar import ops
from autopar.core.layout import Layout, Strategy
from autopar.errors import RuleError
from autopar.rules import AxisOption, axis_options, call_on, localization, trial
from autopar.rules.call import op_name
from autopar.rules.law import check_option, check_options, check_strategies, check_strategy
from autopar.rules.table import TABLE
from autopar.rules.trial import run

CASES = {**COMMON_CASES, **FURTHER_CASES}


@st.composite
def sizes(draw: st.DrawFn) -> Any:
    a, b, c, d = (draw(st.sampled_from([1, 2, 3, 4, 5, 6])) for _ in "abcd")
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    shapes = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(0, len(factors)), max_size=3)) | {0, len(factors)})
        shapes.append([math.prod(factors[i:j]) for i, j in itertools.pairwise(cuts)])
    return SimpleNamespace(a=a, b=b, c=c, d=d, before=shapes[0], after=shapes[1])


def made(target: Any, built: Built) -> tuple[Any, list[torch.Tensor]]:
    return call_on(target, *built, target(*built[0], **built[1]))


LISTED = [
    (target, case)
    for target, cases in CASES.items()
    if cases
    for case in (cases if isinstance(cases, list) else [cases])
]


@pytest.mark.parametrize(("target", "case"), LISTED, ids=lambda v: op_name(v) if v in CASES else "")
@settings(max_examples=6)
@given(s=sizes(), mesh_shape=st.sampled_from([(2,), (3,), (2, 2)]))
def test_every_strategy_of_every_row_matches_the_unsharded_op(
    target: Any, case: Case, s: Any, mesh_shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    call, tensors = made(target, case(s))
    check_strategies(call, tensors, mesh_shape)


def test_the_law_covers_every_row_of_the_table() -> None:
    assert set(TABLE) <= set(CASES)


def test_a_result_of_an_op_with_several_passes_through_getitem() -> None:
    x = real(4, 6)
    call, _ = call_on(operator.getitem, (x, 1), {}, x)
    assert check_options(call, lambda: [x], 2) == 4  # replicated, two sharded dims, a partial sum


R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial("sum")
FOUR = SimpleNamespace(a=4, b=4, c=4, d=4, before=[4, 6], after=[24])
Wrong = tuple[Any, Case, list[Any], list[Any]]
WRONG: Mapping[str, Wrong] = {
    "a product over dims that do not contract": (ops.dot, CASES[ops.dot][0], [S2, S0], [S2]),
    "a contraction taken for whole": (
        aten.mm.default,
        lambda s: on(real(4, 4), real(4, 4)),
        [S1, S0],
        [R],
    ),
    "a partial sum plus a replicated tensor": (aten.add.Tensor, pair, [P, R], [P]),
    "a partial sum plus a number": (aten.add.Scalar, lambda s: on(real(4), 2.0), [P], [P]),
    "a product of two partial sums": (aten.mul.Tensor, pair, [P, P], [P]),
    "a quotient by a partial sum": (aten.div.Tensor, CASES[aten.div.Tensor], [R, P], [P]),
    "a narrowing cast of a partial sum": (
        aten._to_copy.default,
        lambda s: on(real(4, 4) / 3, dtype=torch.bfloat16),
        [P],
        [P],
    ),
    "exp of a partial sum": (aten.exp.default, cube, [P], [P]),
    "half of a where": (aten.where.self, CASES[aten.where.self], [R, P, R], [P]),
    "softmax over a sharded dim": (aten._softmax.default, softmax, [S1], [S1]),
    "a cumulative sum along a sharded dim": (aten.cumsum.default, last, [S2], [S2]),
    "a maximum taken for a sum": (aten.amax.default, DIMS[0], [S0], [P]),
    "a variance taken for a sum": (aten.var.correction, lambda s: on(real(4, 4), [0]), [S0], [P]),
    "layer norm over a sharded dim": (
        aten.native_layer_norm.default,
        CASES[aten.native_layer_norm.default][0],
        [S2, S0, S0],
        [S2, R, R],
    ),
    "the gradient of a norm's weight not reduced": (
        aten.native_layer_norm_backward.default,
        normed,
        [S0, S0, S0, S0, R, R],
        [S0, R, R],
    ),
    "causal attention sharded over the keys": (
        ops.attention,
        lambda s: attended(s, causal=True),
        [R, S2, S2],
        [P, R],
    ),
    "grouped heads sharded, and their keys' gradients not reduced": (
        ops.attention_backward,
        lambda s: attended_backward(s, groups=2),
        [S1, S1, R, R, S1, S1],
        [S1, R, R],
    ),
    "attention sharded over the keys": (ops.attention, attended, [R, S2, S2], [P, R]),
    "a key's gradient not reduced": (
        ops.attention_backward,
        attended_backward,
        [S2, S2, R, R, S2, S2],
        [S2, R, R],
    ),
    "a view of the inner factor": (aten.view.default, reshaped, [S1], [S0]),
    "a transpose that forgets to": (aten.transpose.int, lambda s: on(real(4, 6), 0, 1), [S0], [S0]),
    "a slice of a sharded dim": (aten.slice.Tensor, lambda s: on(real(4, 4), 1, 0, 2), [S1], [S1]),
    "a part of the vocabulary taken for the whole": (
        ops.embedding,
        CASES[ops.embedding],
        [S0, R],
        [R],
    ),
    "a loss' gradient of the weight not reduced": (
        ops.linear_cross_entropy,
        CASES[ops.linear_cross_entropy][0],
        [S0, R, S0],
        [S0, S0, R],
    ),
    "a loss over a part of the features": (
        ops.linear_cross_entropy,
        CASES[ops.linear_cross_entropy][0],
        [S2, S1, R],
        [P, S2, S1],
    ),
    "a convolution that adds its bias on every rank": (
        aten.convolution.default,
        lambda s: convolved(s, bias=True),
        [S1, S1, R],
        [P],
    ),
    "a bias' gradient counted once per rank": (
        aten.convolution_backward.default,
        convolved_backward,
        [R, S1, S1],
        [S1, S1, P],
    ),
    "a mean loss over a sharded batch": (aten.nll_loss_forward.default, nll, [S0, S0], [P, P]),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_law_detects_wrong_strategies(name: str) -> None:
    target, case, inputs, outputs = WRONG[name]
    torch.manual_seed(0)
    call, tensors = made(target, case(FOUR))
    option = AxisOption(tuple(inputs), tuple(outputs))
    assert option not in axis_options(call)
    with pytest.raises(RuleError, match="is wrong on shapes"):
        check_option(call, tensors, option, 2)


def in_bounds(
    target: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], mesh_shape: Any, rank: Any
) -> Any:
    """Run like `trial.run`, but raise an error for an index of a pooling that is out of bounds,
    which the CPU kernels of torch do not check."""
    pooled = {
        aten.max_pool2d_with_indices_backward.default: 2,
        aten.max_pool3d_with_indices_backward.default: 3,
    }
    if target in pooled:
        _, x, indices = tensors
        if indices.numel() and int(indices.max()) >= math.prod(x.shape[-pooled[target] :]):
            raise IndexError("an index lies outside the rank's part")
    return run(target, args, kwargs, tensors, mesh_shape, rank)


@pytest.mark.parametrize(
    "target", sorted((t for t in localization.LOCALIZERS if CASES[t]), key=op_name), ids=op_name
)
def test_the_law_detects_arguments_that_are_not_localized(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each localizer is needed by some case."""
    monkeypatch.setattr(localization, "LOCALIZERS", {})
    monkeypatch.setattr(trial, "run", in_bounds)
    torch.manual_seed(0)
    cases = CASES[target] if isinstance(CASES[target], list) else [CASES[target]]
    shapes = [FOUR, SimpleNamespace(a=2, b=2, c=2, d=2, before=[2, 12], after=[4, 6])]
    with pytest.raises(RuleError, match="is wrong on shapes"):
        for case in cases:
            for s in shapes:
                call, tensors = made(target, case(s))
                check_strategies(call, tensors, (2,))


def test_the_law_detects_axes_that_split_one_dim_in_different_orders() -> None:
    call, tensors = made(aten.neg.default, on(real(8)))
    layout = Layout((S0, S0))
    check_strategy(call, tensors, Strategy((layout,), (layout,)), (2, 2))
    with pytest.raises(RuleError, match="is wrong on shapes"):
        check_strategy(call, tensors, Strategy((layout,), (Layout((S0, S0), (1, 0)),)), (2, 2))
