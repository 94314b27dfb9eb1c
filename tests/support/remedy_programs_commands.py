"""Programs for the remedies of commands: named models, files, reports, measuring, and starting
processes."""

from __future__ import annotations

import importlib.metadata
import json
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from autopar import HardwareProfile, hf
from autopar.cli.commands import _check_stages, clear_command
from autopar.cli.models import built, turning_of
from autopar.cli.shared_options import NamedModel, check_dtype, check_files_exist
from autopar.explanation import explain
from autopar.integrations.libraries import LEAST, library
from autopar.profiler import measure as measuring
from autopar.profiler.measure import COLLECTIVES
from autopar.profiler.worker import CPU, GPU, Sizes, compute_measurements
from autopar.report.charts import canvas
from autopar.report.page import report
from autopar.runtime.launching import launch
from tests.support.made_plan import made_plan
from tests.support.remedy_programs import Program

_SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_TEXT = {**_SIZES, "vocab_size": 16}
_VISION = {**_SIZES, "image_size": 16, "patch_size": 8}
_FUNCTIONS = """
import torch

def made():
    return torch.nn.Linear(4, 4), {"input": torch.ones(8, 4)}

def nothing():
    return 3

def raises():
    raise ValueError("no such size")
"""


def _build_config(kind: str, settings: Any, **how: Any) -> Callable[[], object]:
    """Build the model of a configuration on the meta device."""
    text = settings if isinstance(settings, str) else json.dumps(settings)
    return lambda: hf.build(f"{kind}:{text}", **{"batch": 2, **how})


def _in_folder(make: Callable[[Path], object]) -> Callable[[], object]:
    """Run in a folder that contains `model.py`, a text file, and a plan."""

    def program() -> object:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file in ("model.py", "model.txt"):
                (folder / file).write_text(_FUNCTIONS)
            made_plan().save(folder / "plan.json")
            return make(folder)

    return program


def _function(of: str) -> Callable[[], object]:
    """Load the model of a function, given as for --module."""
    return _in_folder(lambda folder: hf.load_function(f"{folder}/{of}"))


def _build_named(config: str | None, of: str | None, batch: int | None) -> Callable[[], object]:
    def make(folder: Path) -> object:
        function = None if of is None else f"{folder}/{of}"
        return built(NamedModel(hf=config, module=function, batch=batch), "meta")

    return _in_folder(make)


def _without_transformers() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        return built(NamedModel(hf=f"llama:{json.dumps(_TEXT)}", batch=2, seq=4), "meta")


def _with_version(version: str | None) -> Callable[[], object]:
    """Import a library with a given version; None if it is not installed."""

    def version_of(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    def program() -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.metadata, "version", version_of)
            return library("accelerate", "this program")

    return program


def _draw(with_matplotlib: bool) -> Callable[[], object]:
    def program() -> object:
        with pytest.MonkeyPatch.context() as patch:
            if not with_matplotlib:
                patch.setitem(sys.modules, "matplotlib.figure", None)
            return canvas(2.0, 2.0)

    return program


def _launch(script: str = "model.py", fails: bool = False, **how: Any) -> Callable[[], object]:
    """Launch a script with a torchrun that starts no processes."""

    def run(name: str, run_name: str) -> None:
        if fails:
            failure = ProcessFailure(local_rank=1, pid=1, exitcode=3, error_file="")
            raise ChildFailedError("train", {1: failure})

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [])
            patch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "")
            patch.setattr(runpy, "run_module", run)
            launch(folder / script, [], num_processes=2, **how)

    return _in_folder(make)


def _points(sizes: Sizes) -> dict[str, list[dict[str, Any]]]:
    """Return artificial times of all measurements."""
    points: dict[str, list[dict[str, Any]]] = {}
    for number, (kind, point, _) in enumerate(compute_measurements(sizes)):
        points.setdefault(kind, []).append({**point, "time_s": 1e-6 * (number + 1)})
    for kind in COLLECTIVES if sizes is CPU else ():
        points[kind] = [
            {"num_devices": n, "bytes": b, "time_s": 1e-4 * n + b * 1e-9}
            for n in (2, 4)
            for b in (1024, 2**20)
        ]
    if sizes is GPU:
        points["host"] = [{"step_bytes_per_s": 3e11, "copy_bytes_per_s": 5e10}]
    return points


