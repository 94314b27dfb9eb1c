"""Trains a small GPT-2 on real text, planned for four local processes, beside the same run on one process.

The text is the Python standard library's own sources, read by bytes: every machine has it. Prints the plan, the largest
difference of the two loss curves, and predicted and measured memory; writes ``plan.json``,
``demo.png`` (curves and memory) and ``plan.png`` (the layouts).
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

import autopar
from autopar.hf import build
from autopar.report import report
from autopar.run.device_mesh import device_mesh
from autopar.units import size
from benchmarks.ranks import run_ranks
from benchmarks.regret import peak_of

CONFIG = '{"vocab_size":256,"n_positions":128,"n_embd":256,"n_layer":4,"n_head":8,"bos_token_id":0,"eos_token_id":0}'
MESH = autopar.Mesh({"a": 2, "b": 2})
BATCH, SEQ, RATE = 16, 128, 1e-3
NUM_BYTES = 2_000_000


@dataclass(frozen=True, slots=True)
class Curve:
    """What one run of the training saw on one rank: losses, seconds per step (median), peak of live tensor bytes."""

    losses: tuple[float, ...]
    step_s: float
    peak_bytes: int


def text() -> torch.Tensor:
    """The first two million bytes of the standard library's modules, in the order of their names; a vector of int64."""
    data = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        data += path.read_bytes()
        if len(data) >= NUM_BYTES:
            break
    return torch.frombuffer(data, dtype=torch.uint8).to(torch.int64)[:NUM_BYTES]


def batches(num_steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """The same random windows of the text in every run and on every rank: the global batch."""
    data, generator = text(), torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        starts = torch.randint(0, len(data) - SEQ, (BATCH,), generator=generator).tolist()
        ids = torch.stack([data[s : s + SEQ] for s in starts])
        yield {"input_ids": ids, "labels": ids}


def model_and_batch() -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model with the same first weights in every run."""
    return build(f"gpt2:{CONFIG}", device="cpu", batch=BATCH, seq=SEQ, seed=0)


def train(rank: int, tell: Any, plan: str | None, num_steps: int) -> Curve:
    """One rank's run: of the plan, or, without one, of the plain model. The last step is run again to measure its memory."""
    model, example = model_and_batch()
    if plan is not None:
        chosen = autopar.Plan.loads(plan)
        model = autopar.compile(model, device_mesh(chosen.mesh), example_inputs=example, plan=chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, seconds = [], []
    for data in batches(num_steps):
        start = time.perf_counter()
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if rank == 0:
            tell(1)
    return Curve(tuple(losses), sorted(seconds)[len(seconds) // 2], peak_of((model, optimizer), data))


def main(arguments: list[str]) -> int:
    """Run the demo; 0 where the two curves agree."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    flags.add_argument("--steps", type=int, default=60)
    flags.add_argument("--out", type=Path, default=Path("out"))
    options = flags.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=max(Console().width, 120))  # the plan's tables need room
    model, example = model_and_batch()
    num_parameters = sum(p.numel() for p in model.parameters())
    console.print(f"a GPT-2 of {num_parameters / 1e6:.1f} million parameters, planned for {MESH} with the profile cpu-gloo …")
    plan = autopar.plan(model, MESH, example_inputs=example, hardware="cpu-gloo")
    plan.save(options.out / "plan.json")
    console.print(autopar.explain(plan))
    with Progress(console=console) as progress:
        together = progress.add_task("4 processes", total=options.steps)
        ours = run_ranks(MESH.num_devices, train, plan.dumps(), options.steps, told=lambda n: progress.advance(together, n))
        alone = progress.add_task("1 process", total=options.steps)
        (plain,) = run_ranks(1, train, None, options.steps, told=lambda n: progress.advance(alone, n))
    return _report(console, plan, ours, plain, options.out)


def _report(console: Console, plan: autopar.Plan, ours: list[Curve], plain: Curve, out: Path) -> int:
    first = ours[0]
    difference = max(abs(a - b) for a, b in zip(first.losses, plain.losses, strict=True))
    console.print(f"loss {plain.losses[0]:.3f} → {plain.losses[-1]:.3f} on one process, {first.losses[-1]:.3f} on four")
    console.print(f"largest difference of the two loss curves: {difference:.1e}")
    console.print(f"step: {plain.step_s:.2f} s on one process, {first.step_s:.2f} s on four (the four share this machine's cores)")
    measured = ", ".join(size(curve.peak_bytes) for curve in ours)
    console.print(f"memory per rank: predicted {size(plan.prediction.peak_bytes)}, measured {measured}")
    console.print(f"memory of the one process: {size(plain.peak_bytes)}")
    _picture(plan, ours[0], plain, out / "demo.png")
    report(plan, out / "plan.png")
    console.print(f"written: {out / 'plan.json'}, {out / 'demo.png'}, {out / 'plan.png'}")
    return 0 if difference < 1e-3 and plain.losses[-1] < plain.losses[0] else 1


def _picture(plan: autopar.Plan, ours: Curve, plain: Curve, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    losses.plot(plain.losses, color="#9aa5b1", linewidth=5, label="one process")
    losses.plot(ours.losses, color="#0b6e99", linewidth=1.5, label=f"{plan.mesh.num_devices} processes, {plan.mesh}")
    losses.set(xlabel="step", ylabel="loss", title="The same training, planned and plain")
    losses.legend(frameon=False)
    names = ("one process\nmeasured", "per rank\npredicted", "per rank\nmeasured")
    values = [x / 2**20 for x in (plain.peak_bytes, plan.prediction.peak_bytes, ours.peak_bytes)]
    bars = memory.bar(names, values, color=("#9aa5b1", "#f2a541", "#0b6e99"))
    memory.bar_label(bars, fmt="%.1f")
    memory.set(ylabel="MiB", title="Peak of live tensor bytes")
    for axes in (losses, memory):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
