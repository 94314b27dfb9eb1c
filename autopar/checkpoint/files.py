"""Integrity of a checkpoint's files. `autopar.json` contains a checksum of each file and of its
content.

The checksum is CRC-32, since it must detect damage, not manipulation. It detects every change
within 32 consecutive bits, and all but one in 2^32 other changes. It takes a quarter of the time of
BLAKE2. Each rank computes the checksums of the files that it writes. When a checkpoint is loaded,
the files are divided among all ranks for verification.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.checkpoint.companions import OLD_OTHERS, OTHERS, Others
from autopar.checkpoint.contents import CONTENTS
from autopar.checkpoint.earlier_format import FILE as OLD_CONTENTS
from autopar.checkpoint.rank_parts import CheckpointParts, write_bytes
from autopar.checkpoint.safetensors_files import SUFFIX, TensorFile
from autopar.core.json_text import read_json
from autopar.core.text_files import read_text, why_unreadable
from autopar.errors import RuntimeStateError
from autopar.plans import Plan
from autopar.runtime.rank_agreement import gone_ranks
from autopar.runtime.rank_comm import by_all, by_first, num_ranks, of_all, rank

FORMAT, VERSION, OLD_VERSION = "autopar-checkpoint", 3, 2
ABOUT = "autopar.json"
SHARE = "use a folder that all machines share, with its absolute path"
# a shared file system may show changes on other machines with a delay
SEEN_WITHIN_S, PAUSE_S = 30.0, 0.5
_CHUNK_BYTES = 2**22
_NEEDED = {VERSION: {CONTENTS, OTHERS}, OLD_VERSION: {OLD_CONTENTS, OLD_OTHERS}}


def seen_by_all(place: Path, within_s: float) -> None:
    """Wait until all ranks see a folder that the first rank created. Every rank must call this.

    Args:
        place: the folder.
        within_s: the longest wait, in seconds.

    Raises:
        RuntimeStateError: on all ranks, if some ranks do not see the folder in time.
    """
    deadline = time.monotonic() + within_s
    while not place.is_dir() and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    not_seeing = [number for number, sees in enumerate(of_all(place.is_dir())) if not sees]
    if not_seeing:
        raise RuntimeStateError(
            f"ranks {not_seeing} do not see the folder that rank 0 created",
            where=str(place),
            remedy=SHARE,
        )


def checksums(place: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the CRC-32 of files in a folder, by name. Each file is read in chunks."""
    return {name: _checksum(place / name) for name in names}


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk, if the system supports this."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def about_text(about: Mapping[str, Any]) -> str:
    """Return the text of `autopar.json`, including the checksum of its content."""
    return json.dumps({**about, "checksum": _own_checksum(about)}, indent=1) + "\n"


