"""Programs for the remedies of damaged and forged files of checkpoints."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

import autopar
from autopar.errors import RuntimeStateError
from tests.support.old_checkpoints import forge, to_old_format
from tests.support.remedy_programs import Program
from tests.support.remedy_programs_saved import BATCH, Run, damage, run_of


def _planted(run: Run, file: str, content: bytes, step: int = 2) -> None:
    """Replace a file and its checksum."""
    (run.place(step) / file).write_bytes(content)
    forge(run.place(step))


def _contents(run: Run) -> bytes:
    """Return contents that list no shards of the tensors."""
    text = json.loads((run.place(2) / "contents.json").read_text())
    for tensor in text["tensors"].values():
        tensor["boxes"] = tensor["boxes"][:0]
    return json.dumps(text).encode()


def _loads_planted(
    file: str, content: Callable[[Run], bytes], old: bool = False
) -> Callable[[], object]:
    def work(run: Run) -> object:
        if old:
            to_old_format(run.place(2))
        _planted(run, file, content(run))
        return run.load()

    return run_of(work, steps=2)


def _loads_earlier(run: Run) -> None:
    """Load the previous checkpoint, after removing the newest one."""
    _planted(run, "contents.json", b"{}")
    shutil.rmtree(run.place(2))
    assert run.load() == 1


def _loads_copied(run: Run) -> None:
    """Load after copying the file again from the original."""
    whole = (run.place(1) / "contents.json").read_bytes()
    damage(run, 1)
    (run.place(1) / "contents.json").write_bytes(whole)
    assert run.load() == 1


class _Pair(nn.Module):
    """The mean square of two linear layers, which may share their weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def _loads_pair(*, tied: bool, exported: bool = False) -> Callable[[], object]:
    """Load a checkpoint or exported weights of two layers, which share nothing, into a model."""

    def program() -> object:
        apart, module = (
            autopar.compile(_Pair(each), example_inputs=BATCH, hardware="cpu-gloo")
            for each in (False, tied)
        )
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = autopar.Checkpoints(Path(folder, "run"))
            checkpoints.save(1, apart)
            if not exported:
                return checkpoints.load(module)
            checkpoints.export(Path(folder, "weights"))
            return autopar.load_weights(module, Path(folder, "weights"))

    return program


PROGRAMS: dict[str, Program] = {
    "checkpoint/state.py check_tied 0": Program(
        _loads_pair(tied=True),
        "load it into a model that does not tie them",
        _loads_pair(tied=False),
    ),
    "checkpoint/state.py check_tied 0 | exported": Program(
        _loads_pair(tied=True),
        "checkpoints.export(folder), then autopar.load_weights(pm, folder)",
        _loads_pair(tied=True, exported=True),
    ),
    "checkpoint/safetensors_files.py damage_error 0": Program(
        _loads_planted("contents.json", lambda run: b"{}"),
        "use another checkpoint",
        run_of(_loads_earlier, steps=2),
    ),
    "checkpoint/safetensors_files.py damage_error 0 | boxes": Program(
        _loads_planted("contents.json", _contents),
        "copy this one again",
        run_of(_loads_copied, steps=1),
    ),
    "checkpoint/safetensors_files.py unsafe 0": Program(
        _loads_planted(".metadata", lambda run: pickle.dumps(Path), old=True),
        "use another checkpoint, or save again",
        run_of(lambda run: run.save(3), steps=2),
    ),
    "checkpoint/safetensors_files.py unsafe 0 | values": Program(
        _loads_planted("others.pt", lambda run: pickle.dumps(RuntimeStateError), old=True),
        "use another checkpoint, or save again",
        run_of(_loads_earlier, steps=2),
    ),
}
