"""Checkpoints on one process: which are kept and which are refused. A refusal has no side
effects."""

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
    """Two linear layers and a loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).pow(2).mean()


def compile_net(width: int = 8) -> Any:
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
def saved_run(tmp_path: Path) -> tuple[Path, float]:
    """Return the folder of a run after three steps, and the loss of the fourth step."""
    module = compile_net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    checkpoints = autopar.Checkpoints(tmp_path / "run")
    assert checkpoints.load(module, optimizer) == 0 and not optimizer.state
    for n in range(3):
        step(module, optimizer)
        place = checkpoints.save(n + 1, module, optimizer)
        assert place.is_dir()
    return tmp_path / "run", step(module, optimizer)


@pytest.mark.slow
def test_newest_complete_checkpoints_are_kept_and_partial_ones_ignored(
    saved_run: tuple[Path, float],
) -> None:
    folder, expected_loss = saved_run
    (folder / "step_000000002.part").mkdir()
    (folder / "step_000000009.part").mkdir()
    (folder / "notes").mkdir()
    checkpoints = autopar.Checkpoints(folder)
    assert checkpoints.steps() == (2, 3)
    module = compile_net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    assert checkpoints.load(module, optimizer) == 3
    assert optimizer.param_groups[0]["lr"] == 0.1, "the learning rate is loaded"
    assert step(module, optimizer) == expected_loss
    from_plan = autopar.compile(
        Net(), example_inputs=BATCH, plan=folder / "step_000000003" / "plan.json"
    )
    assert from_plan.plan.hash == module.plan.hash, "the saved plan is the plan of the module"


@pytest.mark.slow
def test_saving_a_step_again_replaces_its_checkpoint(saved_run: tuple[Path, float]) -> None:
    folder, _ = saved_run
    module, checkpoints = compile_net(), autopar.Checkpoints(folder)
    checkpoints.save(3, module)
    other = compile_net()
    assert checkpoints.steps() == (2, 3) and checkpoints.load(other) == 3
    assert all(torch.equal(values(other)[name], value) for name, value in values(module).items())
    assert not list(folder.glob("*.old")) and not list(folder.glob("*.part"))


def test_checkpoint_renamed_to_another_step_is_refused(saved_run: tuple[Path, float]) -> None:
    folder, _ = saved_run
    (folder / "step_000000003").rename(folder / "step_000000007")
    module, checkpoints = compile_net(), autopar.Checkpoints(folder)
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
def test_incompatible_checkpoint_is_refused_without_side_effects(
    saved_run: tuple[Path, float], case: str
) -> None:
    folder, _ = saved_run
    module = compile_net(16 if case == "shape" else 8)
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


def test_parameters_without_gradients_have_no_optimizer_state_after_loading(tmp_path: Path) -> None:
    def parts(module: Any) -> tuple[list[Tensor], list[Tensor]]:
        parameters = dict(module.named_parameters())
        return [parameters["first.weight"], parameters["first.bias"]], [
            parameters["second.weight"],
            parameters["second.bias"],
        ]

    def optimizer_of(module: Any) -> torch.optim.Optimizer:
        first, second = parts(module)
        return torch.optim.AdamW([{"params": first}, {"params": second, "lr": 0.05}], lr=0.1)

    module, other = compile_net(), compile_net()
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
def test_checkpoint_before_the_first_step_does_not_change_training(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    def make_optimizer(module: Any) -> torch.optim.Optimizer:
        copies = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in settings.items()
        }
        return getattr(torch.optim, kind)(module.parameters(), **{"lr": 0.1, **copies})

    plain, module, other = compile_net(), compile_net(), compile_net()
    optimizer, fresh = make_optimizer(module), make_optimizer(other)
    autopar.Checkpoints(tmp_path).save(0, module, optimizer)
    assert not optimizer.state and autopar.Checkpoints(tmp_path).load(other, fresh) == 0
    assert not any(fresh.state.values())
    reference = make_optimizer(plain)
    for _ in range(3):
        loss = step(plain, reference)
        assert step(module, optimizer) == loss == step(other, fresh)


@pytest.mark.parametrize("at", [2, 1])
def test_saving_an_earlier_step_than_existing_ones_is_refused(
    saved_run: tuple[Path, float], at: int
) -> None:
    folder, _ = saved_run
    with pytest.raises(
        RuntimeStateError,
        match=f"step {at} cannot be saved because later steps exist: {'3' if at == 2 else '2, 3'}",
    ):
        autopar.Checkpoints(folder).save(at, compile_net())
    assert autopar.Checkpoints(folder).steps() == (2, 3)
    for bad in (-1, 1.5):
        with pytest.raises(RuntimeStateError, match="is not a number of steps"):
            autopar.Checkpoints(folder).save(bad, compile_net())  # type: ignore[arg-type]


def test_interruption_between_two_renames_loses_no_checkpoint(
    saved_run: tuple[Path, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected_loss = saved_run

    def rename(self: Path, target: Path) -> Path:
        if self.suffix == ".part":
            raise KeyboardInterrupt
        return plain(self, target)

    plain = Path.rename
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        autopar.Checkpoints(folder, keep=1).save(3, compile_net())
    monkeypatch.undo()
    assert not (folder / "step_000000003").exists()
    module = compile_net()
    optimizer = torch.optim.AdamW(module.parameters())
    assert (
        autopar.Checkpoints(folder).load(module, optimizer) == 3
        and step(module, optimizer) == expected_loss
    )


class Run:
    """A separate run, as in a separate process. All values of its model are the length of its
    name."""

    def __init__(self, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name, self._patch, self.module, self.checkpoints = (
            name,
            monkeypatch,
            compile_net(),
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
        """Return whether a checkpoint is complete and was saved by this run."""
        return read_about(place)[1] == "" and runs_of({0: place}) == {0: self.name}


@pytest.mark.parametrize("loads", [True, False])
def test_second_of_two_runs_in_one_folder_is_refused(
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
        "a run that loads may continue after the other run"
    )
    with pytest.raises(
        RuntimeStateError, match="step 4 was saved by first, this run is second run"
    ):
        second.save(4)


def test_run_continues_after_a_crashed_run_and_may_save_its_last_step_again(
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
def test_one_of_two_runs_that_save_a_step_concurrently_is_refused(
    tmp_path: Path, when: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Run("first", tmp_path, monkeypatch), Run("second run", tmp_path, monkeypatch)
    if again:
        first.save(1)
        assert first.load() == second.load() == 1
    owner, name = (dcp, "save") if when == "before its parts" else (Path, "rename")
    plain, interruptions = getattr(owner, name), []

    def save_concurrently(*args: Any, **kwargs: Any) -> Any:
        if not interruptions and (name == "save" or args[0].is_dir()):
            interruptions.append(True)
            second.save(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, save_concurrently)
    with pytest.raises(
        RuntimeStateError, match="step 1 was saved by second run, this run is first"
    ):
        first.save(1)
    assert second.is_of(tmp_path / "step_000000001") and second.save(2).is_dir()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, at: int | None = None) -> None:
    """Flip one bit, by default in the middle of the file."""
    content = bytearray(path.read_bytes())
    at = len(content) // 2 if at is None else at
    content[at] ^= 1 << at % 8
    path.write_bytes(content)


FILES = ("autopar.json", "others.json", "plan.json", "contents.json", "rank_00000.safetensors")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [Path.unlink, cut, flip], ids=["gone", "cut", "flipped"])
def test_damaged_checkpoint_is_refused_with_the_previous_step_as_remedy(
    saved_run: tuple[Path, float], file: str, damage: Any
) -> None:
    folder, _ = saved_run
    damage(folder / "step_000000003" / file)
    module = compile_net()
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
def test_error_for_damaged_checkpoints_names_the_newest_complete_one(
    tmp_path: Path, damaged: tuple[int, ...], remedy: str
) -> None:
    module, checkpoints = compile_net(), autopar.Checkpoints(tmp_path, keep=3)
    for n in (1, 2, 3):
        checkpoints.save(n, module)
    for n in damaged:
        flip(tmp_path / f"step_{n:09d}" / "rank_00000.safetensors")
    with pytest.raises(RuntimeStateError, match=remedy):
        checkpoints.load(module)


@pytest.mark.slow
def test_each_flipped_bit_is_detected(saved_run: tuple[Path, float]) -> None:
    place = saved_run[0] / "step_000000003"
    assert read_about(place)[1] == ""
    for file in FILES:
        size, whole = (place / file).stat().st_size, (place / file).read_bytes()
        for at in range(0, size, 1 if file == "autopar.json" else 1 + size // 20):
            flip(place / file, at)
            try:
                damage = read_about(place)[1]
            except RuntimeStateError as refusal:  # the bit is in the format field
                damage = refusal.what if file == "autopar.json" else ""
            assert damage, f"byte {at} of {file}"
            (place / file).write_bytes(whole)
    assert read_about(place)[1] == ""


@pytest.mark.slow
def test_saved_states_that_are_not_loaded_are_logged(
    saved_run: tuple[Path, float], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    module = compile_net()
    optimizer = torch.optim.AdamW(module.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    autopar.Checkpoints(tmp_path / "other").save(1, module, optimizer, scheduler=scheduler)
    assert autopar.Checkpoints(tmp_path / "other").load(module) == 1
    assert "saved in the checkpoint but not loaded: optimizer, scheduler" in caplog.text


class Drawing:
    """An object whose state needs pickle."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("somewhere")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it was not saved")


