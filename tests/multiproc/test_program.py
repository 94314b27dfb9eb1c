"""A program on four gloo processes matches the plain model. The processes measure, and the tests
check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import run_processes

from autopar.runtime.optimizers import REFUSED, SUPPORTED

pytestmark = pytest.mark.multiproc
HERE = Path(__file__).parent
Facts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return run_processes(4, str(HERE / "worker_module.py"), "run", folder)


def test_every_communication_step_equals_the_lockstep_interpreter(facts: Facts) -> None:
    assert [fact["steps"]["wrong"] for fact in facts] == [[]] * 4


def test_every_step_allocates_the_same_memory_on_fake_and_real_groups(facts: Facts) -> None:
    assert [fact["steps"]["memory"] for fact in facts] == [[]] * 4


def test_steps_on_indivisible_dims_move_every_element_in_the_predicted_memory() -> None:
    for fact in run_processes(4, str(HERE / "worker_uneven.py"), "run"):
        assert fact == {"wrong": [], "memory": []}


def test_a_bound_step_equals_the_step(facts: Facts) -> None:
    assert [fact["steps"]["bound"] for fact in facts] == [[]] * 4


@pytest.mark.parametrize("what", ["loss", "logits", "gradients", "norm", "parameters", "mean"])
def test_five_optimizer_steps_follow_the_plain_model(facts: Facts, what: str) -> None:
    assert max(fact["training"][what] for fact in facts) < 2e-6


def test_the_loss_is_the_only_differentiable_output_and_constants_are_returned(
    facts: Facts,
) -> None:
    assert facts[0]["training"]["requires_grad"] == [True, False]
    assert facts[0]["training"]["note"] == "text"


def test_clipping_uses_the_true_global_norm_and_scales_every_gradient(facts: Facts) -> None:
    for fact in facts:
        assert set(fact["norms"]) == {"1.0", "2.0", "3.0", "inf"}
        assert max(fact["norms"].values()) < 2e-6


def test_parameters_and_gradients_have_the_storage_layout_and_match_the_model(
    facts: Facts,
) -> None:
    for fact in facts:
        assert fact["storage"] == {
            "local": True,
            "full": True,
            "grads": True,
            "placements": "(Shard(dim=0), _StridedShard(dim=1, sf=3))",
        }


def test_names_ties_and_frozen_parameters_match_the_model(facts: Facts) -> None:
    assert all(all(fact["names"].values()) for fact in facts)


def test_a_checkpoint_loads_into_every_mesh_and_the_plain_model_and_training_continues(
    facts: Facts,
) -> None:
    for fact in facts:
        assert set(fact["checkpoints"]) == {"(2, 2)", "(4, 1)", "(1, 4)", "plain"}
        assert max(fact["checkpoints"].values()) < 2e-6


def test_a_full_state_dict_loads_into_a_model_built_on_meta(facts: Facts) -> None:
    for fact in facts:
        assert fact["loading"]["keys"] == "<All keys matched successfully>"
        assert fact["loading"]["parameters"] == 0
        assert fact["loading"]["loss"] < 2e-6


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_supported_optimizer_matches_its_steps_on_the_plain_model(
    facts: Facts, name: str
) -> None:
    tolerance = (
        2e-5 if name == "LBFGS" else 2e-6
    )  # fp32, with rounding in many evaluations; `test_held` tests float64
    assert max(fact["optimizers"][name] for fact in facts) < tolerance


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_optimizer_is_refused_at_its_first_step(facts: Facts, name: str) -> None:
    assert all(REFUSED[name] in fact["optimizers"][name] for fact in facts)


@pytest.mark.parametrize("outputs", ["full", "local", "dtensor"])
@pytest.mark.parametrize("batch", ["global", "local"])
def test_the_predicted_peak_equals_the_measured_peak_and_no_memory_is_leaked(
    facts: Facts, outputs: str, batch: str
) -> None:
    for fact in facts:
        predicted, measured, left = fact["memory"][f"{outputs} {batch}"]
        assert measured == predicted
        assert left == {0}


def test_local_batches_and_output_forms_match_the_global_ones(facts: Facts) -> None:
    for rank, fact in enumerate(facts):
        batches = fact["batches"]
        assert batches["loss"] == 0
        assert batches["local"]
        assert batches["dtensor"]
        assert batches["samples"] == ([0, 2, 4, 6] if rank < 2 else [1, 3, 5, 7])
        assert batches["layouts"] == {"0": "S(0) R", "target": "S(0) R"}
        assert "the program expects torch.float32 (4, 8)" in batches["whole batch"]


def test_ranks_with_another_plan_are_named_on_every_rank(facts: Facts) -> None:
    assert all(
        "ranks [2] have a different plan from rank 0" in fact["refusals"]["plan"] for fact in facts
    )


def test_a_mesh_of_another_size_or_shape_is_refused(facts: Facts) -> None:
    for fact in facts:
        assert "has 16 devices, but there are 4 processes" in fact["refusals"]["mesh"]
        assert "the program was compiled for mesh data=4,tensor=1" in fact["refusals"]["other mesh"]


def test_every_storable_layout_joins_to_the_full_tensor(facts: Facts) -> None:
    for fact in facts:
        assert fact["strided"]["wrong"] == []
        assert fact["strided"]["count"] == 31
        assert fact["strided"]["refused"] == [
            ((4, 3, 8), "S(2)#1 S(2)#0"),
            ((3, 8, 4), "S(1)#1 S(1)#0"),
        ]
