"""Vision models that transformers does not have: two diffusion models, a 3D U-Net on volumes, and a
small CNN."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def timestep_embedding(t: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Return sines and cosines [b, dim] of the times `t` [b]."""
    frequencies = torch.exp(
        -math.log(10000.0) * torch.arange(dim // 2, device=t.device, dtype=dtype) / (dim // 2)
    )
    angles = t.to(dtype)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], -1)


class ResidualBlock(nn.Module):
    """GroupNorm, SiLU and convolution twice, shifted by the time; [b, c, h, w] → [b, out, h, w]."""

    def __init__(self, channels: int, out: int, time: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.time, self.dropout = nn.Linear(time, out), nn.Dropout(dropout)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(self.dropout(F.silu(self.norm2(hidden))))


class ImageAttention(nn.Module):
    """Self-attention over the pixels of [b, c, h, w]."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(4, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (
            self.qkv(self.norm(x))
            .reshape(b, 3, self.heads, c // self.heads, h * w)
            .transpose(-1, -2)
            .unbind(1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(-1, -2).reshape(b, c, h, w))


class UNet2d(nn.Module):
    """A denoising U-Net as in DDPM (Ho et al., 2020). The loss is the mean square of predicted
    minus added noise."""

    def __init__(
        self,
        channels: int = 32,
        multipliers: tuple[int, ...] = (1, 2),
        blocks: int = 1,
        heads: int = 4,
        dropout: float = 0.0,
    ):
        super().__init__()
        time, widths = 4 * channels, [channels * m for m in multipliers]
        self.channels = channels
        self.time = nn.Sequential(nn.Linear(channels, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.down, self.up, stack, width = nn.ModuleList(), nn.ModuleList(), [channels], channels
        for level, out in enumerate(widths):
            for _ in range(blocks):
                self.down.append(ResidualBlock(width, out, time, dropout))
                width = out
                stack.append(width)
            if level + 1 < len(widths):
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                stack.append(width)
        self.middle = nn.ModuleList(
            [
                ResidualBlock(width, width, time, dropout),
                ImageAttention(width, heads),
                ResidualBlock(width, width, time, dropout),
            ]
        )
        for level, out in reversed(list(enumerate(widths))):
            for _ in range(blocks + 1):
                self.up.append(ResidualBlock(width + stack.pop(), out, time, dropout))
                width = out
            if level > 0:
                self.up.append(
                    nn.Sequential(
                        nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1)
                    )
                )
        self.head = nn.Sequential(
            nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> dict[str, Tensor]:
        time = self.time(timestep_embedding(t, self.channels, x.dtype))
        level = (t.to(x.dtype) / 1000)[:, None, None, None]
        kept = [hidden := self.stem((1 - level).sqrt() * x + level.sqrt() * noise)]
        for part in self.down:
            kept.append(
                hidden := part(hidden, time) if isinstance(part, ResidualBlock) else part(hidden)
            )
        first, attention, second = self.middle
        hidden = second(attention(first(hidden, time)), time)
        for part in self.up:
            hidden = (
                part(torch.cat([hidden, kept.pop()], 1), time)
                if isinstance(part, ResidualBlock)
                else part(hidden)
            )
        predicted = self.head(hidden)
        return {"loss": F.mse_loss(predicted, noise), "predicted": predicted}


class DiTBlock(nn.Module):
    """Attention and MLP whose norms are modulated by the condition (adaLN-Zero)."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out, self.modulate = (
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
            nn.Linear(dim, 6 * dim),
        )
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Dropout(dropout), nn.Linear(4 * dim, dim)
        )

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulate(F.silu(condition))[
            :, None
        ].chunk(6, -1)
        b, s, d = x.shape
        hidden = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = (
            self.qkv(hidden).reshape(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        )
        x = x + gate1 * self.out(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d)
        )
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer (Peebles and Xie, 2022) on latents [b, 4, side, side], conditioned
    on time and class."""

    def __init__(
        self,
        dim: int = 64,
        layers: int = 2,
        heads: int = 4,
        patch: int = 2,
        side: int = 8,
        classes: int = 8,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.dim, self.patch, self.side = dim, patch, side
        self.embed, self.classes = (
            nn.Conv2d(4, dim, patch, stride=patch),
            nn.Embedding(classes, dim),
        )
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2, dim) * 0.02)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(DiTBlock(dim, heads, dropout) for _ in range(layers))
        self.norm, self.modulate = (
            nn.LayerNorm(dim, elementwise_affine=False),
            nn.Linear(dim, 2 * dim),
        )
        self.head = nn.Linear(dim, patch * patch * 4)

    def forward(self, x: Tensor, t: Tensor, label: Tensor, noise: Tensor) -> dict[str, Tensor]:
        level = (t.to(x.dtype) / 1000)[:, None, None, None]
        tokens = (
            self.embed((1 - level) * x + level * noise).flatten(2).transpose(1, 2) + self.positions
        )
        condition = self.time(timestep_embedding(t, self.dim, x.dtype)) + self.classes(label)
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulate(F.silu(condition))[:, None].chunk(2, -1)
        patches = self.head(self.norm(tokens) * (1 + scale) + shift)
        count = self.side // self.patch
        grid = patches.reshape(-1, count, count, self.patch, self.patch, 4)
        predicted = torch.einsum("bhwpqc->bchpwq", grid).reshape(x.shape)
        return {"loss": F.mse_loss(predicted, noise - x), "predicted": predicted}


class UNet3d(nn.Module):
    """A segmentation U-Net on volumes [b, 1, d, h, w] (Çiçek et al., 2016): BatchNorm, pooling,
    transposed convolutions, and cross entropy plus the soft Dice loss."""

    def __init__(self, channels: int = 8, levels: int = 3, classes: int = 3) -> None:
        super().__init__()
        widths = [channels * 2**i for i in range(levels)]
        self.down = nn.ModuleList(
            self._pair(i, o) for i, o in zip([1, *widths[:-1]], widths, strict=True)
        )
        self.raise_ = nn.ModuleList(
            nn.ConvTranspose3d(i, o, 2, stride=2)
            for o, i in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.up = nn.ModuleList(self._pair(2 * o, o) for o in widths[-2::-1])
        self.head = nn.Conv3d(channels, classes, 1)

    @staticmethod
    def _pair(channels: int, out: int) -> nn.Sequential:
        first = nn.Conv3d(channels, out, 3, padding=1), nn.BatchNorm3d(out), nn.ReLU()
        return nn.Sequential(
            *first, nn.Conv3d(out, out, 3, padding=1), nn.BatchNorm3d(out), nn.ReLU()
        )

    def forward(self, volume: Tensor, labels: Tensor) -> dict[str, Tensor]:
        kept: list[Tensor] = []
        hidden = self.down[0](volume)
        for part in list(self.down)[1:]:
            kept.append(hidden)
            hidden = part(F.max_pool3d(hidden, 2))
        for raise_, part in zip(self.raise_, self.up, strict=True):
            hidden = part(torch.cat([kept.pop(), raise_(hidden)], 1))
        logits = self.head(hidden)
        wanted = F.one_hot(labels, logits.shape[1]).movedim(-1, 1).to(logits.dtype)
        shares = logits.softmax(1)
        overlap = (
            2 * (shares * wanted).sum((2, 3, 4)) / (shares + wanted).sum((2, 3, 4)).clamp_min(1e-6)
        )
        return {"loss": F.cross_entropy(logits, labels) + 1 - overlap.mean(), "logits": logits}


class Cnn(nn.Module):
    """Convolutions with BatchNorm and pooling, then a classifier, on images [b, 3, side, side]."""

    def __init__(self, channels: int = 8, classes: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, out in ((3, channels), (channels, 2 * channels), (2 * channels, 4 * channels)):
            layers += [
                nn.Conv2d(width, out, 3, padding=1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ]
        self.features, self.dropout = nn.Sequential(*layers), nn.Dropout(dropout)
        self.classifier = nn.Linear(4 * channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        pooled = F.adaptive_avg_pool2d(self.features(images), 1).flatten(1)
        logits = self.classifier(self.dropout(pooled))
        return F.cross_entropy(logits, labels, label_smoothing=0.1), logits


def unet2d(batch: int, side: int = 16, **settings: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the U-Net, and images, times and noise."""
    shape = (batch, 3, side, side)
    return UNet2d(**settings), {
        "x": torch.randn(shape),
        "t": torch.randint(0, 1000, shape[:1]),
        "noise": torch.randn(shape),
    }


