"""`Checkpoints`: what a training run saves, and what goes on from it on whatever devices are there
then.

A checkpoint is a folder, which torch.distributed.checkpoint divides among the ranks: the full model
and its optimizer's state under the model's names, whatever layouts and stages they were in, so that
another plan, another mesh or another number of processes loads its own parts. Nothing in it is a
pickle:

    rank_00000.safetensors, …   tensors: each rank wrote one file (`saved_tensors`)
    contents.json               which tensors are in which files, and optimizers' settings
                                (`saved_contents`)
    others.json, .safetensors   the states of what else was passed, such as a scheduler, but for
                                what is in parts (`saved_others`)
    plan.json                   the plan
    autopar.json                the step, the run, and a checksum of each file (`saved_files`)

It is written under another name, and renamed when all ranks' parts are there: a folder that has a
checkpoint's name is whole, unless it was damaged since. Each says which run saved it, by which a
run sees that another one saves into its folder (`saved_runs`).
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.checkpoint.companion_states import read_others
from autopar.checkpoint.companions import beside_of, others_of, parts_of, with_saved
from autopar.checkpoint.files import (
    ABOUT,
    FORMAT,
    PAUSE_S,
    SEEN_WITHIN_S,
    SHARE,
    VERSION,
    read_about,
    seen_by_all,
    sync_folder,
)
from autopar.checkpoint.parts import collect_parts
from autopar.checkpoint.state import keys_of_model, read_states, state_of
from autopar.checkpoint.weights import MAX_FILE_BYTES, export
from autopar.checkpoint.writing import Background, HostCopies, Saving
from autopar.core.json_text import read_json
from autopar.errors import RuntimeStateError, size_text
from autopar.runtime.parameter_module import holder_of
from autopar.runtime.rank_comm import by_all, by_first, num_ranks, of_all, rank
from autopar.version import VERSION as AUTOPAR_VERSION

# --------------------------------------------------------------------------------------------------
# Whether a folder of checkpoints is one run's alone, told from the checkpoints that are there:
# each says which run saved it.
#
# A run knows those that were there when it began, or when it last loaded, and its own. Any other
# was saved meanwhile by another run that is still going on. There is nothing to renew and nothing
# that a dead run leaves behind: whoever goes on after one knows what it saved. A folder gets its
# name only where there is none of that name, so that of two runs that save one step at once one
# does.


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
    strange = {
        step: run
        for step, run in runs_of(found).items()
        if run not in (known.get(step), this_run())
    }
    if strange:
        step = max(strange)
        what = (
            f"another run saves into this folder, too: step {step} is of {strange[step]}, this run"
            f" is {this_run()}"
        )
        remedy = (
            "let one of them go on: end the other, or name another folder. Started again, this one"
            f" goes on after step {max(found)}"
        )
        raise RuntimeStateError(what, remedy=remedy)


log = logging.getLogger("autopar")
_NAME = re.compile(r"step_(\d{9,})")
_KEPT = "Earlier checkpoints are as they were"


class Checkpoints:
    """The checkpoints of one training run, in a folder that all ranks see.

        checkpoints = autopar.Checkpoints("checkpoints")
        start = checkpoints.load(pm, optimizer)  # 0 where there is none
        for step in range(start, 1000):
            ...
            checkpoints.save(step + 1, pm, optimizer)

    Args:
        folder: made where it is not there.
        keep: how many stay; older ones are removed after each save.
        weights: whether the model's weights are in them; else the optimizer's state and what else
            is passed, beside weights that are saved in another way.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, weights: bool = True) -> None:
        if keep < 1:
            raise RuntimeStateError(f"keep={keep} checkpoints", remedy="keep at least one")
        self.folder, self.keep, self.weights = Path(folder), keep, weights
        self._known = runs_of(self._found())
        self._background: Background | None = None
        self._copies = HostCopies()

    def steps(self) -> tuple[int, ...]:
        """The steps of which there are checkpoints; every rank calls it.

        Raises:
            RuntimeStateError: where ranks see others.
        """
        self.wait()
        by_first(self._repair, str(self.folder))
        for _ in range(int(SEEN_WITHIN_S / PAUSE_S)):
            seen = of_all(tuple(sorted(self._found())))
            if len(set(seen)) == 1:
                break
            time.sleep(PAUSE_S)
        different = [number for number, steps in enumerate(seen) if steps != seen[0]]
        if different:
            what = (
                f"ranks {different} do not see the checkpoints that rank 0 sees:"
                f" {seen[different[0]]} against {seen[0]}"
            )
            raise RuntimeStateError(what, where=str(self.folder), remedy=SHARE)
        return seen[0]  # type: ignore[no-any-return]

    def save(
        self, step: int, module: nn.Module, optimizer: Optimizer | None = None, **others: Any
    ) -> Path:
        """Save after so many steps; every rank calls it.

        Args:
            module: what `autopar.compile` returned. optimizer: over its parameters.
            others: by name, what else goes on: modules, compiled or not (averages, critics), their
                optimizers, dicts of values, and what has `state_dict` and `load_state_dict`, such
                as a learning rate's scheduler. Distributed tensors in it are saved in parts; the
                rest has to be alike on all ranks.

        Returns:
            The checkpoint's folder.

        Raises:
            RuntimeStateError: on all ranks, where `module` is not compiled, others differ between
                ranks or hold what JSON and tensors cannot say, the folder has later steps or is not
                shared, another run saves into it, or it cannot be written to. The checkpoints that
                are there stay.
        """
        saving = self._collect(step, module, optimizer, others, None)
        free = size_text(shutil.disk_usage(self.folder).free)
        remedy = f"see the reason; {free} are free there. {_KEPT}"
        with self._another_run_first():
            sums = {
                name: of
                for each in by_all(saving.write, str(saving.place), remedy)
                for name, of in each.items()
            }
            by_first(lambda: self._finish(saving, sums), str(saving.place), remedy)
        return self._place(step)

    def async_save(
        self, step: int, module: nn.Module, optimizer: Optimizer | None = None, **others: Any
    ) -> Path:
        """Save while training goes on; every rank calls it, with arguments as of `save`.

        Each rank copies its part into the memory of the host, which takes less than a step as a
        rule, and writes the copy in the
        background: what training changes meanwhile is not saved. The checkpoint is there, and older
            ones are removed, when all ranks have
        written. A process that ends before leaves the checkpoints that were there, and a folder
        with the suffix ``.part``, which is never loaded. One checkpoint is written at a time: the
        next call of a method waits for it. The host's memory for the copy is kept for the next one.

        Returns:
            The folder that the checkpoint will have.

        Raises:
            RuntimeStateError: on all ranks, as `save`; also if the checkpoint that was written in
                the background before has failed. That one is reported by whichever method is called
                next, and by `wait`; the call then does nothing else.
        """
        saving = self._collect(step, module, optimizer, others, self._copies)
        self._copies.wait()
        self._background = Background(saving, self._finish)
        return self._place(step)

    def wait(self) -> None:
        """Wait for the checkpoint that is written in the background, if there is one; every rank
        calls it.

        Raises:
            RuntimeStateError: on all ranks, if it was not saved.
        """
        background, self._background = self._background, None
        if background is not None:
            with self._another_run_first():
                by_all(background.result, str(background.place))

    def load(self, module: nn.Module, optimizer: Optimizer | None = None, **others: Any) -> int:
        """Go on from the newest checkpoint; every rank calls it, with arguments as of `save`.

        Returns:
            After how many steps it was saved; 0 where there is none, and then nothing is changed.

        Raises:
            RuntimeStateError: on all ranks, where it is of another model or optimizer, some rank
                does not see it, or a file is not as it was written: then it says which earlier one
                is whole. Nothing is changed.
        """
        steps = self.steps()
        if rank() == 0 and (
            begun := [each.name for each in sorted(self.folder.glob("step_*.part"))]
        ):
            log.warning("not saved to the end, and not loaded: %s", ", ".join(begun))
        if not steps:
            return 0
        known = by_first(lambda: runs_of(self._found()), str(self.folder))
        self._known = {
            step: run for step, run in known.items() if step in steps
        }  # one that is saved meanwhile is of a run that goes on
        holder, place = holder_of(module), self._place(steps[-1])
        about, damage = self._read_about(steps[-1])
        if damage:
            raise RuntimeStateError(
                f"step {steps[-1]} is damaged: {damage}",
                where=str(place),
                remedy=self._remedy(steps),
            )
        saved = read_others(place)
        beside = with_saved(others_of(holder, others), saved, place, others)
        missed = read_states(place, [*parts_of(holder, optimizer, weights=self.weights), *beside])
        left = (*missed, *(name for name in saved.kinds if name not in others))
        if about["random_state"] is not None and (
            holder.random_state is not None or holder.variants is not None
        ):
            holder.random_state = about["random_state"]
        if rank() == 0:
            log.warning("going on after step %d, saved on mesh %s", steps[-1], about["mesh"])
            if left:
                log.warning("saved there and not asked for: %s", ", ".join(left))
        return steps[-1]

    def export(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> int:
        """Write the weights of a checkpoint as safetensors, which ``from_pretrained`` reads. Every
        rank calls it, or one process alone, which needs no mesh and no GPU.

        Args:
            step: of which; by default the newest. folder, dtype, max_file_bytes: as of
                `autopar.save_weights`.

        Returns:
            The step.

        Raises:
            RuntimeStateError: on all ranks, where there is no such checkpoint, it is damaged, or
                the folder cannot be written to.
        """
        steps = self.steps()
        if not steps or step not in (None, *steps):
            what = (
                "there is no checkpoint"
                if step is None
                else f"there is no checkpoint of step {step}"
            )
            remedy = (
                f"there are steps {', '.join(map(str, steps))}"
                if steps
                else "name the folder that Checkpoints saved into"
            )
            raise RuntimeStateError(what, where=str(self.folder), remedy=remedy)
        newest = steps[-1] if step is None else step
        place, (about, damage) = self._place(newest), self._read_about(newest)
        if damage:
            others = ", ".join(str(each) for each in steps if each != newest)
            remedy = (
                f"export another step: {others}"
                if others
                else "copy it again from where it was saved: there is no other"
            )
            raise RuntimeStateError(
                f"{place.name} is damaged: {damage}", where=str(place), remedy=remedy
            )
        export(
            place, keys_of_model(place, about.get("tied", {})), Path(folder), dtype, max_file_bytes
        )
        return int(about["step"])

    def _read_about(self, step: int) -> tuple[Mapping[str, Any], str]:
        """What is said beside the checkpoint of a step, and what is damaged; every rank calls
        it."""
        about, damage = read_about(self._place(step))
        if not damage and about.get("step") != step:
            damage = f"it was saved as step {about.get('step')}, and its folder was renamed since"
        return about, damage

    def _remedy(self, steps: Sequence[int]) -> str:
        """What to do where the newest of these is damaged; every rank calls it."""
        for number, step in enumerate(reversed(steps[:-1]), start=1):
            try:
                damage = self._read_about(step)[1]
            except RuntimeStateError as refusal:
                damage = refusal.what
            if not damage:
                others = (
                    f" and {', '.join(map(str, steps[-number:-1]))}, damaged too"
                    if number > 1
                    else ""
                )
                return f"remove it{others}: step {step} is whole, and is taken then"
        return "remove it to begin anew: " + (
            "no earlier one is whole" if len(steps) > 1 else "there is no earlier one"
        )

    def _place(self, step: int) -> Path:
        return self.folder / f"step_{step:09d}"

    def _part(self, step: int, run: str) -> Path:
        return self._place(step).with_suffix(f".{run}.part")

    def _found(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        matches = (
            (_NAME.fullmatch(each.name), each) for each in self.folder.iterdir() if each.is_dir()
        )
        return {int(match[1]): each for match, each in matches if match}

    def _repair(self) -> None:
        """Put back what was about to be replaced when the process ended."""
        for before in self.folder.glob("step_*.old"):
            target = before.with_suffix("")
            if target.exists():
                shutil.rmtree(before)
            else:
                before.rename(target)

    def _check_alone(self) -> None:
        check_alone(self._known, self._found())

    def _begun(self, step: int) -> str:
        """Make an empty folder to write into, where this run may save that step; the run, of
        which it is."""
        found = self._found()
        check_alone(self._known, found)
        if later := [n for n in sorted(found) if n > step]:
            what = f"step {step} is not saved beside later ones: {', '.join(map(str, later))}"
            raise RuntimeStateError(
                what, remedy="load before you train, remove those, or name another folder"
            )
        writing = self._part(step, this_run())
        if writing.exists():
            shutil.rmtree(writing)
        writing.mkdir(parents=True)
        return this_run()

    def _collect(
        self,
        step: int,
        module: nn.Module,
        optimizer: Optimizer | None,
        others: Mapping[str, Any],
        copies: HostCopies | None,
    ) -> Saving:
        """What this rank writes, in a folder that all ranks see; `copies` makes copies of it.
        Every rank calls it."""
        self.wait()
        if not isinstance(step, int) or step < 0:
            raise RuntimeStateError(
                f"step={step!r} is no number of steps",
                remedy="pass how many steps were made, from 0",
            )
        holder = holder_of(module)
        parts = parts_of(holder, optimizer, weights=self.weights)
        beside, written = beside_of(holder, others)
        holder.check_values()
        run = by_first(
            lambda: self._begun(step), str(self.folder), "name a folder that can be written to"
        )
        writing, state = self._part(step, run), state_of([*parts, *beside.values()])
        with self._another_run_first():
            seen_by_all(writing, SEEN_WITHIN_S)
            own = collect_parts(state, f"step {step}", _KEPT, writing, copies)
        tied = {
            name: names[0]
            for each in of_all(holder.same_names())
            for names in each.values()
            for name in names[1:]
        }
        plan = getattr(holder, "plan", None)
        about = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "mesh": "" if plan is None else str(plan.mesh),
            "plan": "" if plan is None else plan.hash,
            "random_state": holder.random_state,
            "world_size": num_ranks(),
            "run": run,
            "tied": tied,
            "autopar": AUTOPAR_VERSION,
            "torch": torch.__version__,
        }
        return Saving(
            step,
            writing,
            rank(),
            num_ranks(),
            own,
            written if copies is None else written.copied(copies),
            about,
            plan,
        )

    @contextmanager
    def _another_run_first(self) -> Iterator[None]:
        """What fails on all ranks may come from another run, which removes what was begun: that
        is said first."""
        try:
            yield
        except RuntimeStateError:
            by_first(self._check_alone, str(self.folder))
            raise

    def _finish(self, saving: Saving, sums: Mapping[str, int]) -> None:
        """Name the checkpoint, whose files have these checksums; remove those that are too many,
        and what was begun and not ended."""
        saving.finish(sums)
        step = saving.step
        before = self._named(step, saving.place)
        sync_folder(self.folder)
        found = self._found()
        begun = (
            each
            for each in self.folder.glob("step_*.part")
            if (match := _NAME.match(each.name)) and int(match[1]) <= step
        )
        for old in (before, *begun, *(found[n] for n in sorted(found)[: -self.keep])):
            shutil.rmtree(old, ignore_errors=True)

    def _named(self, step: int, writing: Path) -> Path:
        """Give the checkpoint its name; where one that bore it is now, if any did."""
        found, target = self._found(), self._place(step)
        check_alone(self._known, found)
        before = target.with_suffix(".old")
        if (
            step in found
            # saved again: the one that is whole is put back (`_repair`) where this ends before the
            # other has its name
        ):
            target.rename(before)
            try:
                check_alone(self._known, {step: before})
            except RuntimeStateError:
                self._repair()
                raise
        writing.rename(target)  # fails where another run has saved that step by now
        return before
