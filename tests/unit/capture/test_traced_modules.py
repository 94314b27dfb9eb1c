"""Models that are fx.GraphModules: the results of torch.fx and torch.export are compiled as the
original module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn

import autopar
from autopar.core.mesh import Mesh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(16, 32),
            nn.BatchNorm1d(32),
            nn.Linear(32, 16, bias=False),
        )
        self.down.weight = nn.Parameter(torch.randn(16, 32))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = x + self.down(torch.relu(self.norm(self.up(x))))
        return nn.functional.mse_loss(made, y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16), torch.randn(8, 16)


def traced(net: nn.Module) -> nn.Module:
    return fx.symbolic_trace(net)


def exported(net: nn.Module) -> nn.Module:
    return torch.export.export(net, batch(), strict=False).module()


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("made", [traced, exported])
def test_a_traced_or_exported_module_matches_the_original_module(
    made: object,
) -> None:
    torch.manual_seed(0)
    net = Net()
    assert callable(made)
    model, example = made(copy.deepcopy(net)), batch()
    how = {"hardware": "cpu-gloo", "constraints": [autopar.constraints.fsdp()]}
    plan = autopar.plan(model, Mesh({"a": 2, "b": 2}), example_inputs=example, **how)
    found = autopar.verify(plan, model, example)
    assert (
        found.ok
        and found.num_collectives
        and set(found.gradients) == dict(net.named_parameters()).keys()
    )
    assert any("running_mean" in name for name in found.buffers)

    pm = autopar.compile(model, example_inputs=example)
    loss, plain = pm(*example), net(*example)
    loss.backward()
    plain.backward()
    torch.testing.assert_close(loss, plain)
    wanted = {name: p.grad for name, p in net.named_parameters()}
    for name, p in pm.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), wanted[name])
    torch.testing.assert_close(pm.get_buffer("norm.running_mean"), net.norm.running_mean)


def test_a_graph_module_keeps_its_graph_and_its_parameters() -> None:
    model = traced(Net())
    assert isinstance(model, fx.GraphModule)
    code, weights = model.code, {name: id(p) for name, p in model.named_parameters()}
    autopar.plan(model, 2, example_inputs=batch(), hardware="cpu-gloo")
    assert model.code == code and {name: id(p) for name, p in model.named_parameters()} == weights
