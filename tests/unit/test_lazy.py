"""Lazily imported names: all exist, and none imports torch before it is needed."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import random
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType

import pytest

import autopar
from autopar import hf
from autopar.core.lazy import import_in_thread

HEAVY = ("torch", "transformers", "numpy", "sympy", "pulp", "highspy", "networkx", "matplotlib")
RUN = """
import sys
from autopar.cli import main
sys.argv = ["autopar", *sys.argv[1:]]
try:
    main()
finally:
    print("heavy:", *sorted({name.partition(".")[0] for name in sys.modules} & set(HEAVY)), file=sys.stderr)
"""  # noqa: E501


def fresh(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process, which has imported nothing, and return the finished process."""
    code = f"HEAVY = {HEAVY}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        (),
        *(
            (command, "--help")
            for command in ("plan", "explain", "check", "profile", "report", "export", "run")
        ),
        ("plan", "--mesch", "8"),
        ("plan",),
        ("plann",),
        ("plan", "--mesh", "8", "--model", "gpt3"),
        ("plan", "--mesh", "8", "--model", "gpt2", "--dtype", "int3"),
        ("plan", "--mesh", "8", "--model", "gpt2", "--chunks", "2"),
        ("plan", "--mesh", "8", "--model", "gpt2", "--memory", "much"),
        *(
            ("plan", "--model", "gpt2", "--mesh", mesh)
            for mesh in ("node=2gpu", "node=2,node=2", "2x2x2", "")
        ),
        *(
            ("plan", "--model", "gpt2", "--mesh", "gpu=2", "--hardware", name)
            for name in ("h1000", "gpu=h100-sxm")
        ),
        ("plan", "--model", "gpt2", "--mesh", "gpu=2", "--hardware", "node=h100-sxm,h100-sxm"),
        ("plan", "--model", "gpt2", "--mesh", "8", "--hardware", "gpu=h100-sxm,h100-sxm"),
        *(
            (command, "no_plan.json")
            for command in ("explain", "check", "verify", "what-if", "report")
        ),
        *((command, __file__, "--hardware", "h1000") for command in ("check", "what-if")),
        ("what-if", __file__, "--mesh", "node="),
        ("diff", __file__, "no_plan.json"),
    ],
    ids=lambda arguments: " ".join(arguments).replace(__file__, "FILE"),
)
def test_help_and_errors_of_mistyped_arguments_do_not_import_torch(
    arguments: tuple[str, ...],
) -> None:
    said = fresh(RUN, *arguments)
    assert said.stderr.splitlines()[-1] == "heavy:", said.stderr
    assert (said.returncode == 0) == ("--help" in arguments or arguments == ("--version",)), (
        said.stderr
    )


def test_names_that_do_not_use_tensors_do_not_import_torch() -> None:
    code = (
        "import sys, autopar\nautopar.Mesh, autopar.HardwareProfile, autopar.AutoparError,"
        " autopar.__version__, dir(autopar)\n"
    )
    said = fresh(code + "print(set(HEAVY) & set(sys.modules))")
    assert said.stdout == "set()\n", said.stderr


@pytest.mark.slow
def test_submodules_and_star_imports_work_lazily() -> None:
    code = (
        "import autopar\nprint(autopar.constraints.ddp(), autopar.rules.register.__name__)\nfrom"
        " autopar import *\nprint(plan.__name__)"
    )
    assert fresh(code).stdout == "ddp() register\nplan\n"


@pytest.mark.parametrize("package", [autopar, hf], ids=lambda package: package.__name__)
def test_every_public_name_exists_and_is_in_dir(package: ModuleType) -> None:
    assert set(package.__all__) <= set(dir(package)) and not {
        "lazily",
        "TYPE_CHECKING",
        "lazy",
    } & set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(
        AttributeError, match=f"module '{package.__name__}' has no attribute 'absent'"
    ):
        _ = package.absent


@pytest.mark.parametrize("package", [autopar, hf], ids=lambda package: package.__name__)
def test_type_checkers_see_the_public_names(package: ModuleType) -> None:
    """Every import for type checkers is the object that the package returns, and `__all__` has no
    other names."""
    tree = ast.parse(Path(inspect.getfile(package)).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module]
    told = {alias.name: node.module or "" for node in imports for alias in node.names}
    (call,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    given = ast.literal_eval(call.args[1])
    modules = {name for name, module in told.items() if module == package.__name__}
    assert told.keys() - modules == given.keys()
    for name, module in told.items():
        there = (
            importlib.import_module(f"{module}.{name}")
            if name in modules
            else getattr(importlib.import_module(module), name)
        )
        assert getattr(package, name) is there
    at_once = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(package.__all__) <= told.keys() | at_once


FREED = """
import gc, weakref
import torch
from torch import nn
import autopar

def compiled():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    made = autopar.compile(net, autopar.Mesh({"gpu": 1}), example_inputs=(torch.randn(4, 8),))
    return made, weakref.ref(net), weakref.ref(net[0].weight)

for number in range(2):
    made, net, weight = compiled()
    gc.collect()
    print(number, net() is None, weight() is None)
"""


@pytest.mark.slow
def test_the_plain_model_is_freed_after_the_first_compile_of_a_process_too() -> None:
    done = fresh(FREED)
    assert done.stdout.split("\n")[:2] == ["0 True True", "1 True True"], done.stdout + done.stderr


def test_a_module_that_stores_an_import_error_keeps_no_frame_of_its_importer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    kept = error\n"
    (tmp_path / "keeps_an_exception.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    class Large:
        pass

    def importing() -> tuple[ModuleType, weakref.ref[Large]]:
        large = Large()
        return import_in_thread("keeps_an_exception"), weakref.ref(large)

    module, large = importing()
    gc.collect()
    assert isinstance(module.kept, ZeroDivisionError) and large() is None
    assert import_in_thread("keeps_an_exception") is module
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_in_thread("no_such_module")


def test_the_import_does_not_change_the_global_random_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "draws_when_imported.py").write_text(
        "from random import getrandbits\n\nNUMBER = getrandbits(24)\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = random.getstate()
    assert import_in_thread("draws_when_imported").NUMBER >= 0
    assert random.getstate() == before
