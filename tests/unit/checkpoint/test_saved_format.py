"""Checkpoint files contain no pickle. Damaged and forged files are refused by name, without side
effects."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from old_checkpoints import forge, to_old_format
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import autopar
from autopar.checkpoint.contents import CONTENTS, check_boxes, read_contents
from autopar.checkpoint.loading import load_parts
from autopar.checkpoint.rank_parts import save_parts
from autopar.checkpoint.safetensors_files import TensorFile, write_tensors
from autopar.checkpoint.values import decode, encode
from autopar.core.json_text import read_json
from autopar.errors import RuntimeStateError

BATCH = {"x": torch.linspace(-1.0, 1.0, 32).reshape(4, 8)}
PART = "rank_00000.safetensors"
Json = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).pow(2).mean()


class Kept:
    """An object of the user that has a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Training:
    """A model, its optimizer and its scheduler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module: Any = autopar.compile(Net(), example_inputs=BATCH, hardware="cpu-gloo")
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 4])
        self.kept = Kept(
            {
                "means": [torch.ones(3), torch.zeros((), dtype=torch.complex128)],
                "best": float("inf"),
            }
        )

    @property
    def others(self) -> Json:
        return {"scheduler": self.scheduler, "kept": self.kept}

    def step(self) -> float:
        loss = self.module(**BATCH)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.item())

    def load(self, folder: Path) -> int:
        return autopar.Checkpoints(folder).load(self.module, self.optimizer, **self.others)

    def state(self) -> str:
        """Return everything that a checkpoint restores as text."""
        rates = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        values = [(name, p.tolist()) for name, p in self.module.state_dict().items()]
        moments = [
            (name, x.tolist()) for of in self.optimizer.state.values() for name, x in of.items()
        ]
        return repr((values, moments, rates, self.scheduler.state_dict(), self.kept.state))


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, float]:
    """Return a folder with one checkpoint, its state, and the loss of the next step."""
    run, folder = Training(), tmp_path_factory.mktemp("whole")
    run.step(), run.step()
    autopar.Checkpoints(folder).save(2, run.module, run.optimizer, **run.others)
    return folder, run.state(), run.step()


@pytest.fixture
def place(complete: tuple[Path, str, float], tmp_path: Path) -> Path:
    """Return the folder of a copy of the checkpoint."""
    shutil.copytree(complete[0], tmp_path / "run")
    return tmp_path / "run" / "step_000000002"


@pytest.fixture(scope="module")
def fresh() -> Training:
    """Return the objects that refused checkpoints are loaded into. They do not change."""
    return Training()


def error_of_loading(fresh: Training, place: Path) -> str:
    """Return the error message of loading a checkpoint. Loading must not change anything."""
    before = fresh.state()
    with pytest.raises(RuntimeStateError) as refusal:
        fresh.load(place.parent)
    assert fresh.state() == before and refusal.value.remedy
    return str(refusal.value)


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_training_resumes_exactly_from_each_format(
    complete: tuple[Path, str, float], place: Path, old: bool
) -> None:
    names = {PART, CONTENTS, "others.json", "others.safetensors", "plan.json", "autopar.json"}
    assert {path.name for path in place.iterdir()} == names
    if old:
        to_old_format(place)
        assert {path.name for path in place.iterdir()} == {
            "__0_0.distcp",
            ".metadata",
            "others.pt",
            "plan.json",
            "autopar.json",
        }
    run = Training()
    run.kept.state = None
    assert run.load(place.parent) == 2 and run.state() == complete[1] and run.step() == complete[2]
    assert autopar.Checkpoints(place.parent).export(place.parent / "weights") == 2
    exported = load_file(place.parent / "weights" / "model.safetensors")
    assert exported.keys() == dict(Net().named_parameters()).keys()


def test_checkpoint_contains_no_pickle_or_archive(place: Path) -> None:
    for path in place.iterdir():
        begin = path.read_bytes()[:9]
        assert begin[:1] == b"{" or (path.suffix == ".safetensors" and begin[8:] == b"{"), path


class Planted:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_pickle_planted_in_any_file_is_not_executed(
    place: Path, fresh: Training, old: bool, tmp_path: Path
) -> None:
    if old:
        to_old_format(place)
    mark = tmp_path / "mark"
    code = pickle.dumps(Planted(mark))
    for path in sorted(place.iterdir()):
        content = path.read_bytes()
        for malicious in (code, code + content):
            path.write_bytes(malicious)
            if path.name != "autopar.json":
                forge(place)
            if path.name != "plan.json":  # the plan is not read
                assert path.name in error_of_loading(fresh, place)
            assert not mark.exists()
        path.write_bytes(content)
        forge(place)
    for name in (".metadata", "others.pt", "__0_0.distcp", "rank_00001.safetensors"):
        if not (place / name).exists():
            (place / name).write_bytes(code)
    forge(place)
    assert Training().load(place.parent) == 2 and not mark.exists()


def box(data: Json, key: str = "model.first.weight") -> list[Any]:
    first_box: list[Any] = data["tensors"][key]["boxes"][0]
    return first_box


CHANGES: dict[str, Callable[[Json], object]] = {
    "dtype": lambda d: d["tensors"]["model.first.weight"].update(dtype="float64"),
    "dtype of as many bytes": lambda d: d["tensors"]["model.first.weight"].update(dtype="int32"),
    "no dtype": lambda d: d["tensors"]["model.first.weight"].update(dtype="nn"),
    "dtype that is not a text": lambda d: d["tensors"]["model.first.weight"].update(
        dtype=["float32"]
    ),
    "shape": lambda d: d["tensors"]["model.first.weight"].update(shape=[8, 16]),
    "shape and box": lambda d: (
        d["tensors"]["model.first.weight"].update(shape=[4, 16]),
        box(d).__setitem__(2, [4, 16]),
    ),
    "negative shape": lambda d: d["tensors"]["model.first.weight"].update(shape=[-8, -8]),
    "huge shape": lambda d: d["tensors"]["model.first.weight"].update(shape=[2**63, 8]),
    "shape of numbers": lambda d: d["tensors"]["model.first.weight"].update(shape=[8.0, 8.0]),
    "no shape": lambda d: d["tensors"]["model.first.weight"].pop("shape"),
    "many dims": lambda d: d["tensors"]["model.first.weight"].update(shape=[1] * 1000),
    "offset": lambda d: box(d).__setitem__(1, [1, 0]),
    "offset of other dims": lambda d: box(d).__setitem__(1, [0]),
    "sizes": lambda d: box(d).__setitem__(2, [4, 8]),
    "no boxes": lambda d: d["tensors"]["model.first.weight"].update(boxes=[]),
    "box twice": lambda d: d["tensors"]["model.first.weight"].update(boxes=[box(d), box(d)]),
    "boxes that overlap": lambda d: d["tensors"]["model.first.weight"].update(
        boxes=[[PART, [0, 0], [8, 4]], [PART, [0, 3], [8, 4]]]
    ),
    "other boxes": lambda d: d["tensors"]["model.first.weight"].update(
        boxes=[[PART, [0, 0], [8, 4]], [PART, [0, 4], [8, 4]]]
    ),
    "box that is a text": lambda d: d["tensors"]["model.first.weight"].update(boxes=["x"]),
    "file": lambda d: box(d).__setitem__(0, "others.safetensors"),
    "file elsewhere": lambda d: box(d).__setitem__(0, "../rank_00000.safetensors"),
    "file that is not there": lambda d: box(d).__setitem__(0, "rank_00007.safetensors"),
    "name": lambda d: d["tensors"].update({"model.third": d["tensors"].pop("model.first.weight")}),
    "names swapped": lambda d: _swap(
        d["tensors"], "model.first.weight", "optimizer.state.first.weight.step"
    ),
    "tensor that is a value": lambda d: (
        d["tensors"].pop("model.first.weight"),
        d["values"].update({"model.first.weight": 1.0}),
    ),
    "value that is a tensor": lambda d: d["tensors"].update(
        {_RATE: d["tensors"]["optimizer.state.first.weight.step"]}
    ),
    "tensor that is a list": lambda d: d["tensors"].update({"model.first.weight": []}),
    "rate that is a text": lambda d: d["values"].update({_RATE: "fast"}),
    "rate that is a list": lambda d: d["values"].update({_RATE: [0.1]}),
    "betas that are a number": lambda d: d["values"].update({_RATE.replace(".lr", ".betas"): 0.9}),
    "three betas": lambda d: d["values"].update(
        {_RATE.replace(".lr", ".betas"): {"!tuple": [0.9, 0.9, 0.9]}}
    ),
    "unknown kind": lambda d: d["values"].update({_RATE: {"!call": "os.system"}}),
    "two kinds": lambda d: d["values"].update({_RATE: {"!tuple": [], "!set": []}}),
    "kind of other content": lambda d: d["values"].update({_RATE: {"!set": [[]]}}),
    "tensor among values": lambda d: d["values"].update(
        {_RATE: {"!tensor": ["cpu", "float32", [2]]}}
    ),
    "no tensors": lambda d: d.pop("tensors"),
    "no values": lambda d: d.update(values=[]),
    "format": lambda d: d.update(format="x"),
    "version": lambda d: d.update(version=2),
}
_RATE = "optimizer.param_groups.first.weight.lr"


def _swap(data: Json, a: str, b: str) -> None:
    data[a], data[b] = data[b], data[a]


@pytest.mark.parametrize("kind", CHANGES)
def test_forged_contents_with_a_valid_checksum_are_refused(
    kind: str, place: Path, fresh: Training
) -> None:
    data = json.loads((place / CONTENTS).read_text())
    CHANGES[kind](data)
    (place / CONTENTS).write_text(json.dumps(data))
    forge(place)
    message = error_of_loading(fresh, place)
    assert any(word in message for word in (CONTENTS, "safetensors", "first.weight", "model.third"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "3",
        "{",
        "[" * 100_000,
        '{"format": 1e999}',
        '{"a": ' + "9" * 5000 + "}",
        "\ufffe",
    ],
)
@pytest.mark.parametrize("name", [CONTENTS, "others.json", "autopar.json"])
def test_invalid_or_hostile_json_is_refused(
    name: str, text: str, place: Path, fresh: Training
) -> None:
    (place / name).write_bytes(text.encode("utf-16") if text == "\ufffe" else text.encode())
    if name != "autopar.json":
        forge(place)
    assert name in error_of_loading(fresh, place) or "of format" in error_of_loading(fresh, place)


STATES: dict[str, Callable[[Json], object]] = {
    "tensor of another shape": lambda s: s["kept"]["means"][0]["!tensor"].__setitem__(2, [4]),
    "tensor of another dtype": lambda s: s["kept"]["means"][0]["!tensor"].__setitem__(1, "int64"),
    "tensor of no dtype": lambda s: s["kept"]["means"][0]["!tensor"].__setitem__(1, "load"),
    "tensor of few facts": lambda s: s["kept"]["means"][0].update({"!tensor": []}),
    "tensor of texts": lambda s: s["kept"]["means"][0].update({"!tensor": "abc"}),
    "tensors moved": lambda s: s["kept"]["means"].insert(0, 0),
    "pairs that are none": lambda s: s["scheduler"].update(milestones={"!counter": [1]}),
    "keys that cannot be": lambda s: s["scheduler"].update(milestones={"!dict": [[[], 1]]}),
    "number that is none": lambda s: s["kept"].update(best={"!float": "x"}),
    "huge number": lambda s: s["kept"].update(best={"!float": 3}),
    "device that is none": lambda s: s["kept"].update(best={"!device": "abacus"}),
    "bytes that are none": lambda s: s["kept"].update(best={"!bytes": "\u00e9"}),
    "size that is none": lambda s: s["kept"].update(best={"!size": ["x"]}),
    "state that is missing": lambda s: s.pop("kept"),
}


@pytest.mark.parametrize("kind", STATES)
def test_forged_states_with_a_valid_checksum_are_refused(
    kind: str, place: Path, fresh: Training
) -> None:
    data = json.loads((place / "others.json").read_text())
    STATES[kind](data["states"])
    (place / "others.json").write_text(json.dumps(data))
    forge(place)
    assert "others." in error_of_loading(fresh, place) or "'kept'" in error_of_loading(fresh, place)


ABOUT: dict[str, Callable[[Json], object]] = {
    "step": lambda a: a.update(step=7),
    "step that is a text": lambda a: a.update(step="2"),
    "no step": lambda a: a.pop("step"),
    "huge random state": lambda a: a.update(random_state=2**63),
    "random state that is a list": lambda a: a.update(random_state=[]),
    "mesh": lambda a: a.update(mesh=3),
    "tied": lambda a: a.update(tied={"a": 3}),
    "files that are a list": lambda a: a.update(files=[]),
    "no files": lambda a: a.update(files={}),
    "file elsewhere": lambda a: a["files"].update({"../../x": 3}),
    "checksum that is a text": lambda a: a["files"].update({PART: "x"}),
    "contents left out": lambda a: a["files"].pop(CONTENTS),
    "others left out": lambda a: a["files"].pop("others.json"),
    "old version": lambda a: a.update(version=2),
    "version that is a list": lambda a: a.update(version=[3]),
}


@pytest.mark.parametrize("kind", ABOUT)
def test_forged_metadata_with_a_valid_checksum_is_refused(
    kind: str, place: Path, fresh: Training
) -> None:
    forge(place, ABOUT[kind])
    assert "autopar.json" in error_of_loading(fresh, place) or "step" in error_of_loading(
        fresh, place
    )


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1, -100])
@pytest.mark.parametrize("name", [PART, "others.safetensors"])
def test_truncated_tensor_file_with_a_valid_checksum_is_refused(
    name: str, cut: int, place: Path, fresh: Training
) -> None:
    content = (place / name).read_bytes()
    (place / name).write_bytes(content[:cut])
    forge(place)
    assert name in error_of_loading(fresh, place)


def test_tensor_file_with_other_dtypes_or_missing_tensors_is_refused(
    place: Path, fresh: Training
) -> None:
    tensors = load_file(place / PART)
    for change in ({"dtype": torch.float64}, {"dtype": torch.int32}):
        save_file(
            {
                name: x.to(**change) if "first.weight" in name and x.dim() == 2 else x
                for name, x in tensors.items()
            },
            place / PART,
        )
        forge(place)
        assert f"{PART} contains model.first.weight" in error_of_loading(fresh, place)
    save_file({name: x for name, x in tensors.items() if "first" not in name}, place / PART)
    forge(place)
    assert f"{PART} does not contain" in error_of_loading(fresh, place)


VALUES: dict[str, Any] = {
    "numbers": [
        0,
        -1,
        2**62,
        2**63,
        -(2**64),
        10**400,
        0.1,
        -0.0,
        5e-324,
        float("inf"),
        float("-inf"),
        True,
        False,
        None,
        1 - 2j,
    ],
    "texts": ["", "!", "\ud800", "\x00", "é" * 100],
    "bytes": [b"", b"\x00\xff", bytearray(b"ab")],
    "containers": [
        (),
        (1, (2,)),
        set(),
        {1, "a"},
        frozenset({(1, 2)}),
        torch.Size((2, 3)),
        [[[]]],
        {},
        {"a": {"b": []}},
    ],
    "keys": {1: 2, "1": 3, None: 4, (1, 2): 5, "!tuple": 6, 1.5: 7, True + 1: 8},
    "tagged": {"!tuple": [1]},
    "kinds of dicts": [OrderedDict(b=1, a=2), Counter({2: 1, 4: 0}), OrderedDict({"!x": 1})],
    "of torch": [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:3")],
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_are_restored_exactly(kind: str) -> None:
    value = VALUES[kind]
    result = decode(read_json(json.dumps(encode(value, ("it",)), allow_nan=False)), ("it",))
    assert repr(result) == repr(value) and type(result) is type(value)


def test_numpy_scalars_are_saved_as_python_numbers() -> None:
    assert (
        repr(encode([np.float64(0.25), np.int32(3), np.bool_(True)], ("it",))) == "[0.25, 3, True]"
    )


def _within_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


REFUSED: dict[str, Any] = {
    "array": np.array(["a text"]),
    "path": Path("x"),
    "function": len,
    "class": int,
    "object": Planted(Path("x")),
    "lambda": lambda: 0,
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.ones(2, device="meta"),
    "kind of int": type("Own", (int,), {})(3),
    "in itself": _within_itself(),
    "kind of dict": type("Own", (dict,), {})(),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_error_for_an_unsupported_value_names_it(
    kind: str, tmp_path: Path, fresh: Training
) -> None:
    state = {"deep": [{"er": REFUSED[kind]}]}
    with pytest.raises(
        RuntimeStateError, match=r"kept\['deep'\]\[0\]\['er'\].* which a checkpoint cannot hold"
    ) as refusal:
        autopar.Checkpoints(tmp_path / "run").save(1, fresh.module, kept=Kept(state))
    assert "state_dict return tensors" in refusal.value.remedy and not list(tmp_path.glob("run/*"))


DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
)


def test_tensors_of_all_dtypes_and_strides_are_restored_exactly(tmp_path: Path) -> None:
    by_dtype = {f"{dtype}": (torch.arange(15).reshape(3, 5) % 7).to(dtype) for dtype in DTYPES}
    tensors = {
        **by_dtype,
        **{f"{name} scalar": x[1, 2] for name, x in by_dtype.items()},
        **{f"{name} none": x[:0] for name, x in by_dtype.items()},
    }
    tensors |= {"turned": torch.rand(3, 5).t(), "part": torch.rand(9, 9)[::2, 1:4]}
    tensors["conjugate"] = torch.rand(3, dtype=torch.complex64).conj()
    write_tensors(tmp_path / "file", tensors)
    file = TensorFile(tmp_path / "file")
    for name, x in tensors.items():
        loaded = file.read(name, x.dtype, x.shape)
        assert loaded.dtype == x.dtype and loaded.tolist() == x.tolist(), name
        if x.dim() == 2 and x.numel():
            box = (slice(1, 3), slice(0, 2))
            assert file.read(name, x.dtype, x.shape, box).tolist() == x[box].tolist()
    plain = load_file(tmp_path / "file")
    assert plain["torch.bfloat16"].tolist() == by_dtype["torch.bfloat16"].tolist(), (
        "other readers of safetensors can read the file"
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nested_states_with_tensors_in_lists_are_restored(tmp_path: Path) -> None:
    state = {
        "a": {"b": [torch.ones(2), torch.zeros(())], "c": "x"},
        "betas": (0.9, 0.99),
        "empty": torch.ones(0, 3),
        "none": None,
    }
    save_parts(state, tmp_path, "a test", "nothing changed")
    loaded: Json = {
        "a": {"b": [torch.zeros(2), torch.ones(())], "c": ""},
        "betas": (0.0, 0.0),
        "empty": torch.ones(0, 3),
        "none": None,
    }
    load_parts(loaded, tmp_path)
    assert repr(loaded) == repr(state)
    assert "a.b.0[0]" in TensorFile(tmp_path / PART).names
    check_boxes(read_contents(tmp_path), tmp_path)