def _measure(device: str, gpu: bool = True, **how: Any) -> Callable[[], object]:
    """Measure a machine with artificial times."""
    chip = SimpleNamespace(name="NVIDIA H200", total_memory=2**37)

    def run(device: str, world_size: int, folder: Path) -> object:
        return _points(CPU if device == "cpu" else GPU)

    def make(folder: Path) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measuring, "_run_workers", run)
            patch.setattr(torch.cuda, "is_available", lambda: gpu)
            patch.setattr(torch.cuda, "device_count", lambda: int(gpu))
            patch.setattr(torch.cuda, "get_device_name", lambda index=0: chip.name)
            patch.setattr(torch.cuda, "get_device_properties", lambda index: chip)
            return measuring.measure(device, out=folder / "out.json", **how)

    return _in_folder(make)


def _wait_for_worker(code: int | None) -> Callable[[], object]:
    """Wait for a measuring process that ends with a code, or that does not end."""

    def make(folder: Path) -> object:
        (folder / "stderr0").write_text("no memory left")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measuring, "LIMIT_S", -1.0)
            worker: Any = SimpleNamespace(poll=lambda: code)
            return measuring._wait([worker], folder)

    return _in_folder(make)


def _load_local(is_measured: bool) -> Callable[[], object]:
    """Load the profile of the local machine, which may not have been measured."""

    def make(folder: Path) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AUTOPAR_HOME", str(folder))
            if is_measured:
                path = HardwareProfile.local_path()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(HardwareProfile.read("cpu-gloo")))
            return HardwareProfile.load("local")

    return _in_folder(make)


def _clear_cache(is_folder_removed: bool) -> Callable[[], object]:
    """Run ``autopar cache clear`` with a cache entry that cannot be removed, or with a folder that
    was removed."""

    def make(folder: Path) -> object:
        entry = folder / "entries" / "entry.json"
        entry.mkdir(parents=True)  # a folder, which `unlink` does not remove
        if is_folder_removed:
            shutil.rmtree(folder / "entries")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AUTOPAR_CACHE_DIR", str(folder))
            return clear_command()

    return _in_folder(make)


def _write_report(name: str) -> Callable[[], object]:
    return _in_folder(lambda folder: report(made_plan(), folder / name))


