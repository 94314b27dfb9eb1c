"""Run by any number of processes: train a model with dropout, save it, and resume on another
number of processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.checkpoint import files, manager, rank_parts
from autopar.errors import RuntimeStateError
from benchmarks.common import load_profile
from benchmarks.zoo import build

SEED, LEARNING_RATE = 5, 1e-2
TRAINED, ALL_STEPS = 3, 6


def run(rank: int, folder: str, steps: int, stages: bool = False) -> dict[str, Any]:
    """Train up to so many steps, from where the newest checkpoint ends; what was seen on the
    way."""
    model, batch = build(
        "gpt2", dropout=0.2, dtype=torch.float64, n_layer=1
    )  # in two stages one of which draws nothing
    constraints = (autopar.constraints.pipeline("gpu", microbatches=1),) if stages else ()
    options: dict[str, Any] = {
        "hardware": load_profile("cpu-gloo-frictionless"),
        "outputs": "loss",
        "num_microbatches": "auto",
    }
    module: Any = autopar.compile(model, example_inputs=batch, constraints=constraints, **options)
    module.manual_seed(SEED)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    checkpoints = autopar.Checkpoints(folder, keep=1)
    start = checkpoints.load(module, optimizer, scheduler=scheduler)
    losses = []
    for step in range(start, steps):
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        checkpoints.save(step + 1, module, optimizer, scheduler=scheduler)
    sharded = sum(not all(x.is_replicate() for x in p.placements) for p in module.parameters())
    return {
        "start": start,
        "losses": losses,
        "sharded": sharded,
        "rate": optimizer.param_groups[0]["lr"],
        "mesh": str(module.plan.mesh),
        "steps": checkpoints.steps(),
        "state": module.random_state,
    }


def blind(rank: int, folder: str) -> dict[str, str]:
    """Ranks that do not see one folder, as where machines do not share it, and one that cannot
    be written to; what each way ends in."""
    manager.SEEN_WITHIN_S = 1.0
    model, batch = build("gpt2", n_layer=1)
    module = autopar.compile(model, example_inputs=batch, hardware="cpu-gloo")
    shared, own = Path(folder) / "shared", Path(folder) / f"of rank {rank}"
    autopar.Checkpoints(shared).save(1, module)
    no_folder = shared / "step_000000001" / "plan.json"
    return {
        "rank 0 sees it": _refusal(
            lambda: autopar.Checkpoints(shared if rank == 0 else own).load(module)
        ),
        "rank 1 sees it": _refusal(
            lambda: autopar.Checkpoints(shared if rank == 1 else own).load(module)
        ),
        "saved apart": _refusal(lambda: autopar.Checkpoints(own).save(2, module)),
        "a file": _refusal(lambda: autopar.Checkpoints(no_folder).save(2, module)),
    }


def damaged(rank: int, folder: str) -> list[str]:
    """Return the errors of loading after a bit is flipped in the file of each rank in turn."""
    model, batch = build("gpt2", n_layer=1)
    module = autopar.compile(model, example_inputs=batch, hardware="cpu-gloo")
    checkpoints = autopar.Checkpoints(folder)
    said = []
    for writer in range(torch.distributed.get_world_size()):
        place = checkpoints.save(writer, module)
        torch.distributed.barrier()
        if rank == 0:
            with (place / f"rank_{writer:05d}.safetensors").open("r+b") as file:
                file.seek(-9, 2)
                byte = file.read(1)[0]
                file.seek(-9, 2)
                file.write(bytes([byte ^ 64]))
        torch.distributed.barrier()
        said.append(_refusal(lambda: checkpoints.load(module)))
    return said


def beside(rank: int, folder: str, name: str) -> dict[str, Any]:
    """One of two runs that begin in one folder at once: how many steps it saved, and what then
    ended it."""
    model, batch = build("gpt2", n_layer=1)
    module = autopar.compile(model, example_inputs=batch, hardware="cpu-gloo")
    checkpoints = autopar.Checkpoints(Path(folder) / "shared")
    assert checkpoints.load(module) == 0
    (Path(folder) / f"{name}.{rank}").touch()
    while len(list(Path(folder).glob("*.?"))) < 4:
        time.sleep(0.001)
    for step in range(1, 4):
        if said := _refusal(lambda step=step: checkpoints.save(step, module)):  # type: ignore[misc]
            return {"saved": step - 1, "said": said}
    damage = files.read_about(checkpoints._place(3))[1]
    return {
        "saved": 3,
        "said": "",
        "run": manager.runs_of(checkpoints._find_checkpoints()),
        "damage": damage,
    }


def background(rank: int, folder: str) -> dict[str, Any]:
    """Save in the background, also where one rank cannot write; what is there then, and what is
    said."""
    model, batch = build("gpt2", n_layer=1)
    module: Any = autopar.compile(
        model, example_inputs=batch, hardware="cpu-gloo", constraints=(autopar.constraints.fsdp(),)
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    checkpoints = autopar.Checkpoints(folder)

    def step() -> None:
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def values() -> list[torch.Tensor]:
        moments = [x for of in optimizer.state.values() for x in of.values()]
        return [
            getattr(x, "to_local", lambda x=x: x)().detach().clone()
            for x in (*module.parameters(), *moments)
        ]

    step()
    wanted = values()
    checkpoints.async_save(1, module, optimizer)
    step()
    checkpoints.wait()
    changed = any(not torch.equal(a, b) for a, b in zip(wanted, values(), strict=True))
    loaded = checkpoints.load(module, optimizer)
    same = all(torch.equal(a, b) for a, b in zip(wanted, values(), strict=True))
    plain = rank_parts.write_tensors
    if rank == 1:
        rank_parts.write_tensors = _full
    checkpoints.async_save(2, module, optimizer)
    step()
    said = _refusal(lambda: checkpoints.save(2, module, optimizer))
    rank_parts.write_tensors = plain
    steps = checkpoints.steps()
    checkpoints.async_save(3, module, optimizer)
    return {
        "changed": changed,
        "loaded": loaded,
        "same": same,
        "said": said,
        "steps": steps,
        "last": checkpoints.steps(),
    }


def _full(*_: Any) -> int:
    raise OSError(28, "No space left on device")


def _refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except RuntimeStateError as error:
        return str(error)
    return ""
