"""Programs for the remedies of optimizers of compiled modules and of loading weights."""

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


def _step(make: Callable[[Any], torch.optim.Optimizer], after: bool = True) -> Callable[[], object]:
    """Run a step of an optimizer that is built from the compiled module or from the plain model."""

    def program() -> None:
        plain = Net()
        optimizer = None if after else make(plain)
        module = compiled(plain)
        module(X).backward()
        (make(module) if optimizer is None else optimizer).step()

    return program


def _optimizer(name: str, **how: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda model: getattr(torch.optim, name)(model.parameters(), lr=0.1, **how)


def _call_meta_model(load: Callable[[Any], object] | None) -> Callable[[], object]:
    """Call a model that was built on the meta device, after `load`."""

    def program() -> object:
        with autopar.weights_on_meta():
            plain = Net()
        module = compiled(plain)
        if load is not None:
            load(module)
        return module(X)

    return program


def _load_saved_file(module: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_file(Net().state_dict(), Path(folder, "model.safetensors"))
        autopar.load_weights(module, folder)


def _load_from(write: Callable[[Path], object], name: str = "", **how: Any) -> Callable[[], object]:
    """Load weights from a folder."""

    def work(module: Any) -> object:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder))
            return autopar.load_weights(module, Path(folder, name), **how)

    return of_module(work)


def _save(name: str = "folder", **how: Any) -> Callable[[], object]:
    """Save weights into a folder, or into a file."""

    def work(module: Any) -> object:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "file").touch()
            return autopar.save_weights(module, Path(folder, name), **how)

    return of_module(work)


def _write_weights(*names: str, prefix: str = "", keep: int = 9) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        weights = {prefix + name: x for name, x in list(Net().state_dict().items())[:keep]}
        for name in names or ("model.safetensors",):
            save_file(weights, folder / name)

    return write


def _text(name: str, text: str, *beside: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        if beside:
            _write_weights(*beside)(folder)
        (folder / name).write_text(text)

    return write


def _index(**places: str) -> str:
    return json.dumps({"weight_map": places})


_INDEX = "model.safetensors.index.json"
_OF_ONE = {name: "one.safetensors" for name in Net().state_dict()}


OPTIMIZERS: dict[str, Program] = {
    "runtime/optimizers.py check_optimizer 0": Program(
        _step(lambda model: torch.optim.SparseAdam(model.parameters())),
        "use one of",
        _step(_optimizer("Adam")),
    ),
    "runtime/optimizers.py check_optimizer 1": Program(
        _step(_optimizer("SGD", fused=True)), "leave out fused=True", _step(_optimizer("SGD"))
    ),
    "runtime/optimizers.py check_optimizer 1 | Adam": Program(
        _step(_optimizer("SGD", fused=True)),
        "Adam and AdamW support it",
        _step(_optimizer("AdamW", fused=True)),
    ),
    "runtime/optimizers.py _check_replaced 0": Program(
        _step(_optimizer("SGD"), after=False),
        "create the optimizer after autopar.compile, with pm.parameters()",
        _step(_optimizer("SGD")),
    ),
}

WEIGHTS: dict[str, Program] = {
    "runtime/guards.py Unset.check 0": Program(
        _call_meta_model(None),
        "autopar.load_weights(pm, folder) loads them from safetensors",
        _call_meta_model(_load_saved_file),
    ),
    "runtime/guards.py Unset.check 0 | state dict": Program(
        _call_meta_model(None),
        "pm.load_state_dict(...) takes full tensors",
        _call_meta_model(lambda module: module.load_state_dict(Net().state_dict())),
    ),
    "checkpoint/weight_files.py _files_of 0": Program(
        _load_from(_write_weights(), "nowhere"),
        "or a folder with such files",
        _load_from(_write_weights()),
    ),
    "checkpoint/weight_files.py _weights_damage_error 0": Program(
        _load_from(_text("model.safetensors", "x")),
        "download or copy it and the other",
        _load_from(_write_weights()),
    ),
    "checkpoint/weight_files.py _weights_damage_error 0 | index": Program(
        _load_from(_text(_INDEX, _index(x="one.safetensors"), "one.safetensors")),
        "download or copy it and the other",
        _load_from(_text(_INDEX, _index(**_OF_ONE), "one.safetensors")),
    ),
    "checkpoint/weight_files.py _weights_choice_error 0": Program(
        _load_from(_write_weights("a.safetensors", "b.safetensors")),
        "pass the path of one of them",
        _load_from(_write_weights("a.safetensors", "b.safetensors"), "b.safetensors"),
    ),
    "checkpoint/weight_files.py _weights_choice_error 1": Program(
        _load_from(_text("pytorch_model.bin", "x")),
        "or safetensors.torch.save_model(...)",
        _load_from(_write_weights()),
    ),
    "checkpoint/weight_files.py _weights_choice_error 2": Program(
        _load_from(lambda folder: None), "pass a folder with weights", _load_from(_write_weights())
    ),
    "checkpoint/weights.py _check_format 0": Program(
        _save(dtype=torch.int8), "pass torch.float64, torch.float32", _save(dtype=torch.float32)
    ),
    "checkpoint/weights.py _check_format 1": Program(
        _save(max_file_bytes=0), "pass a positive number of bytes", _save(max_file_bytes=1)
    ),
    "checkpoint/weights.py _writing_into 0": Program(
        _save("file"), "choose a writable folder", _save("folder")
    ),
    "checkpoint/weights.py _check_known 0": Program(
        _load_from(_write_weights(), names=["head"]),
        "pass names of its parameters and saved buffers",
        _load_from(_write_weights(), names=["layer.bias"]),
    ),
    "checkpoint/weights.py _match_names 0": Program(
        _load_from(_write_weights(prefix="encoder.")),
        "rename= maps its names to names in the files",
        _load_from(_write_weights(prefix="encoder."), rename="encoder.{}".format),
    ),
    "checkpoint/weights.py _match_names 0 | missing": Program(
        _load_from(_write_weights(keep=1)),
        "strict=False leaves missing weights unchanged",
        _load_from(_write_weights(keep=1), strict=False),
    ),
}

PROGRAMS: dict[str, Program] = {**OPTIMIZERS, **WEIGHTS}
