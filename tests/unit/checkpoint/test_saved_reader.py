"""A pickle planted in a checkpoint of an earlier version is refused and not executed."""

from __future__ import annotations

import builtins
import dataclasses
import operator
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from old_checkpoints import forge, to_old_format
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import autopar
from autopar.checkpoint.earlier_format import OldReader
from autopar.checkpoint.loading import load_parts
from autopar.errors import RuntimeStateError


class Call:
    """An object whose pickle calls a function with the given arguments."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.called


def _dotted_name(marker: Path) -> bytes:
    """Pickle a dotted name that reaches `os.system` through an allowed module."""
    text = f"touch {marker}".encode()
    module, name = b"torch.distributed.checkpoint.metadata", b"os.system"
    encoded = b"".join(b"\x8c" + bytes([len(each)]) + each for each in (module, name))
    argument = b"X" + len(text).to_bytes(4, "little") + text
    return b"\x80\x04" + encoded + b"\x93" + argument + b"\x85R."


def _pickle_of(make: Callable[[Path], Any]) -> Callable[[Path], bytes]:
    return lambda marker: pickle.dumps(make(marker))


def _eval(marker: Path) -> Call:
    return Call(builtins.eval, f"open({str(marker)!r}, 'w')")


HOSTILE: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "a command": (_pickle_of(lambda marker: Call(os.system, f"touch {marker}")), "posix.system"),
    "eval": (_pickle_of(_eval), "builtins.eval"),
    "in a dict": (_pickle_of(lambda m: Metadata({"model.a": {"b": [_eval(m)]}})), "builtins.eval"),
    "as a key": (
        _pickle_of(lambda m: Metadata({}, storage_data={(1, _eval(m)): 0})),
        "builtins.eval",
    ),
    "getattr": (
        _pickle_of(lambda marker: Call(getattr, Metadata, "__init__")),
        "builtins.getattr",
    ),
    "a getter": (
        _pickle_of(lambda marker: operator.attrgetter("os.system")),
        "operator.attrgetter",
    ),
    "a dotted name": (_dotted_name, "torch.distributed.checkpoint.metadata.os.system"),
    "torch.load": (
        _pickle_of(lambda marker: Call(torch.load, str(marker))),
        "torch.serialization.load",
    ),
    "a module's class": (
        _pickle_of(lambda marker: nn.Linear(1, 1)),
        "torch.nn.modules.linear.Linear",
    ),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).pow(2).mean()


def _compile_net() -> Any:
    batch = {"x": torch.linspace(-1.0, 1.0, 32).reshape(4, 8)}
    return autopar.compile(Net(), example_inputs=batch, hardware="cpu-gloo")


@pytest.mark.parametrize("kind", HOSTILE)
def test_metadata_that_calls_a_function_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    make, name = HOSTILE[kind]
    marker = tmp_path / "marker"
    (tmp_path / ".metadata").write_bytes(make(marker))
    with pytest.raises(RuntimeStateError) as refusal:
        OldReader(tmp_path).read_metadata()
    assert name in refusal.value.what
    assert str(tmp_path / ".metadata") == str(refusal.value.where)
    with pytest.raises(RuntimeStateError, match=name):
        load_parts({"model.a": torch.zeros(1)}, tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04.", b"no pickle", pickle.dumps({}), pickle.dumps(3)]
)
def test_invalid_metadata_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(RuntimeStateError, match=r"\.metadata of the checkpoint"):
        OldReader(tmp_path).read_metadata()


def test_loading_and_exporting_do_not_execute_planted_code(tmp_path: Path) -> None:
    module, checkpoints, marker = (
        _compile_net(),
        autopar.Checkpoints(tmp_path / "run"),
        tmp_path / "marker",
    )
    place = checkpoints.save(1, module)
    to_old_format(place)
    assert checkpoints.load(module) == 1
    (place / ".metadata").write_bytes(pickle.dumps(_eval(marker)))
    forge(place)
    with pytest.raises(RuntimeStateError, match=r"builtins\.eval"):
        checkpoints.load(module)
    with pytest.raises(RuntimeStateError, match=r"builtins\.eval"):
        checkpoints.export(tmp_path / "weights")
    assert not marker.exists()


def test_planted_non_tensor_value_is_refused(tmp_path: Path) -> None:
    marker, key = tmp_path / "marker", "optimizer.param_groups.a.lr"
    dcp.save({key: _eval(marker)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(RuntimeStateError, match=rf"{key} of the checkpoint is refused"):
        load_parts({key: 0.1}, tmp_path / "saved")
    assert not marker.exists()
    kinds = OldReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert isinstance(kinds[key], BytesStorageMetadata)


def test_checkpoint_written_by_torch_is_read_like_torch_reads_it(tmp_path: Path) -> None:
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int8,
        torch.bool,
    )
    tensors = {f"model.{dtype}": torch.ones(2, 3).to(dtype) for dtype in dtypes}
    nested = {
        "deep": {"tensors": [torch.ones(2), torch.zeros(())]},
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "none": None,
    }
    dcp.save({**tensors, **nested}, checkpoint_id=tmp_path, no_dist=True)
    metadata, expected = (
        OldReader(tmp_path).read_metadata(),
        FileSystemReader(tmp_path).read_metadata(),
    )
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert (metadata.storage_data, metadata.planner_data) == (
        expected.storage_data,
        expected.planner_data,
    )
    state: dict[str, Any] = {name: torch.zeros_like(value) for name, value in tensors.items()}
    state |= {"lr": 0.0, "betas": (0, 0), "none": 1}
    load_parts(state, tmp_path)
    assert all(torch.equal(state[name], value) for name, value in tensors.items())
    assert (state["lr"], state["betas"], state["none"]) == (0.1, (0.9, 0.99), None)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(
            m, "storage_data", {k: _with_path(v, "../a") for k, v in m.storage_data.items()}
        ),
        lambda m: setattr(m, "storage_data", {k: 3 for k in m.storage_data}),
        lambda m: setattr(m, "storage_data", [1]),
        lambda m: setattr(m, "state_dict_metadata", {"a": 3}),
        lambda m: setattr(m, "state_dict_metadata", 3),
        lambda m: m.state_dict_metadata["a"].chunks.clear(),
        lambda m: m.state_dict_metadata["a"].chunks.append(m.state_dict_metadata["a"].chunks[0]),
        lambda m: setattr(m.state_dict_metadata["a"], "size", None),
        lambda m: setattr(m.state_dict_metadata["a"], "chunks", [None]),
    ],
)
def test_metadata_inconsistent_with_its_files_is_refused(
    change: Callable[[Any], object], tmp_path: Path
) -> None:
    dcp.save({"a": torch.ones(4, 4)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = FileSystemReader(tmp_path).read_metadata()
    change(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RuntimeStateError, match=r"\.metadata of the checkpoint is damaged"):
        load_parts({"a": torch.zeros(4, 4)}, tmp_path)


def _with_path(info: Any, name: str) -> Any:
    return dataclasses.replace(info, relative_path=name)


def test_numpy_learning_rate_is_restored(tmp_path: Path) -> None:
    module, other = _compile_net(), _compile_net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=np.float64(0.25))
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5, betas=(0.5, 0.5))
    autopar.Checkpoints(tmp_path).save(1, module, optimizer)
    autopar.Checkpoints(tmp_path).load(other, fresh)
    assert fresh.param_groups[0]["lr"] == 0.25 and fresh.param_groups[0]["betas"] == (0.9, 0.999)
