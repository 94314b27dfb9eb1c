"""The list of models of other libraries. The libraries need not be installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from autopar.errors import AutoparError
from benchmarks.models import ModelSpec
from benchmarks.zoo import libraries


def test_each_listed_model_has_a_library_settings_and_inputs() -> None:
    assert {name.partition("/")[0] for name in libraries.NAMES} == {
        "torchvision",
        "timm",
        "diffusers",
    }
    for name, entry in libraries.LIST["models"].items():
        assert entry["make"].startswith(name.partition("/")[0]), name
        assert set(entry) == {"make", "settings", "inputs"} and entry["inputs"], name
    assert set(libraries.LIST["refused"]) <= set(libraries.NAMES)


def list_model(
    monkeypatch: pytest.MonkeyPatch, make: str, inputs: dict[str, Any], **settings: Any
) -> None:
    monkeypatch.setattr(libraries, "NAMES", ("x",))
    monkeypatch.setattr(
        libraries, "LIST", {"models": {"x": {"make": make, "settings": settings, "inputs": inputs}}}
    )


def test_model_is_built_with_a_loss_and_reproducible_weights_and_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    list_model(
        monkeypatch,
        "torch.nn.Linear",
        {"input": [3], "labels": {"below": 4, "shape": []}},
        in_features=3,
        out_features=4,
    )
    spec = ModelSpec.of("libraries", "x")
    model, batch = spec.build(batch=8, dtype=torch.float64)
    second_model, second_batch = spec.build(batch=8, dtype=torch.float64)
    assert (
        batch["input"].shape == (8, 3)
        and batch["input"].dtype == torch.float64
        and batch["labels"].shape == (8,)
    )
    loss = model(**batch)["loss"]
    assert (
        loss
        == torch.nn.functional.cross_entropy(model.model(batch["input"]), batch["labels"])
        == second_model(**second_batch)["loss"]
    )
    del batch["labels"]
    assert model(**batch)["loss"] == model.model(batch["input"]).square().mean()


def test_batch_has_the_listed_tensors_and_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = {
        "lengths": {"from": 5, "below": 6, "shape": [2]},
        "places": {"count": [2, 2]},
        "flag": False,
        "sizes": {"value": [1, 2]},
    }
    list_model(monkeypatch, "torch.nn.Identity", inputs)
    _, batch = ModelSpec.of("libraries", "x").build(batch=3)
    assert batch["lengths"].tolist() == [[5, 5]] * 3 and batch["places"].tolist() == [
        [0, 1],
        [2, 3],
    ]
    assert batch["flag"] is False and batch["sizes"] == [1, 2]


def test_dropout_is_disabled_and_zero_parameters_are_randomized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    list_model(
        monkeypatch,
        "torch.nn.TransformerEncoderLayer",
        {"src": [5, 8]},
        d_model=8,
        nhead=2,
        dim_feedforward=8,
        batch_first=True,
    )
    model, batch = ModelSpec.of("libraries", "x").build(batch=2)
    assert all(bool(p.any()) for p in model.parameters())
    assert torch.equal(model(**batch)["loss"], model(**batch)["loss"])


def test_error_for_a_missing_library_states_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    list_model(monkeypatch, "no_such_library.models.Net", {})
    with pytest.raises(AutoparError, match="pip install no_such_library"):
        ModelSpec.of("libraries", "x").build()
    with pytest.raises(AutoparError, match="--libraries has no 'y'"):
        ModelSpec.of("libraries", "y")
