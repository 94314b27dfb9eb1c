"""Localization: the call that one rank runs for a strategy."""

from __future__ import annotations

from typing import Any

import torch

from autopar import ops
from autopar.core.layout import Layout, Strategy
from autopar.rules import Local, Operand, Start, call_on, localize

aten = torch.ops.aten


def local(
    mesh_shape: tuple[int, ...],
    inputs: list[str],
    outputs: list[str],
    target: Any,
    *args: Any,
    **kwargs: Any,
) -> Local:
    call, _ = call_on(target, args, kwargs, target(*args, **kwargs))
    return localize(
        call,
        Strategy(tuple(map(Layout.parse, inputs)), tuple(map(Layout.parse, outputs))),
        mesh_shape,
    )


def test_view_becomes_a_reshape_to_the_local_shape() -> None:
    result = local(
        (2, 2), ["S(0) S(1)"], ["S(0) S(1)"], aten.view.default, torch.ones(4, 8), (4, 4, 2)
    )
    assert (result.target, result.args) == (aten.reshape.default, (Operand(0), (2, 2, 2)))


def test_size_arguments_become_local_sizes() -> None:
    result = local((4,), ["R"], ["S(0)"], aten.expand.default, torch.ones(1, 3), [8, -1])
    assert result.args == (Operand(0), (2, 3))
    result = local(
        (2,), ["S(0)"], ["S(0)"], aten.slice_backward.default, torch.ones(4, 2), [4, 6], 1, 0, 2, 1
    )
    assert result.args == (Operand(0), (2, 6), 1, 0, 2, 1)


def test_start_of_a_shard_depends_on_the_rank() -> None:
    ids = torch.zeros(3, dtype=torch.int64)
    result = local((2, 2), ["S(0)#1 S(0)#0", "R R"], ["P P"], ops.embedding, torch.ones(8, 2), ids)
    start = result.kwargs["start"]
    assert isinstance(start, Start)
    assert [start.at((2, 2), (i, j)) for i in range(2) for j in range(2)] == [0, 4, 2, 6]


def test_replicated_vocabulary_has_no_start() -> None:
    ids = torch.zeros(4, dtype=torch.int64)
    result = local((2,), ["R", "S(0)"], ["S(0)"], ops.embedding, torch.ones(8, 2), ids)
    assert (result.args, dict(result.kwargs)) == ((Operand(0), Operand(1)), {})
    assert local((2,), ["R", "R"], ["S(1)"], ops.pick, torch.ones(4, 4), ids, -100).args == (
        Operand(0),
        Operand(1),
        -100,
    )


def test_gradient_of_a_sharded_embedding_has_the_local_number_of_rows() -> None:
    ids = torch.zeros(4, dtype=torch.int64)
    result = local(
        (4,), ["R", "R"], ["S(0)"], ops.embedding_backward, torch.ones(4, 2), ids, 8, None, 3
    )
    assert result.args == (Operand(0), Operand(1), 2, Start(8, Layout.parse("S(0)"), 0), 3)


def test_mean_over_a_sharded_dim_divides_by_the_global_count() -> None:
    result = local((2,), ["S(1)"], ["P"], aten.mean.dim, torch.ones(4, 6), [1], True)
    part = result.target(torch.ones(4, 3), *result.args[1:], **result.kwargs)
    assert torch.equal(part, torch.full((4, 1), 0.5))


def test_mean_over_replicated_dims_is_unchanged() -> None:
    assert (
        local((2,), ["S(0)"], ["S(0)"], aten.mean.dim, torch.ones(4, 6), [1]).target
        is aten.mean.dim
    )


def test_depthwise_convolution_with_sharded_channels_has_local_groups() -> None:
    args = (
        torch.ones(2, 4, 5, 5),
        torch.ones(4, 1, 3, 3),
        None,
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        4,
    )
    assert local((2,), ["S(1)", "S(0)"], ["S(1)"], aten.convolution.default, *args).args[-1] == 2
    assert local((2,), ["S(0)", "R"], ["S(0)"], aten.convolution.default, *args).args[-1] == 4
