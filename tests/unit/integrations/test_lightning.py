"""Lightning's Trainer with a compiled model on one process gives the results, checkpoints and final
weights of the plain model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lit import QUIET, Classifier, Net, batches, same, train_and_test
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import autopar
from autopar.errors import AutoparError

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
]
OPTIONS = {"hardware": "cpu-gloo"}


def strategy(**options: Any) -> Any:
    return autopar.LightningStrategy(compile_options={**OPTIONS, **options})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("ours", "theirs")}
    results: dict[str, Any] = {
        name: train_and_test(folder, strategy() if name == "ours" else "auto")
        for name, folder in folders.items()
    }
    return results | {"folders": folders}


def test_run_matches_the_run_of_the_plain_model(runs: dict[str, Any]) -> None:
    same(runs["ours"], runs["theirs"])
    assert runs["ours"]["said"]["seen"] == runs["ours"]["said"]["seen outside"] == 6.0


def test_checkpoint_has_the_format_of_lightning(
    runs: dict[str, Any],
) -> None:
    checkpoint, expected = (
        torch.load(runs["folders"][name] / "epoch=1.ckpt", weights_only=False)
        for name in ("ours", "theirs")
    )
    assert sorted(checkpoint) == sorted(expected) and sorted(checkpoint["state_dict"]) == sorted(
        expected["state_dict"]
    )
    torch.testing.assert_close(
        checkpoint["state_dict"], expected["state_dict"], rtol=1e-4, atol=1e-6
    )
    module = Classifier.load_from_checkpoint(runs["folders"]["ours"] / "last.ckpt")
    module.eval()
    with torch.no_grad():
        predicted = torch.cat([module(x.to(module.device)) for x, _ in batches(6, 3)])
    torch.testing.assert_close(
        predicted, torch.tensor(runs["theirs"]["predicted"]), rtol=1e-4, atol=1e-5
    )


def test_resumed_run_matches_the_resumed_plain_run(runs: dict[str, Any], tmp_path: Path) -> None:
    results = {
        name: train_and_test(
            tmp_path / name, strategy() if name == "ours" else "auto", folder / "epoch=0.ckpt"
        )
        for name, folder in runs["folders"].items()
    }
    same(results["ours"], results["theirs"])
    assert results["ours"]["losses"] != runs["ours"]["losses"][4:], "the batches are drawn again"


def test_run_resumes_from_a_link_and_old_optimizer_states_are_removed(
    tmp_path: Path,
) -> None:
    saves = ModelCheckpoint(
        dirpath=tmp_path, save_top_k=1, monitor="loss", save_last="link", filename="{epoch}"
    )
    trainer = lightning.Trainer(strategy=strategy(), callbacks=[saves], max_epochs=2, **QUIET)
    trainer.fit(Classifier(), batches(8, 1))
    here = sorted(each.name for each in tmp_path.iterdir())
    assert here == ["epoch=1.ckpt", "epoch=1.ckpt.autopar", "last.ckpt"]
    resumed = lightning.Trainer(
        strategy=strategy(), max_epochs=3, enable_checkpointing=False, **QUIET
    )
    resumed.fit(module := Classifier(), batches(8, 1), ckpt_path=tmp_path / "last.ckpt")
    assert len(module.losses) == 2


def test_resuming_from_a_checkpoint_of_another_strategy_is_refused(runs: dict[str, Any]) -> None:
    trainer = lightning.Trainer(
        strategy=strategy(), max_epochs=3, enable_checkpointing=False, **QUIET
    )
    with pytest.raises(AutoparError, match="saved by another strategy") as refusal:
        trainer.fit(
            Classifier(), batches(8, 1), ckpt_path=runs["folders"]["theirs"] / "epoch=0.ckpt"
        )
    assert "load_from_checkpoint" in refusal.value.remedy


def test_overwritten_checkpoint_has_the_optimizer_state_of_its_own_step(
    tmp_path: Path,
) -> None:
    for epochs, steps in ((2, 4), (1, 2)):
        trainer = lightning.Trainer(
            strategy=strategy(), max_epochs=epochs, enable_checkpointing=False, **QUIET
        )
        trainer.fit(Classifier(), batches(8, 1))
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        assert [each.name for each in (tmp_path / "end.ckpt.autopar").iterdir()] == [
            f"step_{steps:09d}"
        ]
    resumed = lightning.Trainer(
        strategy=strategy(), max_epochs=2, enable_checkpointing=False, **QUIET
    )
    resumed.fit(module := Classifier(), batches(8, 1), ckpt_path=tmp_path / "end.ckpt")
    assert len(module.losses) == 2
    (tmp_path / "end.ckpt.autopar" / "step_000000002").rename(
        tmp_path / "end.ckpt.autopar" / "step_000000003"
    )
    with pytest.raises(
        AutoparError,
        match=r"the checkpoint file is of step 2, but its optimizer state is of step 3",
    ):
        resumed.fit(Classifier(), batches(8, 1), ckpt_path=tmp_path / "end.ckpt")


def test_evaluation_is_planned_for_inference(
    runs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    module = Classifier.load_from_checkpoint(runs["folders"]["theirs"] / "epoch=1.ckpt")
    trainer = lightning.Trainer(strategy=strategy(), **QUIET)
    metrics = trainer.test(module, batches(6, 3), verbose=False)[0]
    assert metrics == pytest.approx(runs["theirs"]["tested"], rel=1e-4)
    assert module.net.plan.prediction.memory_bytes.get("gradients", 0) == 0


def train_both(
    make: Callable[[], Classifier], data: Callable[[], Any], **options: Any
) -> list[Classifier]:
    """Train with autopar and without it, from the same random seed. Return both modules after two
    epochs."""
    modules = []
    for each in (strategy(), "auto"):
        lightning.seed_everything(3, verbose=False)
        defaults = {"max_epochs": 2, "enable_checkpointing": False, **QUIET}
        lightning.Trainer(strategy=each, **{**defaults, **options}).fit(module := make(), data())
        modules.append(module)
    assert (
        modules[0].losses == pytest.approx(modules[1].losses, rel=1e-5)
        and len(modules[0].losses) > 2
    )
    return modules


class Normed(Classifier):
    """A classifier with a batch norm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(16), self.net, nn.BatchNorm1d(4))
        self.net[0].eval()

    def configure_optimizers(
        self,
    ) -> Any:  # not Adam, which depends on the sign of gradients that are only rounding errors
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_training_modes_of_submodules_are_kept() -> None:
    ours, plain = train_both(Normed, lambda: batches(14, 1))
    assert (
        ours.net.get_submodule("0").running_var.sum().item()
        == plain.net[0].running_var.sum().item()
        == 16.0
    )


