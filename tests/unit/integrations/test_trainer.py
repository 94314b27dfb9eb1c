"""autopar's Trainer on one process gives the logs, checkpoints and weights of the transformers
Trainer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from trained import CLIPPED, Tagger, adapted, base, data, log_of, samples, settings, sum_of_logits
from transformers import AutoModelForCausalLM

import autopar
from autopar.errors import RuntimeStateError

OPTIONS = {"compile_options": {"hardware": "cpu-gloo"}}


def same(ours: list[dict[str, float]], theirs: list[dict[str, float]], rel: float = 2e-4) -> bool:
    """Compare two lists of log entries."""
    assert [sorted(each) for each in ours] == [sorted(each) for each in theirs]
    for entry, reference in zip(ours, theirs, strict=True):
        assert entry == pytest.approx(reference, rel=rel)
    return True


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train LoRA with both trainers, with a checkpoint and an evaluation after each step. Save both
    final models."""
    results: dict[str, Any] = {}
    arguments = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "num_train_epochs": 2,
    }
    arguments |= {
        "optim": "sgd",
        "learning_rate": 2.0,
    }  # the size of the steps depends on the size of the gradients, unlike with Adam
    for name, kind, options in (
        ("theirs", transformers.Trainer, {}),
        ("ours", autopar.Trainer, OPTIONS),
    ):
        folder = tmp_path_factory.mktemp(name)
        trainer = kind(
            model=adapted(),
            args=settings(folder, **arguments),
            **data(),
            compute_metrics=sum_of_logits,
            **options,
        )
        trainer.train()
        trainer.save_model(str(folder / "end"))
        results[name] = (trainer, folder, log_of(trainer))
    return results


@pytest.mark.slow
def test_lora_training_matches_the_transformers_trainer(runs: dict[str, Any]) -> None:
    (ours, _, log), (_, _, expected) = runs["ours"], runs["theirs"]
    assert same(log, expected)
    assert {"loss", "grad_norm", "learning_rate"} <= set(log[0]) and {
        "eval_loss",
        "eval_logits",
    } <= set(log[1])
    assert log[1]["eval_samples"] == 6
    assert min(each["grad_norm"] for each in log if "grad_norm" in each) > CLIPPED, (
        "gradients are clipped"
    )
    assert all(p.grad is None for p in ours.compiled().parameters() if not p.requires_grad)


@pytest.mark.slow
def test_saved_adapter_loads_in_peft(runs: dict[str, Any]) -> None:
    (_, folder, _), (_, other, _) = runs["ours"], runs["theirs"]
    adapter, expected = (
        load_file(each / "end" / "adapter_model.safetensors") for each in (folder, other)
    )
    torch.testing.assert_close(adapter, expected, rtol=1e-3, atol=2e-5)
    batch = torch.utils.data.default_collate(samples(4, 5))
    models = [PeftModel.from_pretrained(base(), each / "end").eval() for each in (folder, other)]
    with torch.no_grad():
        assert models[0](**batch).loss.item() == pytest.approx(
            models[1](**batch).loss.item(), rel=1e-5
        )


@pytest.mark.slow
def test_run_resumes_from_a_checkpoint_within_an_epoch(
    runs: dict[str, Any], tmp_path: Path
) -> None:
    first, folder, log = runs["ours"]
    args = settings(tmp_path, num_train_epochs=2, optim="sgd", learning_rate=2.0)
    plan = {"compile_options": {"plan": first.compiled().plan}}
    resumed = autopar.Trainer(model=adapted(), args=args, **data(), **plan)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
    lines = [[line for line in each if "loss" in line] for each in (log_of(resumed), log)]
    assert len(lines[0]) == 4 and same(*lines, rel=1e-6)


@pytest.mark.slow
def test_weights_of_the_plain_model_are_on_the_meta_device(
    runs: dict[str, Any],
) -> None:
    assert all(p.is_meta for p in runs["ours"][0].model.parameters())
    with pytest.raises(NotImplementedError, match="meta"):
        runs["ours"][0].model.merge_and_unload().state_dict()["lm_head.weight"].tolist()


def test_best_checkpoint_is_loaded_and_train_can_be_called_again(tmp_path: Path) -> None:
    logs = []
    for name, kind, options in (
        ("theirs", transformers.Trainer, {}),
        ("ours", autopar.Trainer, OPTIONS),
    ):
        arguments = {
            "save_strategy": "epoch",
            "eval_strategy": "epoch",
            "load_best_model_at_end": True,
            "greater_is_better": True,
        }
        args = settings(
            tmp_path / name,
            **arguments,
            num_train_epochs=3,
            save_total_limit=1,
            save_only_model=True,
            label_names=["labels"],
        )
        trainer = kind(model=Tagger(), args=args, **data(), **options)
        trainer.train()
        trainer.evaluate()
        losses = [each["eval_loss"] for each in log_of(trainer) if "eval_loss" in each]
        assert (
            losses[-1] == pytest.approx(max(losses), rel=1e-6) and losses[-2] < 0.999 * losses[-1]
        ), "the first epoch is the best by this metric"
        prediction = trainer.predict(samples(6, 3))
        trainer.train()
        logs.append(
            [
                log_of(trainer),
                float(prediction.predictions.sum()),
                sorted(each.name for each in (tmp_path / name).iterdir()),
            ]
        )
    assert same(logs[1][0], logs[0][0], rel=2e-3)
    assert logs[1][1] == pytest.approx(logs[0][1], rel=1e-3) and logs[1][2] == logs[0][2]


