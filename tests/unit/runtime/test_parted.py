"""A sharded output cannot be read as if the local shard were the full tensor."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.errors import RuntimeStateError
from autopar.runtime.guarded_outputs import PartedOutput, refuse_reads

READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda out: out.argmax(-1).float().mean().item(),
    "float": lambda out: float(out.sum()),
    "int": lambda out: int(out.argmax(-1).sum()),
    "bool": lambda out: bool((out > 0).sum()),
    "format": lambda out: f"{out.mean():.3f}",
    "tolist": lambda out: out.tolist(),
    "numpy": lambda out: out.detach().cpu().numpy(),
    "array": lambda out: np.asarray(out),
    "allclose": lambda out: torch.allclose(out, out),
    "softmax": lambda out: F.softmax(out, -1).amax().item(),
    "topk": lambda out: out.topk(2).values.mean().item(),
}
BESIDE: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "equals labels": lambda out, x, y: out.argmax(-1) == y,
    "labels equal": lambda out, x, y: y == out.argmax(-1),
    "minus": lambda out, x, y: out - x,
    "minus from": lambda out, x, y: x - out,
    "cross entropy": lambda out, x, y: F.cross_entropy(out, y),
    "index": lambda out, x, y: out[y],
}


@pytest.fixture(scope="module", autouse=True)
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def output(*placements: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    return refuse_reads(
        DTensor.from_local(torch.randn(4, 4), mesh, placements or (Shard(0),), run_check=False)
    )


@pytest.mark.parametrize("read", READS)
def test_reading_a_number_from_a_local_shard_is_refused_with_a_remedy(read: str) -> None:
    with pytest.raises(
        RuntimeStateError,
        match=r"would read only this rank's shard[\s\S]*outputs=\"full\"[\s\S]*full_tensor\(\)",
    ):
        READS[read](output())


def test_reading_a_number_from_a_partial_sum_is_refused() -> None:
    with pytest.raises(RuntimeStateError, match="would read only this rank's shard"):
        output(Partial())[0, 0].item()


@pytest.mark.parametrize("beside", BESIDE)
def test_an_op_with_a_sharded_output_and_a_plain_tensor_is_refused_with_a_remedy(
    beside: str,
) -> None:
    with pytest.raises(
        RuntimeStateError, match=r"a plain tensor[\s\S]*outputs=\"full\"[\s\S]*full_tensor\(\)"
    ):
        BESIDE[beside](output(), torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))


@pytest.mark.parametrize("read", ["item", "float", "int", "bool", "softmax", "topk"])
def test_a_replicated_output_can_be_read(read: str) -> None:
    out = output(Replicate())
    assert READS[read](out) == READS[read](out.to_local())


def test_a_sharded_output_otherwise_behaves_as_a_dtensor() -> None:
    out = output()
    assert isinstance(out, DTensor) and isinstance(out, PartedOutput)
    assert type(out.full_tensor()) is Tensor and out.full_tensor().shape == (8, 4)
    assert type(out.to_local()) is Tensor
    labels = distribute_tensor(torch.zeros(8, dtype=torch.int64), out.device_mesh, [Shard(0)])
    assert (out.argmax(-1) == labels).float().mean().full_tensor().item() >= 0
    assert (out * torch.tensor(2.0)).shape == (8, 4), "torch takes a scalar beside a DTensor"
    assert type(labels + 1) is DTensor and type(labels) is DTensor, "the user's own are left alone"
    changed = labels.double()
    assert changed.add_(out[:, 0]) is changed and type(changed) is DTensor
    with pytest.raises(RuntimeError, match="unbind along the sharded dimension"):
        list(out)


def test_backward_runs_through_ops_on_a_sharded_output() -> None:
    out = output().detach().requires_grad_()
    out.pow(2).sum().backward()
    torch.testing.assert_close(out.grad.to_local(), 2 * out.to_local())


def test_a_sharded_output_is_saved_and_copied_as_a_dtensor() -> None:
    file = io.BytesIO()
    torch.save(output(), file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is DTensor
    copied = copy.deepcopy(output())
    assert type(copied) is PartedOutput and torch.equal(copied.to_local(), output().to_local())


def test_a_plain_tensor_is_not_wrapped() -> None:
    plain = torch.zeros(2)
    assert refuse_reads(plain) is plain and type(plain) is Tensor
