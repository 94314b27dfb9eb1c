"""Programs for the remedies of ranks: meshes and processes, agreement of all ranks, and the end of
ranks."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.errors import RankError
from autopar.program.program import ProgramTensor
from autopar.runtime import device_mesh, rank_agreement, rank_comm, rank_consistency
from autopar.runtime.module import ParallelModule
from autopar.runtime.rank_agreement import Agreement
from autopar.runtime.rank_differences import FAILS, End
from tests.support import handwritten
from tests.support.remedy_programs import Program
from tests.support.remedy_programs_modules import two_ranks
from tests.support.remedy_programs_steps import Net, X, compiled

Step = Callable[[int, Agreement], None]
Change = Callable[[Any], Any]


class Sized(nn.Module):
    """Runs its layer as often as the first size says, and doubles the result if `double` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, sizes: Tensor | None = None, *, double: bool = False) -> Tensor:
        for _ in range(1 if sizes is None else int(sizes[0, 0])):
            x = self.layer(x)
        return x.square().mean() * (2 if double else 1)


def _alone(work: Callable[[], object]) -> Callable[[], object]:
    """Run `work` without a process group."""

    def program() -> object:
        if dist.is_initialized():
            dist.destroy_process_group()
        return work()

    return program


def _of_two(work: Callable[[DeviceMesh], object], *names: str) -> Callable[[], object]:
    """Run `work` as the first of two ranks, with collectives that do nothing."""

    def program() -> object:
        with two_ranks():
            return work(init_device_mesh("cpu", (2,), mesh_dim_names=names or None))

    return program


def _with_second_rank(
    owner: Any, change: Change, work: Callable[[DeviceMesh], object]
) -> Callable[[], object]:
    """Run `work` with a second rank whose value in comparisons is `change` of the value of the
    first rank."""

    def patched(devices: DeviceMesh) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, "of_all_alike", lambda topic, fact: [fact, change(fact)])
            patch.setattr(dist, "broadcast", lambda tensor, source: None)
            return work(devices)

    return _of_two(patched, "data")


def _alike(change: Change, work: Callable[[DeviceMesh], object], says: str) -> Program:
    """Return a program that is refused if ranks differ and accepted if they do not."""
    return Program(
        _with_second_rank(rank_consistency, change, work),
        says,
        _with_second_rank(rank_consistency, lambda fact: fact, work),
    )


def _without_first(fact: list[Any]) -> list[Any]:
    return [None, *fact[1:]]


def _compare_weights(devices: DeviceMesh) -> None:
    tensor = ProgramTensor("w", (4, 4), (4, 4), X.dtype, Layout.parse("R"))
    weights = rank_consistency.CopiedWeights()
    for _ in range(2):
        weights.check([(tensor, torch.ones(4, 4))], devices)


def _share_weights(first: Change) -> Callable[[], object]:
    """Share weights, the first of which differs on the second rank."""

    def change(fact: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        (name, digest), *rest = fact
        return [(name, first(digest)), *rest]

    return _with_second_rank(
        rank_consistency, change, lambda devices: rank_consistency.share_weights(Net(), devices)
    )


def _meet(
    step: Step, steps: int = 1, ends: str = "", limit_s: float = 60.0
) -> Callable[[], object]:
    """Run the same steps on two ranks, then `step`. Each rank is a thread."""

    def program() -> None:
        store, errors = dist.HashStore(), dict[int, RankError]()
        each = [Agreement(store, rank, 2, limit_s) for rank in range(2)]

        def one(rank: int) -> None:
            try:
                for _ in range(steps):
                    each[rank].begin("calls the model", True)
                step(rank, each[rank])
            except RankError as error:
                errors[rank] = error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_agreement, "why_it_ends", lambda: End("it raised ValueError", ends))
            threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
        for error in errors.values():
            raise error

    return program


def _same(rank: int, each: Agreement) -> None:
    each.begin("calls the model", True)


def _differ(rank: int, each: Agreement) -> None:
    each.begin("saves" if rank else "calls the model", True)


def _one_fails(rank: int, each: Agreement) -> None:
    each.begin(f"{FAILS}ValueError: no data" if rank else "compiles Net")


def _one_ends(rank: int, each: Agreement) -> None:
    each.close() if rank else each.begin("calls the model", True)


def _one_comes(rank: int, each: Agreement) -> None:
    if not rank:
        each.begin("calls the model", True)


def _store(gone: bool) -> Callable[[], object]:
    """Run with or without the process that holds the store."""

    def step(rank: int, each: Agreement) -> None:
        if gone and not rank:
            raise each._without_store(dist.DistStoreError("Connection reset by peer"))
        if not gone:
            each.begin("calls the model", True)

    return _meet(step)


