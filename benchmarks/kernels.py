"""Numerics of the native kernels and, on a device, their speed: ``python -m benchmarks.kernels
[--kernel NAME ...] --json FILE``.

On the CPU, for each kernel, number of ranks and dtype: the largest error against the same formula
in float64, relative to the largest value, and whether compiled code and the reference in torch
agree bit for bit. Peers are virtual ranks in one process. On a CUDA device: seconds of a call
(`benchmarks.device_times`), and the share that its reads and writes reach of the bandwidth of a
plain copy of as many bytes, measured at the same time. Without a device or a compiler, `skipped` in
a row states this, and the row has no figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar import ops
from autopar.kernels import library, normed, packing, row_kernels
from autopar.kernels.packing import BucketLayout
from benchmarks import exchanges
from benchmarks.common import ROOT, Row, run_rows
from benchmarks.device_times import measure
from benchmarks.exchanges import Numerics, drawn

WORLDS = (1, 2, 3, 5, 8)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COLUMNS = (
    "on",
    "dtype",
    "num_elements",
    "max_rel_err",
    "bitwise",
    "time_s",
    "host_s",
    "share_of_copy",
    "skipped",
)
RESULTS = ROOT / "benchmarks" / "results" / "kernels.json"
TOLERANCE = 4  # roundings of the dtype at the largest value
ROUNDS = 10
EPS = 1e-5
SIZES = (
    (129, 65),
    (64, 3, 33),
    (7,),
    (4096,),
    (5, 2100),
)  # uneven for all numbers of ranks except 1
DIMS = (0, 2, 0, 0, 1)
DEVICE_SIZES = ((4096, 4096),) * 12 + (
    (4096,),
) * 24  # parameters of three layers, without embeddings


@dataclass(frozen=True, slots=True)
class Timed:
    """A call on the device, the number of bytes that it must read and write, and, if there is no
    CPU path, the same call on float64 tensors."""

    call: Callable[[], object]
    num_bytes: int
    exact: Callable[[], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel: its numerics on the CPU by number of ranks and dtype, None if it runs on devices
    only; and its call on a device by dtype, None if it has none."""

    numerics: Callable[[int, torch.dtype], Numerics] | None
    timed: Callable[[torch.dtype], Timed] | None


def row(spec: dict[str, str], mesh: str) -> list[Row]:
    """Return all rows of one kernel."""
    case = CASES[spec["name"]]
    found = (
        [_numerics_row(case.numerics, world, name) for world in WORLDS for name in DTYPES]
        if case.numerics
        else []
    )
    return found + [_timed_row(case, name) for name in DTYPES]


def _numerics_row(numerics: Callable[[int, torch.dtype], Numerics], world: int, name: str) -> Row:
    found = numerics(world, DTYPES[name])
    error = max(
        (_error(made, exact) for made, exact in zip(found.made, found.exact, strict=True)),
        default=0.0,
    )
    same = all(torch.equal(made, reference) for made, reference in found.alike)
    compiled = library.host() is not None
    fine = error <= TOLERANCE * torch.finfo(DTYPES[name]).eps and same
    return {
        "mesh": f"world={world}",
        "on": "cpu",
        "dtype": name,
        "num_elements": sum(made.numel() for made in found.made),
        "max_rel_err": error,
        "bitwise": same if compiled else None,
        "skipped": None if compiled else f"only the reference ran: {library.why_not()}",
        "ok": fine,
        "error": None
        if fine
        else f"the largest error is {error:.1e}"
        if same
        else "compiled code and the reference differ",
    }


def _error(made: Tensor, exact: Tensor) -> float:
    """Return the largest difference divided by the largest value; 0 for empty tensors."""
    if not made.numel():
        return 0.0
    largest = exact.double().abs().max().item()
    return (made.double() - exact.double()).abs().max().item() / (largest or 1.0)


def _timed_row(case: Case, name: str) -> Row:
    base: Row = {"mesh": "one device", "on": "cuda", "dtype": name, "ok": True, "error": None}
    if not torch.cuda.is_available():
        return {**base, "skipped": "there is no CUDA device"}
    if library.cuda() is None:
        return {**base, "skipped": library.why_not("cuda")}
    if case.timed is None:
        return {**base, "skipped": "it cannot be timed on one device"}
    timed = case.timed(DTYPES[name])
    held = torch.empty(
        timed.num_bytes // 2, dtype=torch.uint8, device="cuda"
    )  # a copy reads and writes each byte once
    other = torch.empty_like(held)
    found = measure({"call": timed.call, "copy": lambda: other.copy_(held)}, ROUNDS)
    call, copy = found["call"], found["copy"]
    figures = {
        "num_bytes": timed.num_bytes,
        "time_s": call.device_s,
        "host_s": call.host_s,
        "copy_s": copy.device_s,
    }
    figures["share_of_copy"] = copy.device_s / call.device_s
    if timed.exact is not None:
        made = timed.call()
        assert isinstance(made, Tensor)
        figures["max_rel_err"] = error = _error(made, timed.exact())
        base |= {
            "ok": error <= TOLERANCE * torch.finfo(made.dtype).eps,
            "error": f"the largest error is {error:.1e}",
        }
        base["error"] = None if base["ok"] else base["error"]
    return {**base, **figures, "device": torch.cuda.get_device_name(), "skipped": None}


