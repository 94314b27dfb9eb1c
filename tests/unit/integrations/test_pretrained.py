"""Adapters of a compiled model are saved in the format of peft and loaded again. Other files are
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.torch_version import TorchVersion
from trained import Tagger, adapted, base, samples

import autopar
from autopar.errors import RuntimeStateError
from autopar.runtime.full_state import _check_joined

BATCH = torch.utils.data.default_collate(samples(4, 1))
FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def trained_adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """Return a compiled model with an adapter and a trainable head after one step, the plain model,
    and the folder that the adapter is saved in."""
    plain, folder = (
        adapted(tied=False, modules_to_save=["lm_head"]),
        tmp_path_factory.mktemp("adapter"),
    )
    module = autopar.compile(plain, example_inputs=BATCH, hardware="cpu-gloo")
    module(**BATCH)["loss"].backward()
    torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5).step()
    autopar.save_pretrained(module, plain, folder)
    return module, plain, folder


@pytest.mark.slow
def test_attributes_of_the_peft_model_are_available_on_the_compiled_module(
    trained_adapter: tuple[Any, Any, Path],
) -> None:
    module, plain, _ = trained_adapter
    for name in (
        "config",
        "device",
        "dtype",
        "generation_config",
        "peft_config",
        "active_adapters",
        "main_input_name",
        "modules_to_save",
    ):
        assert getattr(module, name) == getattr(plain, name), name
    for name in ("generate", "merge_and_unload", "num_parameters", "print_trainable_parameters"):
        with pytest.raises(RuntimeStateError, match=f"does not have '{name}' of "):
            getattr(module, name)


def test_saved_adapter_equals_the_files_that_peft_saves(
    trained_adapter: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    module, plain, folder = trained_adapter
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    plain.load_state_dict(
        {
            name: x.full_tensor() if hasattr(x, "full_tensor") else x
            for name, x in module.state_dict().items()
        }
    )
    plain.save_pretrained(tmp_path)
    plain.load_state_dict(start)
    ours, theirs = load_file(folder / FILE), load_file(tmp_path / FILE)
    assert len(theirs) == 3 and sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert any(
        not torch.equal(ours[key], value)
        for key, value in load_file(_save_start(plain, tmp_path)).items()
    ), "the adapter was trained"
    assert sorted(each.name for each in folder.iterdir()) == sorted(
        each.name for each in tmp_path.iterdir() if each.is_file()
    )
    assert (folder / "adapter_config.json").read_text() == (
        tmp_path / "adapter_config.json"
    ).read_text()


def _save_start(plain: Any, folder: Path) -> Path:
    plain.save_pretrained(folder / "start")
    return folder / "start" / FILE


def test_saved_adapter_loads_into_plain_and_compiled_models(
    trained_adapter: tuple[Any, Any, Path],
) -> None:
    module, plain, folder = trained_adapter
    other = autopar.compile(plain, example_inputs=BATCH, plan=module.plan)
    expected_loss = module(**BATCH)["loss"].item()
    assert other(**BATCH)["loss"].item() != pytest.approx(expected_loss, rel=1e-4)
    autopar.load_adapter(other, plain, folder)
    assert other(**BATCH)["loss"].item() == expected_loss
    with torch.no_grad():
        assert PeftModel.from_pretrained(base(tied=False), folder)(
            **BATCH
        ).loss.item() == pytest.approx(expected_loss, rel=1e-5)


def test_file_of_another_adapter_is_refused_without_side_effects(
    trained_adapter: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    module, plain, folder = trained_adapter
    expected_loss, weights = module(**BATCH)["loss"].item(), load_file(folder / FILE)
    first, *rest = sorted(weights)
    for name, keys, words in (
        ("less", rest, "in the model, but not in"),
        ("more", [*weights, "other.lora_A.weight"], "not in the model"),
    ):
        (tmp_path / name).mkdir()
        save_file(
            {key: torch.zeros_like(weights.get(key, weights[first])) for key in keys},
            tmp_path / name / FILE,
        )
        with pytest.raises(RuntimeStateError, match=words) as refusal:
            autopar.load_adapter(module, plain, tmp_path / name)
        assert "adapter_config.json" in str(refusal.value)
    with pytest.raises(RuntimeStateError, match="there is no adapter"):
        autopar.load_adapter(module, plain, tmp_path)
    assert module(**BATCH)["loss"].item() == expected_loss


def test_models_without_adapter_files_are_refused(
    trained_adapter: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    module, _, folder = trained_adapter
    with pytest.raises(RuntimeStateError, match="no save_pretrained"):
        autopar.save_pretrained(module, Tagger(), tmp_path)
    with pytest.raises(RuntimeStateError, match="not a peft model"):
        autopar.load_adapter(module, base(), folder)
    prompts = get_peft_model(
        base(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    )
    with pytest.raises(RuntimeStateError, match=r"\(PROMPT_TUNING\) do not contain its parameters"):
        autopar.save_pretrained(module, prompts, tmp_path)
    assert not list(tmp_path.iterdir())


KINDS = {
    "dropout": lambda: LoraConfig(
        r=2,
        target_modules=["c_attn"],
        lora_dropout=0.1,
        init_lora_weights=False,
        fan_in_fan_out=True,
    ),
    "rank-stabilized": lambda: LoraConfig(
        r=2,
        target_modules=["c_attn", "c_proj", "c_fc"],
        use_rslora=True,
        init_lora_weights=False,
        fan_in_fan_out=True,
    ),
    "tokens": lambda: LoraConfig(
        r=2,
        target_modules=["c_attn"],
        trainable_token_indices=[1, 5],
        init_lora_weights=False,
        fan_in_fan_out=True,
    ),
    "ia3": lambda: IA3Config(
        target_modules=["c_attn", "mlp.c_proj"],
        feedforward_modules=["mlp.c_proj"],
        fan_in_fan_out=True,
    ),
    "vera": lambda: VeraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    "prompts": lambda: PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_adapters_match_the_plain_model_and_load_in_peft(
    kind: str, tmp_path: Path
) -> None:
    losses, norms = [], []
    plain = [get_peft_model(base(tied=False), KINDS[kind]()) for _ in range(2)]
    plain[1].load_state_dict(plain[0].state_dict())
    module = autopar.compile(
        plain[0].eval(), example_inputs=BATCH, hardware="cpu-gloo"
    )  # dropout draws different numbers than torch
    for each in (module, plain[1].eval()):
        parameters = [p for p in each.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        for _ in range(2):
            loss = each(**BATCH)["loss"]
            loss.backward()
            norms.append(sum(float(p.grad.norm()) for p in parameters if p.grad is not None))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert all(p.grad is None for p in each.parameters())
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5) and norms[:2] == pytest.approx(
        norms[2:], rel=1e-4
    )
    if kind != "prompts":
        autopar.save_pretrained(module, plain[0], tmp_path)
        with torch.no_grad():
            expected_loss = plain[1](**BATCH).loss.item()
            assert PeftModel.from_pretrained(base(tied=False), tmp_path)(
                **BATCH
            ).loss.item() == pytest.approx(expected_loss, rel=1e-5)


def test_strided_shards_that_an_older_torch_cannot_gather_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = autopar.compile(
        Tagger(),
        example_inputs=torch.utils.data.default_collate(samples(4, 1)),
        hardware="cpu-gloo",
    ).device_mesh
    strided = DTensor.from_local(
        torch.zeros(4), mesh, [_StridedShard(0, split_factor=2)], run_check=False
    )
    _check_joined({"bias": strided})
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    _check_joined({"bias": DTensor.from_local(torch.zeros(4), mesh, [Shard(0)], run_check=False)})
    with pytest.raises(RuntimeStateError, match="cannot gather 'bias'") as refusal:
        _check_joined({"bias": strided})
    assert "save_weights" in refusal.value.remedy
