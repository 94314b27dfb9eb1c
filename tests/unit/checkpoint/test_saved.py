"""Checkpoints on one process: which there are, what is refused, and that a refusal changes
nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import autopar
from autopar.checkpoint import manager
from autopar.checkpoint import manager as saved_in
from autopar.checkpoint.files import read_about
from autopar.checkpoint.loading import read_metadata
from autopar.checkpoint.manager import runs_of
from autopar.errors import RuntimeStateError

BATCH = {"x": torch.linspace(-1.0, 1.0, 32).reshape(4, 8)}


class Net(nn.Module):
    """Half of it has no gradient until `both` is set, as a part that is trained later."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).pow(2).mean()


def compiled(width: int = 8) -> Any:
    torch.manual_seed(0)
    return autopar.compile(Net(width), example_inputs=BATCH, hardware="cpu-gloo")


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = module(**BATCH)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in module.named_parameters()}  # type: ignore[operator]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, float]:
    """A run's folder after three steps, and the loss of the next."""
    module = compiled()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    checkpoints = autopar.Checkpoints(tmp_path / "run")
    assert checkpoints.load(module, optimizer) == 0 and not optimizer.state
    for n in range(3):
        step(module, optimizer)
        place = checkpoints.save(n + 1, module, optimizer)
        assert place.is_dir()
    return tmp_path / "run", step(module, optimizer)


@pytest.mark.slow
def test_the_newest_whole_checkpoints_stay_and_what_was_broken_off_is_none(
    saved: tuple[Path, float],
) -> None:
    folder, wanted = saved
    (folder / "step_000000002.part").mkdir()
    (folder / "step_000000009.part").mkdir()
    (folder / "notes").mkdir()
    checkpoints = autopar.Checkpoints(folder)
    assert checkpoints.steps() == (2, 3)
    module = compiled()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    assert checkpoints.load(module, optimizer) == 3
    assert optimizer.param_groups[0]["lr"] == 0.1, "the run's own rate"
    assert step(module, optimizer) == wanted
    again = autopar.compile(
        Net(), example_inputs=BATCH, plan=folder / "step_000000003" / "plan.json"
    )
    assert again.plan.hash == module.plan.hash, "with what it was saved of"


@pytest.mark.slow
def test_a_step_that_is_saved_again_takes_the_place_of_the_first(saved: tuple[Path, float]) -> None:
    folder, _ = saved
    module, checkpoints = compiled(), autopar.Checkpoints(folder)
    checkpoints.save(3, module)
    other = compiled()
    assert checkpoints.steps() == (2, 3) and checkpoints.load(other) == 3
    assert all(torch.equal(values(other)[name], value) for name, value in values(module).items())
    assert not list(folder.glob("*.old")) and not list(folder.glob("*.part"))


def test_a_folder_that_was_renamed_to_another_step_is_refused(saved: tuple[Path, float]) -> None:
    folder, _ = saved
    (folder / "step_000000003").rename(folder / "step_000000007")
    module, checkpoints = compiled(), autopar.Checkpoints(folder)
    before = values(module)
    with pytest.raises(
        RuntimeStateError, match="step 7 is damaged: it was saved as step 3"
    ) as refusal:
        checkpoints.load(module)
    assert "step 2 is complete" in refusal.value.remedy
    assert all(torch.equal(before[name], value) for name, value in values(module).items())
    with pytest.raises(RuntimeStateError, match="saved as step 3"):
        checkpoints.export(folder / "weights")
    assert checkpoints.export(folder / "weights", step=2) == 2


@pytest.mark.parametrize("case", ["shape", "names", "optimizer", "scheduler", "format"])
def test_what_does_not_fit_is_refused_and_nothing_changes(
    saved: tuple[Path, float], case: str
) -> None:
    folder, _ = saved
    module = compiled(16 if case == "shape" else 8)
    if case == "names":
        torch.manual_seed(0)
        module = autopar.compile(
            nn.Sequential(Net()), example_inputs=(BATCH["x"],), hardware="cpu-gloo"
        )
    kind = torch.optim.Adagrad if case == "optimizer" else torch.optim.AdamW
    optimizer = kind(module.parameters(), lr=0.5)
    others = (
        {"warmup": torch.optim.lr_scheduler.StepLR(optimizer, 1)} if case == "scheduler" else {}
    )
    if case == "format":
        about = folder / "step_000000003" / "autopar.json"
        about.write_text(json.dumps({**json.loads(about.read_text()), "version": 99}))
    before, had_state = values(module), bool(optimizer.state)
    words = {
        "shape": r"first\.weight is \(8, 8\) in the checkpoint, \(16, 8\) here",
        "names": "0.first.weight of the model is missing",
        "optimizer": "sum of the optimizer is missing",
        "scheduler": "no 'warmup'",
        "format": "version 99",
    }
    with pytest.raises(RuntimeStateError, match=words[case]):
        autopar.Checkpoints(folder).load(module, optimizer, **others)
    assert all(torch.equal(before[name], value) for name, value in values(module).items())
    assert bool(optimizer.state) == had_state and optimizer.param_groups[0]["lr"] == 0.5


