"""The tables of `autopar_csrc/README.md` match the files of results, and the results reach the
targets."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
LINES = (ROOT / "autopar_csrc" / "README.md").read_text(encoding="utf-8").splitlines()
KERNELS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_reduce_add_rmsnorm")
SOURCES = (
    ("kernels_overlap.json", "pinned", None),
    ("kernels_overlap_h200.json", "pinned", None),
    ("kernels_overlap_h200.json", "device", 70.0),
)
"""Of three lines of the table: file, link and limit."""
COPIED = [
    ("pack", "| `pack`"),
    ("unpack", "| `unpack`"),
    ("reduce_add_rmsnorm", "| `reduce_add_rmsnorm` of"),
    ("reduce_add_rmsnorm_backward", "| its backward |"),
    ("row_norm", "| `row_norm`,"),
    ("row_product", "| its backward's `row_product` |"),
    ("row_norm_backward", "| its `row_norm_backward` |"),
    ("row_weight_gradient", "| its `row_weight_gradient` |"),
    ("sum_exp", "| `sum_exp`,"),
    ("cross_entropy_backward", "| `cross_entropy_backward` of"),
]


def results(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")
    )["rows"]
    return rows


def best(name: str, kernel: str, link: str, gb_per_s: float | None) -> list[float]:
    """Return the efficiency at the best number of chunks, per ratio in ascending order."""
    by_ratio: dict[float, list[float]] = defaultdict(list)
    for row in results(name):
        if (row["model"], row["link"], row.get("gb_per_s")) == (kernel, link, gb_per_s):
            by_ratio[row["ratio"]].append(row["efficiency"])
    return [max(values) for _, values in sorted(by_ratio.items())]


def cells(line: str) -> list[str]:
    return [part.strip() for part in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("kernel", KERNELS)
def test_efficiencies_match_the_results_and_are_at_least_85_percent(kernel: str) -> None:
    first = next(
        i for i, line in enumerate(LINES) if line.startswith(f"| `{kernel}`, host, H100 |")
    )
    for line, (name, link, gb_per_s) in zip(LINES[first : first + 3], SOURCES, strict=True):
        efficiencies = best(name, kernel, link, gb_per_s)
        assert [f"{value:.2f}" for value in efficiencies] == cells(line)
        assert min(efficiencies) >= 0.85


@pytest.mark.parametrize(("kernel", "begins"), COPIED)
def test_shares_of_the_copy_bandwidth_match_the_results(kernel: str, begins: str) -> None:
    line = next(line for line in LINES if line.startswith(begins))
    for name, cell in zip(("kernels.json", "kernels_h200.json"), cells(line), strict=True):
        shares = {
            row["dtype"]: row["share_of_copy"]
            for row in results(name)
            if row["model"] == kernel and row.get("share_of_copy")
        }
        assert cell.partition(":")[0] == ", ".join(
            f"{shares[dtype]:.2f}" for dtype in ("fp32", "bf16", "fp16")
        )
        assert kernel != "pack" or min(shares.values()) >= 0.85
