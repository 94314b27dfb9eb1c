"""Checkpoints in the format of version 2, written by torch.distributed.checkpoint with pickles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autopar.checkpoint.companions import read_all_others
from autopar.checkpoint.files import ABOUT, OLD_VERSION, about_text, checksums
from autopar.checkpoint.loading import load_parts, read_metadata


def to_old_format(place: Path) -> None:
    """Rewrite a checkpoint in the format of version 2."""
    metadata = read_metadata(place)
    state: dict[str, Any] = {
        key: torch.empty(of.size, dtype=of.properties.dtype)
        if isinstance(of, TensorStorageMetadata)
        else metadata.planner_data[key]
        for key, of in metadata.state_dict_metadata.items()
    }
    load_parts(state, place, alone=True)
    others = read_all_others(place)
    for path in place.iterdir():
        if path.name not in (ABOUT, "plan.json"):
            path.unlink()
    dcp.save(state, storage_writer=FileSystemWriter(place), no_dist=True)
    torch.save(others, place / "others.pt")
    forge(
        place, lambda about: about.update(version=OLD_VERSION, files=dict.fromkeys(_names(place)))
    )


def forge(place: Path, change: Callable[[dict[str, Any]], object] = lambda about: None) -> None:
    """Change `autopar.json` and update all checksums, as someone with write access could do.

    Args:
        place: the folder of the checkpoint.
        change: changes the contents of the file.
    """
    about = json.loads((place / ABOUT).read_text())
    del about["checksum"]
    about["files"] = dict.fromkeys(name for name in about["files"] if (place / name).is_file())
    change(about)
    if isinstance(about.get("files"), dict):
        missing = [name for name, checksum in about["files"].items() if checksum is None]
        about["files"].update(checksums(place, missing))
    (place / ABOUT).write_text(about_text(about))


def _names(place: Path) -> list[str]:
    return [path.name for path in place.iterdir() if path.name != ABOUT]
