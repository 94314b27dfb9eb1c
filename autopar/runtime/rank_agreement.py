"""Agreement of all ranks on each operation before it runs.

Before an operation in which all ranks communicate, each rank adds a number derived from its record
(`RankCall`) to a sum in the process group's store. The last rank to arrive checks whether the sum
corresponds to equal records. If it does, all ranks continue. Otherwise, each rank reads the records
of the others and raises an error that names the ranks that differ, while no rank is inside a
collective. Ranks wait in Python: they log a long wait, detect processes that have ended, and wait
no longer than the time limit of the process group.

Each rank sends the store one message without a reply and one message with a reply. All ranks except
the last one wait for one more message.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from autopar.errors import AutoparError, RankError
from autopar.runtime.rank_differences import (
    FAILS,
    Differences,
    End,
    Ends,
    RankCall,
    Tally,
    at_exit,
    at_termination,
    find_line,
    why_it_ends,
)

# --------------------------------------------------------------------------------------------------
# A thread waits for a key of a store, so that the main thread can handle signals.

_NO_LIMIT = timedelta(days=20)  # a store counts milliseconds in 32 bits


class Waiter:
    """A thread that waits for one key of a store at a time.

    Args:
        store: a store that nothing else uses, since a waiting store answers no other requests.
    """

    def __init__(self, store: dist.Store) -> None:
        store.set_timeout(_NO_LIMIT)
        self._store = store
        self._keys: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[str, bytes | RuntimeError]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, key: str) -> None:
        """Begin to wait for a key. The thread waits for keys in the order of the calls."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="autopar-waits", daemon=True)
            self._thread.start()
        self._keys.put(key)

    def answer(self, key: str, within_s: float) -> bytes | None:
        """Return the value of a key; None if the key is not set in time.

        Args:
            key: the key that was passed to `ask`.
            within_s: the longest wait, in seconds.

        Raises:
            DistError: if the store does not answer.
        """
        while True:
            try:
                answered_key, value = self._answers.get(timeout=within_s)
            except queue.Empty:
                return None
            if answered_key != key:  # the answer belongs to a wait that was interrupted
                continue
            if isinstance(value, RuntimeError):
                raise value
            return value

    def close(self) -> None:
        """Stop the thread. If it still waits for a key, this gives up after one second."""
        if self._thread is not None:
            self._keys.put(None)
            self._thread.join(timeout=1.0)
            self._thread = None

    def _run(self) -> None:
        while (key := self._keys.get()) is not None:
            try:
                self._answers.put((key, self._store.get(key)))
            except RuntimeError as error:
                self._answers.put((key, error))


log = logging.getLogger("autopar")
TELL_AFTER_S = 10.0  # a longer wait is logged
_LOOK_EACH_S = 0.2
_READ_WITHIN_S = 3.0  # how long a rank that fails or ends waits for the others to read its record
_KEPT = 8  # number of records kept per rank
_GO, _STOP = b"go", b"stop"


