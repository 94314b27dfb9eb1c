"""Errors for ranks that execute different operations. A message names the ranks that differ, the
operation of each rank, and the remedy. This file also contains records of operations, and detection
of processes that have ended."""

from __future__ import annotations

import functools
import hashlib
import json
import linecache
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process, util
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from autopar.errors import RankError

# --------------------------------------------------------------------------------------------------
# Records of operations in which all ranks take part. Other ranks read them.

_LIBRARIES = (
    str(Path(__file__).parents[1]) + "/",
    str(Path(torch.__file__).parent) + "/",
    *(sysconfig.get_path(kind) + "/" for kind in ("stdlib", "purelib", "platlib")),
)
_MOST = 600  # characters of `what` in a record; the digest covers all characters


@dataclass(frozen=True, slots=True)
class RankCall:
    """One operation of one rank.

    Attributes:
        number: the number of operations so far, including this one. It is equal on all ranks.
        what: the operation in words that follow "rank 1", such as "runs backward".
        line: the line of the user's code; empty if there is none.
        digest: a hash of `what`, from 0 to 2**32 - 1; equal operations have equal digests.
        stepped: whether an optimizer has stepped since the module's last call; None if this rank
            has nothing to train.
    """

    number: int
    what: str
    line: str
    digest: int
    stepped: bool | None = None

    @classmethod
    def of(cls, number: int, what: str, line: str, stepped: bool | None) -> RankCall:
        """Create the record of an operation.

        Args:
            number, what, line, stepped: the attributes. A long `what` is shortened after its digest
                is computed.
        """
        digest = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=4).digest(), "big")
        return cls(
            number, what if len(what) <= _MOST else f"{what[:_MOST]} …", line, digest, stepped
        )

    @classmethod
    def loads(cls, text: str) -> RankCall:
        """Read a record from the text of `dumps`."""
        return cls(*json.loads(text))

    def dumps(self) -> str:
        """Write the record as text."""
        return json.dumps([self.number, self.what, self.line, self.digest, self.stepped])

    def __str__(self) -> str:
        steps = {
            True: " after a step of the optimizer",
            False: " without a step of the optimizer before it",
            None: "",
        }[self.stepped]
        return f"{self.what}{steps}{f' at {self.line}' if self.line else ''}"


def find_line() -> str:
    """Find the line of the user's code that is running.

    Returns:
        The innermost frame outside of libraries as ``file.py:12: code``, or an empty string.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and not file.startswith("<"):
            return f"{file}:{frame.f_lineno}: {linecache.getline(file, frame.f_lineno).strip()}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Tally:
    """The encoding of a sum that shows whether all ranks have arrived with equal operations.

    Its 62 bits have fields for the number of ranks that have arrived, the number of these ranks
    with an optimizer step, the number without one, and the sum of digests, which uses the remaining
    bits.

    Args:
        num_ranks: the number of ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._bits = num_ranks, num_ranks.bit_length()
        self._digest_bits = max(1, min(32, 62 - 4 * self._bits))

    def pack(self, call: RankCall) -> int:
        """Return the summand of one rank."""
        fields = (1 << self._bits | (call.stepped is True)) << self._bits | (call.stepped is False)
        return fields << (self._digest_bits + self._bits) | self._digest(call)

    def count(self, total: int) -> int:
        """Return the number of ranks that have arrived."""
        return total >> (self._digest_bits + 3 * self._bits)

    def agrees(self, total: int, call: RankCall) -> bool:
        """Return whether all ranks have added the summand of an operation equal to `call`."""
        digests = total & ((1 << (self._digest_bits + self._bits)) - 1)
        stepped, not_stepped = (
            total >> (self._digest_bits + n * self._bits) & ((1 << self._bits) - 1) for n in (2, 1)
        )
        return digests == self._num_ranks * self._digest(call) and not (stepped and not_stepped)

    def _digest(self, call: RankCall) -> int:
        return call.digest & ((1 << self._digest_bits) - 1)


# --------------------------------------------------------------------------------------------------
# Detection of other ranks' processes that have ended.
#
# A process that ends regularly or by an exception leaves a record of the reason. A process that is
# killed cannot leave a record, but other processes on its machine detect that it no longer exists.
# Processes on other machines are ended by the launcher, or wait until the time limit of the process
# group.

