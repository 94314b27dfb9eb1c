"""`Checkpoints`, which saves training runs and resumes them on any number of devices.

A checkpoint is a folder. It contains the full model and the state of its optimizer under the
model's names, independently of layouts and stages, so that another plan, mesh or number of
processes can load it. torch.distributed.checkpoint divides the writing among the ranks. No file is
a pickle:

    rank_00000.safetensors, …   tensors; each rank writes one file
                                (`autopar.checkpoint.safetensors_files`)
    contents.json               the files that contain each tensor, and the settings of optimizers
                                (`autopar.checkpoint.contents`)
    others.json, .safetensors   the states of companions, such as a scheduler, except distributed
                                tensors (`autopar.checkpoint.companions`)
    plan.json                   the plan
    autopar.json                the step, the run, and a checksum of each file
                                (`autopar.checkpoint.files`)

A checkpoint is written into a temporary folder, which is renamed when all ranks' parts are
complete. A folder with the name of a checkpoint is therefore complete, unless it was damaged later.
`autopar.json` names the run that saved the checkpoint. A run uses it to detect that another run
saves into the same folder.
"""

from __future__ import annotations

import functools
import logging
import os
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

from autopar.checkpoint.companions import (
    collect_companions,
    others_of,
    parts_of,
    read_others,
    with_saved,
)
from autopar.checkpoint.files import (
    ABOUT,
    FORMAT,
    PAUSE_S,
    SEEN_WITHIN_S,
    SHARE,
    VERSION,
    Background,
    HostCopies,
    Saving,
    read_about,
    seen_by_all,
    sync_folder,
)
from autopar.checkpoint.rank_parts import collect_parts
from autopar.checkpoint.run_folder import (
    NAME,
    as_integer,
    as_step,
    check_folder,
    find_checkpoints,
)
from autopar.checkpoint.state import check_tied, keys_of_model, read_states, state_of
from autopar.checkpoint.weights import MAX_FILE_BYTES, export
from autopar.core.json_text import read_json
from autopar.core.text_files import read_text
from autopar.errors import RuntimeStateError, size_text
from autopar.runtime.parameter_module import holder_of
from autopar.runtime.rank_comm import by_all, by_first, num_ranks, of_all, rank
from autopar.version import VERSION as AUTOPAR_VERSION

# --------------------------------------------------------------------------------------------------
# Detection of another run that saves into the same folder.
#
# A run knows the checkpoints that existed when it started or last loaded, and those that it saved.
# Any other checkpoint was saved by another run that is still active. Unlike a lock, this needs no
# renewal, and a run that ends leaves nothing behind. A folder is renamed only if the target does
# not exist, so that only one of two runs that save the same step at the same time succeeds.


def this_run() -> str:
    """Return the name of this run: host, process id and a random number. All ranks use the name of
    the first rank."""
    return _run_of_process(os.getpid())


@functools.cache
def _run_of_process(pid: int) -> str:  # cached by process, since a fork inherits the cache
    return f"{socket.gethostname()}-{pid}-{uuid.uuid4().hex[:8]}"


