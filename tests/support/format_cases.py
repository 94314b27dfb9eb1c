"""Modules and functions whose captures are compared with the plain model, by memory format: spatial
ops and norms.

The other cases are in `format_cases_of_rows` and in `further_format_cases`, which lists all cases
by name (`CASES`). Shapes are small. Values are normally distributed unless a case states otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


class Function(nn.Module):
    """A function of tensors as a module without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *xs: Tensor) -> Any:
        return self.function(*xs)


@dataclass(frozen=True, slots=True)
class Case:
    """A module and the shapes of its floating-point operands.

    Attributes:
        make: returns the module.
        shapes: the shapes of the operands.
        prepare: converts normally distributed values to an operand of the module.
        ties: whether equal values, as in expanded operands, leave the result undetermined.
    """

    make: Callable[[], nn.Module]
    shapes: tuple[Shape, ...]
    prepare: Callable[[Tensor], Tensor] = lambda x: x
    ties: bool = False


def of(function: Callable[..., Any], *shapes: Shape, **settings: Any) -> Case:
    """Return a case of a function."""
    return Case(lambda: Function(function), shapes, **settings)


def module(make: Callable[[], nn.Module], *shapes: Shape, **settings: Any) -> Case:
    """Return a case of a module."""
    return Case(make, shapes, **settings)


def ids(high: int, *shape: int) -> Tensor:
    """Return reproducible integers below `high`."""
    places = torch.arange(1, math.prod(shape) + 1)
    return ((places * places * 31 + places * 17) % 101 % high).reshape(shape)


def symmetric(x: Tensor) -> Tensor:
    """Return positive definite matrices."""
    return x @ x.mT + 3 * torch.eye(x.shape[-1], dtype=x.dtype)


def apart(x: Tensor) -> Tensor:
    """Return matrices with well-separated singular values."""
    rows, columns = x.shape[-2:]
    return x + torch.eye(rows, columns, dtype=x.dtype) * torch.arange(3, 3 * columns + 3, 3)


IMAGE, SEQUENCE, VOLUME, TOKENS = (2, 4, 6, 6), (2, 4, 9), (2, 4, 4, 4, 4), (2, 6, 8)

CONVOLUTIONS: Mapping[str, Case] = {
    "conv1d": module(lambda: nn.Conv1d(4, 6, 3, padding=1), SEQUENCE),
    "conv1d strided": module(lambda: nn.Conv1d(4, 6, 3, stride=2, bias=False), SEQUENCE),
    "conv1d unbatched": module(lambda: nn.Conv1d(4, 6, 3), (4, 9)),
    "conv2d": module(lambda: nn.Conv2d(4, 6, 3), IMAGE),
    "conv2d pointwise": module(lambda: nn.Conv2d(4, 6, 1), IMAGE),
    "conv2d unbatched": module(lambda: nn.Conv2d(4, 6, 3), IMAGE[1:]),
    "conv2d strided": module(lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), IMAGE),
    "conv2d dilated": module(lambda: nn.Conv2d(4, 6, 2, dilation=2), IMAGE),
    "conv2d same": module(lambda: nn.Conv2d(4, 6, 4, padding="same"), IMAGE),
    "conv2d reflected": module(
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE
    ),
    "conv2d grouped": module(lambda: nn.Conv2d(4, 6, 3, groups=2), IMAGE),
    "conv2d depthwise": module(lambda: nn.Conv2d(4, 8, 3, groups=4), IMAGE),
    "conv2d channels-last weight": module(
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), IMAGE
    ),
    "conv3d": module(lambda: nn.Conv3d(4, 6, 3), VOLUME),
    "conv3d grouped": module(lambda: nn.Conv3d(4, 6, 2, groups=2), VOLUME),
    "transposed1d": module(lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), SEQUENCE),
    "transposed2d": module(lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), IMAGE),
    "transposed2d grouped": module(lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), IMAGE),
    "transposed3d": module(lambda: nn.ConvTranspose3d(4, 6, 2, stride=2), VOLUME),
    "conv2d of a weight": of(lambda x, w: F.conv2d(x, w), IMAGE, (6, 4, 3, 3)),
    # the kernel of torch requires that the first two dims of operands and gradients can be merged
    "conv_tbc": of(
        lambda x, w, b: torch.conv_tbc(x.contiguous(), w, b, 1).flatten().view(6, 2, 5),
        (6, 2, 4),
        (3, 4, 5),
        (5,),
    ),
}