@pytest.mark.slow
def test_states_that_cannot_be_saved_or_loaded_are_refused(saved_run: tuple[Path, float]) -> None:
    folder, _ = saved_run
    with pytest.raises(
        RuntimeStateError,
        match=r"draws\['path'\] is a pathlib.PosixPath, which a checkpoint cannot hold",
    ):
        autopar.Checkpoints(folder).save(4, compile_net(), draws=Drawing())
    (folder.parent / "file").touch()
    with pytest.raises(
        RuntimeStateError, match=r"cannot be used: Not a directory(.|\n)*move it away"
    ):
        autopar.Checkpoints(folder.parent / "file").save(4, compile_net())
    module = compile_net()
    autopar.Checkpoints(folder.parent / "alone").save(1, module)
    with pytest.raises(RuntimeStateError, match="has no optimizer"):
        autopar.Checkpoints(folder.parent / "alone").load(
            module, torch.optim.AdamW(module.parameters())
        )


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeStateError, match="Net is not compiled"):
        autopar.Checkpoints(tmp_path).save(1, Net())
    with pytest.raises(RuntimeStateError, match="keep=0"):
        autopar.Checkpoints(tmp_path, keep=0)
    with pytest.raises(RuntimeStateError, match="loader=int has no state_dict"):
        autopar.Checkpoints(tmp_path).save(1, compile_net(), loader=3)
    assert autopar.Checkpoints(tmp_path).steps() == ()


