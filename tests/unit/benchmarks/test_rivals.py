"""The comparison with other methods: its counters, the equality of the models, and its claims."""

from __future__ import annotations

import json
import random
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import AutoparError, InfeasibleError
from benchmarks.models import ModelSpec
from benchmarks.rivals.checkpointing import chunked_loss, layers_of, methods
from benchmarks.rivals.claims import MIB, aims, at_most, claims, front
from benchmarks.rivals.measuring import Variant, gradient_error, measure, time_ratios
from benchmarks.rivals.plans import Planner, least
from benchmarks.rivals.report import rivals_table
from benchmarks.tables import README, RIVALS_RESULTS

TINY = """llama:{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "use_cache": false}"""  # noqa: E501
ROW = {
    "model": "m",
    "method": "autopar",
    "kind": "autopar",
    "flops": 1,
    "counts": "activations",
    "wall_ratio": None,
}


@pytest.fixture(scope="module")
def tiny_llama() -> Any:
    return ModelSpec.parse_hf(TINY).build(batch=2, seq=16)


@pytest.fixture(scope="module")
def planner(tiny_llama: Any) -> Planner:
    return Planner.of(*tiny_llama, "cpu-gloo")


def variant(model: nn.Module, batch: dict[str, Any], **how: Any) -> Variant:
    return Variant(
        "",
        dict(model.named_parameters()),
        list(batch.values()),
        lambda: model(**batch)["loss"],
        **how,
    )


def test_measured_bytes_and_flops_of_a_step_are_exact() -> None:
    x, weight = torch.ones(8, 16), nn.Parameter(torch.ones(16, 32))
    measured, gradients = measure(Variant("", {"w": weight}, [x], lambda: (x @ weight).exp().sum()))
    product, loss, parameter, batch = 8 * 32 * 4, 4, 16 * 32 * 4, 8 * 16 * 4
    assert gradients["w"].shape == (16, 32)
    assert weight.grad is None
    assert measured.flops == 2 * (
        2 * 8 * 16 * 32
    )  # forward and the gradient of the weight; x has no gradient
    assert (
        measured.end_of_forward_bytes == product + loss
    )  # the exponential and the loss; the product is freed
    # backward: the exponential, the loss, its tangent and the gradient of the product. The gradient
    # of the weight is not an activation.
    assert measured.activation_peak_bytes == 2 * product + 2 * loss
    assert measured.peak_above_parameters_bytes == max(
        2 * product + 2 * loss, product + 2 * loss + parameter
    )
    assert measured.peak_bytes == measured.peak_above_parameters_bytes + parameter + batch


