"""Each launched process has its own GPU and its share of the CPU cores, even if tensors were moved
to ``"cuda"`` before."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import zoo_small
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import autopar
from autopar.api import building
from autopar.core.mesh import Mesh
from autopar.errors import MeshError
from autopar.program.program import Program
from autopar.runtime import rank_comm
from autopar.runtime.call_arguments import Arguments
from autopar.runtime.device_mesh import device_mesh
from autopar.runtime.rank_comm import share_cores, take_gpu


@dataclass
class Gpus:
    """The state of torch.cuda on a simulated machine with some GPUs."""

    num: int
    current: int = 0
    is_touched: bool = True


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    made = Gpus(4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: made.num)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: made.num > 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: made.is_touched)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: setattr(made, "current", number))
    return made


@pytest.mark.parametrize(
    ("place", "before", "after"),
    [
        pytest.param(3, 0, 3, id="nobody has chosen"),
        pytest.param(3, 2, 2, id="the script has"),
        pytest.param(0, 2, 2, id="the script has of the first process"),
        pytest.param(5, 0, 0, id="several share one"),
    ],
)
def test_a_process_uses_the_gpu_of_its_local_rank_unless_the_script_has_set_one(
    place: int, before: int, after: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(place))
    gpus.current = before
    take_gpu()
    assert gpus.current == after


def test_without_a_launcher_the_current_gpu_does_not_change(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    take_gpu()
    assert gpus.current == 0


def test_more_processes_than_gpus_are_refused_before_cuda_is_initialized(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "4")
    gpus.is_touched = False
    with pytest.raises(
        MeshError,
        match=(
            r"process 4 of this machine has no GPU: the machine has 4\n"
            r"  what to do: .*autopar run -n 4"
            r" SCRIPT"
        ),
    ):
        device_mesh(Mesh(8), "cuda")


@pytest.mark.parametrize(
    ("before", "here", "after"),
    [(1, "4", 3), (1, None, 12), (2, "4", 2), (1, "12", 1)],
    ids=["torchrun's one", "alone", "the script's", "a core for each"],
)
def test_a_process_gets_its_share_of_the_cores_for_host_computation(
    before: int,
    here: str | None,
    after: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [before]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: now.__setitem__(0, number))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    share_cores()
    assert now == [after] and bool(caplog.records) == (after != before)


@pytest.mark.parametrize(
    ("backends", "is_told"), [("cpu:gloo,cuda:nccl", False), ("cuda:nccl", True)]
)
def test_process_groups_without_a_cpu_backend_give_a_warning(
    backends: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_comm, "num_ranks", lambda: 2)
    monkeypatch.setattr(rank_comm, "rank", lambda: 0)
    monkeypatch.setattr(rank_comm.dist, "get_backend_config", lambda: backends)
    rank_comm.tell_of_hosts()
    assert [
        record.getMessage().count("of cuda:nccl cannot communicate") for record in caplog.records
    ] == [1] * is_told


@pytest.fixture(scope="module")
def compiled() -> tuple[Program, dict[str, Tensor]]:
    model, batch = zoo_small.llama(num_layers=1)
    made = autopar.compile(
        model, Mesh.parse("d=1"), example_inputs=batch, hardware="h100-sxm"
    ).program
    return made, batch


@pytest.mark.parametrize(("place", "remedy"), [("2", "int(os.environ['LOCAL_RANK'])"), (None, "0")])
def test_a_batch_on_another_gpu_is_copied_and_warns_once(
    place: str | None,
    remedy: str,
    compiled: tuple[Program, dict[str, Tensor]],
    gpus: Gpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if place is not None:
        monkeypatch.setenv("LOCAL_RANK", place)
    program, batch = compiled
    gpus.current = 2
    arguments = Arguments(program, None, "global", (), "cuda")
    with FakeTensorMode():
        there, here = (
            {
                name: torch.zeros(x.shape, dtype=x.dtype, device=f"cuda:{gpu}")
                for name, x in batch.items()
            }
            for gpu in (0, 2)
        )
        arguments._tensors((), here)
        assert not caplog.records
        for given in (there, there, here):
            found = arguments._tensors((), given)
            assert {x.device for x in found} == {torch.device("cuda", 2)}
        assert {id(x) for x in found} <= {id(x) for x in here.values()}, (
            "what is there is taken as it is"
        )
    (said,) = [
        record.getMessage()
        for record in caplog.records
        if "every call copies it" in record.getMessage()
    ]
    assert (
        "is on cuda:0, but this process computes on cuda:2" in said
        and f"set_device({remedy})" in said
    )


class Reached(Exception):
    """Raised when planning begins."""


@pytest.mark.parametrize("num", [0, 4])
def test_a_model_on_the_cpu_of_a_machine_with_gpus_gives_a_warning(
    num: int, gpus: Gpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reached(*_: object) -> None:
        raise Reached

    model, batch = zoo_small.llama(num_layers=1)
    gpus.num = num
    monkeypatch.setattr(building, "_plan_together", reached)
    with pytest.raises(Reached):
        autopar.compile(model, Mesh.parse("d=1"), example_inputs=batch, hardware="h100-sxm")
    assert any(
        "the model and the batch are on the CPU" in record.getMessage() for record in caplog.records
    ) == bool(num)


@pytest.mark.parametrize(
    ("num", "mesh", "is_told"),
    [(8, 1, True), (8, (1, 8), False), (8, Mesh(1), False), (1, 1, False)],
    ids=["one", "all", "asked", "alone"],
)
def test_an_unrequested_use_of_one_of_several_gpus_gives_a_warning(
    num: int, mesh: Any, is_told: bool, gpus: Gpus, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.num = num
    building._tell_of_gpus("cuda", mesh)
    assert [
        record.getMessage().count("one of 8 GPUs is used: `autopar run SCRIPT`")
        for record in caplog.records
    ] == [1] * is_told
