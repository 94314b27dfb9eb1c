"""Damaged checkpoints. They must be refused without a change of state, or load as they were saved.

Two checkpoints, of steps 1 and 2, are saved once per process. Each case damages a copy and loads
it. The second checkpoint is written in the background. Code in a file must never run: a planted
pickle would write a file.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import AutoparError
from benchmarks.faults.damage import WAYS
from benchmarks.faults.file_cases import batch, build
from benchmarks.faults.judging import Notes, WrongResult

State = dict[str, torch.Tensor]
ABOUT = "autopar.json"


class Planted:
    """An object that writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the small model, compiled for this process, and its optimizer."""
    module = autopar.compile(build(), example_inputs=batch())
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def state_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the state that a checkpoint restores, by name."""
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    for index, entries in optimizer.state_dict()["state"].items():
        state |= {
            f"{index}.{k}": v.detach().clone() for k, v in entries.items() if torch.is_tensor(v)
        }
    return state


@cache
def saved() -> tuple[Path, dict[int, State]]:
    """Return a folder with checkpoints of two steps, and the state in each of them."""
    folder = Path(tempfile.mkdtemp(prefix="autopar_checkpoints_"))
    module, optimizer = training()
    checkpoints, states = autopar.Checkpoints(folder), {}
    for step in (1, 2):
        module(**batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        save = checkpoints.save if step == 1 else checkpoints.async_save
        save(step, module, optimizer)
        states[step] = state_of(module, optimizer)
    checkpoints.wait()
    return folder, states


def files_of(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def newest(folder: Path) -> Path:
    """Return the folder of the newest checkpoint."""
    return max(path for path in folder.iterdir() if path.is_dir())


def flip(folder: Path, mark: Path, rng: random.Random) -> str:
    """Flip one bit of a file."""
    path = rng.choice([p for p in files_of(newest(folder)) if p.stat().st_size])
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data))
    data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"{path.name}: a bit of byte {place} of {len(data)}"


def truncate(folder: Path, mark: Path, rng: random.Random) -> str:
    """Remove the end of a file."""
    path = rng.choice(files_of(newest(folder)))
    size = rng.randrange(path.stat().st_size)
    path.write_bytes(path.read_bytes()[:size])
    return f"{path.name}: cut to {size} bytes"


def delete(folder: Path, mark: Path, rng: random.Random) -> str:
    """Remove a file."""
    path = rng.choice(files_of(newest(folder)))
    path.unlink()
    return f"{path.name}: removed"


def swap_steps(folder: Path, mark: Path, rng: random.Random) -> str:
    """Replace a file by that of the other step."""
    old, new = sorted(path for path in folder.iterdir() if path.is_dir())
    path = rng.choice(files_of(new))
    other = old / path.relative_to(new)
    if other.is_file():
        shutil.copy(other, path)
    return f"{path.name}: replaced by that of the other step"


def swap_files(folder: Path, mark: Path, rng: random.Random) -> str:
    """Swap the names of two files of a step."""
    a, b = rng.sample(files_of(newest(folder)), 2)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    return f"{a.name} and {b.name}: swapped"


def other_step(folder: Path, mark: Path, rng: random.Random) -> str:
    """Copy the folder of one step to the name of another."""
    old, new = sorted(path for path in folder.iterdir() if path.is_dir())
    target = rng.choice((new, new.with_name("step_000000007")))
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(old, target)
    return f"{old.name} copied to {target.name}"


def replace(folder: Path, mark: Path, rng: random.Random) -> str:
    """Replace a file by another kind of file."""
    path = rng.choice(files_of(newest(folder)))
    content = rng.choice((b"", b"null", b"{}", b"[" * 100_000, b"\x80\x04.", os.urandom(64)))
    path.write_bytes(content)
    return f"{path.name}: {content[:12]!r}"