@pytest.mark.slow
def test_flops_and_peak_of_torch_and_of_a_plan_agree(tiny_llama: Any, planner: Planner) -> None:
    model, batch = tiny_llama
    plain, gradients = measure(variant(model, batch))
    tokens, width = 32, 32
    per_layer = (
        2 * width * width + 2 * width * (width // 2) + 3 * width * 64
    )  # q and o, k and v, gate, up and down
    forward = 2 * tokens * (4 * per_layer + width * 64) + 4 * (2 * 2 * 2 * 4 * 16 * 16 * 8)
    assert plain.flops == 3 * forward + 4 * (
        2 * 2 * 4 * 16 * 16 * 8
    )  # backward of attention is 2.5 times its forward
    choice = planner.within(10 * MIB)
    measured, others = measure(choice.variant)
    assert measured.flops == plain.flops
    assert measured.peak_bytes == choice.predicted_peak_bytes
    assert gradient_error(others, gradients) < 1e-5


def test_all_methods_give_the_same_gradients_with_at_least_the_same_flops(tiny_llama: Any) -> None:
    model, batch = tiny_llama
    plain, expected = measure(variant(model, batch))
    around = methods(model)
    ways = [variant(model, batch, around=patch) for patch in around.values()]
    ways.append(
        Variant(
            "",
            dict(model.named_parameters()),
            list(batch.values()),
            partial(chunked_loss, model, batch, 3),
        )
    )
    for way in ways:
        measured, gradients = measure(way)
        assert gradient_error(gradients, expected) < 1e-5
        assert measured.flops >= plain.flops
    layered, _ = measure(ways[list(around).index("ckpt_layer")])
    assert layered.end_of_forward_bytes < plain.end_of_forward_bytes / 2
    assert all("forward" not in vars(layer) for layer in layers_of(model))


def test_gradient_error_detects_wrong_and_missing_gradients() -> None:
    a = {"w": torch.tensor([1.0, 2.0])}
    assert gradient_error({"w": torch.tensor([1.0, 2.5])}, a) == 0.25
    assert gradient_error({}, a) == float("inf")


def test_models_without_layers_or_logits_are_refused() -> None:
    with pytest.raises(AutoparError, match="no list of equal layers"):
        methods(nn.Linear(2, 2))
    with pytest.raises(AutoparError, match="causal language models"):
        chunked_loss(nn.Linear(2, 2), {})


@pytest.mark.slow
def test_activation_budget_is_respected_if_gradients_are_larger(
    tiny_llama: Any, planner: Planner
) -> None:
    model, batch = tiny_llama
    plain, expected = measure(variant(model, batch))
    budget = plain.activation_peak_bytes // 2
    measured, gradients = measure(planner.activations_within(budget).variant)
    assert measured.activation_peak_bytes <= budget
    assert measured.flops > plain.flops
    assert gradient_error(gradients, expected) < 1e-5


def test_variants_are_timed_in_turns_and_leave_no_gradients() -> None:
    weight, calls = nn.Parameter(torch.ones(4)), []

    def variant_of(name: str) -> Variant:
        def forward() -> torch.Tensor:
            calls.append(name)
            return weight.square().sum()

        return Variant(name, {"w": weight}, [], forward)

    ratios = time_ratios([variant_of("a"), variant_of("b"), variant_of("c")], rounds=5)
    assert ratios[0] == (1.0, 1.0)
    assert len(ratios) == 3
    assert [sorted(calls[i : i + 3]) for i in range(0, 15, 3)] == [["a", "b", "c"]] * 5
    assert len(set(zip(calls[::3], calls[1::3], strict=True))) > 1  # the order varies
    assert weight.grad is None


@pytest.mark.parametrize(
    ("ticks", "expected"), [([0.0] * 6, None), ([0.0, 5.0, 1.0, 2.0, 2.0, 6.0], 2.5)]
)
def test_rounds_without_a_clock_tick_are_ignored(
    ticks: list[float], expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = nn.Parameter(torch.ones(4))
    instants = iter(
        [at for end, tick in zip(accumulate(ticks), ticks, strict=True) for at in (end - tick, end)]
    )

    def variant_of(name: str) -> Variant:
        return Variant(name, {"w": weight}, [], lambda: weight.square().sum())

    class InOrder(random.Random):
        def sample(self, population: Any, k: int, **_: Any) -> list[Any]:
            return list(population)[:k]

    monkeypatch.setattr("benchmarks.rivals.measuring.random.Random", InOrder)
    monkeypatch.setattr("benchmarks.rivals.measuring.time.process_time", lambda: next(instants))
    ratios = time_ratios([variant_of("a"), variant_of("b")], rounds=3)
    assert ratios[1][1] == expected and ratios[0][1] == (None if expected is None else 1.0)
    assert ratios[1][0] is not None and ratios[1][0] > 0.0


def test_least_finds_the_smallest_feasible_budget() -> None:
    def plan_within(budget: int) -> None:
        if budget < 700:
            raise InfeasibleError("too small")

    assert 700 <= least(plan_within, 0, 5000) <= 707


def plan(budget: int, peak: int, flops: float) -> dict[str, Any]:
    return {
        **ROW,
        "budget_bytes": budget * MIB,
        "activation_peak_bytes": peak * MIB,
        "extra_flops": flops,
    }


def rival(method: str, kind: str, peak: int, flops: float) -> dict[str, Any]:
    return {
        **ROW,
        "method": method,
        "kind": kind,
        "activation_peak_bytes": peak * MIB,
        "extra_flops": flops,
    }


def test_claims_are_evaluated_and_known_failures_explained() -> None:
    plans = [plan(100, 90, 0.0), plan(60, 55, 0.1), plan(50, 56, 0.2)]
    rivals = [
        rival("a", "eager", 95, 0.0),
        rival("b", "eager", 52, 0.3),
        rival("c", "fused", 52, 0.1),
        rival("d", "eager", 96, 0.1),
    ]
    by_text = {claim["claim"]: claim for claim in claims([*plans, *rivals])}
    assert {name: claim["ok"] for name, claim in by_text.items()} == {
        "the measured peak is within the budget": False,
        "the measured peak never rises as the budget falls": False,
        "no more flops than a at no higher peak": True,
        "no more flops than b at no higher peak": False,
        "no more flops than c at no higher peak": False,
    }
    assert [name for name, claim in by_text.items() if claim["known"]] == [
        "no more flops than c at no higher peak"
    ]
    small = claims([plan(100, 70, 0.0), plan(80, 71, 0.0)])[1]
    assert (small["ok"], bool(small["known"])) == (False, True)
    assert claims([plan(100, 70, 0.0), plan(80, 72, 0.0)])[1]["known"] is None
    assert at_most(plans, "activation_peak_bytes", 57 * MIB) == plans[1]
    assert [r["method"] for r in front(rivals, "activation_peak_bytes")] == ["a", "c"]


def test_aim_is_reached_only_by_a_plan_within_its_peak() -> None:
    rows = [
        {**plan(142, 140, 0.06), "model": "llama-12x512"},
        {**plan(115, 116, 0.0), "model": "llama-12x512"},
    ]
    assert [(aim["activation_mib"], aim["ok"]) for aim in aims(rows, "llama-12x512")] == [
        (142, True),
        (115, False),
        (95, False),
    ]
    assert aims(rows, "m") == []


def test_readme_table_matches_the_results_and_no_claim_fails_unexpectedly() -> None:
    report = json.loads(RIVALS_RESULTS.read_text(encoding="utf-8"))
    assert rivals_table(report["rows"]) in README.read_text(encoding="utf-8")
    assert [claim for claim in report["claims"] if not claim["ok"] and not claim["known"]] == []
    assert claims(report["rows"]) == report["claims"]
