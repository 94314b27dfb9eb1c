"""What a measurement runs: ops, their sizes on a CPU and on a GPU, and the point that each makes.

Data is random, never zeros: a chip that multiplies zeros draws less power and runs faster than it will in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar import ops

Point = dict[str, Any]
Run = Callable[[], Any]
Measurement = tuple[str, Point, Callable[[], Run]]  # kind, the point without its time, what makes its data and says what to run
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured on one kind of device, from the size at which an op's start is all its time to one that fills the device.

    Attributes:
        matmuls: dtype name → (m, n, k) of linear layers.
        attentions: dtype name → (batch, heads, length, head size).
        numels: elements of a tensor in float32, for the kinds that memory bounds.
        row: elements of a row that is normalised or looked up.
    """

    matmuls: Mapping[str, Shapes]
    attentions: Mapping[str, Shapes]
    numels: tuple[int, ...]
    row: int


_CPU_MATMULS = ((16, 64, 64), (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 256, 1024), (512, 1024, 1024))
_CPU_ATTENTIONS = ((1, 2, 32, 16), (1, 4, 64, 32), (2, 4, 128, 32), (2, 4, 256, 64))
_CPU_DTYPES = ("float32", "bfloat16", "float64")
CPU = Sizes(
    matmuls=dict.fromkeys(_CPU_DTYPES, _CPU_MATMULS),
    attentions=dict.fromkeys(_CPU_DTYPES, _CPU_ATTENTIONS),
    numels=(256, 4096, 65536, 524288, 2097152),
    row=256,
)
# No side of a product falls from one size to the next: a curve is over flops alone, and a thin product would hide the next ones.
_GPU_MATMULS = (
    (128, 256, 256), (128, 1024, 1024), (512, 1024, 1024), (1024, 1024, 2048), (1024, 2048, 2048), (2048, 2048, 4096),
    (2048, 4096, 4096), (4096, 4096, 4096), (8192, 4096, 4096), (8192, 4096, 14336),
)  # fmt: skip
_GPU_ATTENTIONS = ((1, 8, 128, 64), (1, 32, 256, 128), *((1, 32, length, 128) for length in (512, 1024, 2048, 4096, 8192)))
# The wide dtypes stop earlier: they are many times slower, on consumer GPUs float64 by 64. In float64 attention keeps its scores.
GPU = Sizes(
    matmuls={"float32": _GPU_MATMULS[:-1], "bfloat16": _GPU_MATMULS, "float16": _GPU_MATMULS, "float64": _GPU_MATMULS[:6]},
    attentions={
        "float32": _GPU_ATTENTIONS[:-2],
        "bfloat16": _GPU_ATTENTIONS,
        "float16": _GPU_ATTENTIONS,
        "float64": _GPU_ATTENTIONS[:4],
    },
    numels=(256, 4096, 65536, 2**19, 2**21, 2**23, 2**25, 2**27),  # the last ones well over any cache
    row=4096,
)


def compute_measurements(sizes: Sizes, device: str = "cpu") -> Iterator[Measurement]:
    """Everything that needs no communication. Data is made when a measurement is at hand, since all of it may be more than a device
    holds."""
    for dtype, shapes in sizes.matmuls.items():
        for m, n, k in shapes:
            yield "matmul", {"m": m, "n": n, "k": k, "dtype": dtype}, partial(_matmul, m, n, k, dtype, device)
    for dtype, shapes in sizes.attentions.items():
        for shape in shapes:
            batch, heads, length, size = shape
            flops = 4 * batch * heads * length * length * size
            yield "attention", {"flops": flops, "dtype": dtype}, partial(_attention, shape, dtype, device)
            yield "attention_backward", {"flops": 5 * flops // 2, "dtype": dtype}, partial(_attention_backward, shape, dtype, device)
    for numel in sizes.numels:
        yield from _memory_bound(numel, min(numel, sizes.row), device)


def _drawn(shape: tuple[int, ...], dtype: str, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(getattr(torch, dtype))


def _matmul(m: int, n: int, k: int, dtype: str, device: str) -> Run:
    """A linear layer's product and its two gradients; a third of their time is a point's."""
    x, w, g = (_drawn(shape, dtype, device) for shape in ((m, k), (n, k), (m, n)))

    def run() -> None:
        ops.dot("mk,nk->mn", x, w)
        ops.dot("mn,nk->mk", g, w)
        ops.dot("mn,mk->nk", g, x)

    return run


def _attention(shape: tuple[int, ...], dtype: str, device: str) -> Run:
    q, k, v = (_drawn(shape, dtype, device) for _ in range(3))
    return lambda: ops.attention(q, k, v, None, False, shape[-1] ** -0.5)


def _attention_backward(shape: tuple[int, ...], dtype: str, device: str) -> Run:
    q, k, v, grad = (_drawn(shape, dtype, device) for _ in range(4))
    out, lse = ops.attention(q, k, v, None, False, shape[-1] ** -0.5)
    return lambda: ops.attention_backward(grad, q, k, v, out, lse, None, False, shape[-1] ** -0.5)


def _memory_bound(numel: int, row: int, device: str) -> Iterator[Measurement]:
    """One op of each kind on float32; the bytes are those that `autopar.analysis.work` counts."""

    def addition() -> Run:
        x, y = _drawn((numel,), "float32", device), _drawn((numel,), "float32", device)
        return lambda: torch.add(x, y)

    def gelu() -> Run:
        x = _drawn((numel,), "float32", device)
        return lambda: torch.nn.functional.gelu(x)

    def norm() -> Run:
        rows, weight = _drawn((numel // row, row), "float32", device), _drawn((row,), "float32", device)
        return lambda: torch.nn.functional.layer_norm(rows, weight.shape, weight, weight)

    def lookup() -> Run:
        rows = _drawn((numel // row, row), "float32", device)
        ids = torch.randint(numel // row, (numel // row,), device=device)
        return lambda: ops.embedding(rows, ids)

    yield "elementwise", {"bytes": 12 * numel}, addition
    yield "transcendental", {"bytes": 8 * numel}, gelu
    yield "reduction", {"bytes": 8 * numel}, norm
    yield "indexing", {"bytes": 8 * numel + 8 * (numel // row)}, lookup
