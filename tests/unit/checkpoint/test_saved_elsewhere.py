"""Checkpoints that are loaded into another model or optimizer with the same names, or in another
working directory: equal to the saved values, or refused without side effects."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RuntimeStateError

BATCH = {"x": torch.linspace(-1.0, 1.0, 64).reshape(8, 8)}


class Net(nn.Module):
    """Two linear layers, which may share their weight, and a buffer."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        tied: bool = False,
        counted: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)
        if tied:
            self.second.weight = self.first.weight
        self.register_buffer("counted", (torch.arange(8) / 2).to(counted))

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return (self.second(features).float() * self.counted.float()).pow(2).mean()


def compile_net(*args: Any, **how: Any) -> Any:
    torch.manual_seed(0)
    return autopar.compile(Net(*args, **how), example_inputs=BATCH, hardware="cpu-gloo")


def trained(module: Any, optimizer: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    """Run a step, and return the optimizer."""
    optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=0.1)
    module(**BATCH).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def state(module: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.full_state_dict().items()}


def check_refused(folder: Path, words: str, module: Any, optimizer: Any = None) -> None:
    before = state(module)
    with pytest.raises(RuntimeStateError, match=words):
        autopar.Checkpoints(folder).load(module, optimizer)
    after = state(module)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("counted", [torch.int64, torch.bool, torch.complex64])
def test_numbers_are_not_converted_to_a_dtype_that_cannot_hold_them(
    counted: torch.dtype, tmp_path: Path
) -> None:
    autopar.Checkpoints(tmp_path).save(1, compile_net())
    module = compile_net()
    module._buffers["counted"] = module.counted.to(counted)
    check_refused(tmp_path, rf"counted is torch.float32 in the checkpoint, {counted} here", module)


@pytest.mark.parametrize(
    ("saved", "here", "fits"),
    [
        (torch.int64, torch.int32, False),
        (torch.int32, torch.int64, True),
        (torch.uint8, torch.int8, False),
        (torch.bool, torch.uint8, True),
        (torch.uint8, torch.bool, False),
    ],
)
def test_integers_are_converted_only_to_a_larger_range(
    saved: torch.dtype, here: torch.dtype, fits: bool, tmp_path: Path
) -> None:
    autopar.Checkpoints(tmp_path).save(1, compile_net(counted=saved))
    module = compile_net(counted=here)
    if not fits:
        check_refused(tmp_path, rf"counted is {saved} in the checkpoint, {here} here", module)
        return
    assert autopar.Checkpoints(tmp_path).load(module) == 1
    assert torch.equal(module.counted, Net(counted=saved).counted.to(here))


def test_a_conversion_of_floating_point_numbers_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = compile_net()
    autopar.Checkpoints(tmp_path).save(1, module, trained(module))
    for dtype, words in ((torch.float32, ""), (torch.bfloat16, "first.weight")):
        other = compile_net(dtype)
        optimizer = trained(other)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="autopar"):
            autopar.Checkpoints(tmp_path).load(other, optimizer)
        converted = [text for text in caplog.messages if "converted" in text]
        assert bool(converted) == bool(words)
        assert all("from torch.float32 to torch.bfloat16" in text for text in converted)
        assert torch.equal(state(other)["first.weight"], state(module)["first.weight"].to(dtype))


def test_two_tensors_of_a_checkpoint_are_not_loaded_into_one_tied_tensor(tmp_path: Path) -> None:
    apart, tied = compile_net(), compile_net(tied=True)
    trained(apart)
    autopar.Checkpoints(tmp_path / "apart").save(1, apart)
    words = "'first.weight' and 'second.weight' are one tensor of the model, but two tensors"
    check_refused(tmp_path / "apart", words, tied)
    # the remedies
    assert autopar.Checkpoints(tmp_path / "apart").load(compile_net()) == 1
    autopar.Checkpoints(tmp_path / "apart").export(tmp_path / "weights")
    autopar.load_weights(tied, tmp_path / "weights")
    assert torch.equal(state(tied)["second.weight"], state(apart)["first.weight"])
    # the other direction loses nothing
    autopar.Checkpoints(tmp_path / "tied").save(1, tied)
    assert autopar.Checkpoints(tmp_path / "tied").load(compile_net(tied=True)) == 1
    assert autopar.Checkpoints(tmp_path / "tied").load(apart) == 1
    assert torch.equal(state(apart)["second.weight"], state(tied)["first.weight"])


def grouped(module: Any, *, one: bool = False, swapped: bool = False) -> torch.optim.Optimizer:
    """Return an optimizer with weight decay of the weights, in two groups or in one."""
    if one:
        return torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    weights = [p for p in module.parameters() if p.ndim > 1]
    biases = [p for p in module.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups[::-1] if swapped else groups, lr=0.1)


def test_different_settings_of_a_checkpoint_are_not_loaded_into_one_group(tmp_path: Path) -> None:
    module = compile_net()
    autopar.Checkpoints(tmp_path).save(1, module, trained(module, grouped(module)))
    other = compile_net()
    optimizer = trained(other, grouped(other, one=True))
    words = (
        r"first.\w+ has weight_decay=0.\d and first.\w+ has 0.\d in the checkpoint, but both are"
        r" in one group here"
    )
    check_refused(tmp_path, words, other, optimizer)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    swapped = trained(other, grouped(other, swapped=True))
    assert autopar.Checkpoints(tmp_path).load(other, swapped) == 1
    assert [(g["weight_decay"], len(g["params"])) for g in swapped.param_groups] == [
        (0.0, 2),
        (0.5, 2),
    ]


def test_an_object_in_the_place_of_the_optimizer_is_refused_by_its_class(tmp_path: Path) -> None:
    module = compile_net()
    with pytest.raises(RuntimeStateError, match="a str is in the place of the optimizer"):
        autopar.Checkpoints(tmp_path).save(1, module, "adamw")  # type: ignore[arg-type]


def test_a_change_of_the_working_directory_does_not_change_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, checkpoints = compile_net(), autopar.Checkpoints("run")
    place = checkpoints.save(1, module)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert place.is_dir() and checkpoints.steps() == (1,) and checkpoints.load(module) == 1
    checkpoints.async_save(2, module)
    checkpoints.wait()
    assert checkpoints.steps() == (1, 2) and not os.listdir(tmp_path / "other")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "it is not a regular file"),
        (os.mkdir, "it is a folder"),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
        (lambda path: None, "the file does not exist"),
    ],
)
def test_a_path_that_is_not_a_file_is_reported_as_what_it_is(
    make: Callable[[Path], Any], reason: str, tmp_path: Path
) -> None:
    module, checkpoints = compile_net(), autopar.Checkpoints(tmp_path)
    place = checkpoints.save(1, module)
    for name in ("contents.json", "rank_00000.safetensors"):
        file = place / name
        shutil.move(file, tmp_path / name)
        make(file)
        with pytest.raises(
            RuntimeStateError, match=f"step 1 is damaged: {name} cannot be read: {reason}"
        ):
            checkpoints.load(module)
        if os.path.lexists(file):
            (os.rmdir if file.is_dir() else os.unlink)(file)
        shutil.move(tmp_path / name, file)
    assert checkpoints.load(module) == 1