def plant(folder: Path, mark: Path, rng: random.Random) -> str:
    """Replace a file by a pickle that writes a file, with matching checksums."""
    path = rng.choice(files_of(newest(folder)))
    code = pickle.dumps(Planted(mark))
    path.write_bytes(rng.choice((code, code + path.read_bytes())))
    if path.name != ABOUT:
        forge(newest(folder))
    return f"{path.name}: a pickle, with its checksum"


def plant_beside(folder: Path, mark: Path, rng: random.Random) -> str:
    """Add a pickle under a name that a reader may look for."""
    place = rng.choice((folder, newest(folder)))
    name = rng.choice(
        (".metadata", "__0_9.distcp", "state.pt", "others.pt", "rank_00001.safetensors")
    )
    (place / name).write_bytes(pickle.dumps(Planted(mark)))
    if place != folder:
        forge(place)
    return f"{name}: a pickle next to the files"


def forged_json(folder: Path, mark: Path, rng: random.Random) -> str:
    """Falsify a value in a JSON file, with matching checksums."""
    path = rng.choice([p for p in files_of(newest(folder)) if p.suffix == ".json"])
    damaged = WAYS[rng.choice(("structure", "falsified"))](path.read_text(encoding="utf-8"), rng)
    path.write_text(damaged.text, encoding="utf-8", errors="replace")
    forge(newest(folder))
    return f"{path.name}: {damaged.how}, with its checksum"


def forge(place: Path) -> None:
    """Write the checksums of the current files, as an attacker with write access could."""
    from autopar.checkpoint.files import about_text, checksums

    try:
        about = json.loads((place / ABOUT).read_text(encoding="utf-8"))
        about.pop("checksum", None)
        about["files"] = checksums(place, about["files"])
        (place / ABOUT).write_text(about_text(about), encoding="utf-8")
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        return  # the file with the checksums is itself damaged


def forged_bytes(folder: Path, mark: Path, rng: random.Random) -> str:
    """Truncate a file of tensors, or damage its header, with matching checksums."""
    path = rng.choice([p for p in files_of(newest(folder)) if p.suffix == ".safetensors"])
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.5:
        size = rng.randrange(len(data))
        how, data = f"cut to {size} bytes", data[:size]
    else:
        place = rng.randrange(end)
        data[place] ^= 1 << rng.randrange(8)
        how = f"a bit of byte {place} of the header"
    path.write_bytes(data)
    forge(newest(folder))
    return f"{path.name}: {how}, with its checksum"


DAMAGES: tuple[Callable[[Path, Path, random.Random], str], ...] = (
    flip,
    truncate,
    delete,
    swap_steps,
    swap_files,
    other_step,
    replace,
    plant,
    plant,
    plant_beside,
    forged_json,
    forged_json,
    forged_bytes,
)


def run(seed: int, notes: Notes) -> None:
    """Run the case of a seed.

    Raises:
        WrongResult: if code ran, another state was loaded, or a refusal changed the state.
        AutoparError: if autopar refuses.
    """
    rng = random.Random(seed)
    whole, states = saved()
    with tempfile.TemporaryDirectory() as scratch:
        folder, mark = Path(scratch) / "run", Path(scratch) / "mark"
        shutil.copytree(whole, folder)
        damage = rng.choice(DAMAGES)
        notes.entries["plan"] = damage.__name__
        notes.entries["damage"] = damage(folder, mark, rng)
        module, optimizer = training()
        before = state_of(module, optimizer)
        notes.phase = "load"
        try:
            step = autopar.Checkpoints(folder).load(module, optimizer)
        except AutoparError:
            if not same(before, state_of(module, optimizer)):
                raise WrongResult("the checkpoint was refused, but the state changed") from None
            raise
        finally:
            if mark.exists():
                raise WrongResult("code from a file ran")
        if not same(states.get(step, {}), state_of(module, optimizer)):
            raise WrongResult(f"loaded as step {step}, but the state is not that of step {step}")


def same(a: State, b: State) -> bool:
    """Return whether two states are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
