"""The rows of `published_runs.csv`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).with_name("published_runs.csv")


@dataclass(frozen=True, slots=True)
class Run:
    """One published run. Numbers that the source does not state are None.

    Attributes:
        hidden: features of the residual stream.
        ffn: features between the two linears of an MLP.
        devices_per_node: number of devices per node.
        chunks: number of stages per device (Megatron's virtual pipeline).
        sharding: the statements about ZeRO or FSDP.
        batch: global batch in samples.
        micro_batch: number of samples that a replica processes at a time.
        step_s: measured seconds of a step, or derived from measured tokens per second.
        peak_bytes: measured peak of a device.
    """

    row_id: str
    source: str
    framework: str
    model: str
    gpu: str
    interconnect: str
    precision: str
    sharding: str
    recompute: str
    layers: int | None
    hidden: int | None
    ffn: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    seq: int | None
    num_devices: int | None
    devices_per_node: int
    tp: int
    pp: int
    chunks: int
    cp: int
    ep: int
    dp: int | None
    batch: int | None
    micro_batch: int | None
    step_s: float | None
    peak_bytes: int | None


def _read(row: Mapping[str, str]) -> Run:
    def number(name: str) -> int | None:
        return int(row[name]) if row[name] else None

    def degree(name: str) -> int:
        return number(name) or 1

    devices, dp = number("n_gpus"), number("dp")
    if dp is None and devices is not None:
        dp = devices // (degree("tp") * degree("pp") * degree("cp"))
    batch, seq = number("gbs"), number("seq_len")
    step_s = float(row["step_time_s"] or row["derived_step_time_s"] or 0) or None
    if step_s is None and row["tokens_per_s_per_gpu"] and batch and seq and devices:
        step_s = batch * seq / (float(row["tokens_per_s_per_gpu"]) * devices)
    return Run(
        row["row_id"],
        row["source"],
        row["framework"],
        row["model"],
        row["gpu"],
        row["interconnect"],
        row["precision"],
        row["zero_or_fsdp"],
        row["recompute"],
        number("layers"),
        number("hidden"),
        number("ffn"),
        number("heads"),
        number("kv_heads"),
        number("vocab"),
        seq,
        devices,
        number("gpus_per_node") or 8,
        degree("tp"),
        degree("pp"),
        degree("vpp"),
        degree("cp"),
        degree("ep"),
        dp,
        batch,
        number("mbs"),
        step_s,
        int(float(row["peak_mem_gib"]) * 2**30) if row["peak_mem_gib"] else None,
    )


with DATA.open(encoding="utf-8", newline="") as file:
    RUNS: tuple[Run, ...] = tuple(_read(row) for row in csv.DictReader(file))
