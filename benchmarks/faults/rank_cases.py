"""Misbehaving ranks. All other ranks must raise an error within seconds that names the rank.

Two real processes train a small model. From some step on, one of them behaves differently.
Differences without an effect, such as an additional call if no rank waits for another, may pass if
all losses are those of an undisturbed run.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch.distributed as dist

from benchmarks.common import ROOT
from benchmarks.faults.judging import HANG, RAW, InvalidCase, Misbehaviour, Notes, WrongResult

NUM_RANKS, NUM_STEPS = 2, 5
START_S, NOTICE_S = (
    150.0,
    60.0,
)  # limits in seconds: until the misbehaviour, and from it until all ranks have ended
PLANS = {
    "ddp": "constraints=[autopar.constraints.ddp()]",
    "fsdp": "constraints=[autopar.constraints.fsdp()]",
    "tensor parallel": 'constraints=[autopar.constraints.tensor_parallel(axes="gpu")]',
    "stages": 'constraints=[autopar.constraints.pipeline("gpu", microbatches=2)], outputs="loss"',
}
# Name → statement that the misbehaving rank runs at one step.
FAULTS = {
    "additional evaluation": "with torch.no_grad(): pm(**data)",
    "additional call": "pm(**data)",
    "additional training step": "pm(**data).backward()",
    "one call fewer": "continue",
    "no backward": "pm(**data); continue",
    "fewer batches": "break",
    "smaller batch": "data = {name: value[:6] for name, value in data.items()}",
    "larger batch": "data = {name: torch.cat([value, value]) for name, value in data.items()}",
    "other values": "data = {**data, 'x': data['x'] + 1}",
    "evaluation mode": "pm.eval()",
    "other random numbers": "torch.manual_seed(5)",
    "exception": "raise ValueError('a fault of the script')",
    "interrupt": "raise KeyboardInterrupt",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "exit": "sys.exit(3)",
    "silent exit": "os._exit(0)",
    "saves alone": "autopar.Checkpoints(folder).save(step, pm, optimizer)",
    "saves weights alone": "autopar.save_weights(pm, folder)",
    "clips alone": "pm.clip_grad_norm_(1.0)",
    "loads alone": "autopar.Checkpoints(folder).load(pm, optimizer)",
    "no optimizer step": "pm(**data).backward(); optimizer.zero_grad(); continue",
    "weights changed": "next(pm.parameters()).data.mul_(1.5)",
    "sleeps": "time.sleep(8)",
    "other seed": "",  # from the beginning (see the script)
}
# Plans in which other ranks hold a copy of the changed tensor. A rank may change a shard that only
# this rank holds, or the weights of its stage.
PLANS_WITH_COPIES = {"weights changed": ("ddp",)}
OTHER_SEED = 5
HARMLESS = ("sleeps",)
ENDED = ("exception", "interrupt", "SIGTERM", "SIGKILL", "exit", "silent exit")

SCRIPT = '''"""{title}: rank {odd}, {fault}, at step {step}, {plan}"""

import os
import signal
import sys
import time

import torch
from torch import nn

import autopar

rank, folder = int(os.environ["RANK"]), sys.argv[1]
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout, self.head = nn.Dropout({dropout}), nn.Linear(16, 4)

    def forward(self, x, y):
        h = x + self.down(torch.relu(self.up(x)))
        return nn.functional.cross_entropy(self.head(self.dropout(h)), y)


made = torch.Generator().manual_seed(0)
data = {{
    "x": torch.randn(12, 16, generator=made),
    "y": torch.randint(0, 4, (12,), generator=made),
}}
torch.manual_seed({seed})
mesh = autopar.Mesh({{"gpu": 2}})
pm = autopar.compile(Net(), mesh, example_inputs=data, hardware="cpu-gloo", {options})
optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
for step in range({num_steps}):
    if rank == {odd} and step == {step}:
        print("odd", flush=True)
        {statement}
    loss = pm(**data)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", step, repr(loss.item()), flush=True)
print("end", flush=True)
'''


def run(seed: int, notes: Notes) -> None:
    """Run the case of a seed.

    Raises:
        Misbehaviour: on a hang, or if a rank ends other than by an `AutoparError`.
        WrongResult: if no rank detects it, or if another rank is blamed.
    """
    rng = random.Random(seed)
    faults = tuple(FAULTS)
    fault = faults[seed % len(faults)]  # in turn, so that few seeds cover all of them
    plan = rng.choice(PLANS_WITH_COPIES.get(fault, tuple(PLANS)))
    odd, step = rng.randrange(NUM_RANKS), rng.randrange(1, 4)
    dropout = 0.1 if fault == "other random numbers" else rng.choice((0.0, 0.1))
    notes.entries |= {"mesh": "gpu=2", "plan": f"{plan}: rank {odd}, {fault}"}
    text = script_of(f"ranks:{seed}", plan, odd, fault, step, dropout)
    notes.entries["program"] = text
    notes.phase = "undisturbed"
    usual = undisturbed(plan, dropout, OTHER_SEED if (fault, odd) == ("other seed", 0) else 0)
    notes.phase = "run"
    judge_ranks(launch(text), usual, odd, fault)


def script_of(
    title: str, plan: str, odd: int, fault: str, step: int, dropout: float, seed: int = 0
) -> str:
    """Return the script of both ranks. If `odd` is -1, no rank misbehaves."""
    return SCRIPT.format(
        title=title,
        odd=odd,
        fault=fault,
        step=step,
        plan=plan,
        dropout=dropout,
        seed=f"{OTHER_SEED} if rank == {odd} else {seed}" if fault == "other seed" else seed,
        options=PLANS[plan],
        num_steps=NUM_STEPS,
        statement=FAULTS[fault] or "pass",
    )


class Ended:
    """The end of one rank: its status (None if it was still running), output and errors."""

    def __init__(self, status: int | None, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def losses(self) -> list[str]:
        """The loss of each step that it completed."""
        return re.findall(r"^loss \d+ (\S+)$", self.out, re.MULTILINE)

    @property
    def finished(self) -> bool:
        """Whether it reached the end of the script."""
        return "end" in self.out.split("\n")

    @property
    def refusal(self) -> str:
        """The AutoparError with which it ended; empty if there is none."""
        text = re.sub(
            r"^\[rank\d+\]: ?", "", self.err, flags=re.MULTILINE
        )  # the prefix of torch's excepthook
        start = max(text.rfind("\nautopar.errors."), text.rfind("autopar.errors.AutoparError"))
        return text[start:].strip() if start >= 0 else ""


@cache
def undisturbed(plan: str, dropout: float, seed: int) -> tuple[str, ...]:
    """Return the losses of a run without misbehaviour, from rank 0's seed, since every rank takes
    the parameters of rank 0."""
    ranks = launch(script_of("undisturbed", plan, -1, "sleeps", 0, dropout, seed))
    if not all(rank.finished for rank in ranks):
        raise InvalidCase(f"an undisturbed run does not finish:\n{ranks[0].err[-1500:]}")
    return tuple(ranks[0].losses)


def launch(text: str) -> list[Ended]:
    """Run both ranks of a script, joined as by torchrun. Remaining processes are killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(text, encoding="utf-8")
        processes = [start_rank(rank, folder, store.port) for rank in range(NUM_RANKS)]
        try:
            wait(processes, folder)
            statuses = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [Ended(status, *written(folder, rank)) for rank, status in enumerate(statuses)]


