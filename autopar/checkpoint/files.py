"""Integrity of a checkpoint's files: `autopar.json` holds a checksum of each file and one of
itself.

The checksum is CRC-32, since it has to detect damage and not manipulation. It detects every change
within 32 consecutive bits and all but one in 2^32 other changes, in a quarter of the time of
BLAKE2. Each rank computes the checksums of the files that it wrote. When a checkpoint is loaded,
all ranks share the verification, however many they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autopar.checkpoint.companion_states import OLD_OTHERS, OTHERS
from autopar.checkpoint.contents import CONTENTS
from autopar.checkpoint.earlier_format import FILE as OLD_CONTENTS
from autopar.core.json_text import read_json
from autopar.errors import RuntimeStateError
from autopar.runtime.rank_comm import by_all, by_first, num_ranks, of_all, rank

FORMAT, VERSION, OLD_VERSION = "autopar-checkpoint", 3, 2
ABOUT = "autopar.json"
SHARE = "put checkpoints into a folder that all machines share, by its whole path"
SEEN_WITHIN_S, PAUSE_S = (
    30.0,
    0.5,
)  # shared file systems show on one machine late what another wrote
_CHUNK_BYTES = 2**22
_NEEDED = {VERSION: {CONTENTS, OTHERS}, OLD_VERSION: {OLD_CONTENTS, OLD_OTHERS}}


def seen_by_all(place: Path, within_s: float) -> None:
    """Wait until all ranks see a folder that the first rank made; every rank calls it.

    Args:
        place: the folder.
        within_s: the longest wait, in seconds.

    Raises:
        RuntimeStateError: on all ranks, if some ranks do not see the folder in time.
    """
    deadline = time.monotonic() + within_s
    while not place.is_dir() and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    blind = [number for number, sees in enumerate(of_all(place.is_dir())) if not sees]
    if blind:
        raise RuntimeStateError(
            f"ranks {blind} do not see the folder that rank 0 made", where=str(place), remedy=SHARE
        )


def checksums(place: Path, names: Iterable[str]) -> dict[str, int]:
    """Return the CRC-32 of files in a folder, by name. Each file is read in chunks."""
    return {name: _checksum(place / name) for name in names}


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk, if the system supports it for
    folders."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def about_text(about: Mapping[str, Any]) -> str:
    """Return the text of `autopar.json`, with the checksum of its own content."""
    return json.dumps({**about, "checksum": _own_checksum(about)}, indent=1) + "\n"


def read_about(place: Path) -> tuple[Mapping[str, Any], str]:
    """Read `autopar.json` and verify the files of a checkpoint; every rank calls it.

    Args:
        place: the checkpoint's folder.

    Returns:
        The content of `autopar.json`, and a description of the damage, empty if there is none.

    Raises:
        RuntimeStateError: on all ranks, if the checkpoint has another format, or some rank does not
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
        about = read_json((place / ABOUT).read_text(encoding="utf-8"))
        if not isinstance(about, dict):
            raise ValueError("it is not an object")
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
            f"read it with {written} wrote it; this one reads {FORMAT!r}, versions {OLD_VERSION}"
            f" and {VERSION}"
        )
        raise RuntimeStateError(what, remedy=remedy)
    if about.pop("checksum", None) != _own_checksum(about):
        return {}, f"{ABOUT} is not as it was written"
    if fault := _find_fault(about):
        return {}, f"{ABOUT} {fault}"
    missing = [
        f"{name} is not there" for name in sorted(about["files"]) if not (place / name).is_file()
    ]
    return about, ", ".join(missing[:3])


def _find_fault(about: Mapping[str, Any]) -> str:
    """Return the fault in the form of `autopar.json`; empty if there is none."""
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
        return f"has no {wrong[0]}, or one of another kind"
    if not -(2**63) <= (about["random_state"] or 0) < 2**63 or not all(
        isinstance(name, str) for name in about.get("tied", {}).values()
    ):
        return "has a random state or tied names that mean nothing"
    files = about["files"]
    if not all(type(checksum) is int for checksum in files.values()) or any(
        Path(name).name != name for name in files
    ):
        return "names files that are not in its folder"
    missing = _NEEDED[about["version"]] - files.keys()
    return f"does not list {min(missing)}" if missing else ""


def _find_damage(place: Path, wanted: Mapping[str, int]) -> list[str]:
    """Return a line for each file that does not have its checksum.

    Raises:
        FileNotFoundError: if this rank does not see a file that the first rank has seen.
    """
    found = []
    for name, checksum in wanted.items():
        try:
            if _checksum(place / name) != checksum:
                found.append(f"{name} is not as it was written")
        except FileNotFoundError:
            raise
        except OSError as error:  # such as a read error of the disk
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