class Agreement:
    """The agreement of the ranks of a process group.

    Args:
        store: a store that the ranks share; nothing else uses it.
        rank, num_ranks: the rank of this process, and the number of ranks.
        limit_s: the longest wait for other ranks, in seconds.

    Attributes:
        num_failures: the number of operations in which ranks did not agree, equal on all ranks.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, limit_s: float) -> None:
        self._store, self._rank, self._num_ranks, self._limit_s = store, rank, num_ranks, limit_s
        self._call = RankCall.of(0, "has done nothing yet", "", None)
        self._ends, self._waiter = Ends(store, rank, num_ranks), Waiter(store.clone())
        self._differences, self._tally = Differences(rank, num_ranks), Tally(num_ranks)
        self._failed_at, self.num_failures = -_READ_WITHIN_S, 0

    def begin(self, what: str, stepped: bool | None = None, *, is_aside: bool = False) -> None:
        """Wait until all ranks are about to execute the same operation.

        Args:
            what: the operation in words that follow "rank 1", such as "runs backward".
            stepped: see `RankCall.stepped`.
            is_aside: whether the operation occurs only occasionally, so that it is not part of the
                expected order of operations.

        Raises:
            RankError: on all ranks, if their operations differ.
        """
        self._call = call = RankCall.of(
            self._call.number + 1, what, find_line() or self._call.line, stepped
        )
        try:
            if not self._exchange(call):
                raise self._failure(call)
            if call.number == 1:  # all ranks have arrived
                self._ends.meet()
        except dist.DistError as error:
            raise self._without_store(error) from error
        if not is_aside:
            self._differences.follow(call)

    def name_ended(self, error: BaseException) -> None:
        """Find out whether an error of a collective was caused by a rank that has ended.

        Args:
            error: the error.

        Raises:
            RankError: if another rank has ended.
        """
        self._failed_at = time.monotonic()
        while time.monotonic() < self._failed_at + _READ_WITHIN_S:
            try:
                ended = self._ends.find()
            except dist.DistError as reason:
                raise self._without_store(reason) from error
            if ended:
                raise self._differences.of_ended(ended, self._call) from error
            time.sleep(_LOOK_EACH_S)  # the connections of a process close before the process ends

    def close(self) -> None:
        """Record that this process ends, and give the other ranks time to read it."""
        number, self._failed_at = self._call.number + 1, math.inf
        try:
            self._ends.record(why_it_ends())
            self._stop(number)
            self._ends.wait_until(lambda rank: self._has_failed(rank, number), _READ_WITHIN_S)
            waiting = [rank for rank in range(self._num_ranks) if self._has_failed(rank, number)]
            if waiting:
                log.error("%s", self._differences.describe_exit(waiting, self._call))
        except RuntimeError as error:  # without a store no rank can read the record
            log.debug("the store ended before this process: %s", error)
        self._waiter.close()

    def terminate(self) -> bool:
        """Handle SIGTERM.

        Returns:
            Whether the signal should end the process.

        Raises:
            RankError: if the signal was sent because another rank has failed.
        """
        if time.monotonic() - self._failed_at < _READ_WITHIN_S:
            return False  # the process is already ending with its own error
        try:
            ended = {rank: end for rank, end in self._ends.find().items() if end.kind != "quiet"}
            if not ended:
                self._ends.record(End("it was terminated by SIGTERM", "alone"))
                self._stop(self._call.number + 1)
                return True
        except dist.DistError as error:
            raise self._without_store(error) from error
        self._failed_at = time.monotonic()
        raise self._differences.of_ended(ended, self._call)

    def gone(self) -> frozenset[int]:
        """Return the ranks whose processes ran on this machine and no longer exist."""
        return frozenset(self._ends.gone())

    def leave(self) -> None:
        """Stop the waiting thread. This is called after the process group was destroyed."""
        self._waiter.close()

    def _exchange(self, call: RankCall) -> bool:
        """Exchange records, and return whether those of all ranks are equal."""
        self._write(call)
        total = self._store.add(f"sum {call.number}", self._tally.pack(call))
        if self._tally.count(total) == self._num_ranks:
            is_agreed = self._tally.agrees(total, call)
            self._store.set(f"go {call.number}", _GO if is_agreed else _STOP)
            return is_agreed
        try:
            return self._wait(call, is_first=self._tally.count(total) == 1)
        except BaseException as reason:  # after an interrupt, this rank does not take part
            message = f"was interrupted by {type(reason).__name__} while it waited: it {call.what}"
            self._write(RankCall.of(call.number, message, call.line, call.stepped))
            self._withdraw(call)
            raise

    def _wait(self, call: RankCall, *, is_first: bool) -> bool:
        """Wait until the last rank arrives, a rank has ended, or the time limit is reached. Return
        whether all ranks agree."""
        key, began, is_told = f"go {call.number}", time.monotonic(), not is_first
        self._waiter.ask(key)
        # all ranks have entered the previous operation, so they no longer read the one before it
        if is_first:
            for old in (f"sum {call.number - 2}", f"go {call.number - 2}"):
                self._store.delete_key(old)
        while (answer := self._waiter.answer(key, _LOOK_EACH_S)) is None:
            waited = time.monotonic() - began
            if not is_told and waited > TELL_AFTER_S:
                is_told = True
                log.warning(
                    "%s",
                    self._differences.describe_wait(self._calls(), call, waited, self._limit_s),
                )
            is_over = waited > self._limit_s or bool(self._ends.gone())
            if is_over and not self._store.check([key]):
                self._stop(call.number)
        return answer == _GO

    def _failure(self, call: RankCall) -> RankError:
        """Return the error of this rank. Wait until the other ranks have read the records that they
        need for their errors."""
        self._failed_at, self.num_failures = time.monotonic(), self.num_failures + 1
        error = self._differences.of(self._calls(), self._ends.find(), call, self._limit_s)
        self._withdraw(call)
        self._store.set(f"failed {call.number} {self._rank}", "")
        self._ends.wait_until(lambda rank: self._has_failed(rank, call.number), _READ_WITHIN_S)
        return error

    def _without_store(self, error: dist.DistError) -> RankError:
        self._failed_at = time.monotonic()
        if gone := self._ends.gone():
            return self._differences.of_ended(gone, self._call)
        reason = str(error).strip().split("\n")[0]
        message = f"the process that holds the process group's store does not answer: {reason}"
        remedy = "find out why that process, rank 0 or the launcher, ended"
        return RankError(f"{message}; rank {self._rank} {self._call}", remedy=remedy)

    def _has_failed(self, rank: int, number: int) -> bool:
        return bool(self._store.check([f"failed {number} {rank}"]))

    def _withdraw(self, call: RankCall) -> None:
        """Subtract this rank's number from the sum, so that no later rank continues."""
        self._store.add(f"sum {call.number}", -self._tally.pack(call))
        self._stop(call.number)

    def _stop(self, number: int) -> None:
        self._store.set(f"go {number}", _STOP)

    def _write(self, call: RankCall) -> None:
        self._store.set(f"call {self._rank} {call.number % _KEPT}", call.dumps())

    def _calls(self) -> dict[int, RankCall]:
        """Return the last operation of each rank, up to the number of this rank's operation."""
        last_calls = {}
        for rank in range(self._num_ranks):
            keys = [
                f"call {rank} {number % _KEPT}"
                for number in (self._call.number, self._call.number - 1)
            ]
            calls = [
                RankCall.loads(self._store.get(key)) for key in keys if self._store.check([key])
            ]
            calls = [each for each in calls if each.number <= self._call.number]
            if calls:
                last_calls[rank] = max(calls, key=lambda each: each.number)
        return last_calls


