"""Modules and functions for comparisons of a capture with the plain model, by memory format.

CASES: name -> `Case`. A case makes a module of a few tensors; the shapes are small. Values are normally
distributed, but where a case says otherwise.
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
    """A module, and the shapes of its floating operands.

    Attributes:
        make: the module. shapes: of its operands.
        prepare: what makes of normally distributed values the operand that the module takes.
        ties: whether values that are equal, as expanded ones are, leave the result undetermined.
    """

    make: Callable[[], nn.Module]
    shapes: tuple[Shape, ...]
    prepare: Callable[[Tensor], Tensor] = lambda x: x
    ties: bool = False


def of(function: Callable[..., Any], *shapes: Shape, **settings: Any) -> Case:
    """A case of a function."""
    return Case(lambda: Function(function), shapes, **settings)


def module(make: Callable[[], nn.Module], *shapes: Shape, **settings: Any) -> Case:
    """A case of a module."""
    return Case(make, shapes, **settings)


def ids(high: int, *shape: int) -> Tensor:
    """Integers below `high`, always the same."""
    places = torch.arange(1, math.prod(shape) + 1)
    return ((places * places * 31 + places * 17) % 101 % high).reshape(shape)


def symmetric(x: Tensor) -> Tensor:
    """Positive definite matrices."""
    return x @ x.mT + 3 * torch.eye(x.shape[-1], dtype=x.dtype)


def apart(x: Tensor) -> Tensor:
    """Matrices whose singular values are apart from each other."""
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
    "conv2d reflected": module(lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGE),
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
    "conv_tbc": of(lambda x, w, b: torch.conv_tbc(x, w, b, 1), (6, 2, 4), (3, 4, 5), (5,)),
}

POOLING: Mapping[str, Case] = {
    "max1d": of(lambda x: F.max_pool1d(x, 3, 2), SEQUENCE, ties=True),
    "max2d": of(lambda x: F.max_pool2d(x, 2), IMAGE, ties=True),
    "max2d overlapping": of(lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE, ties=True),
    "max2d dilated": of(lambda x: F.max_pool2d(x, 2, 1, dilation=2, ceil_mode=True), IMAGE, ties=True),
    "max2d unbatched": of(lambda x: F.max_pool2d(x, 2), IMAGE[1:], ties=True),
    "max3d": of(lambda x: F.max_pool3d(x, 2), VOLUME, ties=True),
    "unpool2d": of(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), IMAGE, ties=True),
    "unpool3d": of(lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), VOLUME, ties=True),
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
        lambda x: F.fractional_max_pool2d(x, 2, (3, 3), _random_samples=torch.full((2, 4, 2), 0.5, dtype=x.dtype)),
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
    return F.affine_grid(torch.eye(len(shape) - 2, len(shape) - 1)[None].expand(shape[0], -1, -1), list(shape), align_corners=False)


def sampled(mode: str, padding: str) -> Case:
    return of(
        lambda x, g: F.grid_sample(x, g.tanh() * 1.3, mode=mode, padding_mode=padding, align_corners=False),
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
    **{f"grid sample {mode} {how}": sampled(mode, how) for mode in ("bilinear", "nearest", "bicubic") for how in ("zeros", "border", "reflection")},
    "grid sample 3d": of(lambda x, g: F.grid_sample(x, g.tanh(), align_corners=True), VOLUME, (2, 3, 2, 3, 3)),
    "affine grid": of(lambda t: F.affine_grid(t, [2, 3, 4, 5], align_corners=False), (2, 2, 3)),
    "affine grid 3d": of(lambda t: F.affine_grid(t, [2, 3, 4, 5, 2], align_corners=True), (2, 3, 4)),
    "unfold": of(lambda x: F.unfold(x, 3, padding=1, stride=2), IMAGE),
    "fold": of(lambda x: F.fold(x, (6, 6), 3, padding=1, stride=2), (2, 36, 9)),
    "pixel shuffle": of(lambda x: F.pixel_shuffle(x, 2), IMAGE),
    "pixel unshuffle": of(lambda x: F.pixel_unshuffle(x, 2), IMAGE),
    "channel shuffle": of(lambda x: F.channel_shuffle(x, 2), IMAGE),
    "pad": of(lambda x: F.pad(x, (1, 2, 0, 1), value=0.5), IMAGE),
    "pad negative": of(lambda x: F.pad(x, (-1, 2, 1, -2)), IMAGE),
    **{f"pad {mode} 1d": of(lambda x, mode=mode: F.pad(x, (1, 2), mode=mode), SEQUENCE) for mode in ("reflect", "replicate", "circular")},
    **{f"pad {mode} 2d": of(lambda x, mode=mode: F.pad(x, (1, 2, 0, 3), mode=mode), IMAGE) for mode in ("reflect", "replicate", "circular")},
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
    "batch 2d plain": module(lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False), IMAGE),
    "batch 3d": module(lambda: nn.BatchNorm3d(4), VOLUME),
    "instance 1d": module(lambda: nn.InstanceNorm1d(4), SEQUENCE),
    "instance 2d": module(lambda: nn.InstanceNorm2d(4, affine=True), IMAGE),
    "instance 2d tracked": module(lambda: nn.InstanceNorm2d(4, track_running_stats=True).eval(), IMAGE),
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

QUERIES = (2, 4, 6, 8)


def attended(**how: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **how)


def masked(make: Callable[[Tensor], Tensor], **how: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=make(q), **how)


def _seen(shape: Shape) -> Callable[[Tensor], Tensor]:
    return lambda q: (ids(4, *shape) > 0).index_fill(-1, torch.zeros(1, dtype=torch.long), True)


_QKV = (QUERIES, QUERIES, QUERIES)
ATTENTION: Mapping[str, Case] = {
    "attention": of(attended(), *_QKV),
    "attention causal": of(attended(is_causal=True), *_QKV),
    "attention scaled": of(attended(scale=0.3), *_QKV),
    "attention of a narrow value": of(attended(), QUERIES, QUERIES, (2, 4, 6, 5)),
    "attention of other keys": of(attended(is_causal=True), QUERIES, (2, 4, 9, 8), (2, 4, 9, 8)),
    "attention grouped": of(attended(enable_gqa=True), QUERIES, (2, 2, 6, 8), (2, 2, 6, 8)),
    "attention grouped causal": of(attended(enable_gqa=True, is_causal=True), QUERIES, (2, 2, 6, 8), (2, 2, 6, 8)),
    "attention of tokens": of(attended(), TOKENS, TOKENS, TOKENS),
    "attention of long heads": of(attended(), *((2, 2, 5, 24),) * 3),
    "attention masked": of(masked(_seen((6, 6))), *_QKV),
    "attention masked by sample": of(masked(_seen((2, 1, 1, 6))), *_QKV),
    "attention masked by head": of(masked(_seen((2, 4, 6, 6))), *_QKV),
    "attention masked expanded": of(masked(lambda q: _seen((2, 1, 1, 6))(q).expand(2, 4, 6, 6)), *_QKV),
    "attention biased": of(
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias), *_QKV, (6, 6)
    ),
    "attention biased by head": of(
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias), *_QKV, (2, 4, 6, 6)
    ),
    "attention biased by row": of(
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias), *_QKV, (1, 4, 6, 1)
    ),
    "attention of a constant bias": of(masked(lambda q: torch.arange(36.0, dtype=q.dtype).reshape(6, 6).T / 9), *_QKV),
    "multihead": module(lambda: _Multihead(), TOKENS),
    "transformer layer": module(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), TOKENS),
}


class _Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class _Table(nn.Module):
    def __init__(self, inner: nn.Module, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.read = inner, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.inner, x)


def looked_up(make: Callable[[], nn.Module], read: Callable[[Any], Tensor], width: int = 8) -> Case:
    """A table beside an operand that what is read is multiplied by."""
    shape = tuple(read(make()).shape)
    return module(lambda: _Table(make(), lambda table, x: read(table) * x), shape)


TABLES: Mapping[str, Case] = {
    "embedding": looked_up(lambda: nn.Embedding(7, 8), lambda t: t(ids(7, 2, 6))),
    "embedding transposed": looked_up(lambda: nn.Embedding(7, 8), lambda t: t(ids(7, 6, 2).T)),
    "embedding padded": looked_up(lambda: nn.Embedding(7, 8, padding_idx=1), lambda t: t(ids(7, 2, 6))),
    "embedding by frequency": looked_up(lambda: nn.Embedding(7, 8, scale_grad_by_freq=True), lambda t: t(ids(7, 2, 6))),
    "bag mean": looked_up(lambda: nn.EmbeddingBag(7, 8, mode="mean"), lambda t: t(ids(7, 4, 3))),
    "bag sum": looked_up(lambda: nn.EmbeddingBag(7, 8, mode="sum"), lambda t: t(ids(7, 4, 3))),
    "bag max": looked_up(lambda: nn.EmbeddingBag(7, 8, mode="max"), lambda t: t(ids(7, 4, 3))),
    "table of an operand": of(lambda w: F.embedding(ids(5, 3, 4), w), (5, 8)),
    "table sum of an operand": of(lambda w: F.embedding_bag(ids(5, 3, 4), w, mode="sum"), (5, 8)),
    "table weighed": of(
        lambda w, s: F.embedding_bag(ids(5, 3, 4), w, mode="sum", per_sample_weights=s), (5, 8), (3, 4)
    ),
}


class _Recurrent(nn.Module):
    def __init__(self, kind: Any, **how: Any) -> None:
        super().__init__()
        self.inner = kind(8, 6, **how)

    def forward(self, x: Tensor) -> Tensor:
        result = self.inner(x)
        return result[0] if isinstance(result, tuple) else result


RECURRENT: Mapping[str, Case] = {
    "rnn": module(lambda: _Recurrent(nn.RNN, batch_first=True), TOKENS),
    "gru": module(lambda: _Recurrent(nn.GRU), TOKENS),
    "lstm": module(lambda: _Recurrent(nn.LSTM, batch_first=True, bidirectional=True), TOKENS),
    "rnn cell": module(lambda: _Recurrent(nn.RNNCell), (6, 8)),
    "gru cell": module(lambda: _Recurrent(nn.GRUCell), (6, 8)),
    "lstm cell": module(lambda: _Recurrent(nn.LSTMCell), (6, 8)),
}


def _classes(*shape: int) -> Tensor:
    labels = ids(4, *shape).clone()
    labels.view(-1)[0] = -100
    return labels


LOSSES: Mapping[str, Case] = {
    "cross entropy": of(lambda x: F.cross_entropy(x, _classes(6)), (6, 4)),
    "cross entropy 2d": of(lambda x: F.cross_entropy(x, _classes(2, 6, 6)), IMAGE),
    "cross entropy 2d by element": of(lambda x: F.cross_entropy(x, _classes(2, 6, 6), reduction="none"), IMAGE),
    "cross entropy smoothed": of(lambda x: F.cross_entropy(x, _classes(2, 6, 6), label_smoothing=0.2), IMAGE),
    "cross entropy weighed": of(
        lambda x: F.cross_entropy(x, _classes(2, 6, 6), weight=torch.arange(1.0, 5.0, dtype=x.dtype)), IMAGE
    ),
    "cross entropy of shares": of(lambda x, y: F.cross_entropy(x, y.softmax(1)), IMAGE, IMAGE),
    "cross entropy sum 3d": of(lambda x: F.cross_entropy(x, _classes(2, 4, 4, 4), reduction="sum"), VOLUME),
    "nll": of(lambda x: F.nll_loss(x.log_softmax(1), _classes(6)), (6, 4)),
    "nll 2d": of(lambda x: F.nll_loss(x.log_softmax(1), _classes(2, 6, 6)), IMAGE),
    "nll 2d by element": of(lambda x: F.nll_loss(x.log_softmax(1), _classes(2, 6, 6), reduction="none"), IMAGE),
    "nll 2d raw": of(lambda x: F.nll_loss(x, _classes(2, 6, 6)), IMAGE),
    "nll raw": of(lambda x: F.nll_loss(x, _classes(6)), (6, 4)),
    "bce": of(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), IMAGE, IMAGE),
    "bce by element": of(lambda x: F.binary_cross_entropy(x.sigmoid(), (ids(2, *IMAGE)).to(x.dtype), reduction="none"), IMAGE),
    "bce with logits": of(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=torch.full((6,), 2.0, dtype=x.dtype)),
        IMAGE,
        IMAGE,
    ),
    "mse": of(F.mse_loss, IMAGE, IMAGE),
    "mse by element": of(lambda x, y: F.mse_loss(x, y, reduction="none"), IMAGE, IMAGE),
    "l1": of(F.l1_loss, IMAGE, IMAGE),
    "smooth l1": of(lambda x, y: F.smooth_l1_loss(x, y, reduction="none"), IMAGE, IMAGE),
    "huber": of(lambda x, y: F.huber_loss(x, y, delta=0.5), IMAGE, IMAGE),
    "kl": of(lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), (6, 4), (6, 4)),
    "kl of logs": of(lambda x, y: F.kl_div(x.log_softmax(1), y.log_softmax(1), reduction="none", log_target=True), IMAGE, IMAGE),
    "poisson": of(lambda x, y: F.poisson_nll_loss(x, y.abs(), full=True), (6, 4), (6, 4)),
    "gaussian": of(lambda x, y, z: F.gaussian_nll_loss(x, y, z.exp()), (6, 4), (6, 4), (6, 4)),
    "soft margin": of(lambda x: F.soft_margin_loss(x, ids(2, *IMAGE).to(x.dtype) * 2 - 1, reduction="none"), IMAGE),
    "hinge": of(lambda x: F.hinge_embedding_loss(x, ids(2, *IMAGE).to(x.dtype) * 2 - 1), IMAGE),
    "margin ranking": of(lambda x, y: F.margin_ranking_loss(x, y, torch.ones(6, dtype=x.dtype)), (6,), (6,)),
    "multi margin": of(lambda x: F.multi_margin_loss(x, ids(4, 6)), (6, 4)),
    "multilabel margin": of(lambda x: F.multilabel_margin_loss(x, ids(4, 6, 4)), (6, 4)),
    "multilabel soft": of(lambda x: F.multilabel_soft_margin_loss(x, ids(2, 6, 4).to(x.dtype)), (6, 4)),
    "cosine": of(lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(6, dtype=x.dtype)), (6, 4), (6, 4)),
    "triplet": of(F.triplet_margin_loss, (6, 4), (6, 4), (6, 4)),
    "ctc": of(
        lambda x: F.ctc_loss(x.log_softmax(-1), ids(3, 2, 3) + 1, torch.full((2,), 9), torch.full((2,), 3)), (9, 2, 5)
    ),
    "ctc raw": of(
        lambda x: F.ctc_loss(x, ids(3, 2, 3) + 1, torch.tensor([9, 7]), torch.tensor([3, 2]), reduction="sum"), (9, 2, 5)
    ),
    "cosine similarity": of(lambda x, y: F.cosine_similarity(x, y, dim=1), IMAGE, IMAGE),
    "pairwise distance": of(F.pairwise_distance, (6, 4), (6, 4)),
    "cdist": of(torch.cdist, (2, 5, 4), (2, 6, 4)),
    "cdist of ones": of(lambda x, y: torch.cdist(x, y, p=1.0), (2, 5, 4), (2, 6, 4)),
    "pdist": of(F.pdist, (5, 4), ties=True),
}

SORTED: Mapping[str, Case] = {
    "cumsum": of(lambda x: x.cumsum(1), IMAGE),
    "cumprod": of(lambda x: x.cumprod(2), IMAGE),
    "cummax": of(lambda x: x.cummax(1).values, IMAGE, ties=True),
    "cummin": of(lambda x: x.cummin(3).values, IMAGE, ties=True),
    "logcumsumexp": of(lambda x: x.logcumsumexp(1), IMAGE),
    "sort": of(lambda x: x.sort(1).values, IMAGE, ties=True),
    "sort descending": of(lambda x: x.sort(dim=-1, descending=True, stable=True).values, IMAGE, ties=True),
    "topk": of(lambda x: x.topk(2, 1).values, IMAGE, ties=True),
    "kthvalue": of(lambda x: x.kthvalue(3, 2).values, IMAGE, ties=True),
    "median": of(lambda x: x.median(1).values, IMAGE, ties=True),
    "mode": of(lambda x: x.mode(-1).values, IMAGE, ties=True),
    "quantile": of(lambda x: x.quantile(0.3, 1), IMAGE, ties=True),
    "max": of(lambda x: x.max(1).values, IMAGE, ties=True),
    "amax": of(lambda x: x.amax((1, 3)), IMAGE, ties=True),
    "aminmax": of(lambda x: torch.stack(x.aminmax(dim=1)), IMAGE, ties=True),
    "gather": of(lambda x: x.gather(1, ids(4, 2, 3, 6, 6)), IMAGE),
    "scatter": of(lambda x, y: x.scatter(1, torch.tensor([2, 0]).view(1, 2, 1, 1).expand(2, 2, 6, 6), y), IMAGE, (2, 2, 6, 6)),
    "scatter add": of(lambda x, y: x.scatter_add(2, ids(6, *IMAGE), y), IMAGE, IMAGE),
    "scatter reduce": of(lambda x, y: x.scatter_reduce(2, ids(6, *IMAGE), y, "amax"), IMAGE, IMAGE, ties=True),
    "scatter product": of(lambda x, y: x.scatter_reduce(2, ids(6, *IMAGE), y, "prod"), IMAGE, IMAGE),
    "scatter mean": of(lambda x, y: x.scatter_reduce(2, ids(6, *IMAGE), y, "mean"), IMAGE, IMAGE),
    "index select": of(lambda x: x.index_select(1, ids(4, 5)), IMAGE),
    "index add": of(lambda x, y: x.index_add(2, ids(6, 6), y, alpha=2), IMAGE, IMAGE),
    "index copy": of(lambda x, y: x.index_copy(1, torch.tensor([2, 0, 1, 3]), y), IMAGE, IMAGE),
    "index fill": of(lambda x: x.index_fill(1, torch.tensor([2, 0]), 0.5), IMAGE),
    "index put": of(lambda x, y: x.index_put((ids(2, 6), ids(4, 6)), y[0, 0], accumulate=True), IMAGE, IMAGE),
    "index": of(lambda x: x[:, ids(4, 5), ids(6, 5)], IMAGE),
    "index apart": of(lambda x: x[ids(2, 5), :, ids(6, 5)], IMAGE),
    "take along": of(lambda x: x.take_along_dim(ids(4, 2, 3, 6, 6), 1), IMAGE),
    "take": of(lambda x: x.take(ids(200, 7)), IMAGE),
    "put": of(lambda x, y: x.put(ids(200, 7), y[0, 0, 0, 0].expand(7), accumulate=True), IMAGE, IMAGE),
    "masked fill": of(lambda x: x.masked_fill(ids(2, 2, 1, 6, 6).bool(), 0.5), IMAGE),
    "masked scatter": of(lambda x, y: x.masked_scatter(ids(2, *IMAGE).bool(), y), IMAGE, IMAGE),
    "where": of(lambda x, y: torch.where(ids(2, *IMAGE).bool(), x, y), IMAGE, IMAGE),
    "prod": of(lambda x: x.prod(1), IMAGE),
    "prod of all": of(lambda x: x.prod(), (2, 3, 4)),
    "std": of(lambda x: x.std((1, 2)), IMAGE),
    "var": of(lambda x: torch.stack(torch.var_mean(x, 1)), IMAGE),
    "norm": of(lambda x: x.norm(2, 1), IMAGE),
    "norm of threes": of(lambda x: x.norm(3, (1, 2)), IMAGE),
    "logsumexp": of(lambda x: x.logsumexp(1), IMAGE),
    "softmax": of(lambda x: x.softmax(1), IMAGE),
    "log softmax": of(lambda x: x.log_softmax(1), IMAGE),
    "repeat": of(lambda x: x.repeat(2, 1, 3, 1), IMAGE),
    "repeat interleave": of(lambda x: x.repeat_interleave(3, 1), IMAGE),
    "trapezoid": of(lambda x: torch.trapezoid(x, dim=1), IMAGE),
    "cumulative trapezoid": of(lambda x: torch.cumulative_trapezoid(x, dim=1), IMAGE),
    "diff": of(lambda x: x.diff(dim=2), IMAGE),
    "renorm": of(lambda x: x.renorm(2, 1, 1.0), IMAGE),
    "diagonal": of(lambda x: x.diagonal(0, 1, 3), IMAGE),
    "diag embed": of(lambda x: x.diag_embed(1, 0, 2), SEQUENCE),
    "tril": of(lambda x: x.tril(1), IMAGE),
    "triu": of(lambda x: x.triu(-1), IMAGE),
    "view dtype": of(lambda x: torch.view_as_real(torch.view_as_complex(x.contiguous())), (2, 3, 2)),
}

POINTWISE: Mapping[str, Case] = {
    name: of(function, IMAGE)
    for name, function in {
        "relu": F.relu, "gelu": F.gelu, "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
        "mish": F.mish, "elu": F.elu, "selu": F.selu, "celu": lambda x: F.celu(x, 0.7), "softplus": F.softplus,
        "hardtanh": F.hardtanh, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "leaky": F.leaky_relu,
        "softshrink": F.softshrink, "hardshrink": F.hardshrink, "threshold": lambda x: F.threshold(x, 0.1, 0.2),
        "logsigmoid": F.logsigmoid, "tanhshrink": F.tanhshrink, "softsign": F.softsign, "glu": lambda x: F.glu(x, 1),
        "softmin": lambda x: F.softmin(x, 2), "relu6": F.relu6, "erfinv": lambda x: torch.erfinv(x.tanh() * 0.9),
        "clamp": lambda x: x.clamp(-0.5, 0.5), "sinc": torch.sinc, "digamma": lambda x: torch.digamma(x.abs() + 1),
    }.items()
}  # fmt: skip
POINTWISE = {
    **POINTWISE,
    "prelu": module(lambda: nn.PReLU(4), IMAGE),
    "bilinear": module(lambda: _Bilinear(), (6, 4)),
    "add of a row": of(lambda x, y: x + y, IMAGE, (6, 1)),
    "lerp": of(torch.lerp, IMAGE, IMAGE, IMAGE),
    "addcmul": of(torch.addcmul, IMAGE, IMAGE, IMAGE),
    "addcdiv": of(lambda x, y, z: torch.addcdiv(x, y, z.exp()), IMAGE, IMAGE, IMAGE),
    "max of two": of(torch.maximum, IMAGE, IMAGE),
    "copysign": of(torch.copysign, IMAGE, IMAGE),
    "atan2": of(torch.atan2, IMAGE, IMAGE),
    "cross": of(lambda x, y: torch.linalg.cross(x, y, dim=1), (2, 3, 4, 4), (2, 3, 4, 4)),
    "cat": of(lambda x, y: torch.cat([x, y, x], 1), IMAGE, IMAGE),
    "stack": of(lambda x, y: torch.stack([x, y], 2), IMAGE, IMAGE),
    "chunks": of(lambda x: torch.cat(x.chunk(3, 2)[::-1], 1), IMAGE),
}


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(4, 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.tanh())


PRODUCTS: Mapping[str, Case] = {
    "linear": module(lambda: nn.Linear(8, 5), TOKENS),
    "linear of an image": module(lambda: nn.Linear(6, 5), IMAGE),
    "linear of a vector": module(lambda: nn.Linear(6, 5), (6,)),
    "mm": of(torch.mm, (5, 6), (6, 4)),
    "bmm": of(torch.bmm, (3, 5, 6), (3, 6, 4)),
    "matmul": of(torch.matmul, IMAGE, (6, 5)),
    "matmul broadcast": of(torch.matmul, IMAGE, (4, 6, 5)),
    "mv": of(torch.mv, (5, 6), (6,)),
    "dot": of(torch.dot, (6,), (6,)),
    "outer": of(torch.outer, (6,), (5,)),
    "addmm": of(lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), (4,), (5, 6), (6, 4)),
    "baddbmm": of(torch.baddbmm, (3, 5, 4), (3, 5, 6), (3, 6, 4)),
    "addbmm": of(torch.addbmm, (5, 4), (3, 5, 6), (3, 6, 4)),
    "addmv": of(torch.addmv, (5,), (5, 6), (6,)),
    "einsum": of(lambda x, y: torch.einsum("nchw,cd->ndwh", x, y), IMAGE, (4, 5)),
    "einsum of batches": of(lambda x, y: torch.einsum("nchw,nchv->nwvh", x, y), IMAGE, IMAGE),
    "tensordot": of(lambda x, y: torch.tensordot(x, y, ([1, 3], [0, 1])), IMAGE, (4, 6, 5)),
    "kron": of(torch.kron, (2, 3), (4, 2)),
    "baddbmm expanded": of(lambda x, y: torch.baddbmm(x[:1, :1].expand(3, 5, 4), x[..., :1].expand(3, 5, 6), y), (3, 5, 4), (3, 6, 4)),
}

SQUARE = (2, 4, 4)
LINALG: Mapping[str, Case] = {
    "inv": of(torch.linalg.inv, SQUARE, prepare=symmetric, ties=True),
    "pinv": of(torch.linalg.pinv, (2, 5, 3), prepare=apart, ties=True),
    "solve": of(lambda a, b: torch.linalg.solve(symmetric(a), b), SQUARE, (2, 4, 3)),
    "solve right": of(lambda a, b: torch.linalg.solve(symmetric(a), b, left=False), SQUARE, (2, 3, 4)),
    "solve of a vector": of(lambda a, b: torch.linalg.solve(symmetric(a), b), (4, 4), (4,)),
    "triangular": of(
        lambda a, b: torch.linalg.solve_triangular(symmetric(a), b, upper=True), SQUARE, (2, 4, 3)
    ),
    "lstsq": of(lambda a, b: torch.linalg.lstsq(apart(a), b).solution, (2, 5, 3), (2, 5, 2)),
    "cholesky": of(lambda a: torch.linalg.cholesky(symmetric(a)), SQUARE),
    "cholesky solve": of(lambda b, a: torch.cholesky_solve(b, torch.linalg.cholesky(symmetric(a))), (2, 4, 3), SQUARE),
    "cholesky inverse": of(lambda a: torch.cholesky_inverse(torch.linalg.cholesky(symmetric(a))), SQUARE),
    "det": of(torch.linalg.det, SQUARE, prepare=symmetric, ties=True),
    "slogdet": of(lambda a: torch.linalg.slogdet(a)[1], SQUARE, prepare=symmetric, ties=True),
    "svd": of(lambda a: torch.linalg.svd(a, full_matrices=False)[1], (2, 5, 3), prepare=apart, ties=True),
    "svd vectors": of(
        lambda a: torch.cat([x.abs().flatten() for x in torch.linalg.svd(a, full_matrices=False)]), (2, 5, 3), prepare=apart, ties=True
    ),
    "svdvals": of(torch.linalg.svdvals, (2, 5, 3), prepare=apart, ties=True),
    "qr": of(lambda a: torch.linalg.qr(apart(a))[1].abs(), (2, 5, 3)),
    "qr vectors": of(lambda a: torch.linalg.qr(apart(a))[0].abs(), (2, 5, 3)),
    "eigh": of(lambda a: torch.linalg.eigh(symmetric(a))[0], SQUARE, ties=True),
    "eigh vectors": of(lambda a: torch.linalg.eigh(symmetric(a))[1].abs(), SQUARE, ties=True),
    "eigvalsh": of(lambda a: torch.linalg.eigvalsh(symmetric(a)), SQUARE, ties=True),
    "eig": of(lambda a: torch.linalg.eig(symmetric(a))[0].abs().sort(-1).values, SQUARE, ties=True),
    "lu": of(lambda a: torch.linalg.lu(symmetric(a))[2], SQUARE, ties=True),
    "lu solve": of(lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(symmetric(a)), b), SQUARE, (2, 4, 3)),
    "matrix power": of(lambda a: torch.linalg.matrix_power(a, 3), SQUARE),
    "matrix exp": of(lambda a: torch.linalg.matrix_exp(a * 0.3), SQUARE),
    "matrix norm": of(lambda a: torch.linalg.matrix_norm(a, 2), (2, 5, 3), prepare=apart, ties=True),
    "nuclear norm": of(lambda a: torch.linalg.matrix_norm(a, "nuc"), (2, 5, 3), prepare=apart, ties=True),
    "householder": of(lambda a, t: torch.linalg.householder_product(a.tril(-1), t), (2, 5, 3), (2, 3)),
    "vander": of(lambda x: torch.linalg.vander(x), (2, 4)),
    "multi dot": of(lambda a, b, c: torch.linalg.multi_dot([a, b, c]), (3, 4), (4, 5), (5, 2)),
}


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x)


WAVES: Mapping[str, Case] = {
    "fft": of(lambda x: _real(torch.fft.fft(x)), SEQUENCE),
    "fft of channels": of(lambda x: _real(torch.fft.fft(x, dim=1)), IMAGE),
    "rfft": of(lambda x: _real(torch.fft.rfft(x)), SEQUENCE),
    "irfft": of(lambda x: torch.fft.irfft(torch.fft.rfft(x) * (1 + 2j), n=9), SEQUENCE),
    "fft2": of(lambda x: _real(torch.fft.fft2(x)), IMAGE),
    "rfft2": of(lambda x: _real(torch.fft.rfft2(x, norm="ortho")), IMAGE),
    "irfft2": of(lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 1j), IMAGE),
    "fftn": of(lambda x: _real(torch.fft.fftn(x, dim=(1, 2))), IMAGE),
    "hfft": of(lambda x: torch.fft.hfft(torch.fft.ihfft(x) * (1 + 1j), n=9), SEQUENCE),
    "fftshift": of(lambda x: torch.fft.fftshift(x, dim=2), IMAGE),
    "stft": of(
        lambda x: _real(torch.stft(x, 8, 4, window=torch.hann_window(8, dtype=x.dtype), return_complex=True)), (2, 24)
    ),
    "istft": of(
        lambda x: torch.istft(
            torch.stft(x, 8, 4, window=torch.hann_window(8, dtype=x.dtype), return_complex=True),
            8, 4, window=torch.hann_window(8, dtype=x.dtype),
        ),
        (2, 24),
    ),  # fmt: skip
    "complex": of(lambda x, y: torch.complex(x, y).abs(), IMAGE, IMAGE),
    "complex product": of(lambda x, y: _real(torch.complex(x, y) @ torch.complex(y, x).mT), IMAGE, IMAGE),
    "conjugate": of(lambda x, y: (torch.complex(x, y).conj() * torch.complex(y, x)).imag, IMAGE, IMAGE),
    "adjoint": of(lambda x, y: _real(torch.complex(x, y).mH @ torch.complex(y, x)), IMAGE, IMAGE),
    "polar": of(lambda x, y: _real(torch.polar(x.exp(), y)), IMAGE, IMAGE),
    "angle": of(lambda x, y: torch.angle(torch.complex(x, y)), IMAGE, IMAGE),
    "complex inverse": of(
        lambda x, y: _real(torch.linalg.inv(torch.complex(symmetric(x), y * 0.1))), SQUARE, SQUARE
    ),
}

GROUPS: Mapping[str, Mapping[str, Case]] = {
    "convolutions": CONVOLUTIONS, "pooling": POOLING, "space": SPACE, "norms": NORMS, "attention": ATTENTION,
    "tables": TABLES, "recurrent": RECURRENT, "losses": LOSSES, "sorted": SORTED, "pointwise": POINTWISE,
    "products": PRODUCTS, "linalg": LINALG, "waves": WAVES,
}  # fmt: skip
CASES: Mapping[str, Case] = {name: case for group in GROUPS.values() for name, case in group.items()}
