"""Programs for the remedies of checkpoints: folders, steps, additional states, and damaged
files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

import autopar
from autopar.checkpoint import companions, files, manager, rank_parts
from autopar.checkpoint import manager as saved
from autopar.checkpoint.rank_parts import collect_parts
from tests.support.old_checkpoints import forge
from tests.support.remedy_programs import Program

BATCH = {"x": torch.linspace(-1.0, 1.0, 32).reshape(8, 4)}
_FULL = OSError(28, "No space left on device")


class Net(nn.Module):
    """The mean square of a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


class Stateful:
    """An object with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Run:
    """A compiled model, an optimizer, and a folder."""

    def __init__(self, folder: Path, width: int = 4, keep: int = 3) -> None:
        self.folder = folder
        self.module: Any = autopar.compile(Net(width), example_inputs=BATCH, hardware="cpu-gloo")
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.checkpoints = autopar.Checkpoints(folder, keep=keep)

    def save(self, step: int = 1, **others: Any) -> Path:
        return self.checkpoints.save(step, self.module, **others)

    def load(self, **others: Any) -> int:
        return self.checkpoints.load(self.module, **others)

    def place(self, step: int) -> Path:
        return self.folder / f"step_{step:09d}"


def run_of(
    work: Callable[[Run], object], *, steps: int = 0, width: int = 4
) -> Callable[[], object]:
    """Run `work` on a run that has saved a number of steps."""

    def program() -> object:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(Path(folder), width)
            for step in range(steps):
                run.save(step + 1)
            return work(run)

    return program


def _with_patch(
    owner: Any, name: str, value: Any, work: Callable[[Run], object], **how: Any
) -> Callable[[], object]:
    """Run `work` with a patched attribute."""

    def patched(run: Run) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, value)
            return work(run)

    return run_of(patched, **how)


def _with_second_rank(
    module: ModuleType, other: Callable[[Any], Any], work: Callable[[Run], object], **how: Any
) -> Callable[[], object]:
    """Run `work` with a second rank whose value in comparisons is `other` of the value of the first
    rank."""
    return _with_patch(module, "of_all", lambda fact: [fact, other(fact)], work, **how)


def _raise(error: Exception) -> Callable[..., Any]:
    def raise_(*_: Any, **__: Any) -> Any:
        raise error

    return raise_


def _of_old_steps(work: Callable[[Run], object]) -> Callable[[Run], object]:
    """Run `work` without waiting for a shared folder."""

    def patched(run: Run) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saved, "SEEN_WITHIN_S", 0.001)
            patch.setattr(saved, "PAUSE_S", 0.001)
            return work(run)

    return patched


def _next_run(run: Run) -> Run:
    """Return the next process of a run."""
    return Run(run.folder)


def damage(run: Run, step: int, file: str = "contents.json") -> None:
    """Truncate a file to half of its size."""
    path = run.place(step) / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _with_head(saves: Callable[[Run, Any, Any], object]) -> Callable[[], object]:
    """Run `saves` with a head that is not compiled and an optimizer of both."""

    def work(run: Run) -> object:
        head = nn.Linear(4, 4)
        optimizer = torch.optim.SGD([*run.module.parameters(), *head.parameters()], lr=0.1)
        return saves(run, head, optimizer)

    return run_of(work)


def _lbfgs(run: Run) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(run.module.parameters())


def _critic(with_it: bool) -> Callable[[], object]:
    """Save the optimizer of a second compiled model."""

    def work(run: Run) -> object:
        critic: Any = autopar.compile(Net(4), example_inputs=BATCH, hardware="cpu-gloo")
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        return run.save(of_critic=optimizer, **({"critic": critic} if with_it else {}))

    return run_of(work)


def _term(whole: bool) -> Callable[[], object]:
    """Save a partial sum, or the full tensor."""

    def work(run: Run) -> object:
        x = DTensor.from_local(torch.ones(4), run.module.device_mesh, [Partial()])
        return run.save(state={"x": x.full_tensor() if whole else x})

    return run_of(work)


def _of_stage(average: bool) -> Callable[[], object]:
    """Save a copy of a parameter of one of two stages, or an average of the model instead."""

    def work(run: Run) -> object:
        if average:
            return run.save(average=torch.optim.swa_utils.AveragedModel(run.module))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(companions, "num_ranks", lambda: 2)
            return run.save(state={"x": run.module.get_parameter("layer.weight").detach()})

    return run_of(work)


def _old_and_new(loads: bool) -> Callable[[], object]:
    """Save from two runs into one folder."""

    def work(run: Run) -> object:
        other = _next_run(run)
        with pytest.MonkeyPatch.context() as patch:
            for module in (saved, manager):
                patch.setattr(module, "this_run", lambda: "another")
            other.save(1)
        return (run.load(), run.save(2)) if loads else run.save(2)

    return run_of(work)


def _elsewhere(run: Run) -> Path:
    return autopar.Checkpoints(run.folder / "elsewhere").save(1, run.module)


def _newer(version: int | None) -> Callable[[], object]:
    def work(run: Run) -> object:
        if version is not None:
            forge(run.place(1), lambda about: about.update(version=version))
        return run.load()

    return run_of(work, steps=1)


def _load_setting(saved: Any, here: Any) -> Callable[[], object]:
    """Load an optimizer whose setting differs from the saved one."""

    def work(run: Run) -> object:
        run.optimizer.param_groups[0]["note"] = saved
        run.save(optimizer=run.optimizer)
        run.optimizer.param_groups[0]["note"] = here
        return run.load(optimizer=run.optimizer)

    return run_of(work)


def _marks(mark: str) -> Callable[[], object]:
    """Collect the markers of two ranks. `mark` is the marker of the second rank."""

    def work(run: Run) -> object:
        saving = replace(run.checkpoints._collect(1, run.module, None, {}, None), num_ranks=2)
        (saving.place / "rank_00000.done").write_text("{}")
        if mark:
            (saving.place / f"rank_00001.{mark}").write_text(
                '"no space"' if mark == "failed" else "{}"
            )
        return files._collect_marks(saving)

    return _with_patch(files, "WITHIN_S", 0.0, work)


def _finish(absent: bool) -> Callable[[], object]:
    """Finish a checkpoint on the first rank, which may not see the files of the other ranks."""

    def work(run: Run) -> object:
        saving = run.checkpoints._collect(1, run.module, None, {}, None)
        sums = saving.write()
        return saving.finish({**sums, **({"rank_00001.safetensors": 3} if absent else {})})

    return run_of(work)


def _in_background(run: Run) -> None:
    run.checkpoints.async_save(1, run.module)
    run.checkpoints.wait()


def _save_value(value: Any) -> Callable[[], object]:
    return run_of(lambda run: run.save(kept=Stateful(value)))


def _sparse(value: Tensor) -> Callable[[], object]:
    return run_of(lambda run: collect_parts({"x": value}, "it", "", run.folder))


def _export_damaged(run: Run, step: int | None) -> int:
    """Export from a folder whose newest checkpoint is damaged."""
    damage(run, 2)
    return run.checkpoints.export(run.folder / "weights", step=step)


def _with_file_as_step(run: Run, step: int) -> Path:
    """Write a file with the name of a checkpoint, and return its path."""
    run.folder.mkdir(exist_ok=True)
    run.place(step).write_text("not a folder")
    return run.place(step)


def _load_from_file(run: Run, name: str) -> int:
    """Load from a path next to a file."""
    (run.folder / "file").write_text("not a folder")
    return autopar.Checkpoints(run.folder / name).load(run.module)


FOLDERS: dict[str, Program] = {
    "checkpoint/manager.py Checkpoints.steps 0": Program(
        _with_second_rank(
            saved, lambda fact: (), _of_old_steps(lambda run: run.checkpoints.steps()), steps=1
        ),
        "a folder that all machines share",
        _with_second_rank(saved, lambda fact: fact, lambda run: run.checkpoints.steps(), steps=1),
    ),
    "checkpoint/manager.py Checkpoints.load 0": Program(
        run_of(lambda run: (damage(run, 2), run.load()), steps=2),
        "remove it: step 1 is complete and is used instead",
        run_of(lambda run: (damage(run, 2), shutil.rmtree(run.place(2)), run.load()), steps=2),
    ),
    "checkpoint/manager.py Checkpoints.export 0": Program(
        run_of(lambda run: run.checkpoints.export(run.folder / "weights", step=5), steps=2),
        "choose one of steps 1, 2",
        run_of(lambda run: run.checkpoints.export(run.folder / "weights", step=2), steps=2),
    ),
    "checkpoint/manager.py Checkpoints.export 0 | empty": Program(
        run_of(lambda run: run.checkpoints.export(run.folder / "weights")),
        "the folder that Checkpoints saved into",
        run_of(lambda run: run.checkpoints.export(run.folder / "weights"), steps=1),
    ),
    "checkpoint/manager.py Checkpoints.export 1": Program(
        run_of(lambda run: _export_damaged(run, None), steps=2),
        "export another step: 1",
        run_of(lambda run: _export_damaged(run, 1), steps=2),
    ),
    "checkpoint/manager.py Checkpoints._begin_step 0": Program(
        run_of(lambda run: run.save(1), steps=2),
        "load a checkpoint before training",
        run_of(lambda run: run.save(run.load() + 1), steps=2),
    ),
    "checkpoint/manager.py Checkpoints._begin_step 0 | elsewhere": Program(
        run_of(lambda run: run.save(1), steps=2),
        "choose another folder",
        run_of(_elsewhere, steps=2),
    ),
    "checkpoint/manager.py Checkpoints._begin_step 0 | removed": Program(
        run_of(lambda run: run.save(1), steps=2),
        "remove the later steps",
        run_of(lambda run: (shutil.rmtree(run.place(2)), run.save(1)), steps=2),
    ),
    "checkpoint/run_folder.py check_folder 0": Program(
        run_of(lambda run: (_with_file_as_step(run, 1), run.load())),
        "move it away",
        run_of(lambda run: (_with_file_as_step(run, 1).unlink(), run.load())),
    ),
    "checkpoint/run_folder.py check_folder 0 | file": Program(
        run_of(lambda run: _load_from_file(run, "file")),
        "pass a readable folder",
        run_of(lambda run: _load_from_file(run, "folder")),
    ),
    "checkpoint/run_folder.py as_step 0": Program(
        run_of(lambda run: run.save(-1)),
        "the number of completed steps, an integer from 0 to 2**63 - 1",
        run_of(lambda run: run.save(0)),
    ),
    "checkpoint/files.py seen_by_all 0": Program(
        _with_second_rank(files, lambda fact: False, lambda run: run.save()),
        "a folder that all machines share",
        _with_second_rank(files, lambda fact: True, lambda run: run.save()),
    ),
    "checkpoint/manager.py check_no_other_run 0": Program(
        _old_and_new(False),
        "If this run is restarted, it continues after step 1",
        _old_and_new(True),
    ),
    "checkpoint/files.py _read_manifest 0": Program(
        _newer(99), f"read it with autopar {autopar.__version__}, which wrote it", _newer(None)
    ),
    "checkpoint/files.py Saving.finish 0": Program(
        _finish(True), "a folder that all machines share", _finish(False)
    ),
    "checkpoint/files.py Background.result 0": Program(
        _with_patch(rank_parts, "write_tensors", _raise(_FULL), _in_background),
        "free disk space",
        run_of(_in_background),
    ),
    "checkpoint/files.py _check_failed 0": Program(
        _marks("failed"), "free disk space", _marks("done")
    ),
    "checkpoint/files.py _collect_marks 0": Program(
        _marks(""), "check these ranks", _marks("done")
    ),
}

BESIDE: dict[str, Program] = {
    "checkpoint/companions.py ValueState.state 0": Program(
        _term(False), "the result of x.full_tensor()", _term(True)
    ),
    "checkpoint/companions.py ValueState.state 1": Program(
        _of_stage(False), "copies of weights as AveragedModel(pm)", _of_stage(True)
    ),
    "checkpoint/companions.py _check_own 0": Program(
        run_of(lambda run: run.save(optimizer="adamw")),
        "pass other objects by name",
        run_of(lambda run: run.save(extra={"optimizer": "adamw"})),
    ),
    "checkpoint/companions.py _check_own 1": Program(
        _with_head(lambda run, head, optimizer: run.save(optimizer=optimizer)),
        "save(step, pm, head=head, optimizer_of_both=optimizer)",
        _with_head(lambda run, head, optimizer: run.save(head=head, optimizer_of_both=optimizer)),
    ),
    "checkpoint/companions.py _check_own 2": Program(
        run_of(lambda run: run.save(optimizer=_lbfgs(run))),
        "save(step, pm, lbfgs=optimizer)",
        run_of(lambda run: (run.save(lbfgs=_lbfgs(run)), run.load(lbfgs=_lbfgs(run)))),
    ),
    "checkpoint/companions.py others_of 0": Program(
        _critic(False), "save(step, pm, optimizer, of_critic=..., critic=...)", _critic(True)
    ),
    "checkpoint/companions.py others_of 1": Program(
        run_of(lambda run: run.save(loader=3)),
        "or a dict of values",
        run_of(lambda run: run.save(loader={"at": 3})),
    ),
    "checkpoint/companions.py _check_alike 0": Program(
        _with_second_rank(
            companions, lambda marks: dict.fromkeys(marks, 0), lambda run: run.save(at={"step": 3})
        ),
        companions._ALIKE,
        _with_second_rank(companions, lambda marks: marks, lambda run: run.save(at={"step": 3})),
    ),
    "checkpoint/companions.py with_saved 0": Program(
        run_of(lambda run: (run.save(at={"a": 1}), run.load(there={}))),
        "with the same names",
        run_of(lambda run: (run.save(at={"a": 1}), run.load(at={}))),
    ),
    "checkpoint/companions.py with_saved 1": Program(
        run_of(lambda run: (run.save(head=nn.Linear(4, 4)), run.load(head={}))),
        "an object of the class that was saved",
        run_of(lambda run: (run.save(head=nn.Linear(4, 4)), run.load(head=nn.Linear(4, 4)))),
    ),
    "checkpoint/values.py _refuse 0": Program(
        _save_value(Path("x")), "numbers, strings", _save_value("x")
    ),
    "checkpoint/rank_parts.py _check_kind 0": Program(
        _sparse(torch.eye(4).to_sparse()),
        "save dense tensors",
        _sparse(torch.eye(4).to_sparse().to_dense()),
    ),
    "checkpoint/rank_parts.py collect_parts 0": Program(
        _with_patch(rank_parts, "name_box", _raise(_FULL), lambda run: run.save(2), steps=1),
        "Earlier checkpoints are unchanged",
        run_of(lambda run: run.save(2), steps=1),
    ),
    "checkpoint/state.py _check_same 0": Program(
        run_of(lambda run: run.load(optimizer=run.optimizer), steps=1),
        "load only the model: checkpoints.load(pm)",
        run_of(lambda run: run.load(), steps=1),
    ),
    "checkpoint/state.py _check_same 1": Program(
        run_of(lambda run: Run(run.folder, 8).load(), steps=1),
        "load it into the model and optimizer that were saved",
        run_of(lambda run: Run(run.folder, 4).load(), steps=1),
    ),
    "checkpoint/loading.py _check_fits 0": Program(
        _load_setting("a text", 3),
        "load it into the model and optimizer that were saved",
        _load_setting("a text", "another"),
    ),
    "checkpoint/loading.py load_parts 0": Program(
        _load_setting("a text", 3),
        "load it into the model and optimizer that were saved",
        _load_setting(3, 4),
    ),
}

PROGRAMS: dict[str, Program] = {**FOLDERS, **BESIDE}
