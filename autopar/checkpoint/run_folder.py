"""The folder of a run's checkpoints: the names of checkpoints in it, and their numbers of steps."""

from __future__ import annotations

import operator
import os
import re
from pathlib import Path
from typing import Any

import torch

from autopar.core.text_files import reason_of
from autopar.errors import RuntimeStateError

NAME = re.compile(r"step_(\d{9,})")
"""The name of a checkpoint's folder."""
_MOST_STEPS = 2**63 - 1
_MOST_BITS_SHOWN = 100


def as_integer(value: Any) -> int | None:
    """Return an integer of any type as an int; None for booleans and all other values."""
    if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_step(value: Any) -> int:
    """Return a number of steps as an int.

    Raises:
        RuntimeStateError: if it is not an integer from 0 to 2**63 - 1.
    """
    step = as_integer(value)
    if step is None or not 0 <= step <= _MOST_STEPS:
        # Python does not print integers of many thousands of digits
        bits = 0 if step is None else step.bit_length()
        shown = repr(value) if bits <= _MOST_BITS_SHOWN else f"an integer of {bits} bits"
        raise RuntimeStateError(
            f"step={shown:.80} is not a number of steps",
            remedy="pass the number of completed steps, an integer from 0 to 2**63 - 1",
        )
    return step


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the folders of the checkpoints that this rank sees, by step. There are none in a
    folder that cannot be read; `check_folder` reports the reason."""
    try:
        names = os.listdir(folder)
    except (OSError, ValueError):
        return {}
    matches = filter(None, map(NAME.fullmatch, names))
    found = {int(match[1]): folder / match[0] for match in matches}
    return {step: place for step, place in found.items() if os.path.isdir(place)}


def check_folder(folder: Path) -> None:
    """Check that checkpoints can be searched in a folder, if it exists.

    Raises:
        RuntimeStateError: if the path is not a folder that can be read, or an entry with the name
            of a checkpoint is not a folder. Without the error, training would start from the
            beginning.
    """
    if fault := fault_of_folder(folder) or _find_fault(folder):
        raise RuntimeStateError(
            f"the folder of the checkpoints cannot be used: {fault}",
            where=str(folder),
            remedy=(
                "pass a readable folder, or one that does not exist yet. If a file is in the place"
                " of the folder or of a checkpoint, move it away"
            ),
        )


def fault_of_folder(folder: Path) -> str:
    """Describe why a folder cannot be read; empty if it can, or if it does not exist."""
    try:
        os.listdir(folder)
    except FileNotFoundError:
        links = (each for each in (folder, *folder.parents) if each.is_symlink())
        broken = next((each for each in links if not os.path.exists(each)), None)
        return "" if broken is None else f"{broken} is a symbolic link to a missing path"
    except (OSError, ValueError) as error:
        return reason_of(error)
    return ""


def _find_fault(folder: Path) -> str:
    """Describe an entry that has the name of a checkpoint but is not a folder; empty if there is
    none."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return ""
    places = (folder / name for name in names if NAME.fullmatch(name))
    # an entry that another process has removed in the meantime does not exist any more
    wrong = (each for each in places if os.path.lexists(each) and not os.path.isdir(each))
    return next((f"{each.name} in it is not a folder" for each in wrong), "")