def _random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(tuple(shape), device="cuda", dtype=dtype)


def _pack_numerics(world: int, dtype: torch.dtype) -> Numerics:
    """Return the numerics of packing scaled fp32 gradients into a bucket of `dtype`, with the sums
    of squares."""
    layout = BucketLayout(SIZES, DIMS, world)
    tensors = [drawn(size, torch.float32, seed) for seed, size in enumerate(SIZES)]
    made = packing.pack(tensors, layout, dtype, scale=0.3, squares=True)
    reference = packing.reference_pack(tensors, layout, dtype, 0, world, 0.3, True)
    exact = packing.reference_pack(
        [t.double() for t in tensors], layout, torch.float64, 0, world, 0.3, True
    )
    return Numerics.of(made, reference, exact)


def _unpack_numerics(world: int, dtype: torch.dtype) -> Numerics:
    layout = BucketLayout(SIZES, DIMS, world)
    bucket = drawn((world, layout.row), torch.float32, 0)
    dtypes = [dtype] * len(SIZES)
    made = packing.unpack(bucket, layout, dtypes, scale=0.3)
    exact = packing.reference_unpack(
        bucket.double(), layout, [torch.float64] * len(SIZES), 0, world, 0.3
    )
    return Numerics.of(made, packing.reference_unpack(bucket, layout, dtypes, 0, world, 0.3), exact)


def _pack_timed(dtype: torch.dtype) -> Timed:
    layout = BucketLayout(DEVICE_SIZES, (0,) * len(DEVICE_SIZES), 8)
    tensors = [_random(size, dtype) for size in DEVICE_SIZES]
    read = sum(t.numel() * t.element_size() for t in tensors)
    return Timed(
        lambda: packing.pack(tensors, layout, dtype, scale=0.5),
        read + 8 * layout.row * dtype.itemsize,
    )


def _unpack_timed(dtype: torch.dtype) -> Timed:
    layout = BucketLayout(DEVICE_SIZES, (0,) * len(DEVICE_SIZES), 8)
    bucket = _random((8, layout.row), dtype)
    return Timed(
        lambda: packing.unpack(bucket, layout, [dtype] * len(DEVICE_SIZES)),
        2 * bucket.numel() * dtype.itemsize,
    )


NORMED = (67, 1031)


def _norm_numerics(world: int, dtype: torch.dtype) -> Numerics:
    parts, residual, weight = _norm_inputs(world, dtype)
    made = normed.reduce_add_rmsnorm(parts, residual, weight, EPS)
    exact = normed.reference_forward(
        [p.double() for p in parts], residual.double(), weight.double(), EPS
    )
    return Numerics.of(made, normed.reference_forward(parts, residual, weight, EPS), exact)


def _norm_backward_numerics(world: int, dtype: torch.dtype) -> Numerics:
    parts, residual, weight = _norm_inputs(world, dtype)
    y, squares, _ = normed.reference_forward(parts, residual, weight, EPS)
    inputs = (residual, parts[0], y, squares, weight)
    exact = normed.reference_backward(
        residual.double(), parts[0].double(), y.double(), squares.double(), weight.double(), EPS
    )
    return Numerics.of(
        normed.backward_op(*inputs, EPS), normed.reference_backward(*inputs, EPS), exact
    )