POOLING: Mapping[str, Case] = {
    "max1d": of(lambda x: F.max_pool1d(x, 3, 2), SEQUENCE, ties=True),
    "max2d": of(lambda x: F.max_pool2d(x, 2), IMAGE, ties=True),
    "max2d overlapping": of(lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE, ties=True),
    "max2d dilated": of(
        lambda x: F.max_pool2d(x, 2, 1, dilation=2, ceil_mode=True), IMAGE, ties=True
    ),
    "max2d unbatched": of(lambda x: F.max_pool2d(x, 2), IMAGE[1:], ties=True),
    "max3d": of(lambda x: F.max_pool3d(x, 2), VOLUME, ties=True),
    "unpool2d": of(
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), IMAGE, ties=True
    ),
    "unpool3d": of(
        lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), VOLUME, ties=True
    ),
    "avg1d": of(lambda x: F.avg_pool1d(x, 3, 2), SEQUENCE),
    "avg2d": of(lambda x: F.avg_pool2d(x, 2), IMAGE),
    "avg2d padded": of(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), IMAGE),
    "avg2d unbatched": of(lambda x: F.avg_pool2d(x, 2), IMAGE[1:]),
    "avg3d": of(lambda x: F.avg_pool3d(x, 2), VOLUME),
    "avg3d divided": of(lambda x: F.avg_pool3d(x, 3, 2, 1, divisor_override=5), VOLUME),
    "adaptive avg1d": of(lambda x: F.adaptive_avg_pool1d(x, 4), SEQUENCE),
    "adaptive avg2d": of(lambda x: F.adaptive_avg_pool2d(x, (3, 4)), IMAGE),
    "adaptive avg2d to one": of(lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE),
    "adaptive avg3d": of(lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2)), VOLUME),
    "adaptive max1d": of(lambda x: F.adaptive_max_pool1d(x, 4), SEQUENCE, ties=True),
    "adaptive max2d": of(lambda x: F.adaptive_max_pool2d(x, (3, 4)), IMAGE, ties=True),
    "adaptive max3d": of(lambda x: F.adaptive_max_pool3d(x, (2, 3, 2)), VOLUME, ties=True),
    "lp1d": of(lambda x: F.lp_pool1d(x, 2.0, 3), SEQUENCE),
    "lp2d": of(lambda x: F.lp_pool2d(x, 2.0, 2), IMAGE),
    "fractional2d": of(
        lambda x: F.fractional_max_pool2d(
            x, 2, (3, 3), _random_samples=torch.full((2, 4, 2), 0.5, dtype=x.dtype)
        ),
        IMAGE,
        ties=True,
    ),
    "fractional3d": of(
        lambda x: F.fractional_max_pool3d(
            x, 2, (2, 2, 2), _random_samples=torch.full((2, 4, 3), 0.5, dtype=x.dtype)
        ),
        VOLUME,
        ties=True,
    ),
}

_RESIZED = {
    "nearest": ((SEQUENCE, 13), (IMAGE, (9, 8)), (VOLUME, (5, 6, 7))),
    "nearest-exact": ((SEQUENCE, 13), (IMAGE, (9, 8)), (VOLUME, (5, 6, 7))),
    "linear": ((SEQUENCE, 13),),
    "bilinear": ((IMAGE, (9, 8)),),
    "bicubic": ((IMAGE, (9, 8)),),
    "trilinear": ((VOLUME, (5, 6, 7)),),
    "area": ((SEQUENCE, 5), (IMAGE, (4, 3)), (VOLUME, (3, 2, 5))),
}


def resized(mode: str, size: Any, **settings: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, size, mode=mode, **settings)


def _grid(shape: tuple[int, ...]) -> Tensor:
    return F.affine_grid(
        torch.eye(len(shape) - 2, len(shape) - 1)[None].expand(shape[0], -1, -1),
        list(shape),
        align_corners=False,
    )


def sampled(mode: str, padding: str) -> Case:
    return of(
        lambda x, g: F.grid_sample(
            x, g.tanh() * 1.3, mode=mode, padding_mode=padding, align_corners=False
        ),
        IMAGE,
        (2, 5, 3, 2),
    )


