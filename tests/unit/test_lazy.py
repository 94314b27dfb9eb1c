"""Names that are imported when they are asked for: all are there, none costs torch before it is needed."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import autopar
from autopar import hf

HEAVY = ("torch", "transformers", "numpy", "sympy", "pulp", "highspy", "networkx", "matplotlib")
RUN = """
import sys
from autopar.cli import main
sys.argv = ["autopar", *sys.argv[1:]]
try:
    main()
finally:
    print("heavy:", *sorted({name.partition(".")[0] for name in sys.modules} & set(HEAVY)), file=sys.stderr)
"""


def fresh(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a process of its own says, which has imported nothing."""
    code = f"HEAVY = {HEAVY}\n{code}"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        (),
        *((command, "--help") for command in ("plan", "explain", "check", "profile", "report", "export", "run")),
        ("plan", "--mesch", "8"),
        ("plan",),
        ("plann",),
        ("plan", "--mesh", "8", "--model", "gpt3"),
        ("plan", "--mesh", "8", "--model", "gpt2", "--dtype", "int3"),
        ("plan", "--mesh", "8", "--model", "gpt2", "--chunks", "2"),
        ("plan", "--mesh", "8", "--model", "gpt2", "--memory", "much"),
        *(("plan", "--model", "gpt2", "--mesh", mesh) for mesh in ("node=2gpu", "node=2,node=2", "2x2x2", "")),
        *(("plan", "--model", "gpt2", "--mesh", "gpu=2", "--hardware", name) for name in ("h1000", "gpu=h100-sxm")),
        ("plan", "--model", "gpt2", "--mesh", "gpu=2", "--hardware", "node=h100-sxm,h100-sxm"),
        ("plan", "--model", "gpt2", "--mesh", "8", "--hardware", "gpu=h100-sxm,h100-sxm"),
        *((command, "no_plan.json") for command in ("explain", "check", "verify", "what-if", "report")),
        *((command, __file__, "--hardware", "h1000") for command in ("check", "what-if")),
        ("what-if", __file__, "--mesh", "node="),
        ("diff", __file__, "no_plan.json"),
    ],
    ids=lambda arguments: " ".join(arguments).replace(__file__, "FILE"),
)
def test_help_and_what_is_mistyped_are_told_without_torch(arguments: tuple[str, ...]) -> None:
    said = fresh(RUN, *arguments)
    assert said.stderr.splitlines()[-1] == "heavy:", said.stderr
    assert (said.returncode == 0) == ("--help" in arguments or arguments == ("--version",)), said.stderr


def test_what_says_nothing_of_tensors_is_there_without_torch() -> None:
    code = "import sys, autopar\nautopar.Mesh, autopar.HardwareProfile, autopar.AutoparError, autopar.__version__, dir(autopar)\n"
    said = fresh(code + "print(set(HEAVY) & set(sys.modules))")
    assert said.stdout == "set()\n", said.stderr


def test_what_was_there_at_once_is_there_when_asked_for() -> None:
    code = "import autopar\nprint(autopar.constraints.ddp(), autopar.rules.register.__name__)\nfrom autopar import *\nprint(plan.__name__)"
    assert fresh(code).stdout == "ddp() register\nplan\n"


@pytest.mark.parametrize("package", [autopar, hf], ids=lambda package: package.__name__)
def test_every_name_is_there_and_shown(package: ModuleType) -> None:
    assert set(package.__all__) <= set(dir(package)) and not {"lazily", "TYPE_CHECKING", "lazy"} & set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'absent'"):
        _ = package.absent


@pytest.mark.parametrize("package", [autopar, hf], ids=lambda package: package.__name__)
def test_type_checkers_see_the_names_that_there_are(package: ModuleType) -> None:
    """Every import for type checkers gives what the package gives, and `__all__` has nothing else."""
    tree = ast.parse(Path(inspect.getfile(package)).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module]
    told = {alias.name: node.module or "" for node in imports for alias in node.names}
    (call,) = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    given = ast.literal_eval(call.args[1])
    modules = {name for name, module in told.items() if module == package.__name__}
    assert told.keys() - modules == given.keys()
    for name, module in told.items():
        there = importlib.import_module(f"{module}.{name}") if name in modules else getattr(importlib.import_module(module), name)
        assert getattr(package, name) is there
    at_once = {alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(package.__all__) <= told.keys() | at_once
