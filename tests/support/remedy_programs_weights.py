"""Programs for the remedies of optimizers of compiled modules, and of weights that are read from
files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import autopar
from tests.support.remedy_programs import Program
from tests.support.remedy_programs_steps import Net, X, compiled, of_module


def _stepped(
    make: Callable[[Any], torch.optim.Optimizer], after: bool = True
) -> Callable[[], object]:
    """A step of an optimizer, that is built of the compiled module or of the plain model before."""

    def program() -> None:
        plain = Net()
        optimizer = None if after else make(plain)
        module = compiled(plain)
        module(X).backward()
        (make(module) if optimizer is None else optimizer).step()

    return program


def _optimizer(name: str, **how: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda model: getattr(torch.optim, name)(model.parameters(), lr=0.1, **how)


def _without_values(load: Callable[[Any], object] | None) -> Callable[[], object]:
    """A model that is built on meta."""

    def program() -> object:
        with autopar.weights_on_meta():
            plain = Net()
        module = compiled(plain)
        if load is not None:
            load(module)
        return module(X)

    return program


def _loaded_file(module: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_file(Net().state_dict(), Path(folder, "model.safetensors"))
        autopar.load_weights(module, folder)


def _read(write: Callable[[Path], object], name: str = "", **how: Any) -> Callable[[], object]:
    """Weights from a folder."""

    def work(module: Any) -> object:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            return autopar.load_weights(module, Path(folder, name), **how)

    return of_module(work)


def _weights(*names: str, prefix: str = "", keep: int = 9) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        found = {prefix + name: x for name, x in list(Net().state_dict().items())[:keep]}
        for name in names or ("model.safetensors",):
            save_file(found, folder / name)

    return write


def _text(name: str, text: str, *beside: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        if beside:
            _weights(*beside)(folder)
        (folder / name).write_text(text)

    return write


def _index(**places: str) -> str:
    return json.dumps({"weight_map": places})


_INDEX = "model.safetensors.index.json"
_OF_ONE = {name: "one.safetensors" for name in Net().state_dict()}


OPTIMIZERS: dict[str, Program] = {
    "runtime/optimizers.py check_optimizer 0": Program(
        _stepped(lambda model: torch.optim.SparseAdam(model.parameters())),
        "use one of",
        _stepped(_optimizer("Adam")),
    ),
    "runtime/optimizers.py check_optimizer 1": Program(
        _stepped(_optimizer("SGD", fused=True)), "leave out fused=True", _stepped(_optimizer("SGD"))
    ),
    "runtime/optimizers.py check_optimizer 1 | Adam": Program(
        _stepped(_optimizer("SGD", fused=True)),
        "Adam and AdamW support it",
        _stepped(_optimizer("AdamW", fused=True)),
    ),
    "runtime/optimizers.py _check_replaced 0": Program(
        _stepped(_optimizer("SGD"), after=False),
        "create the optimizer after autopar.compile, with pm.parameters()",
        _stepped(_optimizer("SGD")),
    ),
}

WEIGHTS: dict[str, Program] = {
    "runtime/guards.py Unset.check 0": Program(
        _without_values(None),
        "autopar.load_weights(pm, folder) loads them from safetensors",
        _without_values(_loaded_file),
    ),
    "runtime/guards.py Unset.check 0 | state dict": Program(
        _without_values(None),
        "pm.load_state_dict(...) takes full tensors",
        _without_values(lambda module: module.load_state_dict(Net().state_dict())),
    ),
    "checkpoint/weights.py _files_of 0": Program(
        _read(_weights(), "nowhere"), "or a folder with such files", _read(_weights())
    ),
    "checkpoint/weights.py _weights_damage_error 0": Program(
        _read(_text("model.safetensors", "x")),
        "download or copy it and the other",
        _read(_weights()),
    ),
    "checkpoint/weights.py _weights_damage_error 0 | index": Program(
        _read(_text(_INDEX, _index(x="one.safetensors"), "one.safetensors")),
        "download or copy it and the other",
        _read(_text(_INDEX, _index(**_OF_ONE), "one.safetensors")),
    ),
    "checkpoint/weights.py _weights_choice_error 0": Program(
        _read(_weights("a.safetensors", "b.safetensors")),
        "pass the path of one of them",
        _read(_weights("a.safetensors", "b.safetensors"), "b.safetensors"),
    ),
    "checkpoint/weights.py _weights_choice_error 1": Program(
        _read(_text("pytorch_model.bin", "x")),
        "or safetensors.torch.save_model(...)",
        _read(_weights()),
    ),
    "checkpoint/weights.py _weights_choice_error 2": Program(
        _read(lambda folder: None), "pass a folder with weights", _read(_weights())
    ),
    "checkpoint/weights.py _check_known 0": Program(
        _read(_weights(), names=["head"]),
        "pass names of its parameters and saved buffers",
        _read(_weights(), names=["layer.bias"]),
    ),
    "checkpoint/weights.py _match_names 0": Program(
        _read(_weights(prefix="encoder.")),
        "rename= maps its names to names in the files",
        _read(_weights(prefix="encoder."), rename="encoder.{}".format),
    ),
    "checkpoint/weights.py _match_names 0 | missing": Program(
        _read(_weights(keep=1)),
        "strict=False leaves missing weights unchanged",
        _read(_weights(keep=1), strict=False),
    ),
}

PROGRAMS: dict[str, Program] = {**OPTIMIZERS, **WEIGHTS}