def _gpu(num: int) -> Callable[[], object]:
    """Run as the second process of a machine with `num` GPUs."""

    def program() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_RANK", "1")
            for name, value in (
                ("device_count", num),
                ("is_initialized", False),
                ("current_device", 0),
            ):
                patch.setattr(torch.cuda, name, lambda value=value: value)
            patch.setattr(torch.cuda, "set_device", lambda number: None)
            rank_comm.take_gpu()

    return program


def _topics(other: str) -> Callable[[], object]:
    """Compare what two ranks are about to do."""

    def program() -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_comm, "of_all", lambda fact, topic: [fact, (other, fact[1])])
            return rank_comm.of_all_alike("calls the model", 1)

    return program


def _create_folder(name: str) -> Callable[[], object]:
    """Create a folder on the first rank, in a folder or below a file."""

    def program() -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "file").touch()
            path = Path(folder, name, "new")
            rank_comm.by_first(
                lambda: path.mkdir(parents=True), str(path), remedy="choose a writable folder"
            )

    return program


def _call_single_program(*given: Any, **named: Any) -> Callable[[], object]:
    """Call a module that does not compile programs for other calls."""

    def program() -> object:
        given_there = {"x": X, "sizes": torch.tensor([[1, 2]]), "double": False}
        module: Any = autopar.compile(Sized(), example_inputs=given_there, hardware="cpu-gloo")
        module.variants = None
        return module(*given, **named)

    return program


def _handwritten(data: int) -> Callable[[], object]:
    def program() -> object:
        devices = device_mesh.device_mesh(Mesh({"data": 1, "tensor": 1}))
        return ParallelModule(handwritten.program(data, 1), devices, handwritten.Toy())

    return program


def _on_host(backend: str) -> Callable[[], object]:
    """Train with a parameter on the host."""
    constraint = autopar.constraints.layout("layer", storage="R host")
    return lambda: autopar.compile(
        Net(),
        {"gpu": 1},
        example_inputs=(X,),
        hardware="h100-sxm",
        constraints=[constraint],
        backend=backend,
    )(X).backward()


def _check_layout(layout: Layout) -> None:
    """Check a program of another mode that has a parameter in this layout."""
    module = compiled()
    (storage, *_) = module._storages.values()
    other = replace(storage, tensor=replace(storage.tensor, layout=layout))
    module.check_same(storage.tensor.name, other)


_ONE, _TWO = torch.tensor([[1, 2]]), torch.tensor([[2, 2]])

MESHES: dict[str, Program] = {
    "runtime/device_mesh.py _initialize 0": Program(
        _alone(lambda: device_mesh.device_mesh(Mesh(2))),
        "autopar run -n 2 SCRIPT",
        _of_two(lambda devices: device_mesh.device_mesh(Mesh(2))),
    ),
    "runtime/device_mesh.py device_mesh 0": Program(
        _of_two(lambda devices: device_mesh.device_mesh(Mesh(4))),
        "or plan for a mesh of 2",
        _of_two(lambda devices: device_mesh.device_mesh(Mesh(2))),
    ),
    "runtime/device_mesh.py check_shape 0": Program(
        _handwritten(2), "plan for mesh data=1,tensor=1", _handwritten(1)
    ),
    "runtime/device_mesh.py groups_of 0": Program(
        _of_two(lambda devices: device_mesh.groups_of(DeviceMesh("cpu", [1]))),
        "that covers every process",
        _of_two(device_mesh.groups_of),
    ),
    "runtime/device_mesh.py stage_devices 0": Program(
        _of_two(lambda devices: device_mesh.stage_devices(devices, "stage")),
        "name its dims as in the plan",
        _of_two(lambda devices: device_mesh.stage_devices(devices, "stage"), "stage"),
    ),
    "runtime/device_mesh.py agree 0": Program(
        _with_second_rank(
            device_mesh,
            lambda fact: "another",
            lambda devices: device_mesh.agree("a plan", "plan", devices),
        ),
        "give every rank the same model, batch shapes, mesh and options",
        _with_second_rank(
            device_mesh,
            lambda fact: fact,
            lambda devices: device_mesh.agree("a plan", "plan", devices),
        ),
    ),
    "runtime/module.py ParallelModule.__init__ 0": Program(
        lambda: compiled(batch="local", num_microbatches=2),
        'pass batch="global"',
        lambda: compiled(batch="global", num_microbatches=2),
    ),
    "program/executor.py Executor.__init__ 0": Program(
        _on_host(backend="inductor"), 'use backend="eager"', _on_host(backend="eager")
    ),
    "runtime/parameter_module.py Holder.check_same 0": Program(
        lambda: _check_layout(Layout.parse("R host")),
        "compile the model for that call, and load the state dict into the new module",
        lambda: _check_layout(Layout.parse("R")),
    ),
    "runtime/rank_comm.py take_gpu 0": Program(_gpu(1), "autopar run -n 1 SCRIPT", _gpu(2)),
}

