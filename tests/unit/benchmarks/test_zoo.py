"""The model zoo: models can be built, compute a loss, and have configurable sizes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from autopar.errors import AutoparError
from benchmarks import coverage, zoo
from benchmarks.models import TINY, ModelSpec

aten = torch.ops.aten
# Parameters to which the models give no gradient.
NO_GRADIENT = (
    "embed_positions",
    "masked_spec_embed",
    "vision_tower.encoder.layers.1",
    "post_layernorm",
)


def loss_of(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result["loss"]


@pytest.mark.parametrize("name", zoo.NAMES)
def test_loss_of_each_model_has_gradients_for_all_parameters(name: str) -> None:
    model, batch = zoo.build(name, batch=2)
    assert model.training and all(parameter.any() for parameter in model.parameters())
    loss = loss_of(model(**batch))
    assert loss.isfinite() and loss.shape == ()
    loss.backward()
    lost = [
        n
        for n, p in model.named_parameters()
        if p.grad is None and not any(known in n for known in NO_GRADIENT)
    ]
    assert lost == []


def test_zoo_contains_each_family_of_models() -> None:
    families = {
        "decoder": "llama",
        "encoder": "bert",
        "sequence to sequence": "t5",
        "experts": "mixtral",
        "state space": "mamba",
        "vision": "swin",
        "audio": "wav2vec2",
        "multimodal": "llava",
        "diffusion": "dit",
        "recommendation": "dlrm",
        "batch norm": "cnn",
        "volumes": "unet3d",
        "recurrent": "lstm",
    }
    assert set(families.values()) <= set(zoo.NAMES)


def test_settings_change_the_size_of_a_model_on_the_meta_device() -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 2048, "num_attention_heads": 16}
    model, batch = zoo.build(
        "llama", device="meta", batch=32, seq=40, dtype=torch.bfloat16, **sizes
    )
    assert len(model.model.layers) == 3 and model.lm_head.weight.shape == (128, 2048)
    assert model.lm_head.weight.is_meta and model.lm_head.weight.dtype == torch.bfloat16
    assert tuple(batch["input_ids"].shape) == (32, 40)
    assert zoo.build("dit", device="meta", dim=1024, layers=5)[0].blocks[4].out.weight.shape == (
        1024,
        1024,
    )


def test_nested_settings_change_only_their_submodel() -> None:
    model, _ = zoo.build("clip", device="meta", text_config={"num_hidden_layers": 3})
    assert (
        model.config.text_config.num_hidden_layers == 3
        and model.config.text_config.hidden_size == 64
    )
    assert model.config.vision_config.num_hidden_layers == 2


@pytest.mark.parametrize("name", ["gpt2", "t5", "clip", "dit", "lstm", "nn_transformer"])
def test_dropout_is_zero_by_default(name: str) -> None:
    def active(model: nn.Module) -> bool:
        masks = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
        attributes = (
            value
            for module in model.modules()
            for key, value in vars(module).items()
            if "drop" in key
        )
        return masks or any(isinstance(value, float) and value > 0 for value in attributes)

    assert not active(zoo.build(name, device="meta")[0])
    assert active(zoo.build(name, device="meta", dropout=0.25)[0])


def test_weights_are_determined_by_the_seed() -> None:
    first, second, third = (
        dict(zoo.build("dlrm", seed=seed)[0].named_parameters()) for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], third[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "settings"), [("nothing", {}), ("dit", {"widht": 3}), ("llama", {"hiden_size": 3})]
)
def test_unknown_names_and_settings_are_refused(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(AutoparError):
        zoo.build(name, **settings)


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_have_eight_heads(name: str) -> None:
    model, batch = ModelSpec.known(name).build(meta=True)
    assert model.config.num_attention_heads == 8 and next(iter(batch.values())).shape[0] == 8


def test_coverage_names_ops_without_a_rule_and_their_source_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coverage, "is_fallback", lambda call: call.target is aten.relu.default)
    row = coverage.row(ModelSpec.of("zoo", "dlrm").to_json(), "", 4, 16)
    assert row["captured"] and not row["ok"] and row["num_without_rule"] == 3
    [entry] = row["without_rule"]
    assert (
        entry["op"] == "aten.relu.default"
        and entry["module"] == "bottom.1"
        and "sequences.py" in entry["source"]
    )


def test_coverage_states_why_a_model_is_not_captured(tmp_path: Path) -> None:
    file = tmp_path / "looking.py"
    file.write_text(
        "import torch\n\nclass Looking(torch.nn.Linear):\n    def forward(self, x):\n        y ="
        " super().forward(x).sum()\n        return y if y > 0 else -y\n\ndef made():\n    return"
        " Looking(4, 4), {'x': torch.randn(2, 4)}\n"
    )
    row = coverage.row(ModelSpec("looking", module=f"{file}:made").to_json(), "", 4, 16)
    assert not row["ok"] and not row["captured"]
    assert "looking.py:6" in row["error"] and "torch.where" in row["error"]
