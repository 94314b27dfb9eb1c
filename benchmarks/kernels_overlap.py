"""The share of communication that an overlapped product hides, for one rank of several on one GPU.

The rank does all of its own work. Its peers have already finished: their shards are ready, and
their signals are set. So one GPU measures the time of one rank of a group, without the products of
the others at the same time. The memory of peers is pinned memory of the host (each copy crosses the
bus, as it would cross a link between GPUs) or other memory of the same GPU. There is no copy engine
within a device. There a kernel of few blocks copies (`autopar.kernels.peers.Blocks`), at most at
the rate of a link, and torch keeps the vendor's products off the multiprocessors of these blocks.
Without a limit their rate falls with the clock of the device, which a concurrent product lowers;
the rate of a link does not.

    t_mm       the whole product, in one piece
    t_comm     the copies alone, by the same protocol
    t_seq      the copies, then the product (or in reverse order)
    t_overlap  both, chunk by chunk
    efficiency = (t_seq − t_overlap) / min(t_mm, t_comm)     1: the shorter one is hidden; 0:
                                                             nothing is hidden
    share = (t_seq − t_overlap) / the time that so many chunks could hide at no cost
    (`autopar.cost.kernel_times`)

Products next to blocks use cublasLt, in one piece or in chunks. Its kernels keep their
multiprocessors to the end, and only cublasLt can leave some free. The number of columns of the
product is chosen so that t_comm / t_mm is near `ratio`; the row contains the actual ratio. Times
are medians in milliseconds, by events of the device, with the host far ahead
(`benchmarks.device_times`). `host_ms` is the time that the host needs to enqueue the overlapped
call. Without a GPU there is one row per kernel and link, which states why it is skipped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.kernels import library
from autopar.kernels.chunked import Gather, Shards, gather, scatter
from autopar.kernels.collectives import AxisGroup
from autopar.kernels.normed import AddNorm, prepare_norm
from autopar.kernels.overlapped import prepare_gather, prepare_scatter
from autopar.kernels.peers import Blocks, Regions, SymmetricMemory
from benchmarks.common import Row, run_rows
from benchmarks.device_times import Times, in_turn, measure

KERNELS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_reduce_add_rmsnorm")
LINKS = ("pinned", "device")
RATIOS = (0.3, 0.6, 1.0, 1.7, 3.0)
CHUNKS = (1, 2, 4, 8)
ROUNDS = 10
COLUMNS = (
    "link",
    "blocks",
    "gb_per_s",
    "ratio",
    "num_chunks",
    "reached",
    "t_mm_ms",
    "t_comm_ms",
    "t_seq_ms",
    "t_overlap_ms",
    "efficiency",
    "share",
    "host_ms",
    "skipped",
)
PAST = 1 << 62  # an epoch that no measurement reaches, so that its signal is set
COLUMNS_OF = {
    "all_gather_matmul": 1024,
    "matmul_reduce_scatter": 4096,
    "matmul_reduce_add_rmsnorm": 4096,
}
ROWS = {"pinned": 8192, "device": 65536}  # so that the product of a chunk also fills the device
EQUATION = "mk,kn->mn"
NUM_BLOCKS, GB_PER_S = (
    2,
    70.0,
)  # less than two blocks reach alone on an H200 (`--rate 0`); a product lowers the clock
EPS = 1e-5


class FirstRank(SymmetricMemory):
    """Rank 0 of a group whose peers have finished. Their memory is pinned memory of the host, or
    memory of the same device."""

    def __init__(
        self, size: int, link: str, device: torch.device, blocks: Blocks | None = None
    ) -> None:
        super().__init__("", size, 0, device, blocks)
        self._link = link

    def _new_regions(self, num_bytes: int, num_words: int) -> Regions:
        def bytes_of(rank: int) -> Tensor:
            if rank > 0 and self._link == "pinned":
                return torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

        flags = [
            torch.zeros(num_words, dtype=torch.int64, device=self.device) for _ in range(self.size)
        ]
        for peer in range(1, self.size):
            flags[peer][0] = PAST  # the peer's shard is ready
            flags[0][(1 + peer) * 16] = PAST  # the peer's part has arrived
        torch.cuda.synchronize(self.device)
        return Regions(
            tuple(bytes_of(rank) for rank in range(self.size)), tuple(flags), [0] * self.size
        )


@contextmanager
def beside(blocks: Blocks | None) -> Iterator[None]:
    """Keep products that are enqueued inside off the multiprocessors of the blocks."""
    if blocks is None:
        yield
        return
    carveout = torch._C._set_sm_carveout_experimental
    carveout(blocks.num_blocks)
    try:
        yield
    finally:
        carveout(None)


def pieces(
    kernel: str, peers: FirstRank, rows: int, inner: int, columns: int, num_chunks: int
) -> dict[str, Callable[[], object]]:
    """Return the timed calls: the product alone, the copies alone, one after the other, and both at
    once."""
    device = peers.device
    a = torch.randn(rows, inner, dtype=torch.bfloat16, device=device)
    b = torch.randn(inner, columns, dtype=torch.bfloat16, device=device)
    if kernel == "all_gather_matmul":
        shards = Shards.of([rows, inner], 0, a.dtype, peers.size, num_chunks)
        job, y = prepare_gather(
            EQUATION, a[: -(-rows // peers.size)].contiguous(), b, 0, 0, [rows, inner]
        )
        copies = Gather(job.shard, job.gathered, lambda begin, length: None)

        def copy() -> None:
            gather(peers, shards, {0: copies})

        def multiply() -> None:
            torch.mm(job.gathered, b, out=y)

        return {
            "mm": multiply,
            "comm": copy,
            "seq": in_turn(copy, multiply),
            "overlap": lambda: gather(peers, shards, {0: job}),
        }
    group = AxisGroup("", peers.size, 0)
    if kernel == "matmul_reduce_add_rmsnorm":
        residual = torch.randn(-(-rows // peers.size), columns, dtype=a.dtype, device=device)
        weight = torch.ones(columns, dtype=a.dtype, device=device)
        norm = AddNorm(residual, weight, EPS, rounded=True)
        product, _, _ = prepare_norm(EQUATION, (a, b), norm, 0, group)
    else:
        product, _ = prepare_scatter(EQUATION, (a, b), None, 0, group)
    parts = replace(product, produce=lambda begin, length, out: None)
    shards = Shards.of([rows, columns], 0, a.dtype, peers.size, num_chunks)

    def push() -> None:
        scatter(peers, shards, 0, {0: parts})

    def multiply_all() -> None:
        torch.mm(a, b, out=product.partial)

    both = lambda: scatter(peers, shards, 0, {0: product})  # noqa: E731
    return {"mm": multiply_all, "comm": push, "seq": in_turn(multiply_all, push), "overlap": both}


def row(
    spec: dict[str, str],
    mesh: str,
    link: str,
    ratios: list[float],
    chunks: list[int],
    rows: int | None,
    inner: int,
    num_blocks: int,
    gb_per_s: float,
) -> list[Row]:
    """Return the measurements of one kernel over one link. `mesh` is ``gpu=N`` for a group of N
    ranks."""
    blocks = Blocks(num_blocks, 1e9 * gb_per_s) if link == "device" else None
    shown: Row = {"link": link, "error": None, "ok": True, "skipped": None}
    if blocks is not None:
        shown |= {"blocks": num_blocks, "gb_per_s": gb_per_s or None}
    reason = "there is no GPU" if not torch.cuda.is_available() else library.why_not("cuda")
    if reason:
        return [{**shown, "skipped": reason}]
    kernel, size, rows = spec["name"], int(mesh.partition("=")[2]), rows or ROWS[link]
    columns = COLUMNS_OF[kernel]

    def timed(
        num_chunks: int, inner: int, columns: int, which: tuple[str, ...]
    ) -> dict[str, Times]:
        runs = pieces(
            kernel,
            FirstRank(size, link, torch.device("cuda"), blocks),
            rows,
            inner,
            columns,
            num_chunks,
        )

        def both() -> None:
            with beside(blocks):
                runs["overlap"]()

        return measure({name: both if name == "overlap" else runs[name] for name in which}, ROUNDS)

    if blocks is not None:
        torch.backends.cuda.preferred_blas_library("cublaslt")

    found, first = [], timed(1, inner, columns, ("mm", "comm"))
    for ratio in ratios:
        factor = first["comm"].device_s / (ratio * first["mm"].device_s)
        # more columns or a longer inner dim add compute, but no communication
        sizes = (
            (inner, _rounded(columns * factor))
            if kernel == "all_gather_matmul"
            else (_rounded(inner * factor), columns)
        )
        for num_chunks in chunks:
            figures = _figures(
                kernel,
                size,
                num_chunks,
                timed(num_chunks, *sizes, ("mm", "comm", "seq", "overlap")),
            )
            case = {
                "ratio": ratio,
                "num_chunks": num_chunks,
                "rows": rows,
                "inner": sizes[0],
                "columns": sizes[1],
            }
            found.append({**shown, **case, **figures})
    return found


def _figures(kernel: str, size: int, num_chunks: int, times: dict[str, Times]) -> Row:
    mm, comm, seq, overlap = (times[name].device_s for name in ("mm", "comm", "seq", "overlap"))
    num_moved = (size - 1) * num_chunks
    product_s = mm / (size * num_chunks)
    gathered_s = max(mm, comm + product_s)
    scattered_s = max(mm, num_moved * product_s + comm / num_moved, product_s + comm)
    hidden_s = min(
        mm + comm - (gathered_s if kernel == "all_gather_matmul" else scattered_s), mm, comm
    )
    return {
        **{f"t_{name}_ms": 1e3 * value.device_s for name, value in times.items()},
        "reached": comm / mm,
        "efficiency": (seq - overlap) / min(mm, comm),
        "share": (seq - overlap) / hidden_s,
        "host_ms": 1e3 * times["overlap"].host_s,
        "device": torch.cuda.get_device_name(),
    }


def _rounded(count: float) -> int:
    """Round to whole tiles of the vendor's matmul."""
    return max(64, round(count / 64) * 64)


