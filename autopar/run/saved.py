"""`Checkpoints`: what a training run saves, and what goes on from it on whatever devices are there then.

A checkpoint is a folder that torch.distributed.checkpoint writes: the full model and its optimizer's state under the model's names,
whatever layouts and stages they rested in, so that another plan, another mesh or another number of processes loads its own parts.
Beside it stand `plan.json` and `autopar.json`, which says of which step it is. It is written under another name and renamed when all
ranks have written their parts: a folder that bears a checkpoint's name is whole.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from autopar.errors import RuntimeStateError
from autopar.run.holder import Holder
from autopar.version import VERSION as AUTOPAR_VERSION

log = logging.getLogger("autopar")
FORMAT, VERSION = "autopar-checkpoint", 1
_NAME = re.compile(r"step_(\d{9,})")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameters, of which each stage has others


class Checkpoints:
    """The checkpoints of a training run, in a folder that all ranks see.

        checkpoints = autopar.Checkpoints("checkpoints")
        start = checkpoints.load(pm, optimizer)  # 0 where there is none
        for step in range(start, 1000):
            ...
            checkpoints.save(step + 1, pm, optimizer)

    Args:
        folder: made where it is not there.
        keep: how many stay; older ones are removed after each save.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise RuntimeStateError(f"keep={keep} checkpoints", remedy="keep at least one")
        self.folder, self.keep = Path(folder), keep

    def steps(self) -> tuple[int, ...]:
        """The steps of which there are checkpoints, as the first rank sees them; the same on all ranks."""
        found = self._found() if _rank() == 0 else {}
        return _of_first(tuple(sorted(found)))

    def save(self, step: int, module: nn.Module, optimizer: Optimizer | None = None, **others: Any) -> Path:
        """Save after so many steps; every rank calls it.

        Args:
            module: what `autopar.compile` returned. optimizer: over its parameters.
            others: by name, what has `state_dict` and `load_state_dict` and is alike on all ranks, such as a learning rate's scheduler.

        Returns:
            The checkpoint's folder.

        Raises:
            RuntimeStateError: where `module` is not compiled, or a rank cannot write.
        """
        holder = _holder(module)
        target = self._place(step)
        writing = target.with_suffix(".part")
        if _rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(writing, ignore_errors=True)
        _wait()
        state = {**_model_state(holder), **_optimizer_state(holder, optimizer)}
        beside = {name: _stateful(name, other).state_dict() for name, other in others.items()}
        try:
            dcp.save(state, checkpoint_id=writing)
        except dcp.api.CheckpointException as error:
            raise RuntimeStateError(f"step {step} was not saved: {_reasons(error)}", where=str(writing), remedy="see the reason") from error
        if _rank() == 0:
            torch.save(beside, writing / "others.pt")
            self._finish(step, holder, writing)
        _wait()
        return target

    def load(self, module: nn.Module, optimizer: Optimizer | None = None, **others: Any) -> int:
        """Go on from the newest checkpoint; every rank calls it, with arguments as of `save`.

        Returns:
            After how many steps it was saved; 0 where there is none, and then nothing is changed.

        Raises:
            RuntimeStateError: where it is of another model or optimizer, or some rank does not see it. Nothing is changed then.
        """
        steps = self.steps()
        if not steps:
            return 0
        holder, place = _holder(module), self._place(steps[-1])
        self._seen_by_all(place)
        about, beside = _read(place), _beside(place, others)
        _load(place, holder, optimizer)
        for name, other in others.items():
            other.load_state_dict(beside[name])
        if about["random_state"] is not None and holder.random_state is not None:
            holder.random_state = about["random_state"]
        if _rank() == 0:
            log.info("going on after step %d, saved on mesh %s with plan %s", steps[-1], about["mesh"], about["plan"])
        return steps[-1]

    def plan(self) -> str | None:
        """The text of the newest checkpoint's plan; None where there is none."""
        steps = self.steps()
        return _of_first(_text_of(self._place(steps[-1]) / "plan.json")) if steps else None

    def _place(self, step: int) -> Path:
        return self.folder / f"step_{step:09d}"

    def _found(self) -> dict[int, Path]:
        if not self.folder.is_dir():
            return {}
        matches = ((_NAME.fullmatch(each.name), each) for each in self.folder.iterdir() if each.is_dir())
        return {int(match[1]): each for match, each in matches if match}

    def _finish(self, step: int, holder: Holder, writing: Path) -> None:
        """Name the checkpoint, then remove those that are too many, and what was begun before and not ended."""
        plan, target = getattr(holder, "plan", None), self._place(step)
        about = {
            "format": FORMAT, "version": VERSION, "step": step, "mesh": "" if plan is None else str(plan.mesh),
            "plan": "" if plan is None else plan.hash, "random_state": holder.random_state, "world_size": _world(),
            "autopar": AUTOPAR_VERSION, "torch": torch.__version__,
        }  # fmt: skip
        (writing / "autopar.json").write_text(json.dumps(about, indent=1) + "\n")
        if plan is not None:
            plan.save(writing / "plan.json")
        before = target.with_suffix(".old")
        if target.exists():  # saved again after going back: the one that is whole stays until the other is
            target.rename(before)
        writing.rename(target)
        shutil.rmtree(before, ignore_errors=True)
        found = self._found()
        for old in sorted(found)[: -self.keep]:
            shutil.rmtree(found[old], ignore_errors=True)

    def _seen_by_all(self, place: Path) -> None:
        blind = [rank for rank, sees in enumerate(_of_all((place / "autopar.json").is_file())) if not sees]
        if blind:
            what = f"ranks {blind} do not see the checkpoint that rank 0 sees"
            raise RuntimeStateError(what, where=str(place), remedy="put checkpoints into a folder that all nodes share")


