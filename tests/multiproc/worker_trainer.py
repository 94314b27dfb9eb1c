"""Run by any number of processes: the Trainer of transformers, accelerate and peft on compiled
modules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trained import BUILD, Tagger, data, log_of, samples, settings, sum_of_logits

import autopar
from autopar.errors import RuntimeStateError

SAVED = {
    "save_strategy": "epoch",
    "eval_strategy": "epoch",
    "num_train_epochs": 2,
    "label_names": ["labels"],
}


def options() -> dict[str, Any]:
    """Sharded fully, so that each rank has a part of every batch and of every parameter."""
    return {
        "mesh": {"gpu": 2},
        "compile_options": {"hardware": "cpu-gloo", "constraints": [autopar.constraints.fsdp()]},
    }


def launched(rank: int) -> None:
    """As torchrun tells processes of each other, so that accelerate knows of them."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": dist.get_world_size(),
        "LOCAL_WORLD_SIZE": dist.get_world_size(),
    }
    os.environ.update(
        {name: str(value) for name, value in environment.items()}
        | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    )


def trained(rank: int, folder: str, kind: str) -> dict[str, Any]:
    """A run with checkpoints, and one that goes on from the first of them with other weights;
    what rank 0 wrote lies in `folder`."""
    launched(rank)
    build = BUILD[kind][1]
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * rank * parameter.requires_grad
            )  # as where ranks draw others: the first rank's are taken
    first = autopar.Trainer(
        model=model,
        args=settings(folder, **SAVED),
        **data(),
        compute_metrics=sum_of_logits,
        **options(),
    )
    first.train()
    first.save_model(str(Path(folder) / "end"))
    module = first.compiled()
    facts = {
        "log": log_of(first),
        "writes": first.is_world_process_zero(),
        "gradients": [
            name
            for name, p in module.named_parameters()
            if p.grad is not None and not p.requires_grad
        ],
        "parts": any(p.to_local().numel() < p.numel() for p in module.parameters()),
    }
    given = {"mesh": {"gpu": 2}, "compile_options": {"plan": module.plan}}
    args = settings(
        Path(folder) / "other", **{**SAVED, "eval_strategy": "no", "save_strategy": "no"}
    )
    again = autopar.Trainer(model=build(), args=args, **data(), **given)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    return {**facts, "again": log_of(again)}


def stepped(rank: int) -> dict[str, Any]:
    """Losses, norms and rates of a loop with accelerate; what a worker of the loader draws, and
    what wrapping by accelerate's own says."""
    launched(rank)
    accelerator = autopar.Accelerator(cpu=True, gradient_accumulation_steps=2)
    found = loop(
        accelerator,
        lambda batch: autopar.compile(
            Tagger(), {"gpu": 2}, example_inputs=batch, hardware="cpu-gloo"
        ),
    )
    try:
        torch.nn.parallel.DistributedDataParallel(accelerator._models[0])
        refused = ""
    except RuntimeStateError as error:
        refused = str(error)
    return {"steps": found, "refused": refused}


def loop(accelerator: Any, make: Any) -> list[tuple[float, float, float]]:
    """Run two epochs of shuffled batches with a smaller last batch."""
    loader = torch.utils.data.DataLoader(
        samples(10, 1), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    model = make(torch.utils.data.default_collate(samples(4, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                norm = (
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                    if accelerator.sync_gradients
                    else 0.0
                )
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append((loss.item(), float(norm), scheduler.get_last_lr()[0]))
            count = len(accelerator.gather_for_metrics(batch["labels"]))
            assert count == len(batch["labels"])
    return found