_POLL_S = 0.02
_KILLED = "it was killed (by the system if memory ran out), or called os._exit"


class End(NamedTuple):
    """The reason why a rank's process ended.

    Attributes:
        why: the reason, as a sentence.
        kind: ``"alone"`` if the cause is on this rank, ``"after"`` if another rank is the cause,
            ``"quiet"`` if there was no error.
    """

    why: str
    kind: Literal["alone", "after", "quiet"]


class Ends:
    """The ends of all ranks' processes.

    Args:
        store: a store that all ranks share.
        rank, num_ranks: the rank of this process, and the number of ranks.
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
        """Write a record for the other ranks that this process ends."""
        self._store.set(f"ended {self._rank}", json.dumps(end))

    def find(self) -> dict[int, End]:
        """Find the ranks whose processes have ended. If some of them are the cause of the others,
        return only the cause."""
        ended = {rank: end for rank in self._others if (end := self._end_of(rank)) is not None}
        first = {rank: end for rank, end in ended.items() if end.kind != "after"}
        return first or ended

    def meet(self) -> None:
        """Read the identities of all processes. This is called after all ranks have created this
        object."""
        identities = self._store.multi_get([f"process {rank}" for rank in self._others])
        for rank, text in zip(self._others, identities, strict=True):
            self._processes[rank] = tuple(json.loads(text))

    def gone(self) -> dict[int, End]:
        """Find the processes on this machine that no longer exist, without using the store."""
        known = self._processes.items()
        return {rank: End(_KILLED, "alone") for rank, each in known if not _is_running(each)}

    def wait_until(self, has_read: Callable[[int], bool], limit_s: float) -> None:
        """Wait until each other rank has read a record or ended.

        Args:
            has_read: returns whether a rank has read the record.
            limit_s: the longest wait, in seconds.
        """
        deadline, waiting = time.monotonic() + limit_s, list(self._others)
        while waiting and time.monotonic() < deadline:
            waiting = [
                rank for rank in waiting if not has_read(rank) and self._end_of(rank) is None
            ]
            if waiting:
                time.sleep(_POLL_S)

    def _end_of(self, rank: int) -> End | None:
        # checked before the record, which a process writes before it ends
        is_missing = not _is_running(self._process(rank))
        if self._store.check([f"ended {rank}"]):
            return End(*json.loads(self._store.get(f"ended {rank}")))
        return End(_KILLED, "alone") if is_missing else None

    def _process(self, rank: int) -> tuple[str, ...]:
        if rank not in self._processes and self._store.check([f"process {rank}"]):
            self._processes[rank] = tuple(json.loads(self._store.get(f"process {rank}")))
        return self._processes.get(rank, ())


def why_it_ends() -> End:
    """Return the reason why this process is about to end."""
    error = getattr(sys, "last_value", None)  # an uncaught exception; sys.exit sets none
    if error is None and parent_process() is not None:  # multiprocessing does not set it, either
        return End("its process ended; see its own messages for the reason", "quiet")
    if error is None:
        return End("it reached the end of its script, or called sys.exit", "quiet")
    message = str(error).strip().split("\n")[0]
    return End(
        f"it raised {type(error).__name__}{f': {message}' if message else ''}",
        "after" if isinstance(error, RankError) else "alone",
    )


def at_exit(action: Callable[[], None]) -> None:
    """Call `action` at the exit of this process, but not of processes that it forks."""
    # atexit does not run in processes that multiprocessing starts
    util.Finalize(None, action, exitpriority=100)


def at_termination(action: Callable[[], bool]) -> None:
    """Call `action` at SIGTERM if neither the script nor a library handles that signal.

    Args:
        action: returns whether the signal should end the process. Its errors are raised in the
            script.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        return
    process = os.getpid()

    def take(*_: Any) -> None:
        """Handle the signal."""
        if os.getpid() != process or action():  # a forked process ends without calling `action`
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, take)


def _identity() -> tuple[str, ...]:
    """Return the machine, id and start time of this process; empty if the system does not provide
    them."""
    try:
        return (_process_space(), str(os.getpid()), _state(os.getpid())[1])
    except OSError:  # not Linux, where a process id alone may have been reused
        return ()