class OfHead(Classifier):
    """A classifier whose optimizer has only some of the trainable parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.down.parameters(), lr=1.0)


def test_only_gradients_of_optimized_parameters_are_clipped() -> None:
    train_both(OfHead, lambda: batches(14, 1), gradient_clip_val=0.05)


def shuffled_batches(**options: Any) -> DataLoader[Any]:
    return batches(14, 1, shuffle=True, generator=torch.Generator().manual_seed(5), **options)


class Odd(torch.utils.data.Sampler[list[int]]):
    """A sampler whose batches start at another index in each epoch."""

    def __init__(self) -> None:
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.start += 1
        return iter([[(self.start + i) % 14 for i in range(4)] for _ in range(3)])

    def __len__(self) -> int:
        return 3


class Noisy(torch.utils.data.Dataset[Any]):
    """A dataset that draws samples from its own generator."""

    def __init__(self) -> None:
        self.drawn = torch.Generator().manual_seed(9)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(16, generator=self.drawn)
        return x, x[:4].argmax()


class Drawn(IterableDataset[Any]):
    """A stream that draws samples from its own generator."""

    def __init__(self) -> None:
        self.drawn = torch.Generator().manual_seed(9)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(12):
            x = torch.randn(16, generator=self.drawn)
            yield x, x[:4].argmax()


LOADERS: dict[str, Callable[[], Any]] = {
    "a generator": shuffled_batches,
    "workers that stay": lambda: shuffled_batches(num_workers=1, persistent_workers=True),
    "a worker whose data draw": lambda: DataLoader(
        Noisy(), batch_size=4, num_workers=1, persistent_workers=True
    ),
    "a stream in a worker that stays": lambda: DataLoader(
        Drawn(), batch_size=4, num_workers=1, persistent_workers=True
    ),
    "a sampler with state": lambda: DataLoader(batches(14, 1).dataset, batch_sampler=Odd()),
    "a sampler without batches": lambda: DataLoader(
        [(x, y) for x, y in batches(12, 1)], batch_size=None
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_data_loaders_return_the_same_batches_as_without_autopar(kind: str) -> None:
    train_both(Classifier, LOADERS[kind])


class Eventful(Classifier):
    """A module whose step counts, logs, and changes its batch at random before it calls the net
    with a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.drawn = 0, torch.Generator().manual_seed(7)
        self.net = Scaled(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.seen.update(1)
        self.log("rate", self.optimizers().param_groups[0]["lr"] + self.trainer.current_epoch)
        x = batch[0].add_(
            torch.randn(batch[0].shape, generator=self.drawn).to(next(self.parameters()).dtype)
        )
        loss = nn.functional.cross_entropy(self.net(x, scale=torch.ones(())), batch[1])
        self.losses.append(loss.item())
        return loss


class Scaled(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.net(x) * scale


def test_trial_step_has_no_side_effects() -> None:
    data = list(batches(12, 1))
    ours, plain = train_both(
        Eventful, lambda: DataLoader([(x.clone(), y) for x, y in data], batch_size=None)
    )
    assert ours.steps == plain.steps == 6 and ours.seen.compute() == 6


def test_training_after_evaluation_uses_the_current_weights_and_modes(
    runs: dict[str, Any],
) -> None:
    losses = []
    for each in (strategy(), "auto"):
        lightning.seed_everything(3, verbose=False)
        trainer = lightning.Trainer(
            strategy=each, max_epochs=1, enable_checkpointing=False, **QUIET
        )
        trainer.validate(module := Normed(), batches(6, 2), verbose=False)
        module.load_state_dict(
            {name: x + 0.01 for name, x in Normed().state_dict().items() if "net.1" in name},
            strict=False,
        )
        trainer.fit(module, batches(14, 1))
        losses.append(module.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 4


class Taught(Classifier):
    """A classifier with a frozen teacher that is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Net().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + self.teacher(x)


def test_frozen_child_modules_are_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    ours, _ = train_both(Taught, lambda: batches(14, 1))
    assert (
        type(ours.teacher) is Net
        and "teacher is not compiled: every rank holds and computes all of it" in caplog.text
    )


CALLBACKS = {
    "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(1e-2),
    "EMAWeightAveraging": lambda: callbacks.EMAWeightAveraging(),
    "BackboneFinetuning": lambda: callbacks.BackboneFinetuning(),
    "BatchSizeFinder": lambda: callbacks.BatchSizeFinder(),
    "LearningRateFinder": lambda: callbacks.LearningRateFinder(),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_that_modify_the_plain_model_are_refused(name: str) -> None:
    trainer = lightning.Trainer(
        strategy=strategy(),
        max_epochs=1,
        enable_checkpointing=False,
        callbacks=[CALLBACKS[name]()],
        **QUIET,
    )
    with pytest.raises(AutoparError, match=f"does not support {name}") as refusal:
        trainer.fit(Classifier(), batches(8, 1))
    assert refusal.value.remedy


class Manual(Classifier):
    """A classifier with manual optimization and clipping by value."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="value")
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=5.0)


def test_manual_optimization_with_clipping_by_value() -> None:
    losses = []
    for each in (strategy(), "auto"):
        trainer = lightning.Trainer(
            strategy=each, max_epochs=1, enable_checkpointing=False, **QUIET
        )
        trainer.fit(module := Manual(), batches(14, 1))
        losses.append(module.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][0] != pytest.approx(
        losses[0][3], rel=0.1
    )


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)],
)
def test_precision_plugins_match_the_plain_model(precision: Any, dtype: torch.dtype) -> None:
    losses = []
    for each in (strategy(), "auto"):
        trainer = lightning.Trainer(
            strategy=each, max_epochs=1, precision=precision, enable_checkpointing=False, **QUIET
        )
        trainer.fit(module := Classifier(), batches(8, 1))
        losses.append(module.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2 if "bf16" in precision else 1e-9)
    assert {p.dtype for p in module.net.parameters()} == {dtype}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(batches(8, 1).dataset)  # type: ignore[call-overload]