def test_parameters_that_had_no_gradient_yet_have_no_state_after_loading(tmp_path: Path) -> None:
    def parts(module: Any) -> tuple[list[Tensor], list[Tensor]]:
        named = dict(module.named_parameters())
        return [named["first.weight"], named["first.bias"]], [
            named["second.weight"],
            named["second.bias"],
        ]

    def optimizer_of(module: Any) -> torch.optim.Optimizer:
        first, second = parts(module)
        return torch.optim.AdamW([{"params": first}, {"params": second, "lr": 0.05}], lr=0.1)

    module, other = compiled(), compiled()
    optimizer, fresh = optimizer_of(module), optimizer_of(other)
    module(**BATCH).backward()
    for p in parts(module)[1]:
        p.grad = None
    optimizer.step()
    autopar.Checkpoints(tmp_path).save(1, module, optimizer)
    autopar.Checkpoints(tmp_path).load(other, fresh)
    assert all(p in fresh.state for p in parts(other)[0]) and not any(
        p in fresh.state for p in parts(other)[1]
    )
    optimizer.zero_grad()
    assert [step(module, optimizer) for _ in range(3)] == [step(other, fresh) for _ in range(3)]


KINDS = (
    ("AdamW", {}),
    ("Adam", {"amsgrad": True}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ("NAdam", {}),
    ("ASGD", {}),
    ("AdamW", {"lr": torch.tensor(0.1)}),
)


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=str)
def test_saving_before_the_first_step_changes_nothing(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    def made(module: Any) -> torch.optim.Optimizer:
        settled = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in settings.items()
        }
        return getattr(torch.optim, kind)(module.parameters(), **{"lr": 0.1, **settled})

    plain, module, other = compiled(), compiled(), compiled()
    optimizer, fresh = made(module), made(other)
    autopar.Checkpoints(tmp_path).save(0, module, optimizer)
    assert not optimizer.state and autopar.Checkpoints(tmp_path).load(other, fresh) == 0
    assert not any(fresh.state.values())
    wanted = made(plain)
    for _ in range(3):
        loss = step(plain, wanted)
        assert step(module, optimizer) == loss == step(other, fresh)


@pytest.mark.parametrize("at", [2, 1])
def test_a_run_that_did_not_go_on_writes_nothing_beside_later_steps(
    saved: tuple[Path, float], at: int
) -> None:
    folder, _ = saved
    with pytest.raises(
        RuntimeStateError,
        match=f"step {at} cannot be saved because later steps exist: {'3' if at == 2 else '2, 3'}",
    ):
        autopar.Checkpoints(folder).save(at, compiled())
    assert autopar.Checkpoints(folder).steps() == (2, 3)
    for bad in (-1, 1.5):
        with pytest.raises(RuntimeStateError, match="is not a number of steps"):
            autopar.Checkpoints(folder).save(bad, compiled())  # type: ignore[arg-type]