def _norm_inputs(world: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    return (
        [drawn(NORMED, dtype, 1 + rank) for rank in range(world)],
        drawn(NORMED, dtype, 0),
        drawn(NORMED[1:], dtype, 99),
    )


def _norm_timed(dtype: torch.dtype, world: int = 4, shape: tuple[int, int] = (8192, 4096)) -> Timed:
    """Return a timed call with virtual ranks on one device. Their memory is local, so this does not
    measure links."""
    parts = [_random(shape, dtype) for _ in range(world)]
    residual, weight = _random(shape, dtype), _random(shape[1:], dtype)
    return Timed(
        lambda: normed.reduce_add_rmsnorm(parts, residual, weight, EPS),
        (world + 3) * residual.numel() * dtype.itemsize,
    )


def _norm_backward_timed(dtype: torch.dtype, shape: tuple[int, int] = (8192, 4096)) -> Timed:
    grad_y, grad_normed, y = (_random(shape, dtype) for _ in range(3))
    squares, weight = y.float().square().sum(-1), _random(shape[1:], dtype)
    return Timed(
        lambda: normed.backward_op(grad_y, grad_normed, y, squares, weight, EPS),
        4 * y.numel() * dtype.itemsize,
    )


NORMED_ROWS, LOGITS = (16384, 4096), (8192, 128256)


def _row_norm_timed(dtype: torch.dtype) -> Timed:
    x, _, squares, weight = _row_inputs(dtype)
    n = x.shape[-1]

    def exact() -> Tensor:
        return ops.rms_norm(
            x.double(),
            squares.double(),
            weight.double(),
            n,
            EPS,
            torch.float64,
            torch.float64,
            torch.float64,
        )

    return Timed(
        lambda: row_kernels.rms_norm(
            x, squares, weight, n, EPS, squares.dtype, squares.dtype, dtype
        ),
        2 * x.nbytes,
        exact,
    )


def _row_product_timed(dtype: torch.dtype) -> Timed:
    x, grad, _, weight = _row_inputs(dtype)

    def exact() -> Tensor:
        return ops.rms_product(grad.double(), x.double(), weight.double(), torch.float64)

    return Timed(lambda: row_kernels.rms_product(grad, x, weight, dtype), 2 * x.nbytes, exact)


def _row_norm_backward_timed(dtype: torch.dtype) -> Timed:
    x, grad, squares, weight = _row_inputs(dtype)
    product, n = row_kernels.rms_product(grad, x, weight, dtype), x.shape[-1]

    def exact() -> Tensor:
        wide = [each.double() for each in (grad, x, squares, product)]
        return ops.rms_norm_backward(
            wide[0], wide[1], wide[2], wide[3], weight.double(), n, EPS, torch.float64
        )

    return Timed(
        lambda: row_kernels.rms_norm_backward(grad, x, squares, product, weight, n, EPS, dtype),
        3 * x.nbytes,
        exact,
    )


def _row_weight_gradient_timed(dtype: torch.dtype) -> Timed:
    x, grad, squares, _ = _row_inputs(dtype)
    n = x.shape[-1]

    def exact() -> Tensor:
        return ops.rms_weight_gradient(
            grad.double(), x.double(), squares.double(), n, EPS, torch.float64
        )

    return Timed(
        lambda: row_kernels.rms_weight_gradient(grad, x, squares, n, EPS, dtype),
        2 * x.nbytes,
        exact,
    )


def _row_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, the gradient, squares and the weight."""
    x, grad = _random(NORMED_ROWS, dtype), _random(NORMED_ROWS, dtype)
    return x, grad, x.float().square().sum(-1), _random(NORMED_ROWS[1:], dtype)


def _sum_exp_timed(dtype: torch.dtype) -> Timed:
    x = _random(LOGITS, dtype)
    m = x.amax(-1)
    return Timed(
        lambda: row_kernels.sum_exp(x, m), x.nbytes, lambda: ops.sum_exp(x.double(), m.double())
    )


def _cross_entropy_backward_timed(dtype: torch.dtype) -> Timed:
    x, index = _random(LOGITS, dtype), torch.randint(LOGITS[1], LOGITS[:1], device="cuda")
    m, scale = x.amax(-1), torch.rand(LOGITS[0], device="cuda")
    s = row_kernels.sum_exp(x, m)

    def exact() -> Tensor:
        return ops.cross_entropy_backward(x.double(), m.double(), s.double(), index, scale.double())

    return Timed(
        lambda: row_kernels.cross_entropy_backward(x, m, s, index, scale), 2 * x.nbytes, exact
    )


CASES: dict[str, Case] = {
    "pack": Case(_pack_numerics, _pack_timed),
    "unpack": Case(_unpack_numerics, _unpack_timed),
    "reduce_add_rmsnorm": Case(_norm_numerics, _norm_timed),
    "reduce_add_rmsnorm_backward": Case(_norm_backward_numerics, _norm_backward_timed),
    "all_gather_matmul": Case(exchanges.gathered, None),
    "matmul_reduce_scatter": Case(exchanges.scattered, None),
    "matmul_reduce_add_rmsnorm": Case(exchanges.scattered_and_normed, None),
    "moe_dispatch": Case(exchanges.dispatched, None),
    "moe_combine": Case(exchanges.combined, None),
    "row_norm": Case(None, _row_norm_timed),
    "row_product": Case(None, _row_product_timed),
    "row_norm_backward": Case(None, _row_norm_backward_timed),
    "row_weight_gradient": Case(None, _row_weight_gradient_timed),
    "sum_exp": Case(None, _sum_exp_timed),
    "cross_entropy_backward": Case(None, _cross_entropy_backward_timed),
}
"""Name of a kernel → its case. A new kernel needs only an entry here. `kernels_overlap` times
overlapped products."""


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", metavar="FILE", help="write {env, rows} to this file")
    parser.add_argument(
        "--kernel",
        action="append",
        choices=tuple(CASES),
        help="name of a kernel; may be repeated; by default all",
    )
    options = parser.parse_args()
    cases: list[dict[str, Any]] = [
        {"spec": {"name": name}, "mesh": ""} for name in options.kernel or CASES
    ]
    return run_rows("kernels", cases, COLUMNS, options.json or str(RESULTS))


if __name__ == "__main__":
    raise SystemExit(main())
