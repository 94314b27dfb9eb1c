"""Run by four processes: the handwritten program as a `ParallelModule`, compared with the plain
model."""

from __future__ import annotations

import copy
import gc
import time
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import worker_steps
from handwritten import BATCH, Toy, batch, program
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.core.stored_placements import storable
from autopar.errors import AutoparError
from autopar.program.abstract_executor import LiveBytes
from autopar.program.peak_memory import trace_peak
from autopar.program.splitting import local_part, split
from autopar.runtime.device_mesh import device_mesh
from autopar.runtime.dtensor_checkpoints import CheckpointTensor
from autopar.runtime.module import ParallelModule
from autopar.runtime.optimizers import REFUSED, SUPPORTED
from autopar.runtime.parameters import Storage


def build(
    data: int = 2, tensor: int = 2, model: nn.Module | None = None, **options: Any
) -> ParallelModule:
    target = program(data, tensor)
    return ParallelModule(target, device_mesh(target.mesh), model or Toy(), **options)


def call(model: nn.Module, seed: int = 1) -> dict[str, Any]:
    values = batch(seed)
    result: dict[str, Any] = model(values["x"], target=values["target"])
    return result


def error(a: Tensor, b: Tensor) -> float:
    return float((a.detach() - b.detach()).abs().max() / b.detach().abs().max().clamp(min=1e-3))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst(a: nn.Module, b: nn.Module, *, gradients: bool = False) -> float:
    """Return the largest relative difference of parameters or gradients."""
    theirs = dict(b.named_parameters())
    pairs = [
        (p.grad, theirs[n].grad) if gradients else (p, theirs[n]) for n, p in a.named_parameters()
    ]
    return max(
        error(whole(mine), their) for mine, their in pairs if mine is not None and their is not None
    )


def message(action: Any) -> str:
    try:
        action()
    except AutoparError as caught:
        return str(caught)
    return "no error"


def training(rank: int) -> dict[str, Any]:
    """Run five AdamW steps with clipping, compared with the plain model."""
    plain, parallel = Toy(), build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, parallel)]
    errors: dict[str, float] = {"loss": 0.0, "logits": 0.0, "gradients": 0.0, "norm": 0.0}
    for step in range(5):
        mine, theirs = call(parallel, step), call(plain, step)
        mine["loss"].backward()
        theirs["loss"].backward()
        errors["loss"] = max(errors["loss"], error(mine["loss"], theirs["loss"]))
        errors["logits"] = max(errors["logits"], error(mine["logits"], theirs["logits"]))
        errors["gradients"] = max(errors["gradients"], worst(parallel, plain, gradients=True))
        norms = parallel.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        errors["norm"] = max(errors["norm"], error(*norms), worst(parallel, plain, gradients=True))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    errors["parameters"], errors["mean"] = worst(parallel, plain), error(parallel.mean, plain.mean)
    return {
        **errors,
        "note": mine["note"],
        "requires_grad": [mine["loss"].requires_grad, mine["logits"].requires_grad],
    }


def norms(rank: int) -> dict[str, float]:
    result = {}
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        plain, parallel = Toy(), build()
        call(plain)["loss"].backward()
        call(parallel)["loss"].backward()
        pair = (
            parallel.clip_grad_norm_(0.5, norm_type),
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type),
        )
        result[str(norm_type)] = max(error(*pair), worst(parallel, plain, gradients=True))
    return result


def storage(rank: int) -> dict[str, Any]:
    """Check that parameters are stored as `split` orders them, and join to the values of the
    model."""
    parallel, plain = build(), Toy()
    (target,) = program().stages
    local, full, grads = [], [], []
    call(parallel)["loss"].backward()
    for tensor in target.parameters:
        parameter, value = (
            parallel.get_parameter(tensor.name),
            plain.get_parameter(tensor.name).detach(),
        )
        part = split(value, tensor.layout, target.mesh, tensor.view)[rank]
        local.append(torch.equal(parameter.to_local().reshape(part.shape), part))
        full.append(torch.equal(parameter.full_tensor(), value))
        grads.append(not tensor.has_gradient or parameter.grad.placements == parameter.placements)
    return {
        "local": all(local),
        "full": all(full),
        "grads": all(grads),
        "placements": str(parallel.fused.weight.placements),
    }


def names(rank: int) -> dict[str, Any]:
    parallel, plain = build(), Toy()
    return {
        "state_dict": list(parallel.state_dict()) == list(plain.state_dict()),
        "parameters": [n for n, _ in parallel.named_parameters()]
        == [n for n, _ in plain.named_parameters()],
        "buffers": [n for n, _ in parallel.named_buffers()]
        == [n for n, _ in plain.named_buffers()],
        "tied": parallel.tied.weight is parallel.first.weight,
        "frozen": not parallel.scale.requires_grad,
    }