MODELS: dict[str, Program] = {
    "hf/batches.py _Sizes.length 0": Program(
        _build_config("gpt2", {"n_embd": 8, "n_head": 2, "n_layer": 1}, seq=2048),
        'set "max_position_embeddings": 2048',
        _build_config(
            "gpt2",
            {"n_embd": 8, "n_head": 2, "n_layer": 1, "max_position_embeddings": 2048},
            seq=2048,
        ),
    ),
    "hf/batches.py _Sizes.length 0 | shorter": Program(
        _build_config("gpt2", {"n_embd": 8, "n_head": 2, "n_layer": 1}, seq=2048),
        "--seq of at most 1024",
        _build_config("gpt2", {"n_embd": 8, "n_head": 2, "n_layer": 1}, seq=1024),
    ),
    "hf/batches.py _tokens 0": Program(
        _build_config(
            "llava",
            {
                "text_config": {"model_type": "llama", **_TEXT},
                "vision_config": _VISION,
                "image_token_id": 15,
            },
            seq=4,
        ),
        "--seq with more than 4",
        _build_config(
            "llava",
            {
                "text_config": {"model_type": "llama", **_TEXT},
                "vision_config": _VISION,
                "image_token_id": 15,
            },
            seq=5,
        ),
    ),
    "hf/batches.py not_known 0": Program(
        _build_config("bert/AutoModelForMultipleChoice", _TEXT, seq=4),
        "with a function that returns (model, batch)",
        _function("model.py:made"),
    ),
    "hf/models.py build 0": Program(
        _build_config("llama/AutoModelForMaskedLM", _TEXT, seq=4),
        "correct the head",
        _build_config("llama/AutoModelForCausalLM", _TEXT, seq=4),
    ),
    "hf/models.py _config 0": Program(
        _build_config("lama", _TEXT), "such as llama", _build_config("llama", _TEXT, seq=4)
    ),
    "hf/models.py _config 1": Program(
        _build_config("llama", {**_TEXT, "hiden_size": 16}),
        "did you mean hidden_size",
        _build_config("llama", {**_TEXT, "hidden_size": 16}, seq=4),
    ),
    "hf/models.py _config 1 | none is close": Program(
        _build_config("llama", {**_TEXT, "qqq": 16}),
        "name an attribute of transformers.LlamaConfig",
        _build_config("llama", {**_TEXT, "rms_norm_eps": 1e-6}, seq=4),
    ),
    "hf/models.py _config 2": Program(
        _build_config("llama", {**_TEXT, "num_attention_heads": 3}),
        "correct the settings",
        _build_config("llama", {**_TEXT, "num_attention_heads": 4}, seq=4),
    ),
    "hf/models.py _head 0": Program(
        _build_config("bert/Bert", _TEXT),
        "AutoModelForMaskedLM",
        _build_config("bert/AutoModelForMaskedLM", _TEXT, seq=4),
    ),
    "hf/models.py _head 1": Program(
        _build_config("clip_vision_model", _VISION),
        "clip_vision_model/AutoModel:JSON",
        _build_config("clip_vision_model/AutoModel", _VISION),
    ),
    "hf/models.py load_function 0": Program(
        _function("model.py"), "a Python file and a function in it", _function("model.py:made")
    ),
    "hf/models.py load_function 1": Program(
        _function("absent.py:made"), "a colon and a function in it", _function("model.py:made")
    ),
    "hf/models.py load_function 2": Program(
        _function("model.txt:made"), "ends in .py", _function("model.py:made")
    ),
    "hf/models.py load_function 3": Program(
        _function("model.py:build"),
        "a function that returns (model, batch)",
        _function("model.py:made"),
    ),
    "hf/models.py load_function 4": Program(
        _function("model.py:nothing"),
        "an nn.Module and its example inputs",
        _function("model.py:made"),
    ),
    "hf/models.py _run_user_code 0": Program(
        _function("model.py:raises"), "correct the function", _function("model.py:made")
    ),
    "hf/specs.py parse 0": Program(
        lambda: hf.build("nothing"), "pass TYPE:JSON", _build_config("llama", _TEXT, seq=4)
    ),
    "hf/specs.py parse 1": Program(
        _build_config("llama", "{'hidden_size': 8}"),
        "in double quotes",
        _build_config("llama", _TEXT, seq=4),
    ),
    "hf/specs.py parse 2": Program(
        _build_config("llama", "[8]"), '{"name": value, ...}', _build_config("llama", _TEXT, seq=4)
    ),
    "cli/commands.py clear_command 0": Program(
        _clear_cache(False), "remove the folder", _clear_cache(True)
    ),
    "cli/models.py turning_of 0": Program(
        lambda: turning_of(made_plan(), 3, NamedModel()),
        "pass one of --hf, --model and --module",
        lambda: NamedModel(model="gpt2").check(),
    ),
    "cli/models.py built 0": Program(
        _build_named(None, "model.py:made", 4),
        "omit --batch; the function of --module returns the model and the batch",
        _build_named(None, "model.py:made", None),
    ),
    "cli/models.py built 1": Program(
        _without_transformers, "or pass --module", _build_named(None, "model.py:made", None)
    ),
    "cli/shared_options.py check_dtype 0": Program(
        lambda: check_dtype("int3"), "float32", lambda: check_dtype("float32")
    ),
    "cli/shared_options.py check_files_exist 0": Program(
        _in_folder(lambda folder: check_files_exist(folder / "plan")),
        "check the path",
        _in_folder(lambda folder: check_files_exist(folder / "plan.json")),
    ),
    "cli/shared_options.py NamedModel.check 0": Program(
        lambda: NamedModel(hf="gpt2:{}", model="gpt2").check(),
        "pass one of --hf, --model and --module",
        lambda: NamedModel(model="gpt2").check(),
    ),
    "cli/commands.py _check_stages 0": Program(
        lambda: _check_stages(None, "gpipe", None),
        "pass --pipeline AXIS or --pipeline auto too, or omit --schedule",
        lambda: (_check_stages("stage", "gpipe", None), _check_stages(None, None, None)),
    ),
    "core/text_files.py convert_write_errors 0": Program(
        _in_folder(lambda folder: made_plan().save(folder / "absent" / "plan.json")),
        "check the path",
        _in_folder(lambda folder: made_plan().save(folder / "another.json")),
    ),
}

