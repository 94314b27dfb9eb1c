"""A cached plan equals the planned plan byte for byte. It is not used after a change of anything
that planning read."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_source import SOURCE, load
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar import hf
from autopar.api import planning
from autopar.api.arguments import as_call
from autopar.api.mesh_search import ShapeSearch
from autopar.api.options import PlanRequest
from autopar.cache import origin, store
from autopar.cli import app
from autopar.core.private_folder import warn_once
from autopar.planner import Planned
from autopar.request import PlanOptions

MESH = autopar.Mesh({"gpu": 2})
TINY = 'llama:{"hidden_size":32,"intermediate_size":64,"num_hidden_layers":2,"vocab_size":64,' + (
    '"num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":64}'
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("AUTOPAR_CACHE")
    monkeypatch.setattr(origin, "_STARTED", float("inf"))  # sources may change while the tests run
    warn_once.cache_clear()
    return tmp_path / "cache" / "entries"


@pytest.fixture(autouse=True, scope="module")
def captures() -> None:
    """Trace at each capture, since a shared capture may have read values of another model."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).pow(2).mean()


BATCH = torch.zeros(4, 8)


def find(
    model: nn.Module, batch: Any = BATCH, hardware: Any = "cpu-gloo", **options: Any
) -> planning.PlanResult:
    request = PlanRequest(model, options.pop("mesh", MESH), hardware, PlanOptions(**options))
    return planning.find_plan(request, *as_call(batch))


def is_hit(*args: Any, **more: Any) -> bool:
    return find(*args, **more).planned is None


def plans() -> int:
    """Return the number of cached plans."""
    return sum('"kind": "plan"' in entry.path.read_text() for entry in store.entries())


def test_cached_plan_equals_the_planned_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    first = autopar.plan(Net(), MESH, example_inputs=BATCH, hardware="cpu-gloo")
    assert plans() == 1
    with monkeypatch.context() as patch:
        patch.setattr(planning, "plan_call", None)  # must not be called
        second = autopar.plan(Net(), MESH, example_inputs=BATCH, hardware="cpu-gloo")
    without = autopar.plan(Net(), MESH, example_inputs=BATCH, hardware="cpu-gloo", cache=False)
    assert first.dumps() == second.dumps() == without.dumps()
    assert plans() == 1


PROGRAM = """
import logging, sys, time
import torch, autopar
from autopar import hf
from autopar.api import planning
if sys.argv[1] == "hit":
    planning.plan_call = None
model, batch = hf.build({spec!r}, batch=4, seq=16)
autopar.plan(model, {{"gpu": 2}}, example_inputs=batch, hardware="h100-sxm").save(sys.argv[2])
"""


@pytest.mark.slow
def test_another_process_loads_the_cached_plan_of_a_transformers_model(tmp_path: Path) -> None:
    program = PROGRAM.format(spec=TINY)
    model, batch = hf.build(TINY, batch=4, seq=16)
    here = autopar.plan(model, {"gpu": 2}, example_inputs=batch, hardware="h100-sxm", cache=False)
    for turn in ("miss", "hit"):
        subprocess.run([sys.executable, "-c", program, turn, str(tmp_path / turn)], check=True)
    assert (tmp_path / "miss").read_text() == (tmp_path / "hit").read_text() == here.dumps()


@pytest.mark.slow
def test_concurrent_processes_give_the_same_plan(tmp_path: Path) -> None:
    program = PROGRAM.format(spec=TINY)
    processes = [
        subprocess.Popen([sys.executable, "-c", program, "any", str(tmp_path / name)])
        for name in "ab"
    ]
    assert [process.wait() for process in processes] == [0, 0]
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert plans() == 1


@pytest.mark.parametrize(
    "change",
    [
        {"mesh": autopar.Mesh({"gpu": 4})},
        {"mesh": autopar.Mesh({"data": 2})},
        {"mesh": 2},
        {"hardware": "h100-sxm"},
        {"batch": torch.zeros(8, 8)},
        {"memory_bytes": 10**8},
        {"optimizer": "sgd"},
        {"constraints": (autopar.constraints.ddp(),)},
        {"strict": True},
        {"gap": 0.02},
        {"effort": "thorough"},
        {"time_limit_s": 1e6},
        {"num_microbatches": 1},
        {"loss_rows": 0},
        {"precision": "bf16"},
        {"inference": True},
        {"outputs": "loss"},
    ],
    ids=lambda change: "-".join(change),
)
def test_changed_request_gives_another_cache_entry(change: dict[str, Any]) -> None:
    find(Net())
    assert is_hit(Net())
    assert not is_hit(Net(), **change)
    assert is_hit(Net(), **change)