class Before(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch["x"])


class Two(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.other = Net()


class Bare(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Aside(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].sum()


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net.up, self.net.down)]


REFUSED: dict[str, tuple[type[Classifier], dict[str, Any], Any, str]] = {
    "fp16": (Classifier, {"precision": "16-true"}, batches(8, 1), "16-true"),
    "parameters in two children": (Two, {}, batches(8, 1), "net, other"),
    "parameters of its own": (Bare, {}, batches(8, 1), "net, scale"),
    "a step that fails": (
        Before,
        {},
        batches(8, 1),
        "was run on the first batch and failed before it called net: TypeError",
    ),
    "a step without the model": (Aside, {}, batches(8, 1), "does not call net directly"),
    "no batch": (Classifier, {}, batches(0, 1), "no batch"),
    "a stream": (Classifier, {}, DataLoader(Stream(), batch_size=4), "perhaps only once"),
    "two optimizers": (TwoOptimizers, {}, batches(8, 1), "2 optimizers"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_modules_and_options_are_refused(what: str) -> None:
    kind, options, data, words = REFUSED[what]
    trainer = lightning.Trainer(
        strategy=strategy(), max_epochs=1, enable_checkpointing=False, **{**QUIET, **options}
    )
    with pytest.raises(AutoparError, match=words) as refusal:
        trainer.fit(kind(), data)
    assert refusal.value.remedy


def test_several_devices_with_one_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    trainer = lightning.Trainer(
        strategy=strategy(), max_epochs=1, enable_checkpointing=False, **{**QUIET, "devices": 2}
    )
    with pytest.raises(
        AutoparError, match="2 devices are requested, but there is only one process"
    ) as refusal:
        trainer.fit(Classifier(), batches(8, 1))
    assert "autopar run -n 2" in refusal.value.remedy


def test_example_inputs_support_streams_and_compiled_models_are_kept() -> None:
    example = (torch.zeros(4, 16),)
    options = {"max_epochs": 1, "enable_checkpointing": False, **QUIET}
    losses = []
    trainer = lightning.Trainer(
        strategy=autopar.LightningStrategy(compile_options=OPTIONS, example_inputs=example),
        **options,
    )
    trainer.fit(module := Classifier(), DataLoader(Stream(), batch_size=4))
    losses.append(module.losses)
    module = Classifier()
    module.net = autopar.compile(module.net, example_inputs=example, **OPTIONS)
    trainer = lightning.Trainer(strategy=strategy(), **options)
    trainer.fit(module, DataLoader(Stream(), batch_size=4))
    assert losses[0] == module.losses and len(module.losses) == 2


def test_data_loader_workers_have_the_same_seed_on_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    monkeypatch.setenv("RANK", "3")
    loader = strategy().process_dataloader(batches(8, 1))
    assert loader.worker_init_fn.keywords == {"rank": 0}
    assert (
        os.environ["RANK"] == "3" and strategy().global_rank == 3 and not strategy().is_global_zero
    )
