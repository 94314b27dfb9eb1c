"""A process that runs cases one after another, and a class that starts such processes.

A case that crashes or hangs only ends its process: the next case has a new one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.common import ROOT
from benchmarks.faults.judging import CRASH, FAILED, HANG, judge

KINDS = {
    "losses": "loss_cases",
    "models": "model_cases",
    "processes": "process_cases",
    "files": "file_cases",
    "commands": "command_cases",
    "checkpoints": "checkpoint_cases",
    "ranks": "rank_cases",
}
REDUCE = "reduce"  # reduces a failing model; not a kind of cases
CASES_PER_PROCESS = 60  # then a new process, as captures accumulate in memory
TAIL = 3000
POLL_S = 5.0  # between two looks at how long the process waited for a CPU


def waited_s(pid: int) -> float:
    """Return for how many seconds the main thread of a process was ready to run but had no CPU. A
    case on a busy machine is slow, not hung. 0 if the system does not tell (it is Linux that does).
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


def run_case(kind: str, seed: int) -> dict[str, Any]:
    """Return the row of one case, run in this process."""
    module = importlib.import_module(f"benchmarks.faults.{KINDS.get(kind, 'reduce_cases')}")
    return judge(lambda notes: module.run(seed, notes))


@dataclass(slots=True)
class Worker:
    """Runs cases in a separate process, and replaces it if it crashes or takes too long.

    Attributes:
        limit_s: seconds after which a case counts as hung, without the time for which its process
            waited for a CPU.
        process: the process.
        answers: the file descriptor from which its answers are read.
        log: its output.
        num_cases: number of cases that it has run.
    """

    limit_s: float
    process: subprocess.Popen[str] | None = None
    answers: int = -1
    log: IO[str] = field(default_factory=partial(tempfile.TemporaryFile, "w+", encoding="utf-8"))
    num_cases: int = 0

    def run(self, kind: str, seed: int) -> dict[str, Any]:
        """Return the row of a case, even if the process fails."""
        if self.process is None or self.num_cases >= CASES_PER_PROCESS:
            self._start()
        assert self.process is not None and self.process.stdin is not None
        self.num_cases += 1
        start = time.monotonic()
        self.process.stdin.write(json.dumps([kind, seed]) + "\n")
        self.process.stdin.flush()
        answer = self._answer(start)
        row = json.loads(answer) if answer else self._lost(hung=answer is None)
        return {**row, "row_s": round(time.monotonic() - start, 2)}

    def close(self) -> None:
        """Stop the process."""
        self._stop()
        self.log.close()

    def _stop(self) -> None:
        """Kill the process and all processes that it started."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        os.close(self.answers)
        self.process = None

    def _start(self) -> None:
        self._stop()
        self.log.seek(0)
        self.log.truncate()
        self.answers, write = os.pipe()
        command = [sys.executable, "-m", "benchmarks.faults.worker", str(write)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
            text=True,
            pass_fds=(write,),
            start_new_session=True,
        )
        os.close(write)
        self.num_cases = 0

    def _answer(self, start: float) -> str | None:
        """Return a line; empty if the process ended, None at the time limit."""
        assert self.process is not None
        found, pid = b"", self.process.pid
        waited_before_s = waited_s(pid)
        while not found.endswith(b"\n"):
            left_s = start + self.limit_s + waited_s(pid) - waited_before_s - time.monotonic()
            if left_s <= 0:
                return None
            if not select.select([self.answers], [], [], min(left_s, POLL_S))[0]:
                continue
            if not (part := os.read(self.answers, 1 << 16)):
                return ""
            found += part
        return found.decode()

    def _lost(self, *, hung: bool) -> dict[str, Any]:
        """Return the row of a case without an answer, with the last output of the process."""
        assert self.process is not None
        if hung:
            self.process.send_signal(signal.SIGUSR1)  # the process writes its stacks
            time.sleep(1.0)
        self._stop()
        self.log.seek(0)
        said = self.log.read()[-TAIL:]
        why = HANG if hung else CRASH
        return {"outcome": FAILED, "why": why, "phase": "", "error": said, "ok": False}


def main(answers: int) -> None:
    """Answer each line of standard input, a kind and a seed, with a row."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    with os.fdopen(answers, "w", encoding="utf-8") as out:
        for line in sys.stdin:
            out.write(json.dumps(run_case(*json.loads(line))) + "\n")
            out.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