def ddpm256() -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the size that DDPM trains on 256 × 256 images (Ho et al., 2020, appendix B), and 64 of
    them."""
    return unet2d(64, 256, channels=128, multipliers=(1, 1, 2, 2, 4, 4), blocks=2, heads=1)


def dit(
    batch: int, side: int = 8, classes: int = 8, **settings: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the transformer, and latents, times, classes and noise."""
    shape = (batch, 4, side, side)
    labels = torch.randint(0, classes, shape[:1])
    inputs = {
        "x": torch.randn(shape),
        "t": torch.randint(0, 1000, shape[:1]),
        "label": labels,
        "noise": torch.randn(shape),
    }
    return DiT(side=side, classes=classes, **settings), inputs


def unet3d(
    batch: int, side: int = 8, classes: int = 3, **settings: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the U-Net, and volumes with a class per voxel."""
    volume = (side,) * 3
    settings.pop("dropout", None)
    return UNet3d(classes=classes, **settings), {
        "volume": torch.randn(batch, 1, *volume),
        "labels": torch.randint(0, classes, (batch, *volume)),
    }


def cnn(
    batch: int, side: int = 16, classes: int = 8, **settings: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the CNN, and images with a class each."""
    return Cnn(classes=classes, **settings), {
        "images": torch.randn(batch, 3, side, side),
        "labels": torch.randint(0, classes, (batch,)),
    }
