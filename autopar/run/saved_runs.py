"""Whether a folder of checkpoints is one run's alone, told from the checkpoints that are there: each says which run saved it.

A run knows those that were there when it began, or when it last loaded, and its own. Any other was saved meanwhile by another run that is
still going on. There is nothing to renew and nothing that a dead run leaves behind: whoever goes on after one knows what it saved. A folder
gets its name only where there is none of that name, so that of two runs that save one step at once one does.
"""

from __future__ import annotations

import functools
import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path

from autopar.errors import RuntimeStateError
from autopar.json_text import read_json
from autopar.run.saved_files import ABOUT


def this_run() -> str:
    """Host, process and a random number; of the first rank, it stands for all."""
    return _run_of_process(os.getpid())


@functools.cache
def _run_of_process(pid: int) -> str:  # not of a process that was forked from another one
    return f"{socket.gethostname()}-{pid}-{uuid.uuid4().hex[:8]}"


def runs_of(found: Mapping[int, Path]) -> dict[int, str]:
    """By step, which run saved it; those that do not say so, as damaged ones, are left out."""
    runs = {}
    for step, place in found.items():
        try:
            runs[step] = str(read_json((place / ABOUT).read_text(encoding="utf-8"))["run"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return runs


def check_alone(known: Mapping[int, str], found: Mapping[int, Path]) -> None:
    """That all checkpoints that were found are known ones or this run's.

    Raises:
        RuntimeStateError: where another run saves into the folder, too.
    """
    strange = {step: run for step, run in runs_of(found).items() if run not in (known.get(step), this_run())}
    if strange:
        step = max(strange)
        what = f"another run saves into this folder, too: step {step} is of {strange[step]}, this run is {this_run()}"
        remedy = f"let one of them go on: end the other, or name another folder. Started again, this one goes on after step {max(found)}"
        raise RuntimeStateError(what, remedy=remedy)
