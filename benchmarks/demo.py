"""``make demo``: train a small GPT-2 on real text, on 4 local processes and, for comparison, on
one.

The text is the source code of Python's standard library as bytes, which every machine has. The 4
processes form a 2×2 mesh. The planner chooses the layouts under a memory budget in which the
unsharded model does not fit. Both runs start from the same weights and read the same batches.
Writes ``out/plan.json`` and ``out/demo.png``.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

import autopar
from autopar import hf
from autopar.core.units import size
from autopar.program.abstract_executor import LiveBytes
from benchmarks.ranks import run_ranks

MODEL = """gpt2:{"n_embd": 256, "n_layer": 4, "n_head": 8, "vocab_size": 256, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}"""  # noqa: E501
MESH = {"a": 2, "b": 2}
BATCH, SEQ, LEARNING_RATE, MEASURED_STEP = 8, 128, 1e-3, 1
BUDGET_BYTES = 60 * 10**6
TOLERANCE = 1e-3  # relative difference of losses: float32 rounding after some dozen steps of AdamW
TEXT_BYTES = 4 * 10**6
Told = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Run:
    """One rank's run: the loss of every step, the peak of live tensor bytes in one step, the time,
    and the text of the plan, if any."""

    losses: tuple[float, ...]
    peak_bytes: int
    seconds: float
    plan: str = ""


def text() -> Tensor:
    """Return the standard library's top-level modules as bytes, without the few that contain tables
    of other scripts."""
    sources = (
        path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    )
    joined = b"".join(source for source in sources if source.isascii())
    return torch.frombuffer(bytearray(joined[:TEXT_BYTES]), dtype=torch.uint8).long()


def batches(steps: int) -> list[dict[str, Tensor]]:
    """Return random windows of the text, the same on every process."""
    data, generator = text(), torch.Generator().manual_seed(1)
    starts = torch.randint(0, len(data) - SEQ, (steps, BATCH), generator=generator)
    windows = data[starts[..., None] + torch.arange(SEQ)]
    own = [window.clone() for window in windows]  # a view would keep all windows alive
    return [{"input_ids": window, "labels": window} for window in own]


def build() -> torch.nn.Module:
    return hf.build(MODEL, device="cpu", batch=BATCH, seq=SEQ)[0]


def train(model: torch.nn.Module, steps: int, told: Told) -> tuple[tuple[float, ...], int, float]:
    """Run an ordinary training loop. The peak is that of one step, from the start of forward to the
    end of backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, peak, start = [], 0, time.perf_counter()
    for step, batch in enumerate(batches(steps)):
        if step == MEASURED_STEP:
            loss, peak = _measured(model, optimizer, batch)
        else:
            loss = model(**batch)["loss"]
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        told(losses[-1])
    return tuple(losses), peak, time.perf_counter() - start


def _measured(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]
) -> tuple[Tensor, int]:
    state = [
        x
        for values in optimizer.state.values()
        for x in values.values()
        if isinstance(x, Tensor) and x.dim() > 0
    ]
    with LiveBytes() as memory:
        memory.register([*model.parameters(), *model.buffers(), *batch.values(), *state])
        memory.reset_peak()
        outputs = model(**batch)
        outputs["loss"].backward()
        return outputs["loss"].detach(), memory.peak_bytes


def alone(steps: int, told: Told) -> Run:
    """Run the plain model in this process."""
    return Run(*train(build(), steps, told))


def rank(number: int, tell: Told, steps: int) -> Run:
    """Run one of the processes: the same loop with the compiled model."""
    module = autopar.compile(
        build(),
        MESH,
        example_inputs=batches(1)[0],
        hardware="cpu-gloo",
        memory_bytes=BUDGET_BYTES,
        optimizer="adamw",
    )
    found = train(module, steps, tell if number == 0 else lambda _: None)
    return Run(*found, plan=module.plan.dumps())


