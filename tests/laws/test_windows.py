"""Convolution and pooling sharded over spatial dims with halos, on random geometries of
hypothesis."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from autopar.core.layout import Strategy
from autopar.core.placements import Halo
from autopar.rules import Call, call_on, strategies
from autopar.rules.law import check_strategy

aten = torch.ops.aten
MESHES = ((2,), (3,), (2, 2))


def spatial(call: Call, mesh_shape: tuple[int, ...], num: int) -> list[Strategy]:
    """Return the strategies that shard one of the last `num` dims of a tensor."""
    first = len(call.inputs[0].shape) - num
    found = []
    for strategy in strategies(call, mesh_shape):
        placements = [
            p for layout in (*strategy.inputs, *strategy.outputs) for p in layout.placements
        ]
        if any(isinstance(p, Shard) and p.dim >= first for p in placements):
            found.append(strategy)
    return found


def lawful(target: Any, args: tuple[Any, ...], mesh_shape: tuple[int, ...], num: int) -> int:
    """Check all strategies and return their number."""
    result = target(*args)
    call, tensors = call_on(target, args, {}, result)
    found = spatial(call, mesh_shape, num)
    for strategy in found:
        check_strategy(call, tensors, strategy, mesh_shape)
    return len(found)


@st.composite
def windows(draw: st.DrawFn) -> Any:
    """Draw the kernel, stride, dilation and padding of one dim, and a length of which, for most
    paddings, the result has one stride-th."""
    kernel, stride, dilation = (
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
    )
    extent = dilation * (kernel - 1) + 1
    least = max(0, -(-(extent - stride) // 2))
    padding = draw(st.integers(least, max(least, (extent - 1) // 2)) | st.integers(0, extent // 2))
    length = stride * draw(st.integers(max(2, -(-extent // stride)), 10))
    return SimpleNamespace(
        kernel=kernel, stride=stride, dilation=dilation, padding=padding, length=length
    )


def image(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape).double() / 4


@examples(40)
@given(
    windows(),
    windows(),
    st.sampled_from(MESHES),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from([(1, 1, 1), (1, 0, 0), (0, 1, 1)]),
)
def test_a_convolution_over_spatial_shards_equals_the_unsharded_one(
    h: Any, w: Any, mesh_shape: tuple[int, ...], groups: int, biased: bool, mask: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        image(1, 2, h.length, w.length),
        image(2, 2 // groups, h.kernel, w.kernel),
        image(2) if biased else None,
    )
    how = (
        [h.stride, w.stride],
        [h.padding, w.padding],
        [h.dilation, w.dilation],
        False,
        [0, 0],
        groups,
    )
    forward = (x, weight, bias, *how)
    lawful(aten.convolution.default, forward, mesh_shape, 2)
    grad = image(*aten.convolution.default(*forward).shape)
    lawful(
        aten.convolution_backward.default,
        (grad, x, weight, [2], *how, list(map(bool, mask))),
        mesh_shape,
        2,
    )


@examples(40)
@given(windows(), windows(), st.sampled_from(MESHES), st.booleans(), st.booleans())
def test_pooling_over_spatial_shards_equals_the_unsharded_one(
    h: Any, w: Any, mesh_shape: tuple[int, ...], ceil_mode: bool, count_include_pad: bool
) -> None:
    torch.manual_seed(0)
    x = (
        image(1, 2, h.length, w.length) - 3.0
    )  # mostly negative, so that a maximum over zeros beyond the ends is detected
    kernel, stride, padding = (
        [h.kernel, w.kernel],
        [h.stride, w.stride],
        [min(h.padding, h.kernel // 2), min(w.padding, w.kernel // 2)],
    )
    maximum = (x, kernel, stride, padding, [h.dilation, w.dilation], ceil_mode)
    values, indices = aten.max_pool2d_with_indices.default(*maximum)
    lawful(aten.max_pool2d_with_indices.default, maximum, mesh_shape, 2)
    lawful(
        aten.max_pool2d_with_indices_backward.default,
        (image(*values.shape), *maximum, indices),
        mesh_shape,
        2,
    )
    average = (x, kernel, stride, padding, ceil_mode, count_include_pad)
    grad = image(*aten.avg_pool2d.default(*average).shape)
    lawful(aten.avg_pool2d.default, average, mesh_shape, 2)
    lawful(aten.avg_pool2d_backward.default, (grad, *average, None), mesh_shape, 2)


@pytest.mark.parametrize("mesh_shape", MESHES)
def test_volumes_are_sharded_like_images(mesh_shape: tuple[int, ...]) -> None:
    x, weight, how = (
        image(1, 2, 6, 4, 6),
        image(2, 2, 3, 3, 3),
        ([1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1),
    )
    assert lawful(aten.convolution.default, (x, weight, None, *how), mesh_shape, 3)
    assert lawful(
        aten.convolution_backward.default,
        (image(*x.shape), x, weight, [2], *how, [True] * 3),
        mesh_shape,
        3,
    )
    values, indices = aten.max_pool3d_with_indices.default(x, [2] * 3)
    assert lawful(aten.max_pool3d_with_indices.default, (x, [2] * 3), mesh_shape, 3)
    pooled = (image(*values.shape), x, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, indices)
    assert lawful(aten.max_pool3d_with_indices_backward.default, pooled, mesh_shape, 3)


def test_a_transposed_convolution_is_sharded_if_its_windows_do_not_overlap() -> None:
    x, how = image(1, 2, 4, 6), ([2, 2], [0, 0], [1, 1], True, [0, 0], 1)
    assert lawful(aten.convolution.default, (x, image(2, 2, 2, 2), image(2), *how), (2,), 2) == 2
    assert (
        lawful(
            aten.convolution_backward.default,
            (image(1, 2, 8, 12), x, image(2, 2, 2, 2), [2], *how, [True] * 3),
            (2,),
            2,
        )
        == 2
    )
    assert lawful(aten.convolution.default, (x, image(2, 2, 3, 3), None, *how), (2,), 2) == 0


def test_resizing_by_an_integer_factor_keeps_spatial_shards() -> None:
    assert lawful(aten.upsample_nearest2d.default, (image(1, 2, 4, 6), [8, 9]), (2,), 2) == 1, (
        "6 to 9 is no whole factor"
    )
    assert (
        lawful(aten.upsample_nearest2d.default, (image(1, 2, 4, 4), [12, 12], 3.1, 3.0), (2,), 2)
        == 1
    ), "a height of another scale"
    assert (
        lawful(
            aten.upsample_nearest2d_backward.default,
            (image(1, 2, 8, 12), [8, 12], [1, 2, 4, 6]),
            (2,),
            2,
        )
        == 2
    )


def placed(target: Any, *args: Any) -> list[str]:
    """Return the layouts of the operands with a sharded first spatial dim."""
    call, _ = call_on(target, args, {}, target(*args))
    return [", ".join(map(str, s.inputs)) for s in spatial(call, (2,), 2)][:1]


def test_a_halo_has_the_elements_that_windows_read_beyond_a_shard() -> None:
    x, how = image(1, 2, 8, 8), ([1, 1], False, [0, 0], 1)

    def halo(kernel: int, stride: int, padding: int) -> list[str]:
        return placed(
            aten.convolution.default,
            x,
            image(2, 2, kernel, kernel),
            None,
            [stride] * 2,
            [padding] * 2,
            *how,
        )

    assert halo(3, 1, 1) == ["S(2)~1~1, R"]
    assert halo(5, 1, 2) == ["S(2)~2~2, R"]
    assert halo(3, 2, 1) == ["S(2)~1~0, R"], "the second of two rows is the last that a window sees"
    assert halo(4, 2, 1) == ["S(2)~1~1, R"]
    assert halo(2, 2, 0) == halo(1, 1, 0) == ["S(2), R"], "patches do not overlap"
    assert halo(3, 1, 0) == [], "without padding the parts of the result begin elsewhere"
    assert placed(aten.max_pool2d_with_indices.default, x, [3, 3], [2, 2], [1, 1]) == [
        "S(2)~1~0~lowest"
    ]
    grad = image(1, 2, 8, 8)
    backward = (grad, x, image(2, 2, 3, 3), None, [1, 1], [1, 1], *how)
    assert placed(aten.convolution_backward.default, *backward, [True, True, False]) == [
        "S(2)~1~1, S(2)~1~1, R"
    ]
    assert placed(aten.convolution_backward.default, *backward, [False, True, False]) == [
        "S(2), S(2)~1~1, R"
    ]
    assert placed(aten.convolution_backward.default, *backward, [True, False, False]) == [
        "S(2)~1~1, S(2), R"
    ]


def test_a_halo_is_at_most_a_neighbouring_shard_and_needs_one_splitting_axis() -> None:
    x = image(1, 1, 6, 1)
    how = ([1, 1], [2, 0], [1, 1], False, [0, 0], 1)
    call, _ = call_on(
        aten.convolution.default,
        args := (x, image(1, 1, 5, 1), None, *how),
        {},
        aten.convolution.default(*args),
    )
    assert spatial(call, (3,), 2), "parts of 2"
    assert not spatial(call, (6,), 2), "parts of 1"
    assert all(
        sum(isinstance(p, Halo) for p in s.inputs[0].placements) == 1
        for s in spatial(call, (2, 3), 2)
    )