@functools.cache
def _process_space() -> str:
    """Return the boot id of the machine and the namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _state(process: int) -> tuple[str, str]:
    """Return the state of a process (a letter) and its start time."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _is_running(identity: tuple[str, ...]) -> bool:
    """Return whether a process is running; True if this cannot be determined on this machine."""
    if not identity or identity[0] != _process_space():
        return True
    try:
        state, started = _state(int(identity[1]))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX" and started == identity[2]


_MOST_SHOWN = 4
_ALIKE = (
    "call the model, backward, optimizer.step(), save and load in the same order and the same"
    " number of times on every rank, with batches of the same shapes and dtypes, the same settings"
    " of the optimizer and the same factor of the loss; this includes the end of an epoch"
    " (drop_last=True), evaluation and saving"
)


FAILS = "cannot continue: "
"""The beginning of the operation of a rank that has raised an error."""


def _different_operations_error(what: str, ranks: Sequence[int] = ()) -> RankError:
    """Return the error for ranks that execute different operations."""
    return RankError(what, remedy=_ALIKE, ranks=ranks)


def _failed_error(failed: Sequence[int], calls: Mapping[int, RankCall]) -> RankError:
    """Return the error for ranks that have raised an error, of which the first is shown. If they
    are the majority, the other ranks are those that differ."""
    others = [rank for rank in calls if rank not in failed]
    meanwhile = f"; rank {others[0]} {calls[others[0]]}" if others else ""
    different = failed if 2 * len(failed) <= len(calls) else others
    remedy = (
        f"see the message of rank {failed[0]}; build the model, its batch and its options in the"
        " same way on every rank"
    )
    shown = f"{_ranks(failed)} {calls[failed[0]]}{meanwhile}"
    return RankError(shown, remedy=remedy, ranks=different)