def test_loss_and_weight_decay_of_the_trainer_depend_on_the_model_class(tmp_path: Path) -> None:
    """Label smoothing shifts the labels of causal language models, and the weights of norms do not
    decay. Both depend on the class of a module."""
    logs = []
    for name, kind, options in (
        ("theirs", transformers.Trainer, {}),
        ("ours", autopar.Trainer, OPTIONS),
    ):
        args = settings(
            tmp_path / name,
            label_smoothing_factor=0.1,
            weight_decay=1.0,
            max_steps=1,
            gradient_accumulation_steps=1,
        )
        trainer = kind(model=base(), args=args, train_dataset=samples(4, 1), **options)
        trainer.train()
        trainer.save_model()
        logs.append(log_of(trainer))
    assert same(logs[1], logs[0])
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("ours", "theirs")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_bf16_matches_the_transformers_trainer(tmp_path: Path) -> None:
    losses = {}
    kinds = (
        ("theirs", transformers.Trainer, {}),
        ("ours", autopar.Trainer, OPTIONS),
        ("fp32", autopar.Trainer, OPTIONS),
    )
    for name, kind, options in kinds:
        args = settings(
            tmp_path / name,
            bf16=name != "fp32",
            max_steps=2,
            gradient_accumulation_steps=1,
            label_names=["labels"],
        )
        trainer = kind(model=Tagger(), args=args, train_dataset=samples(8, 1), **options)
        trainer.train()
        losses[name] = [each["loss"] for each in log_of(trainer)[:-1]]
    assert losses["ours"] == pytest.approx(losses["theirs"], rel=3e-3)
    assert losses["ours"] != pytest.approx(losses["fp32"], rel=1e-6)


def test_reading_a_batch_for_compilation_does_not_change_random_states(
    tmp_path: Path,
) -> None:
    class Noisy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            ids = torch.randint(0, 32, (8,)) + random.randint(0, 0) + int(np.random.randint(0, 1))
            return {"input_ids": ids, "labels": ids}

    trainer = autopar.Trainer(
        model=Tagger(), args=settings(tmp_path), train_dataset=Noisy(), **OPTIONS
    )
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[2]
    trainer.compiled()
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[2]) == before[1:]


class Stream(torch.utils.data.IterableDataset):
    """A stream of seven samples."""

    def __iter__(self) -> Any:
        return iter(samples(7, 3))


def test_smaller_last_batch_of_a_stream_is_weighted_by_its_samples(tmp_path: Path) -> None:
    losses = [
        kind(
            model=Tagger(),
            args=settings(tmp_path),
            train_dataset=samples(4, 1),
            eval_dataset=dataset,
            **options,
        ).evaluate()["eval_loss"]
        for kind, dataset, options in (
            (transformers.Trainer, Stream(), {}),
            (autopar.Trainer, Stream(), OPTIONS),
            (autopar.Trainer, samples(7, 3), OPTIONS),
        )
    ]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)


def test_stream_is_not_read_before_training_and_needs_example_inputs(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeStateError, match="a Stream, yields samples one after another"
    ) as raised:
        autopar.Trainer(
            model=Tagger(), args=settings(tmp_path, max_steps=1), train_dataset=Stream(), **OPTIONS
        ).train()
    assert "example_inputs=" in raised.value.remedy
    example = torch.utils.data.default_collate(samples(4, 1))
    logs = []
    for kind, options in (
        (transformers.Trainer, {}),
        (autopar.Trainer, {"example_inputs": example, **OPTIONS}),
    ):
        trainer = kind(
            model=Tagger(), args=settings(tmp_path, max_steps=1), train_dataset=Stream(), **options
        )
        trainer.train()
        logs.append(log_of(trainer))
    assert same(*logs)


def frozen(trainer: Any) -> None:
    trainer.model.head.requires_grad_(False)


def written(trainer: Any) -> None:
    trainer.model.load_state_dict(Tagger().state_dict())


def replaced(trainer: Any) -> None:
    trainer.model = Tagger()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (frozen, "was frozen after"),
        (written, "was written"),
        (replaced, "is not the model that was compiled"),
    ],
)
def test_changes_of_the_plain_model_after_compilation_are_refused(
    tmp_path: Path, change: Any, words: str
) -> None:
    trainer = autopar.Trainer(
        model=Tagger(), args=settings(tmp_path, max_steps=1), train_dataset=samples(8, 1), **OPTIONS
    )
    trainer.train()
    change(trainer)
    with pytest.raises(RuntimeStateError, match=words):
        trainer.train()


def test_changes_of_the_arguments_before_training_take_effect(tmp_path: Path) -> None:
    args = settings(tmp_path, max_steps=1)
    trainer = autopar.Trainer(Tagger(), args, None, samples(8, 1), **OPTIONS)
    args.max_steps = 2
    trainer.train()
    assert trainer.state.global_step == 2