class announced:
    """A context manager for an operation that all ranks execute together. With one rank, it does
    nothing.

    Args:
        what: the operation in words, as in `RankCall`, or a function that returns them.
        devices: the mesh of the ranks that take part. If it does not include the whole process
            group, nothing is compared.
        stepped, is_aside: see `Agreement.begin`.

    Raises:
        RankError: on entry, on all ranks, if their operations differ; on exit, if a collective has
            failed because another rank has ended.
    """

    def __init__(
        self,
        what: str | Callable[[], str],
        devices: DeviceMesh | None = None,
        stepped: bool | None = None,
        *,
        is_aside: bool = False,
    ) -> None:
        self._what, self._devices, self._stepped, self._is_aside = what, devices, stepped, is_aside
        self._agreement: Agreement | None = None

    def __enter__(self) -> None:
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if num_ranks == 1 or (self._devices is not None and self._devices.size() != num_ranks):
            return
        self._agreement = _of_group(num_ranks)
        if self._agreement is not None:
            operation = self._what if isinstance(self._what, str) else self._what()
            self._agreement.begin(operation, self._stepped, is_aside=self._is_aside)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        of_collective = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo" in str(error)
        )
        if of_collective and error is not None and self._agreement is not None:
            self._agreement.name_ended(error)
        return False


@contextmanager
def failures_told() -> Iterator[None]:
    """A context for work that all ranks do, and in which they communicate. If the work raises an
    error on some ranks only, the other ranks raise an error that names these ranks and contains
    their reason, instead of waiting for them.

    Raises:
        Exception: the error of this rank.
    """
    try:
        yield
    except RankError:  # all ranks have raised it
        raise
    except Exception as error:
        what = error.what if isinstance(error, AutoparError) else str(error)
        message = f"{FAILS}{type(error).__name__}: {what.strip()}"
        # the other ranks compare this with their next operation, and this rank raises its own error
        with suppress(RankError), announced(message, is_aside=True):
            pass
        raise


def num_failures() -> int:
    """Return the number of operations in which ranks did not agree."""
    return sum(agreement.num_failures for _, agreement in _newest if agreement is not None)


def gone_ranks() -> frozenset[int]:
    """Return the ranks whose processes ran on this machine and no longer exist. This communicates
    with no rank, and any thread may call it."""
    agreement = _newest[-1][1] if _newest else None
    return frozenset() if agreement is None else agreement.gone()


_newest: list[tuple[dist.ProcessGroup | None, Agreement | None]] = []


def _of_group(num_ranks: int) -> Agreement | None:
    """Return the agreement of the default process group; None if its ranks are not processes."""
    group = dist.group.WORLD
    if not _newest or _newest[-1][0] is not group:
        for _, before in _newest[-1:]:
            if before is not None:
                before.leave()
        _newest.append((group, None if dist.get_backend() == "fake" else _make(num_ranks)))
    return _newest[-1][1]


def _make(num_ranks: int) -> Agreement:
    default_store = _get_default_store()
    limit_s = default_store.timeout.total_seconds()
    store = dist.PrefixStore(f"autopar {len(_newest)}", default_store.clone())
    agreement = Agreement(store, dist.get_rank(), num_ranks, limit_s)
    if not any(before for _, before in _newest):
        at_exit(_close)
        at_termination(_terminate)
    return agreement


def _close() -> None:
    for _, agreement in _newest[-1:]:
        if agreement is not None:
            agreement.close()


def _terminate() -> bool:
    agreement = _newest[-1][1] if _newest else None
    return True if agreement is None else agreement.terminate()