def test_key_contains_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key has all fields of the options, including fields that are added later."""
    keys: list[Any] = []
    monkeypatch.setattr(
        planning.Key,
        "of",
        lambda *arguments: (
            keys.append(arguments[-1]) or (_ for _ in ()).throw(planning.Opaque("seen"))
        ),
    )
    find(Net())
    options = keys[0][2]
    assert set(options) == set(planning.OPTIONS) - {"cache"}


def test_key_contains_the_figures_of_the_hardware(tmp_path: Path) -> None:
    data = autopar.HardwareProfile.read("h100-sxm")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**data, "name": "mine"}))
    find(Net(), hardware=str(file))
    assert is_hit(Net(), hardware=str(file))
    figure = data["launch_overhead_s"]
    edited = {**data, "name": "mine", "launch_overhead_s": {**figure, "value": 1e-3}}
    file.write_text(json.dumps(edited))
    assert not is_hit(Net(), hardware=str(file))


def test_model_with_edited_source_is_planned_again(tmp_path: Path) -> None:
    find(*load(tmp_path).make())
    assert is_hit(*load(tmp_path).make())
    for before, after in (("loss.mean()", "loss.sum()"), ("self.scale = 1.5", "self.scale = 2.5")):
        assert not is_hit(*load(tmp_path, SOURCE.replace(before, after)).make())


def test_warnings_of_planning_are_repeated_for_a_cached_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warnings = []
    for turn in range(2):
        caplog.clear()
        model = Net().requires_grad_(False)
        assert is_hit(model) == (turn == 1)
        warnings.append(
            [(r.levelno, r.message) for r in caplog.records if r.levelno > logging.INFO]
        )
    assert warnings[0] == warnings[1]
    assert "planning inference" in warnings[0][0][1]


def test_plan_of_a_search_stopped_by_a_time_limit_is_not_cached() -> None:
    result = find(Net(), time_limit_s=1e-6)
    assert result.planned is not None
    assert plans() == 0


def test_best_plan_of_an_interrupted_search_is_not_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def add_and_interrupt(search: ShapeSearch, mesh: autopar.Mesh, planned: Planned) -> None:
        add(search, mesh, planned)
        search.budget.unlimited().interrupt()

    add = ShapeSearch.add
    monkeypatch.setattr(ShapeSearch, "add", add_and_interrupt)
    assert not is_hit(Net())
    assert plans() == 0


def test_plans_of_other_solvers_are_not_cached() -> None:
    assert not is_hit(Net(), solver="cbc")
    assert plans() == 0


def test_damaged_entry_is_logged_and_replaced(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    find(Net())
    (file,) = (f for f in folder.iterdir() if '"kind": "plan"' in f.read_text())
    body = file.read_bytes().rpartition(b"\n")[0]
    for damaged in (body.replace(b'"kind": "compute"', b'"kind": 7', 1), b"{}", b"{}\n{}\n{}"):
        warn_once.cache_clear()
        caplog.clear()
        store.write_entry(file.stem, damaged.decode())
        assert not is_hit(Net())
        assert "a cache entry is not used and will be replaced" in caplog.text
        assert is_hit(Net())


# --------------------------------------------------------------------------------------------------
# Captures that read more than the key.


class ReadsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("flag", torch.tensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).sum() * (2 if self.flag.item() else 3)


class ReadsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return sum(part.sum() for part in self.up(x).split(sizes.tolist()))


@torch.library.custom_op("autopar_tests_cache::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class OwnOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(torch.ops.autopar_tests_cache.double(x)).sum()


@pytest.mark.parametrize(
    ("model", "batch", "complaint"),
    [
        (ReadsBuffer(), BATCH, "the values of the buffer flag"),
        (ReadsInput(), (BATCH, torch.tensor([1, 3])), "the values of an input"),
        (OwnOp(), BATCH, "the operator autopar_tests_cache.double"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_model_that_depends_on_more_than_the_key_is_not_cached(
    model: nn.Module, batch: Any, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "autopar"):
        find(model, batch)
    assert complaint in caplog.text
    assert plans() == 0
    assert not is_hit(model, batch)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return vars(sys)["modules"][__name__].hidden(self.up(x)).sum()


def hidden(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_model_with_functions_outside_the_key_is_not_cached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, "autopar"):
        find(Tables())
    assert "forward calls hidden in" in caplog.text
    assert plans() == 0


def test_key_covers_functions_in_containers() -> None:
    table: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"hidden": hidden}

    class Registered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return table["hidden"](self.up(x)).sum()

    find(Registered())
    assert is_hit(Registered())
    table["hidden"] = torch.relu
    assert not is_hit(Registered())


class PlannedAgainError(Exception):
    pass


def refuse_to_plan(*args: Any, **kwargs: Any) -> Any:
    raise PlannedAgainError


@pytest.mark.slow
def test_model_with_replaced_library_functions_is_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import masking_utils
    from transformers.integrations import sdpa_attention
    from transformers.models.llama import modeling_llama

    model, batch = hf.build(TINY, batch=4, seq=16)
    find(model, batch)
    assert is_hit(model, batch)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    changes: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
        lambda patch: patch.setattr(modeling_llama, "apply_rotary_pos_emb", replacement),
        lambda patch: patch.setattr(sdpa_attention, "repeat_kv", replacement),
        lambda patch: patch.setattr(modeling_llama.LlamaRMSNorm, "forward", replacement),
        lambda patch: patch.setattr(masking_utils, "create_causal_mask", replacement),
        lambda patch: patch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS, "sdpa", replacement),
        lambda patch: patch.setattr(sdpa_attention, "_is_torch_npu_available", True),
    )
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            patch.setattr(planning, "plan_call", refuse_to_plan)
            with pytest.raises(PlannedAgainError):
                is_hit(model, batch)
    assert is_hit(model, batch)


@pytest.mark.slow
def test_model_with_a_changed_library_file_is_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from autopar.cache import manifest

    model, batch = hf.build(TINY, batch=4, seq=16)
    find(model, batch)
    digest = manifest.file_digest

    def edited_digest(file: str) -> str:
        return "edited" if file.endswith("modeling_llama.py") else digest(file)

    monkeypatch.setattr(manifest, "file_digest", edited_digest)
    assert not is_hit(model, batch)


# --------------------------------------------------------------------------------------------------
# `compile` and the command line.


def test_compile_uses_the_cached_plan() -> None:
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Net()
        module = autopar.compile(model, example_inputs=torch.ones(4, 8), hardware="cpu-gloo")
        loss = module(torch.ones(4, 8))
        loss.backward()
        losses.append((loss.item(), module.plan.hash))
    assert losses[0] == losses[1]
    torch.manual_seed(0)
    assert losses[0][0] == pytest.approx(Net()(torch.ones(4, 8)).item(), rel=1e-6)
    assert plans() == 1


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.slow
def test_command_line_prints_the_origin_of_a_plan(tmp_path: Path) -> None:
    command = ("plan", "--hf", TINY, "--mesh", "gpu=2", "--batch", "4", "--seq", "16", "--out")
    first, second, third = (str(tmp_path / name) for name in "abc")
    assert "planned in" in run(*command, first)
    assert "plan loaded from the cache; pass --no-cache to plan again" in run(*command, second)
    assert "planned in" in run(*command, third, "--no-cache")
    texts = {Path(file).read_text() for file in (first, second, third)}
    assert len(texts) == 1


def test_command_line_lists_and_clears_the_cache(folder: Path) -> None:
    assert "entries: 0" in run("cache", "info")
    find(Net())
    assert f"folder: {folder}" in run("cache", "info")
    assert "entries: 2" in run("cache", "info")
    assert "plan: Net on gpu=2 of cpu-gloo" in run("cache", "list")
    assert "capture: Net, float32 [4, 8]" in run("cache", "list")
    assert "removed 2 entries" in run("cache", "clear")
    assert "entries: 0" in run("cache", "info")
    assert run("cache", "list") == ""
