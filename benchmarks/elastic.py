"""``python -m benchmarks.elastic``: a machine fails during training and returns; the losses are
compared with those of one process.

Two agents (`autopar run`, as on two machines, here both on this one) start two processes each,
which train the GPT-2 of `make demo`. After some steps one agent and its processes are killed. The
other agent restarts its processes, plans for the remaining two, and continues from the newest
checkpoint. Then the first agent returns, and all four processes continue. Each row is one of these
three parts of the run.

Everything is computed in float64, including the loss. With AdamW, float32 rounding grows to
thousandths of the loss within so many steps. An error of a restart would not be visible in
comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from benchmarks.common import ROOT, Row, run_rows
from benchmarks.demo import LEARNING_RATE, batches, build

PROCESSES = 2  # per agent
PARTS = ("both machines", "one was killed", "it is back")
BUDGET_BYTES = 240 * 10**6  # per process
TOLERANCE = 1e-9  # relative difference of losses: float64 rounding, which grows with AdamW
LIMIT_S = 900.0
NAMES = ("first", "second")
WORD, MACHINE = "told", "AUTOPAR_ELASTIC_MACHINE"


class Exact(nn.Module):
    """The demo's model, with a loss in the dtype of its logits. Its original loss is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build().double()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens)["logits"]
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def windows(steps: int) -> list[Tensor]:
    """Return the demo's batches."""
    return [batch["input_ids"] for batch in batches(steps)]


def train(folder: Path, steps: int) -> None:
    """Run an ordinary training loop on each process. It continues from the newest checkpoint."""
    (folder / f"{os.environ[MACHINE]}.{os.getpid()}").touch()
    data = windows(steps)
    model = autopar.compile(
        Exact(), example_inputs=data[0], hardware="cpu-gloo", memory_bytes=BUDGET_BYTES
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    checkpoints = autopar.Checkpoints(folder / "checkpoints")
    for step in range(checkpoints.load(model, optimizer), steps):
        loss = model(data[step])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step + 1, model, optimizer)
        if dist.get_rank() == 0:
            rests = max(model.parameters(), key=lambda p: p.numel()).placements
            said = {
                "step": step,
                "loss": loss.item(),
                "processes": dist.get_world_size(),
                "rests": str(rests),
                "at_s": time.time(),
            }
            with (folder / WORD).open("a") as file:
                file.write(json.dumps(said) + "\n")


def row(spec: dict[str, Any], mesh: str, steps: int) -> list[Row]:
    """Return one row per part of the run."""
    with tempfile.TemporaryDirectory() as folder:
        told = follow(Path(folder), steps)
    wanted = alone(steps)
    starts = [
        n for n, each in enumerate(told) if not n or each["processes"] != told[n - 1]["processes"]
    ]
    if len(starts) != len(PARTS):
        raise AutoparError(f"the run had {len(starts)} parts instead of {len(PARTS)}")
    rows = []
    for part, start, end in zip(PARTS, starts, [*starts[1:], len(told)], strict=True):
        here, before = told[start:end], told[start - 1] if start else None
        worst = max(
            abs(each["loss"] - wanted[each["step"]]) / wanted[each["step"]] for each in here
        )
        again = 0 if before is None else before["step"] + 1 - here[0]["step"]
        rows.append(
            {
                "part": part,
                "processes": here[0]["processes"],
                "steps": f"{here[0]['step']} to {here[-1]['step']}",
                "largest_weight": here[0]["rests"],
                "run_twice": again,
                "pause_s": None if before is None else here[0]["at_s"] - before["at_s"],
                "max_rel_diff": worst,
                "ok": worst <= TOLERANCE,
                "error": None,
            }
        )
    return rows


def alone(steps: int) -> list[float]:
    """Return the losses of the plain model in one process, without interruption."""
    model, losses = Exact(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for batch in windows(steps):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def follow(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Run all parts, and return the reports of the first rank for each step, in order.

    Raises:
        AutoparError: if agents end too early, or at the time limit.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meet, agents = f"localhost:{port}", list[subprocess.Popen[bytes]]()
    try:
        agents.append(_agent(folder, meet, steps, "first"))
        _listens(port)  # the rendezvous is on the machine that does not fail
        agents.append(_agent(folder, meet, steps, "second"))
        _await(folder, agents, lambda told: len(told) >= steps // 3)
        _kill_agent(folder, agents[1], "second")
        _await(
            folder,
            agents[:1],
            lambda told: told[-1]["processes"] == PROCESSES and told[-1]["step"] >= steps // 2,
        )
        agents[1] = _agent(folder, meet, steps, "second")
        _await(folder, agents, lambda told: told[-1]["step"] == steps - 1)
        for agent in agents:
            agent.wait(timeout=LIMIT_S)
    finally:
        for agent, name in zip(agents, NAMES, strict=False):
            _kill_agent(folder, agent, name)
    return _reports(folder)


def _agent(folder: Path, meet: str, steps: int, name: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "autopar",
        "run",
        "-n",
        str(PROCESSES),
        "--nodes",
        "1:2",
        "--meet",
        meet,
        "--restarts",
        "3",
    ]
    known = {
        **os.environ,
        MACHINE: name,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PET_RDZV_CONF": "last_call_timeout=5",
    }
    with (folder / f"{name}.log").open("ab") as log:
        work = [*command, __file__, str(folder), str(steps)]
        return subprocess.Popen(work, cwd=ROOT, env=known, stdout=log, stderr=log)


def _kill_agent(folder: Path, agent: subprocess.Popen[bytes], name: str) -> None:
    """Kill an agent and its processes, which are in other sessions."""
    agent.kill()
    agent.wait()
    for mark in folder.glob(f"{name}.[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(mark.suffix[1:]), signal.SIGKILL)
        mark.unlink()


def _listens(port: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if not probe.connect_ex(("localhost", port)):
                return
        time.sleep(0.1)


def _reports(folder: Path) -> list[dict[str, Any]]:
    file = folder / WORD
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _await(folder: Path, agents: Sequence[subprocess.Popen[bytes]], ends: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not ((told := _reports(folder)) and ends(told)):
        ended = [agent for agent in agents if agent.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = "\n".join(
                path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("*.log"))
            )
            raise AutoparError(
                f"{'an agent ended too early' if ended else 'no further step ran'}: {logs}"
            )
        time.sleep(0.2)


def main() -> int:
    flags = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description=__doc__)
    flags.add_argument("--json", metavar="FILE", help="write {env, rows} to this file")
    flags.add_argument(
        "--steps",
        type=int,
        default=150,
        help="steps of all parts together; must suffice for an agent to start",
    )
    options = flags.parse_args()
    case = {"spec": {"name": "the demo's gpt2"}, "mesh": "2x2", "steps": options.steps}
    columns = (
        "part",
        "processes",
        "steps",
        "largest_weight",
        "run_twice",
        "pause_s",
        "max_rel_diff",
    )
    return run_rows("elastic", [case], columns, options.json)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        sys.exit(main())
