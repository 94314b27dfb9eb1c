"""Outputs that the loss does not use: their gradients are not computed, and other gradients are as
if these outputs were detached."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar import constraints as asked
from autopar.api.planning import plan_model
from autopar.capture import Trace
from autopar.core.mesh import Mesh
from autopar.kernels.packing import into_bucket
from autopar.planner import Planned
from autopar.program import lockstep
from autopar.program.executor import without
from autopar.program.program import LazyGraphModule, Program, StageProgram

aten = torch.ops.aten
MESHES = {"pair": Mesh({"a": 2}), "square": Mesh({"a": 2, "b": 2})}
PLANS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "ddp": ("pair", (asked.ddp(),)),
    "fsdp": ("square", (asked.fsdp(),)),
    "heads": ("square", (asked.fsdp(axes="a"), asked.tensor_parallel("1d", axes="b"))),
}
OUTPUTS = ("left", "right", "hidden", "joined")


class Forked(nn.Module):
    """Two heads on one body. Returns the results of both heads and of the body, and the
    concatenated results of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
        self.left, self.right = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        left, right = self.left(hidden), self.right(hidden)
        return {
            "left": left,
            "right": right,
            "hidden": hidden,
            "joined": torch.cat([left, right], -1).tanh(),
        }


@cache
def planned(plan: str) -> tuple[nn.Module, Tensor, Trace, Planned]:
    torch.manual_seed(0)
    model, x = Forked().double(), torch.randn(8, 8, dtype=torch.float64)
    mesh, constraints = PLANS[plan]
    options: dict[str, Any] = {
        "hardware": "h100-sxm",
        "constraints": constraints,
        "outputs": "dtensor",
    }
    return model, x, *plan_model(model, MESHES[mesh], example_inputs=(x,), **options)


def pruned(program: StageProgram, absent: tuple[str, ...]) -> tuple[StageProgram, list[str]]:
    """Return the program without these tangents in backward, and the parameters that have no
    gradient then."""
    given = [n.target for n in program.backward.graph.nodes if n.op == "placeholder"][
        program.num_saved :
    ]
    names = dict(zip((t.name for t in program.outputs if t.has_gradient), given, strict=True))
    graph = without(program.backward.graph, given, [names[name] for name in absent])
    end = next(iter(reversed(graph.nodes)))
    trained = [t.name for t in program.parameters if t.has_gradient]
    none = [name for name, result in zip(trained, end.args[0], strict=True) if result is None]
    end.args = (tuple(result for result in end.args[0] if result is not None),)
    parameters = tuple(
        replace(t, has_gradient=t.has_gradient and t.name not in none) for t in program.parameters
    )
    return (
        replace(program, backward=LazyGraphModule(program.backward, graph), parameters=parameters),
        none,
    )


@pytest.mark.parametrize(
    "absent", [c for n in (1, 2, 3) for c in combinations(OUTPUTS, n)], ids=" ".join
)
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_with_unused_outputs_match_the_plain_model_including_missing_ones(
    plan: str, absent: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, trace, found = planned(plan)
    program, none = pruned(found.stage_program(), absent)

    def tangent_of(path: str, shape: Any, dtype: torch.dtype, **how: Any) -> Tensor:
        return real(path, shape, dtype, **how) * (path not in absent)

    real = lockstep.tangent_of
    monkeypatch.setattr(lockstep, "tangent_of", tangent_of)
    values = {name: p.detach() for name, p in model.named_parameters()}
    whole = Program.of_one_stage(trace, program)
    ours = lockstep.run_lockstep(whole, values, {}, [x]).gradients
    plain = Forked().double()
    plain.load_state_dict(model.state_dict())
    outputs = plain(x)
    used = [o for o in trace.outputs if o.path not in absent]
    torch.autograd.backward(
        [outputs[o.path] for o in used],
        [real(o.path, o.shape, o.dtype, is_loss=False) for o in used],
    )
    assert none == [name for name, p in plain.named_parameters() if p.grad is None]
    for name, p in plain.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(ours[name], p.grad)


def test_unused_outputs_reduce_compute_and_communication() -> None:
    *_, found = planned("ddp")
    program = found.stage_program()
    few, none = pruned(program, ("right", "hidden", "joined"))
    assert none == ["right.weight", "right.bias"]
    count = [sum(n.op == "call_function" for n in p.backward.graph.nodes) for p in (few, program)]
    assert count[0] < count[1]
    assert any(n.target is into_bucket for n in program.backward.graph.nodes), (
        "gradients go in a bucket"
    )


def test_missing_tangents_become_zeros_and_in_place_sums_spoil_no_reader() -> None:
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    both = graph.call_function(aten.cat.default, ([first, second],))
    doubled = graph.call_function(aten.mul.Tensor, (first, 2))
    total = graph.call_function(aten.add.Tensor, (doubled, second))
    written = graph.call_function(aten.neg.out, (total,), {"out": total})
    graph.output(
        (
            both,
            written,
            graph.call_function(aten.add.Tensor, (doubled, 1.0)),
            graph.call_function(aten.exp.default, (second,)),
        )
    )
    made = without(graph, ["first", "second"], ["second"])
    x = torch.tensor([1.0, 2.0])
    joined, negated, more, none = fx.GraphModule({}, made)(x, torch.zeros(2))
    assert (
        joined.tolist() == [1, 2, 0, 0]
        and negated.tolist() == [-2, -4]
        and more.tolist() == [3, 5]
        and none is None
    )


def test_a_scaled_term_is_unchanged() -> None:
    graph = fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    graph.output((graph.call_function(aten.add.Tensor, (first, second), {"alpha": 3}),))
    made = fx.GraphModule({}, without(graph, ["first", "second"], ["first"]))
    assert made(torch.zeros(1), torch.ones(1))[0].item() == 3
