"""``autopar cache info|list|clear``: the plans and captures that are cached on this machine."""

from __future__ import annotations

import json
import time

import typer

from autopar.cache import store
from autopar.core.private_folder import find_sharing, is_cache_on
from autopar.core.terminal import say
from autopar.core.units import size
from autopar.errors import AutoparError

cache_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The cache of plans and captures on this machine.",
)
_UNITS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


@cache_app.command("info")
def info_command() -> None:
    """Where the cache is, how many entries it has, and whether it is used."""
    folder, found = store.entry_folder(), store.entries()
    say(f"folder: {folder}")
    say(f"entries: {len(found)}, {size(sum(e.num_bytes for e in found))}")
    say(f"limit: {size(store.MAX_BYTES)}; the entries that were not used for longest go first")
    if found:
        say(f"last used: {_ago(found[0].used_s)}; longest not used: {_ago(found[-1].used_s)}")
    if not is_cache_on("plans"):
        say("the cache is off: AUTOPAR_CACHE in the environment does not list plans")
    elif folder.is_dir() and (reason := find_sharing(folder.resolve())):
        say(f"the folder is not used: {reason}")


@cache_app.command("list")
def list_command() -> None:
    """The cached plans and captures, those that were used last first."""
    for entry in store.entries():
        say(f"{entry.path.stem[:16]}  {size(entry.num_bytes)}  {_ago(entry.used_s)}  {_of(entry)}")


@cache_app.command("clear")
def clear_command() -> None:
    """Remove all cached plans and captures."""
    try:
        num, num_bytes = store.clear()
    except OSError as error:
        raise AutoparError(
            f"an entry of the cache cannot be removed: {error}",
            remedy=f"remove the folder: {store.entry_folder()}",
        ) from error
    say(f"removed {num} {'entry' if num == 1 else 'entries'}, {size(num_bytes)}")


def _of(entry: store.EntryFile) -> str:
    """Return what an entry is, in words; "damaged" if it cannot be read."""
    try:
        with entry.path.open(encoding="utf-8") as lines:
            head = json.loads(next(lines))
        return f"{head['kind']}: {head['about']}"
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return "damaged"


def _ago(used_s: float) -> str:
    age_s = max(time.time() - used_s, 0.0)
    for unit_s, name in _UNITS:
        if age_s >= unit_s:
            num = int(age_s // unit_s)
            return f"{num} {name}{'s' if num > 1 else ''} ago"
    return "less than a minute ago"