SPACE: Mapping[str, Case] = {
    **{
        f"{mode} {len(shape) - 2}d": of(resized(mode, size), shape)
        for mode, cases in _RESIZED.items()
        for shape, size in cases
    },
    "bilinear corners": of(resized("bilinear", (9, 8), align_corners=True), IMAGE),
    "bilinear antialias": of(resized("bilinear", (4, 3), antialias=True), IMAGE),
    "bicubic antialias": of(resized("bicubic", (4, 3), antialias=True), IMAGE),
    "bicubic corners": of(resized("bicubic", (9, 8), align_corners=True), IMAGE),
    "nearest by scale": of(lambda x: F.interpolate(x, scale_factor=1.5), IMAGE),
    "upsample module": module(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    **{
        f"grid sample {mode} {how}": sampled(mode, how)
        for mode in ("bilinear", "nearest", "bicubic")
        for how in ("zeros", "border", "reflection")
    },
    "grid sample 3d": of(
        lambda x, g: F.grid_sample(x, g.tanh(), align_corners=True), VOLUME, (2, 3, 2, 3, 3)
    ),
    "affine grid": of(lambda t: F.affine_grid(t, [2, 3, 4, 5], align_corners=False), (2, 2, 3)),
    "affine grid 3d": of(
        lambda t: F.affine_grid(t, [2, 3, 4, 5, 2], align_corners=True), (2, 3, 4)
    ),
    "unfold": of(lambda x: F.unfold(x, 3, padding=1, stride=2), IMAGE),
    "fold": of(lambda x: F.fold(x, (6, 6), 3, padding=1, stride=2), (2, 36, 9)),
    "pixel shuffle": of(lambda x: F.pixel_shuffle(x, 2), IMAGE),
    "pixel unshuffle": of(lambda x: F.pixel_unshuffle(x, 2), IMAGE),
    "channel shuffle": of(lambda x: F.channel_shuffle(x, 2), IMAGE),
    "pad": of(lambda x: F.pad(x, (1, 2, 0, 1), value=0.5), IMAGE),
    "pad negative": of(lambda x: F.pad(x, (-1, 2, 1, -2)), IMAGE),
    **{
        f"pad {mode} 1d": of(lambda x, mode=mode: F.pad(x, (1, 2), mode=mode), SEQUENCE)
        for mode in ("reflect", "replicate", "circular")
    },
    **{
        f"pad {mode} 2d": of(lambda x, mode=mode: F.pad(x, (1, 2, 0, 3), mode=mode), IMAGE)
        for mode in ("reflect", "replicate", "circular")
    },
    **{
        f"pad {mode} 3d": of(lambda x, mode=mode: F.pad(x, (1, 2, 0, 3, 1, 1), mode=mode), VOLUME)
        for mode in ("reflect", "replicate", "circular")
    },
    "windows": of(lambda x: x.unfold(2, 3, 2), IMAGE),
    "roll": of(lambda x: x.roll((1, 2), (1, 3)), IMAGE),
    "flip": of(lambda x: x.flip((1, 3)), IMAGE),
    "rot90": of(lambda x: x.rot90(1, (2, 3)), IMAGE),
}

NORMS: Mapping[str, Case] = {
    "batch 1d": module(lambda: nn.BatchNorm1d(4), SEQUENCE),
    "batch 1d of rows": module(lambda: nn.BatchNorm1d(8), (6, 8)),
    "batch 2d": module(lambda: nn.BatchNorm2d(4), IMAGE),
    "batch 2d eval": module(lambda: nn.BatchNorm2d(4).eval(), IMAGE),
    "batch 2d plain": module(
        lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False), IMAGE
    ),
    "batch 3d": module(lambda: nn.BatchNorm3d(4), VOLUME),
    "instance 1d": module(lambda: nn.InstanceNorm1d(4), SEQUENCE),
    "instance 2d": module(lambda: nn.InstanceNorm2d(4, affine=True), IMAGE),
    "instance 2d tracked": module(
        lambda: nn.InstanceNorm2d(4, track_running_stats=True).eval(), IMAGE
    ),
    "instance 3d": module(lambda: nn.InstanceNorm3d(4), VOLUME),
    "group 1d": module(lambda: nn.GroupNorm(2, 4), SEQUENCE),
    "group of rows": module(lambda: nn.GroupNorm(2, 8), (6, 8)),
    "group 2d": module(lambda: nn.GroupNorm(2, 4), IMAGE),
    "group 2d by channel": module(lambda: nn.GroupNorm(4, 4), IMAGE),
    "group 2d plain": module(lambda: nn.GroupNorm(2, 4, affine=False), IMAGE),
    "group 3d": module(lambda: nn.GroupNorm(2, 4), VOLUME),
    "layer": module(lambda: nn.LayerNorm(8), TOKENS),
    "layer of two dims": module(lambda: nn.LayerNorm((6, 6)), IMAGE),
    "layer plain": module(lambda: nn.LayerNorm(8, elementwise_affine=False), TOKENS),
    "rms": module(lambda: nn.RMSNorm(8), TOKENS),
    "rms of two dims": module(lambda: nn.RMSNorm((6, 6)), IMAGE),
    "local response": module(lambda: nn.LocalResponseNorm(3), IMAGE),
    "cross map": module(lambda: nn.LocalResponseNorm(2), SEQUENCE),
    "normalize": of(lambda x: F.normalize(x, dim=1), IMAGE),
    "weight norm": module(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 5)), TOKENS),
}
