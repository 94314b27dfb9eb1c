"""The result of an op in a program does not depend on the strides of its operands.

Layouts, collectives and views change strides between the capture and the program, and copies that
did nothing at capture are not in the graph. Therefore, no kernel may assume a format of its
operands unless it refuses other formats.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from formats import EXPANDED, OPERANDS, RELAID
from further_cases import FURTHER_CASES
from rule_cases import CASES as COMMON_CASES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from autopar.ops.formats import ANY_FORMAT
from autopar.rules.call import op_name

aten = torch.ops.aten
CASES = {**COMMON_CASES, **FURTHER_CASES}
SIZES = SimpleNamespace(a=2, b=3, c=4, d=5, before=[2, 6], after=[3, 4])
NOT_INITIALISED = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
REFUSING = (  # refuse other formats, so that the program passes a copy
    aten.view.default,
    aten._unsafe_view.default,
    aten.view_as_complex.default,
    aten.as_strided.default,
    aten._grouped_mm.default,
)
SINGULAR = (
    aten._linalg_det.default,
)  # with repeated values, its factors depend on rounding errors
FAST = ("channels last", "reversed", "every second", "spread")


def relaid(x: Any, chosen: bool, name: str) -> Any:
    """Return an argument with the same values. A chosen tensor has the given format."""
    return OPERANDS[name](x) if chosen and isinstance(x, Tensor) else x


def results(target: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> list[Tensor]:
    args, kwargs = tree_unflatten(list(leaves), spec)
    torch.manual_seed(0)
    return [x for x in tree_leaves(target(*args, **kwargs)) if isinstance(x, Tensor)]


def depends_on(
    target: Callable[..., Any], args: Any, kwargs: Any, names: Sequence[str]
) -> Iterator[str]:
    """Return the operands and formats, of `names`, for which a call gives other results, each as
    text."""
    given, spec = tree_flatten((args, kwargs))
    tensors = [place for place, leaf in enumerate(given) if isinstance(leaf, Tensor)]
    for name in names:
        leaves = given if name in RELAID else [relaid(x, True, name) for x in given]
        leaves = [x.contiguous() if isinstance(x, Tensor) else x for x in leaves]
        due = results(target, leaves, spec)
        for places in (*((place,) for place in tensors), tuple(tensors)):
            laid = [relaid(x, place in places, name) for place, x in enumerate(leaves)]
            made = results(target, laid, spec)
            if not all(
                torch.allclose(a, b, equal_nan=True) for a, b in zip(made, due, strict=True)
            ):
                yield f"operands {[tensors.index(place) for place in places]} {name}"


def cases() -> Iterator[Any]:
    """Iterate over calls and formats: a few formats per row, and all others in slow tests."""
    for target, made in CASES.items():
        if made and target not in (operator.getitem, *NOT_INITIALISED, *REFUSING):
            for case in made if isinstance(made, list) else [made]:
                names = [
                    name
                    for name in (*RELAID, *EXPANDED)
                    if name not in EXPANDED or target not in SINGULAR
                ]
                few, others = (
                    [name for name in names if name in FAST],
                    [name for name in names if name not in FAST],
                )
                yield pytest.param(target, case, few, id=op_name(target))
                yield pytest.param(
                    target, case, others, id=f"{op_name(target)} further", marks=pytest.mark.slow
                )


@pytest.mark.parametrize(("target", "case", "names"), list(cases()))
def test_an_op_gives_the_same_result_for_operands_in_any_memory_format(
    target: Any, case: Any, names: list[str]
) -> None:
    torch.manual_seed(0)
    args, kwargs = case(SIZES)
    assert list(depends_on(ANY_FORMAT.get(target, target), args, kwargs, names)) == []


class Calls(TorchDispatchMode):
    """Records one call of each op of `ANY_FORMAT`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ANY_FORMAT:
            self.found.setdefault(func, tree_map(_copied, (args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def bags(weight: Tensor, scale: Tensor) -> Tensor:
    ids = torch.tensor([[0, 3, 1], [2, 2, 4]])
    weighed = F.embedding_bag(ids, weight, mode="sum", per_sample_weights=scale)
    return (
        weighed
        + F.embedding_bag(ids.flatten(), weight, torch.tensor([0, 2]), mode="mean")
        + weight.max()
    )


def test_ops_without_a_format_row_accept_operands_in_any_memory_format() -> None:
    def real(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    torch.manual_seed(0)
    samples = torch.full((2, 3, 3), 0.5, dtype=torch.float64)
    with Calls() as calls:
        norms = (
            F.group_norm(real(2, 4, 5, 5), 2, real(4), real(4)).sum()
            + torch._weight_norm(real(3, 4), real(3, 1), 0).square().sum()
        )
        pools = (
            F.fractional_max_pool3d(real(2, 3, 5, 5, 5), 2, (2, 2, 2), _random_samples=samples)
            .square()
            .sum()
        )
        pools = (
            pools
            + F.fractional_max_pool2d(real(2, 3, 6, 6), 2, (3, 3), _random_samples=samples[..., :2])
            .square()
            .sum()
        )
        pools = pools + F.adaptive_max_pool3d(real(2, 3, 5, 5, 5), 2).square().sum()
        rows = (
            F.layer_norm(real(3, 2, 4), (4,), real(4), real(4)).square().sum()
            + F.pdist(real(5, 3)).square().sum()
        )
        (norms + pools + rows + bags(real(5, 4), real(2, 3)).square().sum()).backward()
        with torch.no_grad():
            bags(real(5, 4).detach(), real(2, 3).detach())
    assert set(calls.found) == set(ANY_FORMAT)
    for op, (args, kwargs) in calls.found.items():
        assert list(depends_on(ANY_FORMAT[op], args, kwargs, RELAID)) == [], op