class Differences:
    """Descriptions of differences between the ranks of a process group, from the view of one rank.

    Args:
        rank, num_ranks: this rank, and the number of ranks.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._last: RankCall | None = None
        self._followed: set[tuple[int, int, bool | None]] = set()

    def follow(self, call: RankCall) -> None:
        """Record an operation on which all ranks agreed. It is then expected to follow its
        predecessor again."""
        self._followed.add(self._step(call))
        self._last = call

    def of(
        self, calls: Mapping[int, RankCall], ended: Mapping[int, End], own: RankCall, limit_s: float
    ) -> RankError:
        """Return the error for ranks whose operations differ.

        Args:
            calls: the last operation of each rank that has one.
            ended: the ranks whose processes have ended.
            own: this rank's operation.
            limit_s: the longest wait of a rank, in seconds.
        """
        here = {rank: call for rank, call in calls.items() if call.number == own.number}
        groups = self._groups(here)
        if len(groups) > 1 and (len(here) == self._num_ranks or not ended):
            return self._of_groups(groups, here)
        if ended:
            return self.of_ended(ended, own)
        late = [rank for rank in range(self._num_ranks) if rank not in here]
        late = late or [self._rank]  # the other ranks gave up before this rank arrived
        did = f"rank {self._rank} {own}{self._last_of(late, calls)}"
        message = f"{_ranks(late)} did not arrive within {limit_s:g} s: {did}"
        remedy = (
            "find out what that rank is doing; if it needs longer, call "
            "torch.distributed.init_process_group(timeout=...) before autopar.compile"
        )
        return RankError(message, remedy=remedy, ranks=late)

    def of_ended(self, ended: Mapping[int, End], own: RankCall) -> RankError:
        """Return the error for processes that have ended.

        Args:
            ended: the ranks whose processes have ended.
            own: this rank's operation.
        """
        (first, end), *_ = ended.items()
        more = (
            f", as did {_ranks([rank for rank in ended if rank != first])}"
            if len(ended) > 1
            else ""
        )
        message = (
            f"rank {first} has ended: {end.why}{more}; rank {self._rank} {own}"
            f"{self._last_agreement(own)}"
        )
        remedy = (
            _ALIKE
            if end.kind == "quiet"
            else f"see the messages of rank {first}; the other ranks cannot continue without it"
        )
        return RankError(message, remedy=remedy, ranks=list(ended))

    def describe_exit(self, waiting: Sequence[int], own: RankCall) -> str:
        """Describe that waiting ranks fail because this rank ends after the operation `own`."""
        fail = "fails" if len(waiting) == 1 else "fail"
        return (
            f"rank {self._rank} ended, and {_ranks(waiting)} {fail} without it; its last call: it"
            f" {own}"
        )

    def describe_wait(
        self, calls: Mapping[int, RankCall], own: RankCall, waited_s: float, limit_s: float
    ) -> str:
        """Describe how long this rank has waited, and for which ranks.

        Args:
            calls: the last operation of each rank that has one.
            own: this rank's operation.
            waited_s, limit_s: the time that this rank has waited, and the longest wait, in seconds.
        """
        late = [
            rank
            for rank in range(self._num_ranks)
            if rank not in calls or calls[rank].number < own.number
        ]
        waits = f"rank {self._rank} has waited {waited_s:.0f} s for {_ranks(late)}"
        return f"{waits}, of at most {limit_s:.0f} s: it {own}{self._last_of(late, calls)}"

    def _of_groups(
        self, groups: Sequence[Sequence[int]], calls: Mapping[int, RankCall]
    ) -> RankError:
        if failed := sorted(rank for rank, call in calls.items() if call.what.startswith(FAILS)):
            return _failed_error(failed, calls)
        others = self._others(groups, calls)
        before = self._last_agreement(calls[groups[0][0]])
        if not others:
            shown = "; ".join(
                f"{_ranks(ranks)} {calls[ranks[0]]}" for ranks in groups[:_MOST_SHOWN]
            )
            return _different_operations_error(f"ranks do different things: {shown}{before}")
        first = next(ranks[0] for ranks in groups if ranks[0] not in others)
        shown = "; ".join(
            f"{_ranks(ranks)} {calls[ranks[0]]}"
            for ranks in groups[:_MOST_SHOWN]
            if ranks[0] in others
        )
        than = f"rank {first}" if self._num_ranks == 2 else "the others"
        does = "does something" if len(others) == 1 else "do something"
        message = f"{_ranks(others)} {does} else than {than}: {shown}; rank {first} {calls[first]}"
        return _different_operations_error(f"{message}{before}", others)

    def _groups(self, calls: Mapping[int, RankCall]) -> list[list[int]]:
        """Group the ranks by operation, the largest group first."""
        digests = {call.digest for call in calls.values()}
        ranks_by_operation: dict[object, list[int]] = {}
        for rank, call in sorted(calls.items()):
            key = call.digest if len(digests) > 1 else call.stepped
            if key is not None:  # a rank without trained parameters has no steps to compare
                ranks_by_operation.setdefault(key, []).append(rank)
        return sorted(ranks_by_operation.values(), key=lambda ranks: -len(ranks))

    def _others(self, groups: Sequence[Sequence[int]], calls: Mapping[int, RankCall]) -> list[int]:
        """Return the ranks that differ from the majority or, without a majority, from the expected
        order. Return no ranks if neither can be determined."""
        num_ranks = sum(map(len, groups))
        if 2 * len(groups[0]) > num_ranks:
            return sorted(rank for ranks in groups[1:] for rank in ranks)
        unexpected = [
            rank
            for ranks in groups
            for rank in ranks
            if self._step(calls[rank]) not in self._followed
        ]
        return sorted(unexpected) if len(unexpected) < num_ranks else []

    def _step(self, call: RankCall) -> tuple[int, int, bool | None]:
        return (0 if self._last is None else self._last.digest, call.digest, call.stepped)

    def _last_agreement(self, own: RankCall) -> str:
        is_earlier = self._last is not None and self._last.number < own.number
        return (
            f"; before that, all ranks agreed; in the last common operation, each {self._last.what}"
            if is_earlier and self._last
            else ""
        )

    def _last_of(self, late: Iterable[int], calls: Mapping[int, RankCall]) -> str:
        others = [rank for rank in late if rank in calls and rank != self._rank]
        lines = [f"rank {rank}: {calls[rank]}" for rank in others[:_MOST_SHOWN]]
        return f"; the last operation of {', of '.join(lines)}" if lines else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