def checkpoints(rank: int, folder: str) -> dict[str, Any]:
    """Load model and optimizer from 2×2 into 2×2, 4×1, 1×4 and the plain model, and train each
    for one more step."""
    plain, parallel = Toy(), build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, parallel)]
    advance(plain, optimizers[0])
    advance(parallel, optimizers[1])
    saved = {
        "model": parallel.state_dict(),
        "optimizer": get_optimizer_state_dict(parallel, optimizers[1]),
    }
    dcp.save(saved, checkpoint_id=folder)
    before = copy.deepcopy(plain)
    advance(plain, optimizers[0])
    result = {}
    for mesh in ((2, 2), (4, 1), (1, 4)):
        other = build(*mesh)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.to_local().zero_()
        optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
        state = {
            "model": other.state_dict(),
            "optimizer": get_optimizer_state_dict(other, optimizer),
        }
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        set_optimizer_state_dict(other, optimizer, state["optimizer"])
        loaded = worst(other, before)
        advance(other, optimizer)
        result[str(mesh)] = max(loaded, worst(other, plain))
    state = {"model": Toy().state_dict()}
    dcp.load(state, checkpoint_id=folder)
    last = Toy()
    last.load_state_dict(state["model"])
    return {**result, "plain": worst(last, before)}


def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run one step, with several evaluations if the optimizer needs them."""

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = call(model)["loss"]
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(evaluate)
    else:
        evaluate()
        optimizer.step()
    optimizer.zero_grad()


def loading(rank: int) -> dict[str, Any]:
    """Load full state dicts, also into a model on meta."""
    plain = Toy()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1.0)
    with torch.device("meta"):
        empty = Toy()
    parallel = build(model=empty)
    keys = parallel.load_state_dict(plain.state_dict())
    parallel.offset.copy_(plain.offset)
    mine, theirs = call(parallel), call(plain)
    return {
        "keys": str(keys),
        "parameters": worst(parallel, plain),
        "loss": error(mine["loss"], theirs["loss"]),
    }


def optimizers(rank: int) -> dict[str, Any]:
    """Run three steps of each optimizer, compared with the plain model, or return the error. From
    the second step on, steps run on local tensors (`autopar.runtime.optimizers`)."""
    result: dict[str, Any] = {}
    for name in (*SUPPORTED, *REFUSED):
        plain, parallel = Toy(), build()
        pair = [
            getattr(torch.optim, name)([p for p in m.parameters() if p.requires_grad], lr=0.01)
            for m in (plain, parallel)
        ]
        if name in REFUSED:
            call(parallel)["loss"].backward()
            result[name] = message(pair[1].step)
            continue
        for _ in range(3):
            for model, optimizer in zip((plain, parallel), pair, strict=True):
                advance(model, optimizer)
        result[name] = worst(parallel, plain)
    return result


def memory(rank: int) -> dict[str, Any]:
    """Return predicted and measured bytes, and the bytes left after each of ten steps."""
    result: dict[str, Any] = {}
    for outputs in ("full", "local", "dtensor"):
        for mode in ("global", "local"):
            parallel = build(outputs=outputs, batch=mode)
            mesh = parallel.program.mesh
            values = list(batch().values())
            if mode == "local":
                borders = zip(values, parallel.program.inputs, strict=True)
                values = [
                    local_part(x, t.layout, mesh.shape, t.view, mesh.coordinate(rank)).clone()
                    for x, t in borders
                ]
            predicted = trace_peak(
                parallel.program.stages[0],
                outputs=outputs,
                batch=mode,
                coordinate=mesh.coordinate(rank),
            )
            result[f"{outputs} {mode}"] = (predicted.peak_bytes, *measured(parallel, values))
            assert (
                trace_peak(
                    parallel.program.stages[0], outputs=outputs, batch=mode, train=False
                ).peak_bytes
                < predicted.peak_bytes
            )
    return result


def measured(parallel: ParallelModule, values: list[Tensor]) -> tuple[int, set[int]]:
    """Return the peak, and the bytes that each of ten steps left.

    The gloo thread may keep an operand for a moment after the wait. So the least of the peaks
    counts, and the bytes left are counted after a pause."""
    gc.disable()  # a reference cycle must not be collected during the test
    peaks, left = set(), set()
    for _ in range(
        16
    ):  # calls 1, 2, 4, 8 and 16 compare batches between ranks, which is not part of a step
        parallel(values[0], target=values[1])["loss"].backward()
        parallel.zero_grad()
    with LiveBytes() as live:
        live.register([*parallel.parameters(), *parallel.buffers(), *values])
        resident = live.live_bytes
        for _ in range(10):
            live.reset_peak()
            out = parallel(values[0], target=values[1])
            out["loss"].backward()
            peaks.add(live.peak_bytes)
            del out
            parallel.zero_grad()
            deadline = time.monotonic() + 5.0
            while live.live_bytes != resident and time.monotonic() < deadline:
                time.sleep(0.01)
            left.add(live.live_bytes - resident)
    gc.enable()
    return min(peaks), left


def batches(rank: int) -> dict[str, Any]:
    """Return results of local batches and of all output forms."""
    whole_outputs = call(build())
    local = build(batch="local", outputs="local")
    dtensor = call(build(outputs="dtensor"))["logits"]
    half = slice(0, BATCH // 2) if rank < 2 else slice(BATCH // 2, BATCH)
    values = batch()
    out = local(values["x"][half], target=values["target"][half])
    sampler = local.sampler(range(8), shuffle=False)
    return {
        "loss": error(out["loss"], whole_outputs["loss"]),
        "local": torch.equal(out["logits"], whole_outputs["logits"][half]),
        "dtensor": isinstance(dtensor, DTensor)
        and torch.equal(dtensor.full_tensor(), whole_outputs["logits"]),
        "samples": list(sampler),
        "layouts": {k: str(v) for k, v in local.input_layouts.items()},
        "whole batch": message(lambda: call(local)),
    }


def refusals(rank: int) -> dict[str, str]:
    """Return the errors of impossible calls on every rank."""
    devices = device_mesh(Mesh({"data": 2, "tensor": 2}))
    differing = program(plan_hash="a" if rank != 2 else "b")
    return {
        "plan": message(lambda: ParallelModule(differing, devices, Toy())),
        "mesh": message(lambda: device_mesh(Mesh({"data": 4, "tensor": 4}))),
        "other mesh": message(lambda: ParallelModule(program(4, 1), devices, Toy())),
    }


def layouts_of(view: tuple[int, ...]) -> list[Layout]:
    """Return every layout over two axes that divides the view."""
    choices = product([Replicate(), *(Shard(d) for d in range(len(view)))], repeat=2)
    layouts = {Layout(choice, order) for choice in choices for order in permutations(range(2))}
    return sorted((layout for layout in layouts if layout.divides(view, (2, 2))), key=str)


def strided(rank: int) -> dict[str, Any]:
    """Check for every layout of a fused and of a plain weight that a layout allowed by `storable`
    joins to the full tensor, also box by box."""
    devices = device_mesh(Mesh({"data": 2, "tensor": 2}))
    result: dict[str, Any] = {"wrong": [], "refused": [], "count": 0}
    for shape, view in (((8, 8), (8, 8)), ((4, 24), (4, 3, 8)), ((24, 4), (3, 8, 4))):
        full = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for layout in layouts_of(view):
            if not storable(shape, view, layout, (2, 2)):
                result["refused"].append((view, str(layout)))
                continue
            tensor = replace(
                program().stages[0].parameters[0], shape=shape, view=view, layout=layout
            )
            stored = Storage.of(tensor, devices).distribute(full)
            result["count"] += 1
            if not (
                torch.equal(stored.full_tensor(), full)
                and boxes_cover(CheckpointTensor.of(stored), full)
            ):
                result["wrong"].append((view, str(layout)))
    return result


def boxes_cover(stored: CheckpointTensor, full: Tensor) -> bool:
    """Return whether the boxes have the values of the full tensor at their positions, and each
    local element once."""
    rebuilt = torch.full_like(full, -1.0)
    for chunk in stored.__create_chunk_list__():
        place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        rebuilt[place] = stored.__get_tensor_shard__(MetadataIndex("x", chunk.offsets))
    here = rebuilt >= 0
    return torch.equal(rebuilt[here], full[here]) and int(here.sum()) == stored.to_local().numel()


CHECKS = (training, norms, storage, names, loading, optimizers, memory, batches, refusals, strided)


def run(rank: int, folder: str) -> dict[str, Any]:
    """Return all facts that the tests check. Those of the steps are included to save a start."""
    facts: dict[str, Any] = {"steps": worker_steps.run(rank)}
    for check in CHECKS:
        facts[check.__name__] = check(rank)
        dist.barrier()
    facts["checkpoints"] = checkpoints(rank, folder)
    return facts
