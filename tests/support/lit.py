"""A LightningModule, data with a smaller last batch, and a run with checkpoints that records its
results, shared by the tests of Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "log_every_n_steps": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Classifier(lightning.LightningModule):
    """A module whose loss is computed outside the net. `seen` adds up over batches and over
    processes."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.net = Net()
        self.seen, self.losses = torchmetrics.SumMetric(), list[float]()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 1.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1], self.weights)
        self.log("loss", loss, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any) -> None:
        out = self(batch[0])
        self.seen(len(out))
        self.log("seen", self.seen)
        self.log("val", nn.functional.cross_entropy(out, batch[1]), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        assert len(state) == 5 and all(isinstance(x.sum().item(), float) for x in state.values()), (
            "on every rank"
        )

    test_step = validation_step

    def predict_step(self, batch: Any) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        decayed = [
            {
                "params": [p for p in self.parameters() if (p.ndim > 1) is many],
                "weight_decay": 0.1 * many,
            }
            for many in (True, False)
        ]
        optimizer = torch.optim.AdamW(decayed, lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Outside(lightning.Callback):
    """A callback that counts with its own metric, created during the run."""

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        self.seen = torchmetrics.SumMetric()

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.seen.update(len(batch[0]))

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("seen outside", self.seen.compute())


def batches(count: int, seed: int, **options: Any) -> DataLoader[Any]:
    """Return batches of four samples, and one of the rest."""
    values = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return DataLoader([(x, x[:4].argmax()) for x in values], batch_size=4, **options)


def train_and_test(
    folder: Path, strategy: Any, resume: Path | None = None, seed: int = 1, **options: Any
) -> dict[str, Any]:
    """Train for two epochs of shuffled batches, with two batches per step, clipping, and a
    checkpoint after each epoch; then test and predict."""
    lightning.seed_everything(seed, verbose=False)
    module, saves = (
        Classifier(),
        ModelCheckpoint(dirpath=folder, save_top_k=-1, filename="{epoch}", save_last="link"),
    )
    defaults = {"max_epochs": 2, "gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    trainer = lightning.Trainer(
        strategy=strategy, callbacks=[saves, Outside()], **{**QUIET, **defaults, **options}
    )
    trainer.fit(module, batches(14, 1, shuffle=True), batches(6, 2), ckpt_path=resume)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    test_metrics = trainer.test(module, batches(6, 3), verbose=False)[0]
    predictions = trainer.predict(module, batches(6, 3))
    return {
        "losses": module.losses,
        "said": metrics,
        "tested": test_metrics,
        "predicted": torch.cat(predictions).tolist(),
        "writes": trainer.is_global_zero,
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups]
        if trainer.optimizers
        else [],
        "parts": [
            getattr(p, "to_local", p.detach)().numel() / p.numel() for p in module.parameters()
        ],
    }


def same(actual: dict[str, Any], expected: dict[str, Any], rel: float = 1e-4) -> None:
    """Assert that two runs recorded the same results."""
    import pytest

    assert (
        actual["losses"] == pytest.approx(expected["losses"], rel=rel) and len(actual["losses"]) > 3
    )
    for each in ("said", "tested"):
        assert sorted(actual[each]) == sorted(expected[each])
        assert actual[each] == pytest.approx(expected[each], rel=rel)
    assert actual["rates"] == expected["rates"]
    torch.testing.assert_close(
        *(torch.tensor(run["predicted"]) for run in (actual, expected)), rtol=rel, atol=1e-5
    )
