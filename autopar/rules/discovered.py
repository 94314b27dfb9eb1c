"""What discovery found, remembered in a file of the user's cache directory: ``$XDG_CACHE_HOME/autopar/discovered.json``.

Only proposals are remembered: they pass the law again each time they are read, so that a file that is stale, of another
machine or edited by hand can cost choices but never give a wrong rule. JSON, never pickle; of one version of torch.
``AUTOPAR_CACHE=0`` in the environment turns it off. A file that is damaged, or that another user can write to, is not read:
rules are found again, and the log says why. One that cannot be written is left out: what was found stays known to the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.errors import LayoutError
from autopar.json_text import read_json
from autopar.layout import Layout
from autopar.private_folder import find_foreign, private_folder, warn_once
from autopar.rules.call import Call, op_name
from autopar.rules.notation import AxisOption

_FORMAT, _VERSION = "autopar-discovered", 2


def path() -> Path | None:
    """Find the file of the cache, and make its folder, which is one of this process if other users can write to the user's own.

    Returns:
        The file, which may not exist; None if the cache is off, or its folder cannot be made.
    """
    if os.environ.get("AUTOPAR_CACHE") == "0":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    try:
        folder = private_folder(Path(home) / "autopar", "discovered rules", "name a folder of your own: XDG_CACHE_HOME=FOLDER")
    except OSError:
        return None
    return folder / "discovered.json"


def load(call: Call) -> tuple[AxisOption, ...]:
    """The options found for an equal call, but replicate-everything; empty where none are known."""
    try:
        options = tuple(map(decode, _rules(path()).get(_key(call), ())))
    except (LayoutError, TypeError, ValueError, AttributeError) as error:
        warn_once(f"an entry of the discovered rules is damaged ({error}): {_key(call)} is found again")
        return ()
    fit = all(len(o.inputs) == len(call.inputs) and len(o.outputs) == len(call.outputs) for o in options)
    return options if fit else ()


def save(call: Call, options: Sequence[AxisOption]) -> None:
    """Remember the options of a call."""
    file = path()
    if file is None:
        return
    rules = {**_rules(file), _key(call): [encode(option) for option in options]}
    data = {"format": _FORMAT, "version": _VERSION, "torch": torch.__version__, "rules": rules, "sha256": digest(rules)}
    with contextlib.suppress(OSError):  # a cache: what cannot be written is found again
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8") as part:
            json.dump(data, part, indent=1, sort_keys=True)
        os.replace(part.name, file)


def encode(option: AxisOption) -> list[list[str]]:
    """An option as JSON."""
    return [[str(Layout((p,))) for p in side] for side in (option.inputs, option.outputs)]


def decode(data: Sequence[Sequence[str]]) -> AxisOption:
    """The inverse of `encode`.

    Raises:
        LayoutError: where a placement cannot be read.
    """
    inputs, outputs = ([p for token in side for p in Layout.parse(token).placements] for side in data)
    return AxisOption(tuple(inputs), tuple(outputs))


def digest(rules: dict[str, Any]) -> str:
    """The checksum of the entries of a file."""
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def _rules(file: Path | None) -> dict[str, Any]:
    """The file's entries; none if it is missing, damaged, of another version, or another user's."""
    if file is None:
        return {}
    try:
        if not (reason := find_foreign(file)):
            return _entries(read_json(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = f"{file} cannot be read: {error}"
    warn_once(f"{reason}. The rules in it are found again")
    return {}


def _entries(data: Any) -> dict[str, Any]:
    """The entries of what was read; none of another version of autopar or torch.

    Raises:
        ValueError: if it is not what `save` wrote.
    """
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError("it is not a file of discovered rules")
    if (data.get("version"), data.get("torch")) != (_VERSION, torch.__version__):
        return {}
    rules = data.get("rules")
    if not isinstance(rules, dict) or data.get("sha256") != digest(rules):
        raise ValueError("it is not as it was written")
    return rules


def _key(call: Call) -> str:
    """Op, schema, settings, shapes and dtypes; equal for equal calls of any process."""
    text = repr((op_name(call.target), str(getattr(call.target, "_schema", "")), call.args, sorted(call.kwargs.items())))
    text += repr([(info.shape, str(info.dtype)) for info in (*call.inputs, *call.outputs)])
    return f"{op_name(call.target)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