def read_about(place: Path) -> tuple[Mapping[str, Any], str]:
    """Read `autopar.json` and verify the files of a checkpoint. Every rank must call this.

    Args:
        place: the checkpoint's folder.

    Returns:
        The content of `autopar.json`, and a description of the damage, which is empty if there is
        none.

    Raises:
        RuntimeStateError: on all ranks, if the checkpoint has another format, or a rank does not
            see it.
    """
    about, damage = by_first(lambda: _read_manifest(place), str(place))
    if damage:
        return {}, damage
    mine = {name: wanted for name, wanted in sorted(about["files"].items())[rank() :: num_ranks()]}
    found = by_all(lambda: _find_damage(place, mine), str(place), SHARE)
    names = sorted(line for lines in found for line in lines)
    return about, f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _read_manifest(place: Path) -> tuple[Mapping[str, Any], str]:
    """Return the content of `autopar.json` and a description of the damage: a file that is
    unreadable, changed, malformed or missing."""
    try:
        about = read_json(read_text(place / ABOUT))
        if not isinstance(about, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        return {}, f"{ABOUT} cannot be read ({type(error).__name__}: {error})"
    if about.get("format") != FORMAT or about.get("version") not in (VERSION, OLD_VERSION):
        what = (
            f"the checkpoint is of format {about.get('format')!r:.40}, version"
            f" {about.get('version')!r:.40}"
        )
        written = (
            f"autopar {about['autopar']:.40}, which"
            if isinstance(about.get("autopar"), str)
            else "the version of autopar that"
        )
        remedy = (
            f"read it with {written} wrote it; this version reads {FORMAT!r}, versions"
            f" {OLD_VERSION} and {VERSION}"
        )
        raise RuntimeStateError(what, remedy=remedy)
    if about.pop("checksum", None) != _own_checksum(about):
        return {}, f"{ABOUT} was changed after it was written"
    if fault := _find_fault(about):
        return {}, f"{ABOUT} {fault}"
    faults = ((name, why_unreadable(place / name)) for name in sorted(about["files"]))
    return about, ", ".join(
        [f"{name} cannot be read: {fault}" for name, fault in faults if fault][:3]
    )


def _find_fault(about: Mapping[str, Any]) -> str:
    """Describe the fault in the structure of `autopar.json`; empty if there is none."""
    kinds: dict[str, type | tuple[type, ...]] = {
        "step": int,
        "mesh": str,
        "plan": str,
        "random_state": (int, type(None)),
        "run": str,
        "tied": dict,
        "files": dict,
    }
    wrong = [
        name
        for name, kind in kinds.items()
        if not isinstance(about.get(name, {} if name == "tied" else ...), kind)
    ]
    if wrong:
        return f"has no {wrong[0]}, or one of the wrong type"
    if not -(2**63) <= (about["random_state"] or 0) < 2**63 or not all(
        isinstance(name, str) for name in about.get("tied", {}).values()
    ):
        return "has an invalid random state or invalid tied names"
    files = about["files"]
    if not all(type(checksum) is int for checksum in files.values()) or any(
        Path(name).name != name for name in files
    ):
        return "lists files outside its folder"
    missing = _NEEDED[about["version"]] - files.keys()
    return f"does not list {min(missing)}" if missing else ""


def _find_damage(place: Path, wanted: Mapping[str, int]) -> list[str]:
    """Return a line for each file whose checksum differs.

    Raises:
        FileNotFoundError: if this rank does not see a file that the first rank has seen.
    """
    found = []
    for name, checksum in wanted.items():
        try:
            if _checksum(place / name) != checksum:
                found.append(f"{name} was changed after it was written")
        except FileNotFoundError:
            raise
        except OSError as error:  # for example, a read error of the disk
            found.append(f"{name} cannot be read ({error})")
    return found


def _checksum(path: Path) -> int:
    checksum, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:size], checksum)
    return checksum


def _own_checksum(about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


# --------------------------------------------------------------------------------------------------
# Writing of one checkpoint, by all ranks together or in the background during training.
#
# Files are written into a temporary folder, which is renamed when all parts are complete
# (`Checkpoints`). In the background, ranks do not communicate: each rank writes a marker file when
# its part is on the disk, and the first rank waits for the markers of all ranks. Collectives of
# training and of saving are therefore never mixed. If a rank ends early, the folder keeps its
# temporary name and is never loaded.

log = logging.getLogger("autopar")
# Time limits of the first rank for the parts of other ranks, in general and while the process is
# ending.
WITHIN_S, AT_EXIT_S = 1800.0, 60.0
_POLL_S = 0.02
_DONE, _FAILED = ".done", ".failed"
_FREE_SPACE = (
    "see the reason: free disk space, or choose another folder. Earlier checkpoints are unchanged"
)
Finish = Callable[["Saving", Mapping[str, int]], object]


@dataclass(frozen=True, slots=True)
class Saving:
    """The content of a checkpoint that one rank writes.

    Attributes:
        step: the number of training steps.
        place: the folder to write into.
        rank, num_ranks: the rank of this process, and the number of ranks.
        parts: the part of this rank.
        others: the states of companions. Only the first rank writes them.
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
        """Write this rank's files. Return the CRC-32 of each file, by file name."""
        sums = self.parts.write(self.place)
        if self.rank == 0:
            sums |= self.others.write(self.place)
            if self.plan is not None:
                sums["plan.json"] = write_bytes(
                    self.place / "plan.json", self.plan.dumps().encode()
                )
        return sums

    def finish(self, sums: Mapping[str, int]) -> None:
        """Write `autopar.json` with the checksums of all ranks' files. Only the first rank calls
        this.

        Args:
            sums: the checksum of each file, by file name.

        Raises:
            RuntimeStateError: if a file is missing or incomplete.
        """
        for name in sums:
            if not (self.place / name).is_file():
                raise RuntimeStateError(
                    f"step {self.step} is incomplete: {name} does not exist", remedy=SHARE
                )
            if name.endswith(SUFFIX):
                TensorFile(self.place / name)
        write_bytes(self.place / ABOUT, about_text({**self.about, "files": dict(sums)}).encode())
        sync_folder(self.place)


class HostCopies:
    """Copies of tensors in host memory. The memory is reused for the next checkpoint."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._used: dict[str, Tensor] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host. The copy of a tensor on a GPU is complete after `wait`."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._used[name] = buffer.copy_(tensor, non_blocking=True)
        return buffer

    def wait(self) -> None:
        """Wait until all copies are complete, and free memory that was not reused."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._buffers, self._used = self._used, {}


class Background:
    """A thread of this process that writes a checkpoint.

    The process does not end before the thread. An error is logged immediately, and raised by
    `result`.

    Args:
        saving: the content that this rank writes.
        finish: completes the checkpoint, given the checksums of all files. Only the first rank
            calls it.
    """

    def __init__(self, saving: Saving, finish: Finish) -> None:
        self._saving, self._finish = saving, finish
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"autopar-save-{saving.step}")
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread is available; the marker informs the first rank
            self._fail(error)

    @property
    def place(self) -> Path:
        """The folder to write into."""
        return self._saving.place

    def result(self) -> None:
        """Wait until this rank has written its part.

        Raises:
            RuntimeStateError: if writing failed. The message contains the step.
        """
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            reason = self._error
            if isinstance(reason, RuntimeStateError):
                message, remedy = reason.what, reason.remedy
            else:
                message, remedy = f"{type(reason).__name__}: {reason}", ""
            what = f"step {self._saving.step} was not saved in the background: {message}"
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
        except BaseException as error:  # the next call raises any error, and rank 0 waits for it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        log.error("step %d was not saved in the background: %s", self._saving.step, error)
        if self._saving.rank:
            _mark_failed(self._saving, error)