def _load(place: Path, holder: Holder, optimizer: Optimizer | None) -> None:
    """Read the model, where it lies, and the optimizer's state."""
    saved = FileSystemReader(place).read_metadata()
    model, fresh = _model_state(holder), optimizer is not None and not optimizer.state
    state = _optimizer_state(holder, optimizer)
    never = _never_stepped(state, saved)
    wanted = {**model, **{key: value for key, value in state.items() if key not in never}}
    try:
        _check_same(wanted, saved, place)
    except RuntimeStateError:
        if optimizer is not None and fresh:  # torch has made one, to know what there is to load
            optimizer.state.clear()
        raise
    dcp.load(wanted, checkpoint_id=place)
    if optimizer is not None:
        given = {key.removeprefix("optimizer."): value for key, value in {**state, **wanted}.items() if key.startswith("optimizer.")}
        set_optimizer_state_dict(holder, optimizer, given, options=_FLAT)
        _forget(holder, optimizer, never)


def _beside(place: Path, others: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was saved of `others`, by name."""
    for name, other in others.items():
        _stateful(name, other)
    found = torch.load(place / "others.pt", weights_only=True)
    missing = [name for name in others if name not in found]
    if missing:
        what = f"the checkpoint has no {missing[0]!r}" + (f"; it has {', '.join(found)}" if found else "")
        raise RuntimeStateError(what, where=str(place), remedy="save and load with the same names")
    return found  # type: ignore[no-any-return]


def _read(place: Path) -> Mapping[str, Any]:
    about = json.loads((place / "autopar.json").read_text())
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        what = f"the checkpoint is of format {about.get('format')!r}, version {about.get('version')!r}"
        raise RuntimeStateError(what, where=str(place), remedy=f"this autopar reads {FORMAT!r}, version {VERSION}")
    return about  # type: ignore[no-any-return]


def _holder(module: nn.Module) -> Holder:
    """The compiled module; of one that was planned at its first call, what stands behind it."""
    found = module if isinstance(module, Holder) else module._modules.get("module")
    if not isinstance(found, Holder):
        what = f"{type(module).__name__} is not compiled, or was not called yet"
        raise RuntimeStateError(what, remedy="pass what autopar.compile(model, mesh, example_inputs=batch) returned")
    return found


def _model_state(holder: Holder) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in holder.state_dict().items()}


def _optimizer_state(holder: Holder, optimizer: Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {}
    return {f"optimizer.{key}": value for key, value in get_optimizer_state_dict(holder, optimizer, options=_FLAT).items()}


def _stateful(name: str, other: Any) -> Any:
    if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
        what = f"{name}={type(other).__name__} has no state_dict and load_state_dict"
        raise RuntimeStateError(what, remedy="pass what has both, such as a scheduler or a StatefulDataLoader")
    return other


def _never_stepped(state: Mapping[str, Any], saved: Metadata) -> frozenset[str]:
    """Keys of the state of parameters that had no gradient yet when the checkpoint was saved: optimizers have none of them then, and torch
    makes all of it before it loads."""
    told = {key.split(".", 2)[2] for key in saved.state_dict_metadata if key.startswith("optimizer.state.")}
    mine = [key for key in state if key.startswith("optimizer.state.")]
    stepped = {name.rpartition(".")[0] for name in told}
    return frozenset(key for key in mine if key.split(".", 2)[2].rpartition(".")[0] not in stepped) if told else frozenset()


def _forget(holder: Holder, optimizer: Optimizer, never: frozenset[str]) -> None:
    """Drop the state that torch made for parameters that had none."""
    names = {key.split(".", 2)[2].rpartition(".")[0] for key in never}
    for name, parameter in holder.named_parameters():
        if name in names:
            optimizer.state.pop(parameter, None)


def _check_same(wanted: Mapping[str, Any], saved: Metadata, place: Path) -> None:
    """That the checkpoint has all that is wanted, in the same shapes, on every rank, and no more of the model."""
    known, wrong = saved.state_dict_metadata, []
    here = set().union(*_of_all({key for key in wanted if key.startswith("model.")}))
    beyond = [key.removeprefix("model.") for key in known if key.startswith("model.") and key not in here]
    wrong += [f"{name} of its model is not in this one" for name in beyond]
    for key, value in wanted.items():
        kind, _, name = key.partition(".")
        there = known.get(key)
        if there is None:
            wrong.append(f"{name} of the {kind} is not in it")
        elif isinstance(there, TensorStorageMetadata) and isinstance(value, torch.Tensor) and there.size != value.shape:
            wrong.append(f"{name} is {tuple(there.size)} in it, {tuple(value.shape)} here")
    found = [(rank, lines) for rank, lines in enumerate(_of_all(wrong)) if lines]
    if found:
        rank, lines = found[0]
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        on = f" (rank {rank})" if _world() > 1 else ""
        what = f"the checkpoint is of another model or optimizer: {'; '.join(lines[:3])}{more}{on}"
        raise RuntimeStateError(what, where=str(place), remedy="load it into what it was saved of, or name another folder")


def _reasons(error: Any) -> str:
    """What each rank that failed says, once."""
    return "; ".join(dict.fromkeys(str(failure[0]) for failure in error.failures.values()))


def _text_of(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _of_all(fact: Any) -> list[Any]:
    facts = [fact] * _world()
    if _world() > 1:
        dist.all_gather_object(facts, fact)
    return facts


def _of_first(fact: Any) -> Any:
    return _of_all(fact)[0]


def _wait() -> None:
    if _world() > 1:
        dist.barrier()
