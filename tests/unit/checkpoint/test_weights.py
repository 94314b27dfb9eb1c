"""Loading and saving weights as safetensors on one process. A model on the meta device does not run
before its weights are loaded."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import cli
from autopar.errors import RuntimeStateError

BATCH = {"x": torch.linspace(-1.0, 1.0, 32).reshape(4, 8)}


class Net(nn.Module):
    """A model with tied weights, a persistent buffer of integers, and non-persistent buffers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(8, width),
            nn.Linear(8, width),
            nn.Linear(width, 1),
        )
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.tensor([3, 4]))
        self.register_buffer("scale", torch.full((width,), 2.0), persistent=False)
        self.register_buffer("mask", torch.ones(width, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.first(x) + self.second(x)) * self.scale * self.mask
        return (self.last(features) * self.seen[0]).pow(2).mean()


def seeded_net(seed: int = 0, width: int = 8) -> Net:
    torch.manual_seed(seed)
    return Net(width)


def compile_model(model: nn.Module) -> Any:
    return autopar.compile(model, example_inputs=BATCH, hardware="cpu-gloo")


def compile_on_meta() -> Any:
    with autopar.weights_on_meta():
        return compile_model(Net())


def state(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (x.full_tensor() if hasattr(x, "full_tensor") else x).clone()
        for name, x in module.state_dict().items()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the weights of seed 1 in several files."""
    autopar.save_weights(compile_model(seeded_net(1)), tmp_path / "weights", max_file_bytes=100)
    return tmp_path / "weights"


def test_weights_in_several_files_with_an_index_are_saved_and_loaded(folder: Path) -> None:
    names = {each.name for each in folder.iterdir()}
    assert (
        "model.safetensors.index.json" in names
        and "model-00001-of-00003.safetensors" in names
        and len(names) == 4
    )
    module = compile_on_meta()
    assert autopar.load_weights(module, folder) == ()
    assert same(state(module), seeded_net(1).state_dict())
    assert module(**BATCH).item() == pytest.approx(seeded_net(1)(**BATCH).item(), rel=1e-6)


def test_tied_weights_are_saved_once_and_loaded_by_any_of_their_names(
    folder: Path, tmp_path: Path
) -> None:
    names = {name for each in folder.glob("*.safetensors") for name in load_file(each)}
    assert names == {
        "first.weight",
        "first.bias",
        "second.bias",
        "last.weight",
        "last.bias",
        "seen",
    }
    here = dict(seeded_net(2).state_dict())
    del here["first.weight"]
    save_file(here, tmp_path / "other.safetensors")
    module = compile_on_meta()
    autopar.load_weights(module, tmp_path / "other.safetensors")
    assert torch.equal(state(module)["first.weight"], seeded_net(2).first.weight)


def test_saved_weights_replace_previous_weights_but_no_other_files(folder: Path) -> None:
    for other in ("config.json", "model_ema.safetensors"):
        (folder / other).write_text("{}")
    autopar.save_weights(compile_model(seeded_net(2)), folder, dtype=torch.bfloat16)
    assert {each.name for each in folder.iterdir()} == {
        "config.json",
        "model_ema.safetensors",
        "model.safetensors",
    }
    weights = load_file(folder / "model.safetensors")
    assert (
        torch.equal(weights["last.weight"], seeded_net(2).last.weight.bfloat16())
        and weights["seen"].dtype == torch.int64
    )
    module = compile_on_meta()
    autopar.load_weights(module, folder)
    assert torch.equal(state(module)["last.weight"], seeded_net(2).last.weight.bfloat16().float())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights_are_exchanged_with_transformers_in_both_directions(
    kind: str, tmp_path: Path
) -> None:
    sizes = {
        "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 16},
        "llama": {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "intermediate_size": 32,
        },
    }
    config = AutoConfig.for_model(
        kind, vocab_size=32, bos_token_id=1, eos_token_id=2, **sizes[kind]
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    with autopar.weights_on_meta():
        empty = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(32).reshape(4, 8)
    batch = {"input_ids": ids, "labels": ids}
    module: Any = autopar.compile(empty, example_inputs=batch, hardware="cpu-gloo", outputs="loss")
    autopar.load_weights(module, tmp_path / "theirs")
    assert module(**batch).loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-5)
    autopar.save_weights(module, tmp_path / "ours")
    config.save_pretrained(tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert same(loaded.state_dict(), model.state_dict())


def test_names_can_be_mapped_and_missing_weights_can_be_left_unchanged(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(
        {
            "encoder." + name: x
            for name, x in seeded_net(3).state_dict().items()
            if name != "second.weight"
        },
        tmp_path / "x.safetensors",
    )
    module = compile_model(seeded_net(0))
    autopar.load_weights(module, tmp_path / "x.safetensors", rename="encoder.{}".format)
    assert same(state(module), seeded_net(3).state_dict())
    save_file(
        {"last.weight": seeded_net(4).last.weight.detach(), "head.weight": torch.ones(2)},
        tmp_path / "x.safetensors",
    )
    missing = autopar.load_weights(module, tmp_path / "x.safetensors", strict=False)
    assert (
        set(missing) == {"seen", "first.weight", "first.bias", "second.bias", "last.bias"}
        and len(missing) == 5
    )
    assert same(
        state(module), {**seeded_net(3).state_dict(), "last.weight": seeded_net(4).last.weight}
    )
    assert "1 weights are in the files but not in the model: head.weight" in caplog.text
    assert (
        f"5 weights are missing in the files, so left unchanged: {', '.join(missing[:3])}, …"
        in caplog.text
    )


def test_only_the_named_weights_are_loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, start = compile_model(seeded_net(5)), seeded_net(5).state_dict()
    autopar.load_weights(module, folder, names=["first.bias"])
    assert (
        same(state(module), {**start, "first.bias": seeded_net(1).first.bias}) and not caplog.text
    )
    with pytest.raises(RuntimeStateError, match=r"the model has no 'head\.bias'"):
        autopar.load_weights(module, folder, names=["first.weight", "head.bias"])


def _of(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], Path]:
    def write(place: Path) -> Path:
        here = {
            name: x for name, x in seeded_net(1).state_dict().items() if name != "second.weight"
        }
        change(here)
        save_file(here, place / "model.safetensors")
        return place

    return write


def _text(name: str, text: str) -> Callable[[Path], Path]:
    def write(place: Path) -> Path:
        (place / name).write_text(text)
        return place

    return write


def _pipe(name: str, *more: tuple[str, str]) -> Callable[[Path], Path]:
    def write(place: Path) -> Path:
        os.mkfifo(place / name)
        for file, text in more:
            (place / file).write_text(text)
        return place

    return write


def _index_of_other_folder(*parts: str) -> Callable[[Path], Path]:
    """Write an index that names a file outside its folder, which contains all weights."""

    def write(place: Path) -> Path:
        state = seeded_net(1).state_dict()
        names = [name for name in state if name != "second.weight"]
        save_file({name: state[name] for name in names}, place / "one.safetensors")
        (place / "new").mkdir()
        named = os.path.join(*(part or str(place) for part in parts), "one.safetensors")
        index = {"weight_map": {name: named for name in names}}
        return _text("model.safetensors.index.json", json.dumps(index))(place / "new")

    return write


def _two(place: Path) -> Path:
    for name in "ab":
        save_file({"x": torch.ones(1)}, place / f"{name}.safetensors")
    return place


def _index_of_nothing(place: Path) -> Path:
    _of(lambda here: None)(place).joinpath("model.safetensors").rename(place / "one.safetensors")
    return _text("model.safetensors.index.json", '{"weight_map": {"x": "one.safetensors"}}')(place)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (
            _of(lambda here: here.pop("last.bias")),
            r"do not fit the model: last.bias is missing[\s\S]*rename=",
        ),
        (
            _of(lambda here: here.update({"seen": torch.ones(2)})),
            r"seen is F32 in the files, torch.int64 here",
        ),
        (
            _of(lambda here: here.update({"last.bias": torch.ones(2)})),
            r"last.bias is \(2,\) in the files, \(1,\) here",
        ),
        (
            _of(lambda here: here.update({"last.bias": torch.ones(1, dtype=torch.float8_e4m3fn)})),
            r"last.bias is F8_E4M3 in the files",
        ),
        (_text("pytorch_model.bin", "x"), r"only in pickle files \(pytorch_model.bin\)"),
        (_text("model.safetensors", "x"), r"cannot be read"),
        (_text("model.safetensors.index.json", "[]"), r"the index cannot be read"),
        (
            _text("model.safetensors.index.json", '{"weight_map": {"x": "gone.safetensors"}}'),
            r"gone.safetensors",
        ),
        (_text("model.safetensors.index.json", '{"weight_map": {"x": 1}}'), r"has no weight_map"),
        (_text("model.safetensors.index.json", "[" * 100_000), r"the index cannot be read"),
        (_index_of_other_folder(".."), r"names '../one.safetensors', which is not the name of a f"),
        (_index_of_other_folder(""), r"names '/.*one.safetensors', which is not the name of a fil"),
        (_pipe("model.safetensors"), r"no weights found: it is not a regular file"),
        (_pipe("model.safetensors.index.json"), r"no weights found: it is not a regular file"),
        (
            _pipe("x", ("model.safetensors.index.json", '{"weight_map": {"x": "x"}}')),
            r"x cannot be read: it is not a regular file",
        ),
        (
            _of(lambda here: here.update({"seen": torch.ones(2, dtype=torch.uint64)})),
            r"seen is U64 in the files, torch.int64 here",
        ),
        (_index_of_nothing, r"the index lists 'x' in a file that does not contain it"),
        (_two, r"several sets of weights found: a.safetensors, b.safetensors"),
        (lambda place: place, r"no .safetensors files"),
        (lambda place: place / "nowhere", r"no weights found"),
    ],
)
def test_incompatible_or_unreadable_weights_are_refused_without_side_effects(
    write: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    module = compile_model(seeded_net(0))
    with pytest.raises(RuntimeStateError, match=words):
        autopar.load_weights(module, write(tmp_path))
    assert same(state(module), seeded_net(0).state_dict())


def test_weights_on_meta_keeps_buffers_and_tied_weights() -> None:
    with autopar.weights_on_meta():
        model = Net()
    assert (
        model.first.weight.is_meta
        and model.first.weight is model.second.weight
        and not model.scale.is_meta
    )  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError), autopar.weights_on_meta():
        raise ZeroDivisionError
    assert not Net().first.weight.is_meta


WAYS: dict[str, Callable[[Any, Path], object]] = {
    "full tensors": lambda module, place: module.load_state_dict(seeded_net(1).state_dict()),
    "in place": lambda module, place: dcp.load(
        {"model": module.state_dict()}, checkpoint_id=place / "dcp"
    ),
    "a checkpoint": lambda module, place: autopar.Checkpoints(place / "run").load(module),
}


@pytest.mark.parametrize("way", WAYS)
def test_module_without_values_can_be_run_and_saved_only_after_loading(
    way: str, tmp_path: Path
) -> None:
    source = compile_model(seeded_net(1))
    autopar.Checkpoints(tmp_path / "run").save(1, source)
    dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path / "dcp")
    module = compile_on_meta()
    for use in (lambda: module(**BATCH), lambda: autopar.save_weights(module, tmp_path / "x")):
        with pytest.raises(
            RuntimeStateError,
            match=(r"'first\.weight' was on the meta device and has no values; so were 4 others"),
        ):
            use()
    with pytest.raises(RuntimeStateError, match="was on the meta device"):
        autopar.Checkpoints(tmp_path / "other").save(1, module)
    WAYS[way](module, tmp_path)
    assert module(**BATCH).item() == pytest.approx(source(**BATCH).item(), rel=1e-6)


@pytest.mark.parametrize("name", ["scale", "mask", "seen"])
def test_buffer_without_values_is_detected_for_each_dtype(name: str) -> None:
    model = seeded_net(1)
    values = model.get_buffer(name).clone()
    model._buffers[name] = values.to("meta")
    module = compile_model(model)
    with pytest.raises(RuntimeStateError, match=f"'{name}' was on the meta device"):
        module(**BATCH)
    module.get_buffer(name).copy_(values)
    assert module(**BATCH).item() == pytest.approx(seeded_net(1)(**BATCH).item(), rel=1e-6)


@pytest.mark.slow
def test_checkpoint_is_exported_without_a_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = autopar.Checkpoints(tmp_path / "run")
    for step in (1, 2):
        checkpoints.save(step, compile_model(seeded_net(step)))
    assert checkpoints.export(tmp_path / "one", step=1) == 1
    weights = load_file(tmp_path / "one" / "model.safetensors")
    assert same({**weights, "second.weight": weights["first.weight"]}, seeded_net(1).state_dict())
    monkeypatch.setattr(
        sys,
        "argv",
        ["autopar", "export", str(tmp_path / "run"), str(tmp_path / "two"), "--dtype", "bfloat16"],
    )
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert not exit_.value.code and "of step 2 written" in capsys.readouterr().out.replace(
        "\n", " "
    )
    assert torch.equal(
        load_file(tmp_path / "two" / "model.safetensors")["last.weight"],
        seeded_net(2).last.weight.bfloat16(),
    )
    with pytest.raises(RuntimeStateError, match=r"no checkpoint of step 3[\s\S]*steps 1, 2"):
        checkpoints.export(tmp_path / "three", step=3)
    data = next((tmp_path / "run" / "step_000000002").glob("rank_*"))
    data.write_bytes(data.read_bytes()[:-9] + b"x" * 9)
    with pytest.raises(RuntimeStateError, match="step_000000002 is damaged"):
        checkpoints.export(tmp_path / "three")
    assert not (tmp_path / "three").exists()


def test_loaded_values_equal_to_the_marker_of_missing_values_are_accepted() -> None:
    model = seeded_net(1)
    weights = {**model.state_dict(), "seen": torch.full((2,), torch.iinfo(torch.int64).min)}
    with autopar.weights_on_meta():
        empty = Net()
    empty._buffers["seen"] = torch.zeros(2, dtype=torch.int64, device="meta")
    module = compile_model(empty)
    module.load_state_dict(weights)
    assert module(**BATCH).isfinite() and torch.equal(module.seen, weights["seen"])


def test_interrupted_replacement_of_weights_is_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, moves = Path.replace, list[Path]()

    def fail_second_move(self: Path, target: Path) -> Path:
        if moves:
            raise OSError("the disk is full")
        moves.append(self)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail_second_move)
    with pytest.raises(RuntimeStateError, match="the disk is full"):
        autopar.save_weights(compile_model(seeded_net(2)), folder, max_file_bytes=100)
    monkeypatch.undo()
    with pytest.raises(RuntimeStateError, match="several sets of weights found: model-00001-of"):
        autopar.load_weights(compile_model(seeded_net(0)), folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.int8}, "dtype=torch.int8: weights are not written in this dtype"),
        ({"dtype": torch.float8_e4m3fn}, "weights are not written in this dtype"),
        ({"dtype": torch.complex64}, "weights are not written in this dtype"),
        ({"dtype": "bf16"}, "dtype='bf16': weights are not written in this dtype"),
        ({"max_file_bytes": 0}, "max_file_bytes=0 is not a size of a file"),
        ({"max_file_bytes": "5GB"}, "max_file_bytes='5GB' is not a size of a file"),
    ],
)
def test_weights_are_not_written_in_a_form_that_loses_values(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    module = compile_model(seeded_net(0))
    with pytest.raises(RuntimeStateError, match=words):
        autopar.save_weights(module, tmp_path / "new", **change)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda place: place.write_text(""), "Not a directory"),
        (lambda place: place.symlink_to("gone"), "place is a symbolic link to a missing path"),
        (os.mkfifo, "Not a directory"),
    ],
)
def test_a_path_that_cannot_be_a_folder_of_weights_is_refused_with_its_reason(
    make: Callable[[Path], Any], reason: str, tmp_path: Path
) -> None:
    make(tmp_path / "place")
    module = compile_model(seeded_net(0))
    with pytest.raises(
        RuntimeStateError, match=rf"weights cannot be written into this folder: .*{reason}\n"
    ):
        autopar.save_weights(module, tmp_path / "place")