def runs_of(found: Mapping[int, Path]) -> dict[int, str]:
    """Return the name of the run that saved each step. Checkpoints without a name, such as damaged
    ones, are left out."""
    runs = {}
    for step, place in found.items():
        try:
            runs[step] = str(read_json(read_text(place / ABOUT))["run"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return runs


def check_no_other_run(known: Mapping[int, str], found: Mapping[int, Path]) -> None:
    """Check that all checkpoints of a folder are known or belong to this run.

    Args:
        known: the runs of the known checkpoints, by step.
        found: the folders of the checkpoints that exist, by step.

    Raises:
        RuntimeStateError: if another run also saves into the folder.
    """
    foreign = {
        step: run
        for step, run in runs_of(found).items()
        if run not in (known.get(step), this_run())
    }
    if foreign:
        step = max(foreign)
        what = (
            f"another run also saves into this folder: step {step} was saved by {foreign[step]},"
            f" this run is {this_run()}"
        )
        remedy = (
            "end one of the two runs, or choose another folder. If this run is restarted, it"
            f" continues after step {max(found)}"
        )
        raise RuntimeStateError(what, remedy=remedy)


log = logging.getLogger("autopar")
_KEPT = "Earlier checkpoints are unchanged"


class Checkpoints:
    """The checkpoints of one training run, in a folder that all ranks see.

        checkpoints = autopar.Checkpoints("checkpoints")
        start = checkpoints.load(pm, optimizer)  # 0 if there is no checkpoint
        for step in range(start, 1000):
            ...
            checkpoints.save(step + 1, pm, optimizer)

    Args:
        folder: the folder of the checkpoints. It is created if it does not exist.
        keep: the number of checkpoints to keep. Older ones are removed after each save.
        weights: whether the model's weights are saved. If False, only the optimizer's state and
            other objects are saved, and the weights must be saved in another way.

    Raises:
        RuntimeStateError: if `keep` is not an integer of at least 1. A path that is not a folder
            is reported when checkpoints are saved or loaded.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, weights: bool = True) -> None:
        kept = as_integer(keep)
        if kept is None or kept < 1:
            raise RuntimeStateError(f"keep={keep!r} checkpoints", remedy="keep at least one")
        # absolute, so that a later change of the working directory has no effect
        self.folder, self.keep, self.weights = Path(folder).absolute(), kept, weights
        self._known = runs_of(self._find_checkpoints())
        self._background: Background | None = None
        self._copies = HostCopies()

    def steps(self) -> tuple[int, ...]:
        """Return the steps of the existing checkpoints in ascending order. Every rank must call
        this.

        Raises:
            RuntimeStateError: if ranks see different checkpoints, or the path is not a folder that
                can be read, or a file has the name of a checkpoint.
        """
        self.wait()
        by_first(self._repair, str(self.folder))
        for _ in range(int(SEEN_WITHIN_S / PAUSE_S)):
            seen = of_all(tuple(sorted(self._find_checkpoints())))
            if len(set(seen)) == 1:
                break
            time.sleep(PAUSE_S)
        different = [number for number, steps in enumerate(seen) if steps != seen[0]]
        if different:
            what = (
                f"ranks {different} see different checkpoints from rank 0:"
                f" {seen[different[0]]} instead of {seen[0]}"
            )
            raise RuntimeStateError(what, where=str(self.folder), remedy=SHARE)
        return seen[0]

    def save(
        self, step: int, module: nn.Module, optimizer: Optimizer | None = None, **others: Any
    ) -> Path:
        """Save a checkpoint. Every rank must call this.

        Args:
            step: the number of completed training steps, an integer from 0 to 2**63 - 1.
            module: the result of `autopar.compile`.
            optimizer: the optimizer over the module's parameters, or None.
            others: other objects to save, by name: modules, compiled or not (averages, critics),
                their optimizers, dicts of values, and objects with `state_dict` and
                `load_state_dict`, such as a learning rate scheduler. Each rank saves its shards of
                distributed tensors. All other values must be equal on all ranks.

        Returns:
            The checkpoint's folder.

        Raises:
            RuntimeStateError: on all ranks, if `step` is not such an integer, `module` is not
                compiled, `others` differ between ranks or have values that cannot be written as
                JSON and tensors, the folder has later steps or is not shared, another run saves
                into it, or it is not writable. Existing checkpoints are unchanged.
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
        return self._place(saving.step)

    def async_save(
        self, step: int, module: nn.Module, optimizer: Optimizer | None = None, **others: Any
    ) -> Path:
        """Save a checkpoint in the background while training continues. Every rank must call this.

        Each rank copies its part to host memory, which usually takes less time than a training
        step, and writes the copy in the background. Later changes of the tensors are not saved.
        When all ranks have written their parts, the checkpoint is complete, and older checkpoints
        are removed. If a process ends earlier, existing checkpoints are unchanged, and a folder
        with the suffix ``.part`` remains, which is never loaded. Only one checkpoint is written at
        a time: the next call of a method waits for it. The host memory of the copy is reused for
        the next checkpoint.

        Args:
            step, module, optimizer, others: see `save`.

        Returns:
            The folder of the checkpoint. It exists when the checkpoint is complete.

        Raises:
            RuntimeStateError: on all ranks, under the conditions of `save`, or if the previous
                checkpoint could not be written in the background. The next call of any method
                reports that failure and does nothing else.
        """
        saving = self._collect(step, module, optimizer, others, self._copies)
        self._copies.wait()
        self._background = Background(saving, self._finish)
        return self._place(saving.step)

    def wait(self) -> None:
        """Wait until the checkpoint in the background, if any, is written. Every rank must call
        this.

        Raises:
            RuntimeStateError: on all ranks, if the checkpoint could not be saved.
        """
        background, self._background = self._background, None
        if background is not None:
            with self._another_run_first():
                by_all(background.result, str(background.place))

    def load(self, module: nn.Module, optimizer: Optimizer | None = None, **others: Any) -> int:
        """Load the newest checkpoint. Every rank must call this.

        Args:
            module: the result of `autopar.compile`.
            optimizer: the optimizer over the module's parameters, or None.
            others: the other objects to load, under the names with which they were saved.

        Returns:
            The number of training steps after which the checkpoint was saved. If there is no
            checkpoint, the result is 0 and no object is changed.

        Raises:
            RuntimeStateError: on all ranks, if the checkpoint belongs to another model or
                optimizer, a rank does not see it, or a file is damaged; also as `steps`. If a file
                is damaged, the message names the newest earlier checkpoint without damage. No
                object is changed.
        """
        steps = self.steps()
        if rank() == 0 and (
            unfinished := [each.name for each in sorted(self.folder.glob("step_*.part"))]
        ):
            log.warning("incomplete checkpoints are not loaded: %s", ", ".join(unfinished))
        if not steps:
            return 0
        known = by_first(lambda: runs_of(self._find_checkpoints()), str(self.folder))
        # a checkpoint that was saved after `steps` was read belongs to another active run
        self._known = {step: run for step, run in known.items() if step in steps}
        holder, place = holder_of(module), self._place(steps[-1])
        about, damage = self._read_about(steps[-1])
        if damage:
            raise RuntimeStateError(
                f"step {steps[-1]} is damaged: {damage}",
                where=str(place),
                remedy=self._remedy(steps),
            )
        check_tied(holder.same_names().values(), about.get("tied"), place)
        saved = read_others(place)
        companions = with_saved(others_of(holder, others), saved, place, others)
        missed = read_states(
            place, [*parts_of(holder, optimizer, weights=self.weights), *companions]
        )
        left = (*missed, *(name for name in saved.kinds if name not in others))
        if about["random_state"] is not None and (
            holder.random_state is not None or holder.variants is not None
        ):
            holder.random_state = about["random_state"]
        if rank() == 0:
            log.warning("continuing after step %d, saved on mesh %s", steps[-1], about["mesh"])
            if left:
                log.warning("saved in the checkpoint but not loaded: %s", ", ".join(left))
        return steps[-1]

    def export(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> int:
        """Write the weights of a checkpoint as safetensors files, which ``from_pretrained`` reads.
        Either every rank calls this, or a single process, which needs no mesh and no GPU.

        Args:
            folder: the folder of the weights. It is created if it does not exist.
            step: the step of the checkpoint; by default, the newest step.
            dtype, max_file_bytes: see `autopar.save_weights`.

        Returns:
            The step.

        Raises:
            RuntimeStateError: on all ranks, if there is no such checkpoint, it is damaged, or the
                folder is not writable.
        """
        step = None if step is None else as_step(step)
        steps = self.steps()
        if not steps or step not in (None, *steps):
            what = (
                "no checkpoint exists" if step is None else f"no checkpoint of step {step} exists"
            )
            remedy = (
                f"choose one of steps {', '.join(map(str, steps))}"
                if steps
                else "pass the folder that Checkpoints saved into"
            )
            raise RuntimeStateError(what, where=str(self.folder), remedy=remedy)
        newest = steps[-1] if step is None else step
        place, (about, damage) = self._place(newest), self._read_about(newest)
        if damage:
            others = ", ".join(str(each) for each in steps if each != newest)
            remedy = (
                f"export another step: {others}"
                if others
                else "copy it again from its source: no other checkpoint exists"
            )
            raise RuntimeStateError(
                f"{place.name} is damaged: {damage}", where=str(place), remedy=remedy
            )
        if about.get("has_hooks") and rank() == 0:
            log.warning(
                "the weights are exported without the model's state dict hooks: the files contain"
                " the values of parameters under their names"
            )
        export(
            place, keys_of_model(place, about.get("tied", {})), Path(folder), dtype, max_file_bytes
        )
        return int(about["step"])

    def _read_about(self, step: int) -> tuple[Mapping[str, Any], str]:
        """Return the content of a step's `autopar.json`, and a description of the damage, which is
        empty if there is none. Every rank must call this."""
        about, damage = read_about(self._place(step))
        if not damage and about.get("step") != step:
            damage = f"it was saved as step {about.get('step')}, and its folder was renamed"
        return about, damage

    def _remedy(self, steps: Sequence[int]) -> str:
        """Return the remedy for a damaged newest step. Every rank must call this."""
        for number, step in enumerate(reversed(steps[:-1]), start=1):
            try:
                damage = self._read_about(step)[1]
            except RuntimeStateError as refusal:
                damage = refusal.what
            if not damage:
                others = (
                    f" and {', '.join(map(str, steps[-number:-1]))}, which are damaged too"
                    if number > 1
                    else ""
                )
                return f"remove it{others}: step {step} is complete and is used instead"
        return "remove it to start from the beginning: " + (
            "no earlier checkpoint is complete"
            if len(steps) > 1
            else "no earlier checkpoint exists"
        )

    def _place(self, step: int) -> Path:
        return self.folder / f"step_{step:09d}"

    def _part(self, step: int, run: str) -> Path:
        return self._place(step).with_suffix(f".{run}.part")

    def _find_checkpoints(self) -> dict[int, Path]:
        """Return the folders of the checkpoints that this rank sees, by step."""
        return find_checkpoints(self.folder)

    def _repair(self) -> None:
        """Restore checkpoints whose replacement was interrupted, and remove replaced
        checkpoints."""
        check_folder(self.folder)
        for before in self.folder.glob("step_*.old"):
            target = before.with_suffix("")
            if target.exists():
                shutil.rmtree(before)
            else:
                before.rename(target)

    def _check_alone(self) -> None:
        check_no_other_run(self._known, self._find_checkpoints())

    def _begin_step(self, step: int) -> str:
        """Check that this run may save a step, and create an empty folder to write into. Return the
        name of the run."""
        check_folder(self.folder)
        found = self._find_checkpoints()
        check_no_other_run(self._known, found)
        if later := [n for n in sorted(found) if n > step]:
            what = (
                f"step {step} cannot be saved because later steps exist:"
                f" {', '.join(map(str, later))}"
            )
            raise RuntimeStateError(
                what,
                remedy=(
                    "load a checkpoint before training, remove the later steps, or choose another"
                    " folder"
                ),
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
        """Collect the content that this rank writes. Every rank must call this.

        Args:
            step, module, optimizer, others: see `save`.
            copies: copies the tensors to the host; if None, tensors are not copied.
        """
        self.wait()
        step = as_step(step)
        holder = holder_of(module)
        parts = parts_of(holder, optimizer, weights=self.weights)
        companions, written = collect_companions(holder, others)
        holder.check_values()
        run = by_first(lambda: self._begin_step(step), str(self.folder), "choose a writable folder")
        writing, state = self._part(step, run), state_of([*parts, *companions.values()])
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
            "has_hooks": bool(holder.model_hooks.saving),
            "autopar": AUTOPAR_VERSION,
            "torch": torch.__version__,
        }
        return Saving(
            step,
            writing,
            rank(),
            num_ranks(),
            own,
            written if copies is None else written.with_copies(copies),
            about,
            plan,
        )

    @contextmanager
    def _another_run_first(self) -> Iterator[None]:
        """A context that, if its body fails on all ranks, first checks whether another run saves
        into the folder. Such a run may have caused the failure by removing the unfinished
        folder."""
        try:
            yield
        except RuntimeStateError:
            by_first(self._check_alone, str(self.folder))
            raise

    def _finish(self, saving: Saving, sums: Mapping[str, int]) -> None:
        """Complete and rename a checkpoint. Remove old checkpoints, and unfinished folders of this
        and earlier steps.

        Args:
            saving: the content that this rank has written.
            sums: the checksum of each file of all ranks, by file name.
        """
        saving.finish(sums)
        step = saving.step
        before = self._rename_finished(step, saving.place)
        sync_folder(self.folder)
        found = self._find_checkpoints()
        unfinished = (
            each
            for each in self.folder.glob("step_*.part")
            if (match := NAME.match(each.name)) and int(match[1]) <= step
        )
        for old in (before, *unfinished, *(found[n] for n in sorted(found)[: -self.keep])):
            shutil.rmtree(old, ignore_errors=True)

    def _rename_finished(self, step: int, writing: Path) -> Path:
        """Rename the folder to the name of the checkpoint. Return the path of the replaced
        checkpoint, which exists only if a checkpoint was replaced."""
        found, target = self._find_checkpoints(), self._place(step)
        check_no_other_run(self._known, found)
        before = target.with_suffix(".old")
        if step in found:
            # if the process ends before the folder is renamed, `_repair` restores the checkpoint
            target.rename(before)
            try:
                check_no_other_run(self._known, {step: before})
            except RuntimeStateError:
                self._repair()
                raise
        writing.rename(target)  # fails if another run has saved this step in the meantime
        return before
