"""Waiting for a key of a store in a thread, so that the one that asks takes signals meanwhile."""

from __future__ import annotations

import queue
import threading
from datetime import timedelta

import torch.distributed as dist

_NO_LIMIT = timedelta(days=20)  # the longest that a store takes, in milliseconds of 32 bits


class Waiter:
    """Waits for one key at a time.

    Args:
        store: of its own, since a store that waits takes no other question.
    """

    def __init__(self, store: dist.Store) -> None:
        store.set_timeout(_NO_LIMIT)
        self._store = store
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[str, bytes | RuntimeError]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, key: str) -> None:
        """Begin to wait for a key. One that was asked for before has to come first."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="autopar-waits", daemon=True)
            self._thread.start()
        self._asked.put(key)

    def answer(self, key: str, within_s: float) -> bytes | None:
        """The value of the key, or None if it has not come within so many seconds.

        Raises:
            DistError: if the store does not answer.
        """
        while True:
            try:
                found, value = self._answers.get(timeout=within_s)
            except queue.Empty:
                return None
            if found != key:  # of a wait that was interrupted
                continue
            if isinstance(value, RuntimeError):
                raise value
            return value

    def close(self) -> None:
        """End the thread, if what it waits for is there."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(timeout=1.0)
            self._thread = None

    def _run(self) -> None:
        while (key := self._asked.get()) is not None:
            try:
                self._answers.put((key, self._store.get(key)))
            except RuntimeError as error:
                self._answers.put((key, error))