ALIKE: dict[str, Program] = {
    "runtime/rank_consistency.py share_weights 0": Program(
        _share_weights(lambda digest: None),
        "build the model in the same way on every rank: with weights, or on the meta device",
        _share_weights(lambda digest: digest),
    ),
    "runtime/rank_consistency.py share_weights 1": Program(
        _share_weights(lambda digest: ((8, 8), *digest[1:])),
        "the same configuration and dtype",
        _share_weights(lambda digest: digest),
    ),
    "runtime/rank_consistency.py check_batch 0": _alike(
        _without_first,
        lambda devices: rank_consistency.check_batch(["x"], [X], devices),
        "pass the same batch on every rank",
    ),
    "runtime/rank_consistency.py check_parts 0": _alike(
        _without_first,
        lambda devices: rank_consistency.check_parts(["x"], [X], [Layout.parse("R")], devices),
        "pass the same tensors on these ranks",
    ),
    "runtime/rank_consistency.py CopiedWeights.check 0": _alike(
        lambda norms: {name: (part, 1.5 * norm) for name, (part, norm) in norms.items()},
        _compare_weights,
        "on all ranks",
    ),
    "runtime/rank_consistency.py check_random_state 0": _alike(
        lambda state: state + 1,
        lambda devices: rank_consistency.check_random_state(3, devices),
        "pm.manual_seed(seed)",
    ),
    "runtime/rank_consistency.py PlainTensorCheck.check 0": _alike(
        _without_first,
        lambda devices: rank_consistency.PlainTensorCheck().check("add", [X], devices),
        "set the same seed for random tensors (torch.manual_seed)",
    ),
    "runtime/rank_consistency.py check_tangents 0": _alike(
        _without_first,
        lambda devices: rank_consistency.check_tangents([("y", X)], devices),
        "or let the model compute its loss",
    ),
    "runtime/rank_comm.py of_all_alike 0": Program(
        _topics("saves"), "call the model in the same way on every rank", _topics("calls the model")
    ),
    "runtime/rank_comm.py _unpack_outcome 0": Program(
        _create_folder("file"), "choose a writable folder", _create_folder("folder")
    ),
    "runtime/rank_differences.py _different_operations_error 0": Program(
        _meet(_differ), "in the same order and the same number of times on every rank", _meet(_same)
    ),
    "runtime/rank_differences.py _different_operations_error 0 | from the begin": Program(
        _meet(_differ, steps=0),
        "in the same order and the same number of times on every rank",
        _meet(_same, steps=0),
    ),
    "runtime/rank_differences.py _failed_error 0": Program(
        _meet(_one_fails),
        "build the model, its batch and its options in the same way on every rank",
        _meet(_same),
    ),
    "runtime/rank_differences.py Differences.of 0": Program(
        _meet(_one_comes, limit_s=0.1),
        "torch.distributed.init_process_group(timeout=...)",
        _meet(_same),
    ),
    "runtime/rank_differences.py Differences.of_ended 0": Program(
        _meet(_one_ends, ends="quiet"), "the same number of times on every rank", _meet(_same)
    ),
    "runtime/rank_differences.py Differences.of_ended 0 | with an error": Program(
        _meet(_one_ends, ends="alone"), "see the messages of rank 1", _meet(_same)
    ),
    "runtime/rank_agreement.py Agreement._without_store 0": Program(
        _store(gone=True),
        "find out why that process, rank 0 or the launcher, ended",
        _store(gone=False),
    ),
    "runtime/call_arguments.py Arguments._check_settings 0": Program(
        _call_single_program(X, _ONE, double=True),
        "pass the value the program was compiled for",
        _call_single_program(X, _ONE, double=False),
    ),
    "runtime/call_arguments.py Arguments._check_settings 0 | compiled for it": Program(
        _call_single_program(X, _ONE, double=True),
        "or compile the model again for this call",
        lambda: compiled(Sized(), X, _ONE)(X, _ONE, double=True),
    ),
    "runtime/call_arguments.py Arguments._check_known 0": Program(
        _call_single_program(X, _TWO, double=False),
        "pass the same values",
        _call_single_program(X, _ONE, double=False),
    ),
    "runtime/call_arguments.py Arguments._leaves 0": Program(
        _call_single_program(X, [_ONE], double=False),
        "call it as in example_inputs",
        _call_single_program(X, _ONE, double=False),
    ),
}

PROGRAMS: dict[str, Program] = {**MESHES, **ALIKE}
