"""Writing of one checkpoint, by all ranks together or in the background during training.

Files are written into a temporary folder, which is renamed when all parts are complete
(`Checkpoints`). In the background, ranks do not communicate: each writes a marker file when its
part is on the disk, and the first rank waits for the markers of all. So collectives of training and
of saving never mix, and if a rank ends early, the folder keeps its temporary name and is never
loaded.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.checkpoint.companion_states import Others
from autopar.checkpoint.files import ABOUT, SHARE, about_text, sync_folder
from autopar.checkpoint.rank_parts import CheckpointParts, write_bytes
from autopar.checkpoint.safetensors_files import SUFFIX, TensorFile
from autopar.core.json_text import read_json
from autopar.errors import RuntimeStateError
from autopar.plans import Plan

log = logging.getLogger("autopar")
# How long the first rank waits for the parts of the others, and how long when the process is
# ending.
WITHIN_S, AT_EXIT_S = 1800.0, 60.0
_POLL_S = 0.02
_DONE, _FAILED = ".done", ".failed"
_FREE_SPACE = (
    "see the reason: free space on the disk, or name another folder. Earlier checkpoints are as"
    " they were"
)
Finish = Callable[["Saving", Mapping[str, int]], object]


@dataclass(frozen=True, slots=True)
class Saving:
    """The content of a checkpoint that one rank writes.

    Attributes:
        step: the number of training steps.
        place: the folder that is written into.
        rank, num_ranks: the rank of this process, and the number of ranks.
        parts: the part of this rank.
        others: the states of companions; only the first rank writes them.
        about: the content of `autopar.json` without the checksums of files.
        plan: the plan, or None if there is none.
    """

    step: int
    place: Path
    rank: int
    num_ranks: int
    parts: CheckpointParts
    others: Others
    about: Mapping[str, Any]
    plan: Plan | None

    def write(self) -> dict[str, int]:
        """Write this rank's files and return the CRC-32 of each file, by file name."""
        sums = self.parts.write(self.place)
        if self.rank == 0:
            sums |= self.others.write(self.place)
            if self.plan is not None:
                sums["plan.json"] = write_bytes(
                    self.place / "plan.json", self.plan.dumps().encode()
                )
        return sums

    def finish(self, sums: Mapping[str, int]) -> None:
        """Write `autopar.json` with the checksums of all ranks' files; the first rank calls it.

        Raises:
            RuntimeStateError: if a file is missing or incomplete.
        """
        for name in sums:
            if not (self.place / name).is_file():
                raise RuntimeStateError(
                    f"step {self.step} is not whole: {name} is not there", remedy=SHARE
                )
            if name.endswith(SUFFIX):
                TensorFile(self.place / name)
        write_bytes(self.place / ABOUT, about_text({**self.about, "files": dict(sums)}).encode())
        sync_folder(self.place)


class HostCopies:
    """Copies of tensors in the memory of the host. The memory is used again for the next
    checkpoint."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._used: dict[str, Tensor] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor. The copy of a tensor on a GPU is complete after `wait`."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._used[name] = buffer.copy_(tensor, non_blocking=True)
        return buffer

    def wait(self) -> None:
        """Wait until all copies are complete, and free the memory that was not used again."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._buffers, self._used = self._used, {}


class Background:
    """A thread of this process that writes a checkpoint.

    The process does not end before the thread. An error is logged at once, and raised by `result`.

    Args:
        saving: the content that this rank writes.
        finish: completes the checkpoint, given the checksums of all files; only the first rank
            calls it.
    """

    def __init__(self, saving: Saving, finish: Finish) -> None:
        self._saving, self._finish = saving, finish
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"autopar-save-{saving.step}")
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads; the marker tells the first rank
            self._fail(error)

    @property
    def place(self) -> Path:
        """The folder that is written into."""
        return self._saving.place

    def result(self) -> None:
        """Wait until this rank has written its part.

        Raises:
            RuntimeStateError: if writing failed. The message has the step.
        """
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            reason = self._error
            if isinstance(reason, RuntimeStateError):
                said, remedy = reason.what, reason.remedy
            else:
                said, remedy = f"{type(reason).__name__}: {reason}", ""
            what = f"step {self._saving.step} was not saved in the background: {said}"
            raise RuntimeStateError(
                what, where=str(self.place), remedy=remedy or _FREE_SPACE
            ) from reason

    def _run(self) -> None:
        saving = self._saving
        try:
            sums = saving.write()
            _mark(saving, _DONE, sums)
            if saving.rank == 0:
                self._finish(saving, _collect_marks(saving))
        except Exception as error:  # whatever it is, the next call raises it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._error = error
        log.error("step %d was not saved in the background: %s", self._saving.step, error)
        if self._saving.rank:
            _leave_failed(self._saving, error)


def _mark(saving: Saving, kind: str, content: Any) -> None:
    """Write a marker file atomically."""
    path = saving.place / f"rank_{saving.rank:05d}{kind}"
    begun = path.with_suffix(f"{kind}.tmp")
    write_bytes(begun, json.dumps(content).encode())
    begun.rename(path)


def _leave_failed(saving: Saving, error: Exception) -> None:
    """Write the marker of a failure for the first rank. If that fails, too, the first rank waits
    for `WITHIN_S`."""
    try:
        _mark(saving, _FAILED, str(error))
    except OSError as reason:
        log.error("rank %d cannot tell rank 0 so: %s", saving.rank, reason)


def _collect_marks(saving: Saving) -> dict[str, int]:
    """Wait for the markers of all ranks, and return the checksums of all files.

    Raises:
        RuntimeStateError: if a rank failed, or wrote no marker in time.
    """
    deadline, is_ending = time.monotonic() + WITHIN_S, False
    sums: dict[str, int] = {}
    missing = set(range(saving.num_ranks))
    while missing:
        for rank in sorted(missing):
            failed, done = (saving.place / f"rank_{rank:05d}{kind}" for kind in (_FAILED, _DONE))
            if failed.exists():
                said = read_json(failed.read_text())
                raise RuntimeStateError(
                    f"rank {rank} could not write its part: {said}", remedy=_FREE_SPACE
                )
            if done.exists():
                sums |= read_json(done.read_text())
                done.unlink()
                missing.discard(rank)
        if not is_ending and not threading.main_thread().is_alive():
            deadline, is_ending = min(deadline, time.monotonic() + AT_EXIT_S), True
        if missing and (time.monotonic() > deadline or not saving.place.is_dir()):
            what = f"ranks {sorted(missing)} did not write their parts in time"
            raise RuntimeStateError(
                what, remedy="see what became of them; the checkpoint before this one is as it was"
            )
        if missing:
            time.sleep(_POLL_S)
    return sums
