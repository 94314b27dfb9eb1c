"""Programs for the remedies of Lightning's Trainer."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import autopar
from tests.support.remedy_programs import Program

_OPTIONS = {"hardware": "cpu-gloo"}
_EXAMPLE = (torch.zeros(4, 16),)


def _lit() -> Any:
    """Return the modules and data of the tests of Lightning, which takes seconds to import."""
    from tests.support import lit

    return lit


class Stream(IterableDataset[Any]):
    """A stream of samples that can be read once."""

    def __iter__(self) -> Iterator[Any]:
        return iter(_lit().batches(8, 1).dataset)


@cache
def _kinds() -> dict[str, Any]:
    """Return LightningModules by name."""
    lit = _lit()

    class Two(lit.Classifier):
        """Trains two child modules."""

        def __init__(self) -> None:
            super().__init__()
            self.other = lit.Net()

    class Both(lit.Classifier):
        """Trains one child module that contains two."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(self.net, nn.Linear(4, 4))

    class Before(lit.Classifier):
        """Its step reads an attribute that is created at the start of a run."""

        def on_train_start(self) -> None:
            self.factor = 2.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.factor * super().training_step(batch, batch_idx)

    class Aside(lit.Classifier):
        """Its step calls a method of the net, or the net."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net.up(batch[0]).sum()

    class Optimizers(lit.Classifier):
        """Has a given number of optimizers."""

        def __init__(self, count: int) -> None:
            super().__init__()
            self.automatic_optimization, self.count = False, count

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            parts = [self.net.up, self.net.down]
            groups = [{"params": list(part.parameters())} for part in parts]
            if self.count == 1:
                return torch.optim.SGD(groups, lr=0.1)
            return [torch.optim.SGD([group], lr=0.1) for group in groups]

    return {kind.__name__: kind for kind in (lit.Classifier, Two, Both, Before, Aside, Optimizers)}


def _trainer(example: Any = None, **options: Any) -> Any:
    import lightning

    strategy = autopar.LightningStrategy(compile_options=_OPTIONS, example_inputs=example)
    defaults = {"max_epochs": 1, "enable_checkpointing": False, **_lit().QUIET}
    return lightning.Trainer(strategy=strategy, **{**defaults, **options})


def _quietly(work: Callable[[Path], object]) -> Callable[[], object]:
    def program() -> object:
        with (
            tempfile.TemporaryDirectory() as folder,
            warnings.catch_warnings(),
            pytest.MonkeyPatch.context() as patch,
        ):
            warnings.simplefilter("ignore")
            patch.delenv("RANK", raising=False)
            return work(Path(folder))

    return program


def _fit(
    kind: str = "Classifier",
    *given: Any,
    data: Callable[[], Any] | None = None,
    example: Any = None,
    arguments: Callable[[], dict[str, Any]] = dict,
) -> Callable[[], object]:
    """Train a LightningModule.

    Args:
        data: returns the data loader.
        example: a batch as the child module is called with it.
        arguments: returns arguments of the trainer.
    """

    def work(folder: Path) -> object:
        loader = _lit().batches(8, 1) if data is None else data()
        return _trainer(example, **arguments()).fit(_kinds()[kind](*given), loader)

    return _quietly(work)


def _averaging() -> dict[str, Any]:
    from lightning.pytorch import callbacks

    return {"callbacks": [callbacks.StochasticWeightAveraging(1e-2)]}


def _own_average() -> dict[str, Any]:
    """Average the parameters of the compiled module in a hook."""
    from lightning.pytorch import callbacks

    class Average(callbacks.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            values = [p.to_local().detach().clone() for p in module.net.parameters()]
            self.sums = [a + b for a, b in zip(values, getattr(self, "sums", values), strict=True)]

    return {"callbacks": [Average()]}


def _resumed(change: Callable[[Path], object], begin: bool = False) -> Callable[[], object]:
    """Resume from a checkpoint that was changed, or start with its weights."""

    def work(folder: Path) -> object:
        path = folder / "end.ckpt"
        trainer = _trainer()
        trainer.fit(_kinds()["Classifier"](), _lit().batches(8, 1))
        trainer.save_checkpoint(path)
        change(folder)
        if begin:
            return _trainer().fit(
                _kinds()["Classifier"].load_from_checkpoint(path), _lit().batches(8, 1)
            )
        return _trainer(max_epochs=2).fit(
            _kinds()["Classifier"](), _lit().batches(8, 1), ckpt_path=path
        )

    return _quietly(work)


def _of_another_step(folder: Path) -> None:
    (state,) = (folder / "end.ckpt.autopar").iterdir()
    state.rename(state.with_name("step_000000009"))


def _without_state(folder: Path) -> None:
    shutil.rmtree(folder / "end.ckpt.autopar")


_WITH_EXAMPLE = "pass LightningStrategy(example_inputs=...)"

PROGRAMS: dict[str, Program] = {
    "integrations/lightning_modules.py child_to_compile 0": Program(
        _fit("Two"), "move the trained modules into a single nn.Module, a child", _fit("Both")
    ),
    "integrations/lightning_modules.py call_of 0": Program(
        _fit(data=lambda: DataLoader(Stream(), batch_size=4)),
        _WITH_EXAMPLE,
        _fit(data=lambda: DataLoader(Stream(), batch_size=4), example=_EXAMPLE),
    ),
    "integrations/lightning_modules.py call_of 1": Program(
        _fit(data=lambda: _lit().batches(0, 1)),
        _WITH_EXAMPLE,
        _fit(data=lambda: _lit().batches(0, 1), example=_EXAMPLE),
    ),
    "integrations/lightning_modules.py call_of 2": Program(
        _fit("Before"), _WITH_EXAMPLE, _fit("Before", example=_EXAMPLE)
    ),
    "integrations/lightning_modules.py call_of 3": Program(
        _fit("Aside"), "move the other methods of net that the step calls into its forward", _fit()
    ),
    "integrations/lightning_modules.py check_optimizers 0": Program(
        _fit("Optimizers", 2),
        "return one optimizer, with a parameter group per setting",
        _fit("Optimizers", 1),
    ),
    "integrations/lightning_modules.py check_trainer 0": Program(
        _fit(arguments=lambda: {"precision": "16-true"}),
        '"bf16-true"',
        _fit(arguments=lambda: {"precision": "bf16-true"}),
    ),
    "integrations/lightning_modules.py check_trainer 1": Program(
        _fit(arguments=_averaging),
        "p.to_local() of the compiled module's parameters in a custom hook",
        _fit(arguments=_own_average),
    ),
    "integrations/lightning_strategy.py WholeBatches.setup_environment 0": Program(
        _fit(arguments=lambda: {"devices": 2}),
        "or pass Trainer(devices=1)",
        _fit(arguments=lambda: {"devices": 1}),
    ),
    "integrations/lightning_strategy.py LightningStrategy.load_optimizer_state_dict 0": Program(
        _resumed(_without_state), "move end.ckpt.autopar too", _resumed(lambda folder: None)
    ),
    "integrations/lightning_strategy.py LightningStrategy.load_optimizer_state_dict 1": Program(
        _resumed(_of_another_step),
        "or start from the weights only: load_from_checkpoint",
        _resumed(_of_another_step, begin=True),
    ),
}