def test_a_kill_between_two_names_loses_nothing(
    saved: tuple[Path, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wanted = saved

    def rename(self: Path, target: Path) -> Path:
        if self.suffix == ".part":
            raise KeyboardInterrupt
        return plain(self, target)

    plain = Path.rename
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        autopar.Checkpoints(folder, keep=1).save(3, compiled())
    monkeypatch.undo()
    assert not (folder / "step_000000003").exists()
    module = compiled()
    optimizer = torch.optim.AdamW(module.parameters())
    assert (
        autopar.Checkpoints(folder).load(module, optimizer) == 3
        and step(module, optimizer) == wanted
    )


class Run:
    """A run of its own, as in a process of its own, that saves a model with one value in it."""

    def __init__(self, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name, self._patch, self.module, self.checkpoints = (
            name,
            monkeypatch,
            compiled(),
            autopar.Checkpoints(folder, keep=5),
        )

    def load(self) -> int:
        return self.checkpoints.load(self.module)

    def save(self, at: int) -> Path:
        with torch.no_grad(), self._patch.context() as patch:
            for module in (saved_in, manager):
                patch.setattr(module, "this_run", lambda: self.name)
            next(self.module.parameters()).fill_(len(self.name))
            return self.checkpoints.save(at, self.module)

    def is_of(self, place: Path) -> bool:
        """Whether a checkpoint is whole, and what this run saves."""
        return read_about(place)[1] == "" and runs_of({0: place}) == {0: self.name}


@pytest.mark.parametrize("loads", [True, False])
def test_of_two_runs_in_one_folder_that_which_saves_later_is_refused(
    tmp_path: Path, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Run("first", tmp_path, monkeypatch)
    first.save(1)
    second = Run("second run", tmp_path, monkeypatch)
    assert not loads or second.load() == 1
    place = second.save(2)
    for at in (2, 3, 1):
        with pytest.raises(
            RuntimeStateError,
            match=(
                "another run also saves into this folder: step 2 was saved by second run, this run"
                " is"
                " first"
            ),
        ):
            first.save(at)
    assert second.is_of(place) and first.is_of(tmp_path / "step_000000001")
    second.save(3)
    assert first.load() == 3 and first.save(4).is_dir(), (
        "the one that loads goes on after the other"
    )
    with pytest.raises(
        RuntimeStateError, match="step 4 was saved by first, this run is second run"
    ):
        second.save(4)


def test_a_run_goes_on_after_one_that_died_and_may_save_its_last_step_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Run("first", tmp_path, monkeypatch).save(1)
    (tmp_path / "step_000000002.first.part").mkdir()
    second = Run("second run", tmp_path, monkeypatch)
    assert second.load() == 1
    assert (
        second.is_of(second.save(1))
        and second.is_of(second.save(2))
        and not list(tmp_path.glob("*.part"))
    )


@pytest.mark.parametrize("when", ["before its parts", "before its name"])
@pytest.mark.parametrize("again", [False, True], ids=["new", "again"])
def test_of_two_runs_that_save_a_step_at_once_one_does(
    tmp_path: Path, when: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Run("first", tmp_path, monkeypatch), Run("second run", tmp_path, monkeypatch)
    if again:
        first.save(1)
        assert first.load() == second.load() == 1
    owner, name = (dcp, "save") if when == "before its parts" else (Path, "rename")
    plain, begun = getattr(owner, name), []

    def meanwhile(*args: Any, **kwargs: Any) -> Any:
        if not begun and (name == "save" or args[0].is_dir()):
            begun.append(True)
            second.save(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, meanwhile)
    with pytest.raises(
        RuntimeStateError, match="step 1 was saved by second run, this run is first"
    ):
        first.save(1)
    assert second.is_of(tmp_path / "step_000000001") and second.save(2).is_dir()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, at: int | None = None) -> None:
    """One bit, by default in the middle."""
    content = bytearray(path.read_bytes())
    at = len(content) // 2 if at is None else at
    content[at] ^= 1 << at % 8
    path.write_bytes(content)


FILES = ("autopar.json", "others.json", "plan.json", "contents.json", "rank_00000.safetensors")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [Path.unlink, cut, flip], ids=["gone", "cut", "flipped"])
def test_a_damaged_checkpoint_is_refused_with_what_else_there_is(
    saved: tuple[Path, float], file: str, damage: Any
) -> None:
    folder, _ = saved
    damage(folder / "step_000000003" / file)
    module = compiled()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    before = values(module)
    words = (
        rf"step 3 is damaged: {file} (.|\n)*step_000000003(.|\n)*remove it: step 2 is complete and"
        r" is used instead"
    )
    with pytest.raises(RuntimeStateError, match=words):
        autopar.Checkpoints(folder).load(module, optimizer)
    assert (
        all(torch.equal(before[name], value) for name, value in values(module).items())
        and not optimizer.state
    )


@pytest.mark.parametrize(
    ("damaged", "remedy"),
    [
        ((3, 2), "remove it and 2, which are damaged too: step 1 is complete and is used instead"),
        ((3, 2, 1), "to start from the beginning: no earlier checkpoint is complete"),
    ],
)
def test_of_several_damaged_checkpoints_the_newest_whole_one_is_named(
    tmp_path: Path, damaged: tuple[int, ...], remedy: str
) -> None:
    module, checkpoints = compiled(), autopar.Checkpoints(tmp_path, keep=3)
    for n in (1, 2, 3):
        checkpoints.save(n, module)
    for n in damaged:
        flip(tmp_path / f"step_{n:09d}" / "rank_00000.safetensors")
    with pytest.raises(RuntimeStateError, match=remedy):
        checkpoints.load(module)


@pytest.mark.slow
def test_a_bit_that_is_flipped_anywhere_is_found(saved: tuple[Path, float]) -> None:
    place = saved[0] / "step_000000003"
    assert read_about(place)[1] == ""
    for file in FILES:
        size, whole = (place / file).stat().st_size, (place / file).read_bytes()
        for at in range(0, size, 1 if file == "autopar.json" else 1 + size // 20):
            flip(place / file, at)
            try:
                damage = read_about(place)[1]
            except RuntimeStateError as refusal:  # in the words that say of which format it is
                damage = refusal.what if file == "autopar.json" else ""
            assert damage, f"byte {at} of {file}"
            (place / file).write_bytes(whole)
    assert read_about(place)[1] == ""


@pytest.mark.slow
def test_what_was_saved_and_is_not_asked_for_is_told(
    saved: tuple[Path, float], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    module = compiled()
    optimizer = torch.optim.AdamW(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    autopar.Checkpoints(tmp_path / "other").save(1, module, optimizer, scheduler=scheduler)
    assert autopar.Checkpoints(tmp_path / "other").load(module) == 1
    assert "saved in the checkpoint but not loaded: optimizer, scheduler" in caplog.text


class Drawing:
    """A state that would have to be pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("somewhere")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it was not saved")


@pytest.mark.slow
def test_what_could_not_be_read_back_is_not_saved(saved: tuple[Path, float]) -> None:
    folder, _ = saved
    with pytest.raises(
        RuntimeStateError,
        match=r"draws\['path'\] is a pathlib.PosixPath, which a checkpoint cannot hold",
    ):
        autopar.Checkpoints(folder).save(4, compiled(), draws=Drawing())
    (folder.parent / "file").touch()
    with pytest.raises(
        RuntimeStateError, match=r"NotADirectoryError(.|\n)*choose a writable folder"
    ):
        autopar.Checkpoints(folder.parent / "file").save(4, compiled())
    module = compiled()
    autopar.Checkpoints(folder.parent / "alone").save(1, module)
    with pytest.raises(RuntimeStateError, match="has no optimizer"):
        autopar.Checkpoints(folder.parent / "alone").load(
            module, torch.optim.AdamW(module.parameters())
        )


def test_what_is_no_compiled_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeStateError, match="Net is not compiled"):
        autopar.Checkpoints(tmp_path).save(1, Net())
    with pytest.raises(RuntimeStateError, match="keep=0"):
        autopar.Checkpoints(tmp_path, keep=0)
    with pytest.raises(RuntimeStateError, match="loader=int has no state_dict"):
        autopar.Checkpoints(tmp_path).save(1, compiled(), loader=3)
    assert autopar.Checkpoints(tmp_path).steps() == ()


@pytest.mark.slow
def test_a_model_that_is_planned_at_its_first_call_is_saved_from_then_on(tmp_path: Path) -> None:
    module = autopar.compile(Net(), hardware="cpu-gloo")
    with pytest.raises(RuntimeStateError, match="has not been called yet"):
        autopar.Checkpoints(tmp_path).save(1, module)
    module(**BATCH)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    step(module, optimizer)
    autopar.Checkpoints(tmp_path).save(1, module, optimizer)
    other = compiled()
    assert autopar.Checkpoints(tmp_path).load(other, torch.optim.AdamW(other.parameters())) == 1
    assert all(
        torch.equal(values(other)[name], p.detach().full_tensor())
        for name, p in module.named_parameters()
    )


@pytest.mark.slow
def test_a_group_without_parameters_is_no_hindrance(tmp_path: Path) -> None:
    """As where weights decay and biases do not, and a model has no biases."""
    losses = []
    for loads in (False, True):
        module = compiled()
        optimizer = torch.optim.AdamW(
            [{"params": list(module.parameters())}, {"params": [], "weight_decay": 0.5}], lr=0.1
        )
        checkpoints = autopar.Checkpoints(tmp_path)
        if loads:
            assert checkpoints.load(module, optimizer) == 1
        else:
            step(module, optimizer)
            checkpoints.save(1, module, optimizer)
        assert [len(group["params"]) for group in optimizer.param_groups] == [4, 0]
        assert optimizer.param_groups[1]["weight_decay"] == 0.5
        losses.append(step(module, optimizer))
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_without_weights_the_optimizer_alone_is_saved_and_read(tmp_path: Path) -> None:
    module = compiled()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    step(module, optimizer)
    place = autopar.Checkpoints(tmp_path, weights=False).save(1, module, optimizer)
    keys = read_metadata(place).state_dict_metadata
    assert keys and all(key.startswith("optimizer.") for key in keys)
    other = compiled()
    fresh, before = torch.optim.AdamW(other.parameters(), lr=0.5), values(other)
    assert autopar.Checkpoints(tmp_path, weights=False).load(other, fresh) == 1
    assert all(torch.equal(values(other)[name], value) for name, value in before.items())
    assert fresh.param_groups[0]["lr"] == 0.1
    other.load_state_dict(module.state_dict())
    assert step(other, fresh) == step(module, optimizer) and step(other, fresh) == step(
        module, optimizer
    )