def main(arguments: list[str]) -> int:
    flags = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels_overlap", description=__doc__
    )
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--json", metavar="FILE", help="write {env, rows} to this file")
    flags.add_argument(
        "--mesh", action="append", default=[], help="gpu=N: one rank of N; by default gpu=4"
    )
    flags.add_argument(
        "--chunks",
        type=int,
        action="append",
        default=[],
        help="chunks per shard; by default 1, 2, 4 and 8",
    )
    flags.add_argument(
        "--rows", type=int, help=f"rows of the product; by default, for each link: {ROWS}"
    )
    flags.add_argument("--inner", type=int, default=4096)
    flags.add_argument(
        "--links", choices=LINKS, action="append", default=[], help="by default both"
    )
    flags.add_argument(
        "--kernels", choices=KERNELS, action="append", default=[], help="by default all"
    )
    flags.add_argument(
        "--blocks", type=int, default=NUM_BLOCKS, help="blocks that copy within the device"
    )
    flags.add_argument(
        "--rate",
        type=float,
        action="append",
        default=[],
        help=f"largest rate of the blocks in GB/s; 0: no limit; by default {GB_PER_S:g}",
    )
    options = flags.parse_args(arguments)
    shared = {
        "ratios": RATIOS,
        "chunks": options.chunks or CHUNKS,
        "rows": options.rows,
        "inner": options.inner,
    }
    cases: list[dict[str, Any]] = [
        {
            "spec": {"name": kernel},
            "mesh": mesh,
            "link": link,
            "num_blocks": options.blocks,
            "gb_per_s": rate,
            **shared,
        }
        for kernel in options.kernels or KERNELS
        for mesh in options.mesh or ["gpu=4"]
        for link in options.links or LINKS
        for rate in (options.rate or [GB_PER_S] if link == "device" else [0.0])
    ]
    return run_rows("kernels_overlap", cases, COLUMNS, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
