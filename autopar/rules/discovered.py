"""What discovery found, remembered in a file of the user's cache directory: ``$XDG_CACHE_HOME/autopar/discovered.json``.

Only proposals are remembered: they pass the law again each time they are read, so that a file that is stale, of another
machine or edited by hand can cost choices but never give a wrong rule. JSON, never pickle; of one version of torch.
``AUTOPAR_CACHE=0`` in the environment turns it off. A file that cannot be read is as good as none, and one that cannot be
written is left out: what was found stays known to the process.
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
from autopar.layout import Layout
from autopar.rules.call import Call, op_name
from autopar.rules.notation import AxisOption

_FORMAT, _VERSION = "autopar-discovered", 1


def path() -> Path | None:
    """The file; None where the cache is off."""
    if os.environ.get("AUTOPAR_CACHE") == "0":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "autopar" / "discovered.json"


def load(call: Call) -> tuple[AxisOption, ...]:
    """The options found for an equal call, but replicate-everything; empty where none are known."""
    try:
        options = tuple(map(decode, _rules(path()).get(_key(call), ())))
    except (LayoutError, TypeError, ValueError, AttributeError):
        return ()
    fit = all(len(o.inputs) == len(call.inputs) and len(o.outputs) == len(call.outputs) for o in options)
    return options if fit else ()


def save(call: Call, options: Sequence[AxisOption]) -> None:
    """Remember the options of a call."""
    file = path()
    if file is None:
        return
    rules = {**_rules(file), _key(call): [encode(option) for option in options]}
    data = {"format": _FORMAT, "version": _VERSION, "torch": torch.__version__, "rules": rules}
    with contextlib.suppress(OSError):  # a cache: what cannot be written is found again
        file.parent.mkdir(parents=True, exist_ok=True)
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


def _rules(file: Path | None) -> dict[str, Any]:
    """The file's entries; none where it is missing, damaged, or of another version of torch."""
    try:
        data = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):
        return {}
    wanted = {"format": _FORMAT, "version": _VERSION, "torch": torch.__version__}
    if not isinstance(data, dict) or any(data.get(name) != value for name, value in wanted.items()):
        return {}
    return data["rules"] if isinstance(data.get("rules"), dict) else {}


def _key(call: Call) -> str:
    """Op, schema, settings, shapes and dtypes; equal for equal calls of any process."""
    text = repr((op_name(call.target), str(getattr(call.target, "_schema", "")), call.args, sorted(call.kwargs.items())))
    text += repr([(info.shape, str(info.dtype)) for info in (*call.inputs, *call.outputs)])
    return f"{op_name(call.target)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