def both(steps: int) -> tuple[Run, list[Run]]:
    """Run on one process, then on four, with a progress bar each."""
    count = TextColumn("{task.completed:>3}/{task.total} {task.fields[loss]}")
    with Progress(
        TextColumn("{task.description:<14}"), BarColumn(), count, TimeElapsedColumn()
    ) as progress:
        tasks = [
            progress.add_task(name, total=steps, loss="")
            for name in ("one process", "four processes")
        ]

        def told(task: Any) -> Told:
            return lambda loss: progress.update(task, advance=1, loss=f"loss {loss:.3f}")

        progress.update(tasks[1], visible=False)
        single = alone(steps, told(tasks[0]))
        progress.update(tasks[1], visible=True, loss="planning")
        progress.reset(tasks[1])
        os.environ["OMP_NUM_THREADS"] = (
            "1"  # inherited by the ranks, which share the cores of this machine
        )
        return single, run_ranks(4, rank, steps, told=told(tasks[1]))


def picture(path: Path, plan: autopar.Plan, single: Run, ranks: list[Run]) -> None:
    """Draw the loss curves, their difference, and the plan's layouts and memory."""
    from matplotlib.figure import Figure

    from autopar import report

    figure: Any = Figure(figsize=(12, 12), dpi=110, layout="constrained", facecolor="white")
    top, middle, bottom = figure.subfigures(3, 1, height_ratios=(3.2, 6, 2.6))
    curves, difference = top.subplots(1, 2)
    curves.plot(single.losses, color="#e8924a", linewidth=5, alpha=0.5, label="one process")
    curves.plot(ranks[0].losses, color="#2f5d8a", linewidth=1.3, label="four processes, 2×2 mesh")
    curves.set_ylabel("loss per byte")
    curves.legend(frameon=False)
    difference.semilogy(
        [max(d, 1e-12) for d in differences(single, ranks)], color="#d1605e", linewidth=1.3
    )
    difference.set_ylabel("relative difference of the losses")
    for axes in (curves, difference):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    report.layouts(plan, inside=middle)
    report.memory(plan, inside=bottom)
    figure.savefig(path)


def differences(single: Run, ranks: list[Run]) -> list[float]:
    """Return the largest relative difference of the losses over the ranks for each step."""
    steps = zip(single.losses, *(run.losses for run in ranks), strict=True)
    return [
        max(abs(loss - reference) / reference for loss in losses) for reference, *losses in steps
    ]


def tell(console: Console, plan: autopar.Plan, single: Run, ranks: list[Run]) -> bool:
    """Print the results. Return whether the losses of the four processes match those of one."""
    apart, predicted = max(differences(single, ranks)), plan.prediction.peak_bytes
    console.print(autopar.explain(plan))
    console.rule("the same training on one process and on four")
    console.print(
        f"loss        {single.losses[0]:.4f} at the start, {single.losses[-1]:.4f} at the end,"
        f" after {len(single.losses)} steps"
    )
    console.print(
        f"difference  {apart:.1e} at most, relative, at any step on any rank (float32 rounding,"
        " which AdamW amplifies)"
    )
    console.print(
        f"memory      one process {size(single.peak_bytes)}; budget per rank {size(BUDGET_BYTES)}:"
        " the unsharded model would not fit"
    )
    for number, run in enumerate(ranks):
        off = run.peak_bytes / predicted - 1
        console.print(
            f"  rank {number}    predicted {size(predicted)}, measured {size(run.peak_bytes)}"
            f" ({off:+.2%})"
        )
    cores = f"one thread each, {os.cpu_count()} cores"
    console.print(
        f"time        {single.seconds:.0f} s on one process, {ranks[0].seconds:.0f} s on four"
        f" ({cores})"
    )
    return apart < TOLERANCE


def main(arguments: list[str]) -> int:
    flags = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    flags.add_argument("--steps", type=int, default=80)
    flags.add_argument("--out", type=Path, default=Path("out"))
    options = flags.parse_args(arguments)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console() if Console().is_terminal else Console(width=140)
    single, ranks = both(options.steps)
    plan = autopar.Plan.loads(ranks[0].plan)
    plan.save(options.out / "plan.json")
    picture(options.out / "demo.png", plan, single, ranks)
    followed = tell(console, plan, single, ranks)
    console.print(f"wrote {options.out / 'plan.json'} and {options.out / 'demo.png'}")
    if not followed:
        console.print("[red]the losses of the four processes differ from those of one[/red]")
    return 0 if followed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
