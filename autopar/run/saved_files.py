"""Whether a checkpoint's files are as they were written: a checksum of each, in `autopar.json`, which has one of itself.

CRC-32, since it is damage that is looked for, not intent: any change within 32 bits in a row is found, of others all but one in 2^32, at a
quarter of what BLAKE2 takes. Each rank sums up the files that it wrote; those that load, however many they are, share the reading.
"""

from __future__ import annotations

import json
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autopar.errors import RuntimeStateError, size_text
from autopar.run.ranks import by_all, by_first, num_ranks, of_all, rank

FORMAT, VERSION = "autopar-checkpoint", 2
ABOUT = "autopar.json"
SHARE = "put checkpoints into a folder that all machines share, by its whole path"
SEEN_WITHIN_S, PAUSE_S = 30.0, 0.5  # shared file systems show on one machine late what another wrote
_CHUNK_BYTES = 2**22


class Writer(FileSystemWriter):
    """Torch's writer, which knows the names of the files that this rank wrote."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.written: tuple[str, ...] = ()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future = super().write_data(plan, planner)
        self.written = tuple(sorted({result.storage_data.relative_path for result in future.wait()}))
        return future


def save_parts(state: dict[str, Any], writer: FileSystemWriter, what: str, kept: str) -> None:
    """Every rank its part, by torch.distributed.checkpoint.

    Args:
        what: is saved. kept: what has not changed where it fails.

    Raises:
        RuntimeStateError: on all ranks, saying why it failed on which.
    """
    try:
        dcp.save(state, storage_writer=writer)
    except dcp.api.CheckpointException as error:
        reasons = "; ".join(dict.fromkeys(str(failure[0]) for failure in error.failures.values()))  # each once
        remedy = f"see the reason; {size_text(shutil.disk_usage(writer.path).free)} are free there. {kept}"
        raise RuntimeStateError(f"{what} was not saved: {reasons}", where=str(writer.path), remedy=remedy) from error


def seen_by_all(place: Path, within_s: float) -> None:
    """Wait until all ranks see a folder that the first made.

    Raises:
        RuntimeStateError: on all ranks, where some do not within that time.
    """
    deadline = time.monotonic() + within_s
    while not place.is_dir() and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    blind = [number for number, sees in enumerate(of_all(place.is_dir())) if not sees]
    if blind:
        raise RuntimeStateError(f"ranks {blind} do not see the folder that rank 0 made", where=str(place), remedy=SHARE)


def checksums(place: Path, names: Iterable[str]) -> dict[str, int]:
    """Of files in a folder, by name; each is read in pieces."""
    return {name: _checksum(place / name) for name in names}


def about_text(about: Mapping[str, Any]) -> str:
    """What `autopar.json` is, with the checksum of all that it says."""
    return json.dumps({**about, "checksum": _own_checksum(about)}, indent=1) + "\n"


def read_about(place: Path) -> tuple[Mapping[str, Any], str]:
    """What `autopar.json` says, and what is damaged of the checkpoint, empty where nothing is; every rank calls it.

    Raises:
        RuntimeStateError: on all ranks, where it is of another format, or some rank does not see it.
    """
    about, damage = by_first(lambda: _read(place), str(place), "see the reason")
    if damage:
        return {}, damage
    mine = {name: wanted for name, wanted in sorted(about["files"].items())[rank() :: num_ranks()]}
    found = by_all(lambda: _damaged(place, mine), str(place), SHARE)
    names = sorted(line for lines in found for line in lines)
    return about, f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _read(place: Path) -> tuple[Mapping[str, Any], str]:
    """What `autopar.json` says, once all other files are there as well, and what is damaged."""
    try:
        about = json.loads((place / ABOUT).read_text())
        if not isinstance(about, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        return {}, f"{ABOUT} cannot be read ({type(error).__name__}: {error})"
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        what = f"the checkpoint is of format {about.get('format')!r}, version {about.get('version')!r}"
        raise RuntimeStateError(what, remedy=f"this autopar reads {FORMAT!r}, version {VERSION}")
    if about.pop("checksum", None) != _own_checksum(about):
        return {}, f"{ABOUT} is not as it was written"
    missing = [f"{name} is not there" for name in sorted(about["files"]) if not (place / name).is_file()]
    return about, ", ".join(missing[:3])


def _damaged(place: Path, wanted: Mapping[str, int]) -> list[str]:
    """What is wrong with files of these checksums.

    Raises:
        FileNotFoundError: of one that this rank does not see; the first has seen it.
    """
    found = []
    for name, checksum in wanted.items():
        try:
            if _checksum(place / name) != checksum:
                found.append(f"{name} is not as it was written")
        except FileNotFoundError:
            raise
        except OSError as error:  # as of a disk that cannot read it any more
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
