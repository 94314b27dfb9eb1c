"""The recompute policies: kept values, recomputed ops and communication match the paper, and
results match the model.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import zoo_small
from torch import fx, nn

from autopar import constraints
from autopar.capture import Trace, capture
from autopar.constraints import Recompute
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError, InfeasibleError
from autopar.planner import Planned, PlanOptions, make_plan
from autopar.verification import verify_program

LAYERS, B, S, H, DATA = 2, zoo_small.BATCH, zoo_small.SEQUENCE, 32, 2
MESH, PROFILE = Mesh({"data": DATA, "tensor": 2}), HardwareProfile.load("h100-sxm")
KINDS = (
    "llama",
    "eager",
    pytest.param("gpt2", marks=pytest.mark.slow),
)  # eager attention consists of several ops


@cache
def traced(kind: str) -> tuple[Trace, nn.Module, dict[str, Any]]:
    settings: dict[str, Any] = {
        "gpt2": {"n_positions": S},
        "eager": {"attn_implementation": "eager"},
    }.get(kind, {})
    model, batch = getattr(zoo_small, "gpt2" if kind == "gpt2" else "llama")(
        num_layers=LAYERS, **settings
    )
    return capture(model, (), batch), model, batch


@cache
def planned(kind: str, recompute: Recompute | None, memory_bytes: int | None = None) -> Planned:
    forced = constraints.megatron(tp=2, dp=DATA, recompute=recompute)
    return make_plan(
        traced(kind)[0],
        MESH,
        PROFILE,
        PlanOptions(constraints=(forced,), memory_bytes=memory_bytes),
    )


def nodes(kind: str) -> dict[str, fx.Node]:
    return {n.meta["key"]: n for n in traced(kind)[0].graph.nodes if n.op == "call_function"}


def again(kind: str, recompute: Recompute | None) -> set[str]:
    """Return the keys of the recomputed nodes."""
    return set(planned(kind, recompute).plan.recomputed_choices())


def kept(kind: str, recompute: Recompute | None) -> Counter[str]:
    """Return the bytes of values that forward keeps for backward, by node."""
    found = (
        (k.node.format(*i), k.bytes)
        for k in planned(kind, recompute).plan.kept
        for i in k.instances
    )
    return Counter({key: size for key, size in found if key in nodes(kind)})


def is_in_layer(key: str) -> bool:
    return any(part.isdecimal() for part in key.partition("/")[0].split("."))


@pytest.mark.parametrize("kind", KINDS)
def test_full_recompute_keeps_only_the_output_of_each_layer(
    kind: str,
) -> None:
    """This is b·s·h elements per layer (section 5: 2·s·b·h bytes in 16 bits)."""
    inside = {key: size for key, size in kept(kind, "full").items() if is_in_layer(key)}
    assert sorted(inside.values()) == [4 * B // DATA * S * H] * LAYERS
    free = {key for key in kept(kind, "none") if is_in_layer(key)}
    assert free - again(kind, "full") == set(inside), "what backward reads is kept, or made again"
    assert all(map(is_in_layer, again(kind, "full")))


@pytest.mark.parametrize("kind", KINDS)
def test_full_recompute_has_one_more_reduction_per_layer(kind: str) -> None:
    """This is the all-reduce of attention. The all-reduce of the MLP gives the output of the layer,
    which is kept."""
    moved = {}
    for recompute in ("none", "full", "selective"):
        steps = [(step.phase, step.collective) for _, step in planned(kind, recompute).plan.steps()]
        found = [c for p, c in steps if (p, c.kind, c.axis) == ("backward", "all_reduce", 1)]
        moved[recompute] = Counter(c.bytes // 4 for c in found)
    whole = B // DATA * S * H
    assert moved["none"] == moved["selective"] == {whole: 2 * LAYERS + 1}
    assert moved["full"] == {whole: 3 * LAYERS + 1}


@pytest.mark.parametrize("kind", KINDS)
def test_selective_recompute_repeats_only_the_ops_around_the_softmax(
    kind: str,
) -> None:
    of = {key: node.target for key, node in nodes(kind).items()}
    found = Counter(
        getattr(of[key], "__name__", "").partition(".")[0] for key in again(kind, "selective")
    )
    if kind == "eager":  # scores, mask and softmax; the copies between them are views without cost
        assert found["dot"] == found["add"] == found["_softmax"] == LAYERS
        scores = [
            key
            for key in kept(kind, "none")
            if nodes(kind)[key].meta["val"].shape[-2:] == (S, S) and is_in_layer(key)
        ]
        assert len(scores) >= LAYERS
        assert not [key for key in kept(kind, "selective") if key in scores]
    else:
        assert found.pop("attention") == LAYERS
        sums = [
            key
            for key in kept(kind, "none")
            if key.endswith("self_attn/getitem/forward/1") or key.endswith("attn/getitem/forward/1")
        ]
        assert len(sums) == LAYERS and not set(sums) & set(kept(kind, "selective"))
    assert all("attn" in key.partition("/")[0] for key in again(kind, "selective"))
    less, more = (planned(kind, recompute).plan.prediction for recompute in ("selective", "none"))
    assert (
        less.memory_bytes["activations"] < more.memory_bytes["activations"]
        and less.peak_bytes <= more.peak_bytes
    )


def test_a_budget_that_needs_recompute_is_refused_without_it() -> None:
    assert not again("llama", "none")
    budget = int(planned("llama", "none").plan.prediction.peak_bytes * 0.93)
    assert planned("llama", None, budget).plan.recomputed_choices()
    with pytest.raises(InfeasibleError):
        planned("llama", "none", budget)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_plans_with_named_recompute_match_the_model(kind: str, recompute: Recompute) -> None:
    trace, model, batch = traced(kind)
    assert verify_program(trace, planned(kind, recompute).program, model, (), batch).ok


def test_selective_recompute_without_attention_is_refused() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.down(torch.relu(self.up(x)))).pow(2).mean()

    options = PlanOptions(constraints=(constraints.megatron(tp=2, dp=2, recompute="selective"),))
    with pytest.raises(
        ConstraintError,
        match=r"recompute='selective': the model has no attention(.|\n)*recompute='full'",
    ):
        make_plan(capture(Block(), (torch.ones(4, 8),), {}), MESH, PROFILE, options)