OTHERS: dict[str, Program] = {
    "integrations/libraries.py library 0": Program(
        _with_version(None),
        f"pip install 'accelerate>={LEAST['accelerate']}'",
        _with_version("99.0"),
    ),
    "integrations/libraries.py library 1": Program(
        _with_version("0.1"),
        f"pip install 'accelerate>={LEAST['accelerate']}'",
        _with_version("99.0"),
    ),
    "report/charts.py canvas 0": Program(_draw(False), 'pip install "autopar[plot]"', _draw(True)),
    "report/page.py report 0": Program(
        _write_report("plan.txt"), ".svg", _write_report("plan.svg")
    ),
    "core/text_files.py convert_write_errors 0 | report": Program(
        _write_report("absent/plan.svg"), "check the path", _write_report("plan.svg")
    ),
    "explanation/explain.py explain 0": Program(
        lambda: explain(made_plan(), module="absent"),
        "its modules are",
        lambda: explain(made_plan(), module="*"),
    ),
    "core/hardware/profile.py _path 0": Program(
        _load_local(False), "run `autopar profile` first", _load_local(True)
    ),
    "runtime/launching.py launch 0": Program(
        _launch("absent.py"), "pass a Python file", _launch("model.py")
    ),
    "runtime/launching.py _check_machines 0": Program(
        _launch(nodes="two", meet="host:1"), "2:4", _launch(nodes="2:4", meet="host:1")
    ),
    "runtime/launching.py _check_machines 1": Program(
        _launch(nodes="4:2", meet="host:1"), "2:4", _launch(nodes="2:4", meet="host:1")
    ),
    "runtime/launching.py _check_machines 2": Program(
        _launch(nodes="2"), "--meet HOST:PORT", _launch(nodes="2", meet="host:1")
    ),
    "runtime/launching.py launch 1": Program(
        _launch(fails=True), "the error of that rank above", _launch()
    ),
    "profiler/measure.py measure 0": Program(
        _measure("abacus"), "pass cpu, or cuda", _measure("cpu")
    ),
    "profiler/measure.py _measure_cpu 0": Program(
        _measure("cpu", world_size=1), "use 2 or more", _measure("cpu", world_size=2)
    ),
    "profiler/measure.py _measure_cpu 1": Program(
        _measure("cpu", links="h100-sxm"), "omit links", _measure("cpu")
    ),
    "profiler/measure.py _measure_gpu 0": Program(
        _measure("cuda", world_size=2), "omit world_size", _measure("cuda", links="h100-sxm")
    ),
    "profiler/measure.py _measure_gpu 1": Program(
        _measure("cuda", gpu=False), "with a GPU, with a CUDA build of torch", _measure("cuda")
    ),
    "profiler/measure.py _wait 0": Program(
        _wait_for_worker(None), "fewer processes", _wait_for_worker(0)
    ),
    "profiler/measure.py _wait 1": Program(
        _wait_for_worker(3), "measure again", _wait_for_worker(0)
    ),
}

PROGRAMS: dict[str, Program] = {**MODELS, **OTHERS}
