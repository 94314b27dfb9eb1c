"""The list of other libraries' models, none of which has to be installed."""

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


def test_every_model_of_the_list_is_of_a_library_with_settings_and_inputs() -> None:
    assert {name.partition("/")[0] for name in libraries.NAMES} == {
        "torchvision",
        "timm",
        "diffusers",
    }
    for name, entry in libraries.LIST["models"].items():
        assert entry["make"].startswith(name.partition("/")[0]), name
        assert set(entry) == {"make", "settings", "inputs"} and entry["inputs"], name
    assert set(libraries.LIST["refused"]) <= set(libraries.NAMES)


def listed(
    monkeypatch: pytest.MonkeyPatch, make: str, inputs: dict[str, Any], **settings: Any
) -> None:
    monkeypatch.setattr(libraries, "NAMES", ("x",))
    monkeypatch.setattr(
        libraries, "LIST", {"models": {"x": {"make": make, "settings": settings, "inputs": inputs}}}
    )


def test_a_model_comes_with_its_loss_and_a_batch_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed(
        monkeypatch,
        "torch.nn.Linear",
        {"input": [3], "labels": {"below": 4, "shape": []}},
        in_features=3,
        out_features=4,
    )
    spec = ModelSpec.of("libraries", "x")
    model, batch = spec.build(batch=8, dtype=torch.float64)
    again, same = spec.build(batch=8, dtype=torch.float64)
    assert (
        batch["input"].shape == (8, 3)
        and batch["input"].dtype == torch.float64
        and batch["labels"].shape == (8,)
    )
    loss = model(**batch)["loss"]
    assert (
        loss
        == torch.nn.functional.cross_entropy(model.model(batch["input"]), batch["labels"])
        == again(**same)["loss"]
    )
    del batch["labels"]
    assert model(**batch)["loss"] == model.model(batch["input"]).square().mean()


def test_a_batch_has_numbers_and_plain_values_as_the_list_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = {
        "lengths": {"from": 5, "below": 6, "shape": [2]},
        "places": {"count": [2, 2]},
        "flag": False,
        "sizes": {"value": [1, 2]},
    }
    listed(monkeypatch, "torch.nn.Identity", inputs)
    _, batch = ModelSpec.of("libraries", "x").build(batch=3)
    assert batch["lengths"].tolist() == [[5, 5]] * 3 and batch["places"].tolist() == [
        [0, 1],
        [2, 3],
    ]
    assert batch["flag"] is False and batch["sizes"] == [1, 2]


def test_dropout_is_off_and_what_begins_as_zeros_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    listed(
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


def test_a_library_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed(monkeypatch, "no_such_library.models.Net", {})
    with pytest.raises(AutoparError, match="pip install no_such_library"):
        ModelSpec.of("libraries", "x").build()
    with pytest.raises(AutoparError, match="--libraries has no 'y'"):
        ModelSpec.of("libraries", "y")
