"""Adapters of a compiled model are saved as peft saves them, and read back, and what is not
theirs is refused."""

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
def stepped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A compiled model with an adapter and a head of its own that have made a step, the plain
    one, and where it was saved."""
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
def test_what_peft_reads_through_its_model_is_read_through_the_compiled_one(
    stepped: tuple[Any, Any, Path],
) -> None:
    module, plain, _ = stepped
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


def test_what_is_saved_is_what_peft_would_save_of_the_same_values(
    stepped: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    module, plain, folder = stepped
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
        for key, value in load_file(_saved(plain, tmp_path)).items()
    ), "it was trained"
    assert sorted(each.name for each in folder.iterdir()) == sorted(
        each.name for each in tmp_path.iterdir() if each.is_file()
    )
    assert (folder / "adapter_config.json").read_text() == (
        tmp_path / "adapter_config.json"
    ).read_text()


def _saved(plain: Any, folder: Path) -> Path:
    plain.save_pretrained(folder / "start")
    return folder / "start" / FILE


def test_it_is_read_into_the_plain_model_and_into_another_compiled_one(
    stepped: tuple[Any, Any, Path],
) -> None:
    module, plain, folder = stepped
    other = autopar.compile(plain, example_inputs=BATCH, plan=module.plan)
    wanted = module(**BATCH)["loss"].item()
    assert other(**BATCH)["loss"].item() != pytest.approx(wanted, rel=1e-4)
    autopar.load_adapter(other, plain, folder)
    assert other(**BATCH)["loss"].item() == wanted
    with torch.no_grad():
        assert PeftModel.from_pretrained(base(tied=False), folder)(
            **BATCH
        ).loss.item() == pytest.approx(wanted, rel=1e-5)


def test_another_adapters_file_is_refused_and_nothing_changes(
    stepped: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    module, plain, folder = stepped
    wanted, weights = module(**BATCH)["loss"].item(), load_file(folder / FILE)
    first, *rest = sorted(weights)
    for name, kept, words in (
        ("less", rest, "in the model, but not in"),
        ("more", [*weights, "other.lora_A.weight"], "not in the model"),
    ):
        (tmp_path / name).mkdir()
        save_file(
            {key: torch.zeros_like(weights.get(key, weights[first])) for key in kept},
            tmp_path / name / FILE,
        )
        with pytest.raises(RuntimeStateError, match=words) as refusal:
            autopar.load_adapter(module, plain, tmp_path / name)
        assert "adapter_config.json" in str(refusal.value)
    with pytest.raises(RuntimeStateError, match="there is no adapter"):
        autopar.load_adapter(module, plain, tmp_path)
    assert module(**BATCH)["loss"].item() == wanted


def test_what_has_no_such_files_is_refused(stepped: tuple[Any, Any, Path], tmp_path: Path) -> None:
    module, _, folder = stepped
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
def test_adapters_of_other_kinds_train_as_the_plain_model_and_are_read_by_peft(
    kind: str, tmp_path: Path
) -> None:
    losses, norms = [], []
    plain = [get_peft_model(base(tied=False), KINDS[kind]()) for _ in range(2)]
    plain[1].load_state_dict(plain[0].state_dict())
    module = autopar.compile(
        plain[0].eval(), example_inputs=BATCH, hardware="cpu-gloo"
    )  # dropout draws other numbers than torch
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
            wanted = plain[1](**BATCH).loss.item()
            assert PeftModel.from_pretrained(base(tied=False), tmp_path)(
                **BATCH
            ).loss.item() == pytest.approx(wanted, rel=1e-5)


def test_what_an_older_torch_cannot_join_is_refused_before_anything_is_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = autopar.compile(
        Tagger(),
        example_inputs=torch.utils.data.default_collate(samples(4, 1)),
        hardware="cpu-gloo",
    ).device_mesh
    apart = DTensor.from_local(
        torch.zeros(4), mesh, [_StridedShard(0, split_factor=2)], run_check=False
    )
    _check_joined({"bias": apart})
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    _check_joined({"bias": DTensor.from_local(torch.zeros(4), mesh, [Shard(0)], run_check=False)})
    with pytest.raises(RuntimeStateError, match="cannot gather 'bias'") as refusal:
        _check_joined({"bias": apart})
    assert "save_weights" in refusal.value.remedy
