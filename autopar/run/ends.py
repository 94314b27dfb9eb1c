"""How the processes of other ranks end, as far as this one can know.

A process that ends by itself leaves a record of why. One that is killed cannot; the others on its
machine see that it is not there any more. On other machines the launcher ends them, or they wait
for as long as the process group's time limit says.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process, util
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from autopar.errors import RankError

_POLL_S = 0.02
_KILLED = "it was killed (by the system if memory ran out), or left by os._exit"


class End(NamedTuple):
    """How a rank's process ended.

    Attributes:
        why: in words, a sentence.
        kind: ``"alone"`` of what began on this rank, ``"after"`` of an error that tells of another
            rank, ``"quiet"`` of no error.
    """

    why: str
    kind: Literal["alone", "after", "quiet"]


class Ends:
    """The ends of all ranks' processes.

    Args:
        store: that all ranks share.
        rank, num_ranks: this process and how many there are.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._others = (
            store,
            rank,
            [n for n in range(num_ranks) if n != rank],
        )
        self._processes: dict[int, tuple[str, ...]] = {}
        store.set(f"process {rank}", json.dumps(_identity()))

    def record(self, end: End) -> None:
        """Let the others know that this process ends."""
        self._store.set(f"ended {self._rank}", json.dumps(end))

    def find(self) -> dict[int, End]:
        """Find the ranks whose processes have ended; if any began it, those alone."""
        found = {rank: end for rank in self._others if (end := self._end_of(rank)) is not None}
        first = {rank: end for rank, end in found.items() if end.kind != "after"}
        return first or found

    def meet(self) -> None:
        """Learn of all processes, after all ranks have made this object."""
        found = self._store.multi_get([f"process {rank}" for rank in self._others])
        for rank, text in zip(self._others, found, strict=True):
            self._processes[rank] = tuple(json.loads(text))

    def gone(self) -> dict[int, End]:
        """Find the processes on this machine that are not there any more, without the store."""
        known = self._processes.items()
        return {rank: End(_KILLED, "alone") for rank, each in known if not _is_running(each)}

    def wait_until(self, has_read: Callable[[int], bool], limit_s: float) -> None:
        """Wait until each other rank has read something or ended.

        Args:
            has_read: whether a rank has.
            limit_s: seconds after which this returns at any rate.
        """
        deadline, waiting = time.monotonic() + limit_s, list(self._others)
        while waiting and time.monotonic() < deadline:
            waiting = [
                rank for rank in waiting if not has_read(rank) and self._end_of(rank) is None
            ]
            if waiting:
                time.sleep(_POLL_S)

    def _end_of(self, rank: int) -> End | None:
        is_missing = not _is_running(
            self._process(rank)
        )  # before the record is looked for, which a process leaves before it ends
        if self._store.check([f"ended {rank}"]):
            return End(*json.loads(self._store.get(f"ended {rank}")))
        return End(_KILLED, "alone") if is_missing else None

    def _process(self, rank: int) -> tuple[str, ...]:
        if rank not in self._processes and self._store.check([f"process {rank}"]):
            self._processes[rank] = tuple(json.loads(self._store.get(f"process {rank}")))
        return self._processes.get(rank, ())


def why_it_ends() -> End:
    """Why this process is about to end."""
    error = getattr(
        sys, "last_value", None
    )  # of an exception that nobody caught; sys.exit leaves none
    if error is None and parent_process() is not None:  # where an error is not left either
        return End("its process came to its end, and its own messages say why", "quiet")
    if error is None:
        return End("it came to the end of its script, or called sys.exit", "quiet")
    said = str(error).strip().split("\n")[0]
    return End(
        f"it raised {type(error).__name__}{f': {said}' if said else ''}",
        "after" if isinstance(error, RankError) else "alone",
    )


def at_exit(action: Callable[[], None]) -> None:
    """Call `action` when this process ends by itself, but not in processes that it forks."""
    util.Finalize(
        None, action, exitpriority=100
    )  # atexit does not run in processes that multiprocessing starts


def at_termination(action: Callable[[], bool]) -> None:
    """Call `action` at SIGTERM, if neither the script nor a library takes that signal.

    Args:
        action: returns whether the process is to end by the signal. The script raises its errors.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        return
    process = os.getpid()

    def take(*_: Any) -> None:
        if os.getpid() != process or action():  # a forked process has no part in it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, take)


def _identity() -> tuple[str, ...]:
    """Where this process is, its number and when it started; empty if the system does not say."""
    try:
        return (_here(), str(os.getpid()), _state(os.getpid())[1])
    except OSError:  # no Linux: nothing tells whether a process of that number is the same one
        return ()


@functools.cache
def _here() -> str:
    """The machine as it is now, and the namespace of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _state(process: int) -> tuple[str, str]:
    """Its state, a letter, and when it started."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _is_running(identity: tuple[str, ...]) -> bool:
    """Whether a process is there; True where this machine cannot know."""
    if not identity or identity[0] != _here():
        return True
    try:
        state, started = _state(int(identity[1]))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX" and started == identity[2]