def written(folder: Path, rank: int) -> tuple[str, str]:
    """Return the output and the errors of a rank."""
    out, err = (folder / f"{rank}.{kind}" for kind in ("out", "err"))
    return out.read_text(errors="replace"), err.read_text(errors="replace")


def start_rank(rank: int, folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the process of a rank, with its output in files."""
    joined: Mapping[str, str] = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is not on a rank
        "OMP_NUM_THREADS": "1",
    }
    environment = {**os.environ, **joined, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(folder / "script.py"), str(folder / "saved")]
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=err, cwd=folder)


def wait(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until all processes have ended, or until the time limit."""
    deadline, done = time.monotonic() + START_S, False
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        if not done and any("odd" in path.read_text().split("\n") for path in folder.glob("*.out")):
            done, deadline = True, time.monotonic() + NOTICE_S
        time.sleep(0.2)


def judge_ranks(ranks: list[Ended], usual: tuple[str, ...], odd: int, fault: str) -> None:
    """Raise an error if a rank did not end as it must."""
    gone = fault in ENDED or (ranks[odd].status == 0 and ranks[odd].finished)
    left = [rank for rank in range(NUM_RANKS) if not (rank == odd and gone)]
    waiting = [rank for rank in left if ranks[rank].status is None]
    if waiting:
        raise Misbehaviour(
            HANG, f"ranks {waiting} still wait after {NOTICE_S:.0f} s\n{said(ranks)}"
        )
    passed = all(rank.finished for rank in ranks)
    if passed and all(tuple(rank.losses) == usual for rank in ranks):
        return
    if fault in HARMLESS:
        raise WrongResult(f"harmless behaviour changes the result\n{said(ranks)}")
    if passed:
        raise WrongResult(f"no rank detects it\n{said(ranks)}")
    for rank in left:
        if not ranks[rank].refusal:
            raise Misbehaviour(RAW, f"rank {rank} ends without an AutoparError\n{said(ranks)}")
    blamed = [set(re.findall(r"\brank (\d+)", ranks[rank].refusal)) for rank in left]
    if any(str(odd) not in names for names in blamed):
        raise WrongResult(f"rank {odd} is not named\n{said(ranks)}")


def said(ranks: list[Ended]) -> str:
    """Return how the ranks ended, with their output."""
    return "\n".join(
        f"rank {number}: status {rank.status}, {len(rank.losses)} losses\n{rank.err[-999:].strip()}"
        for number, rank in enumerate(ranks)
    )
