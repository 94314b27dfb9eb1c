"""The contents of the state dict of a compiled module, and how it is pickled, in one process."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import autopar
from autopar.errors import RuntimeStateError

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Net(nn.Module):
    """A model with tied weights, persistent and non-persistent buffers, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.b.weight = self.a.weight
        self.register_buffer("gain", torch.ones(4))
        self.register_buffer("aside", torch.ones(4), persistent=False)
        self.version: Any = 1

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.norm(self.a(x))) * self.gain * self.aside).square().mean()

    def get_extra_state(self) -> Any:
        return {"version": self.version}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]


def compiled(plain: nn.Module, **options: Any) -> Any:
    return autopar.compile(copy.deepcopy(plain), hardware="cpu-gloo", **options)


def test_the_plain_model_loads_the_full_state_dict_strictly() -> None:
    plain = Net()
    plain.version = 7
    module = compiled(plain, example_inputs=(X,))
    module(X).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    state = module.full_state_dict()
    assert state.keys() == plain.state_dict().keys() and state["a.weight"] is state["b.weight"]
    assert all(
        type(x) is Tensor and not x.requires_grad
        for name, x in state.items()
        if name != "_extra_state"
    )
    fresh = Net()
    fresh.load_state_dict(state)
    assert fresh.version == 7 and fresh(X).item() == pytest.approx(module(X).item())
    assert fresh.norm.running_mean.any()
    before = module(X).item()
    for x in state.values():
        if isinstance(x, Tensor):
            x.zero_()
    assert module(X).item() == before, "the state dict is a copy"


def test_full_state_dict_is_refused_before_the_first_call_and_without_values() -> None:
    module = compiled(nn.Linear(4, 4))
    with pytest.raises(
        RuntimeStateError, match="full_state_dict is not available before the first call"
    ):
        module.full_state_dict()
    with autopar.weights_on_meta():
        empty = nn.Linear(4, 4)
    with pytest.raises(RuntimeStateError, match="load_weights"):
        autopar.compile(empty, example_inputs=(X,), hardware="cpu-gloo").full_state_dict()


def test_pickles_of_one_process_contain_plain_tensors() -> None:
    module, plain = compiled(nn.Linear(4, 4), example_inputs=(X,)), nn.Linear(4, 4)
    optimizer = torch.optim.Adam(module.parameters())
    module(X).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(
        {
            "model": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "weight": module.weight,
        },
        file,
    )
    file.seek(0)
    found = torch.load(file, weights_only=True)
    plain.load_state_dict(found["model"])
    assert plain(X).equal(module(X)) and found["weight"].requires_grad
    torch.optim.Adam(plain.parameters()).load_state_dict(found["optimizer"])
    assert type(found["optimizer"]["state"][0]["exp_avg"]) is Tensor


def test_a_copy_of_a_parameter_has_its_type_and_values() -> None:
    module = compiled(nn.Linear(4, 4), example_inputs=(X,))
    weight = copy.copy(module.weight)
    assert type(weight) is type(module.weight) and weight.full_tensor().equal(
        module.weight.full_tensor()
    )


def test_extra_state_must_not_change_after_compilation() -> None:
    plain = Net()
    module = compiled(plain, example_inputs=(X,))
    assert module.state_dict()["_extra_state"] == {"version": 1}
    module.load_state_dict(plain.state_dict())
    module.load_state_dict(module.full_state_dict())
    plain.version = 2
    with pytest.raises(
        RuntimeStateError, match="'_extra_state' changed after the model was compiled"
    ):
        module.load_state_dict(plain.state_dict())


def test_a_checkpoint_does_not_contain_extra_state(tmp_path: Path) -> None:
    module, other = (compiled(Net(), example_inputs=(X,)) for _ in range(2))
    autopar.Checkpoints(tmp_path).save(1, module, average=AveragedModel(module))
    average = AveragedModel(other)
    assert autopar.Checkpoints(tmp_path).load(other, average=average) == 1
    for made in (other, average.module):
        assert made.full_state_dict()["a.weight"].equal(module.full_state_dict()["a.weight"])


def test_assigned_tied_tensors_remain_one_tensor() -> None:
    module, other = compiled(Net(), example_inputs=(X,)), Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = {name: x for name, x in other.state_dict().items() if name != "_extra_state"}
    module.load_state_dict(state, assign=True, strict=False)
    assert module.a.weight is module.b.weight
    assert all(torch.equal(module.full_state_dict()[name], x) for name, x in state.items())
    assert module(X).item() == pytest.approx(other(X).item(), rel=1e-6)
    own = {name: x.detach().clone() for name, x in module.state_dict().items() if "." in name}
    for name in ("a.weight", "b.weight"):
        own[name] = own[name] + 1.0
    module.load_state_dict(own, assign=True, strict=False)
    assert torch.equal(module.full_state_dict()["b.weight"], other.a.weight.detach() + 1.0)
    module(X).backward()
    optimizer.step()
    assert not torch.equal(module.full_state_dict()["b.weight"], other.a.weight.detach() + 1.0)


def test_different_values_of_tied_tensors_are_not_assigned() -> None:
    module = compiled(Net(), example_inputs=(X,))
    before = module.full_state_dict()
    state = {"a.weight": torch.ones(4, 4), "b.weight": torch.zeros(4, 4)}
    with pytest.raises(
        RuntimeStateError, match=r"different values of 'b.weight' and 'a.weight', which are one"
    ):
        module.load_state_dict(state, assign=True, strict=False)
    assert torch.equal(module.full_state_dict()["a.weight"], before["a.weight"])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(4, device="meta"), "it is on the meta device"),
        (torch.ones(4).to_sparse(), "it is a tensor of layout torch.sparse_coo"),
    ],
)
@pytest.mark.parametrize("name", ["a.bias", "gain"])
def test_tensors_without_values_are_not_loaded(value: Tensor, reason: str, name: str) -> None:
    module = compiled(Net(), example_inputs=(X,))
    before = module.full_state_dict()
    with pytest.raises(
        RuntimeStateError, match=f"the state dict has no values of '{name}': {reason}"
    ):
        module.load_state_dict({name: value}, strict=False)
    assert torch.equal(module.full_state_dict()[name], before[name])