@pytest.mark.slow
def test_lazily_planned_model_can_be_saved_after_its_first_call(tmp_path: Path) -> None:
    module = autopar.compile(Net(), hardware="cpu-gloo")
    with pytest.raises(RuntimeStateError, match="has not been called yet"):
        autopar.Checkpoints(tmp_path).save(1, module)
    module(**BATCH)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    step(module, optimizer)
    autopar.Checkpoints(tmp_path).save(1, module, optimizer)
    other = compile_net()
    assert autopar.Checkpoints(tmp_path).load(other, torch.optim.AdamW(other.parameters())) == 1
    assert all(
        torch.equal(values(other)[name], p.detach().full_tensor())
        for name, p in module.named_parameters()
    )


@pytest.mark.slow
def test_empty_parameter_group_is_saved_and_loaded(tmp_path: Path) -> None:
    """Groups can be empty, for example, a group for biases of a model without biases."""
    losses = []
    for loads in (False, True):
        module = compile_net()
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
def test_checkpoint_without_weights_contains_only_the_optimizer(tmp_path: Path) -> None:
    module = compile_net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    step(module, optimizer)
    place = autopar.Checkpoints(tmp_path, weights=False).save(1, module, optimizer)
    keys = read_metadata(place).state_dict_metadata
    assert keys and all(key.startswith("optimizer.") for key in keys)
    other = compile_net()
    fresh, before = torch.optim.AdamW(other.parameters(), lr=0.5), values(other)
    assert autopar.Checkpoints(tmp_path, weights=False).load(other, fresh) == 1
    assert all(torch.equal(values(other)[name], value) for name, value in before.items())
    assert fresh.param_groups[0]["lr"] == 0.1
    other.load_state_dict(module.state_dict())
    assert step(other, fresh) == step(module, optimizer) and step(other, fresh) == step(
        module, optimizer
    )