def _marker(saving: Saving, number: int, kind: str) -> Path:
    """Return the marker file of a rank."""
    return saving.place / f"rank_{number:05d}{kind}"


def _mark(saving: Saving, kind: str, content: Any) -> None:
    """Write a marker file atomically."""
    path = _marker(saving, saving.rank, kind)
    temporary = path.with_suffix(f"{kind}.tmp")
    write_bytes(temporary, json.dumps(content).encode())
    temporary.rename(path)


def _mark_failed(saving: Saving, error: BaseException) -> None:
    """Write the marker of a failure for the first rank. On a full disk, the marker is an empty
    file, which needs no space. If this also fails, the first rank waits for `WITHIN_S`."""
    with contextlib.suppress(OSError):  # it may be what fills the disk
        (saving.place / saving.parts.file).unlink()
    try:
        _mark(saving, _FAILED, f"{type(error).__name__}: {error}")
    except OSError:
        try:
            _marker(saving, saving.rank, _FAILED).touch()
        except OSError as reason:
            log.error("rank %d cannot report this to rank 0: %s", saving.rank, reason)


def _check_failed(saving: Saving, other: int) -> None:
    """Raise RuntimeStateError if a rank has written the marker of a failure."""
    failed = _marker(saving, other, _FAILED)
    if failed.exists():
        text = failed.read_text()
        message = read_json(text) if text else "see its log"
        raise RuntimeStateError(
            f"rank {other} could not write its part: {message}", remedy=_FREE_SPACE
        )


def _collect_marks(saving: Saving) -> dict[str, int]:
    """Wait for the markers of all ranks. Return the checksums of all files.

    Raises:
        RuntimeStateError: if a rank failed or ended, or did not write its marker in time.
    """
    deadline, is_ending = time.monotonic() + WITHIN_S, False
    sums: dict[str, int] = {}
    missing = set(range(saving.num_ranks))
    while missing:
        gone = gone_ranks()  # before the markers, which a process writes before it ends
        for other in sorted(missing):
            _check_failed(saving, other)
            done = _marker(saving, other, _DONE)
            if done.exists():
                sums |= read_json(done.read_text())
                done.unlink()
                missing.discard(other)
        if not is_ending and not threading.main_thread().is_alive():
            deadline, is_ending = min(deadline, time.monotonic() + AT_EXIT_S), True
        late = time.monotonic() > deadline or not saving.place.is_dir()
        if at_fault := sorted(missing if late else missing & gone):
            reason = "did not write their shards in time" if late else "ended without their shards"
            raise RuntimeStateError(
                f"ranks {at_fault} {reason}",
                remedy="check these ranks; the previous checkpoint is unchanged",
            )
        if missing:
            time.sleep(_POLL_S)
    return sums
