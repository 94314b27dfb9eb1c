"""The house has floors: a module imports only from a strictly lower one. Also: no circles, short files, short functions.

Each checker takes parsed modules and returns sentences about what is wrong, so that it can be shown to fail on a planted
violation.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The unit is the first name below `autopar`: a module of that name, or a package, whose modules share its floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "version", "units", "typed", "garbage", "ambient", "lazy", "schedules", "json_text", "private_folder"),
    ("mesh", "hardware", "hf", "halo", "mirrored", "streams", "terminal", "keywords"),
    ("layout", "collective", "devices"),
    ("layout_graph", "choices", "random_ops", "norm_ops", "extreme_ops", "ops"),
    ("redistribute",),
    ("problem",),
    ("plans", "constraints", "capture", "rules", "solve", "kernels"),
    ("request",),
    ("analysis", "run", "breakdown", "stages"),
    ("strategies",),  # merges nodes by what analysis says of them
    ("cost", "emit", "validation"),  # validation judges what emit makes, and shares nothing with it
    ("planning", "verification", "certificate", "explanation"),
    ("report",),  # its page holds the explanation's tables
    ("api",),
    ("training",),  # compiles what it trains
    ("cli",),
)
FLOOR = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}
TOP = len(FLOORS)  # autopar/__init__.py and __main__.py see everything

PROCESS_GROUP_UNITS = {"run", "kernels", "api", "training", "cli"}
# Placement and tensor types, which make no process group, are words of the vocabulary.
PLACEMENT_MODULES = ("torch.distributed.tensor",)
PRIVATE_TORCH_ONLY_IN = "autopar.capture._torch"
TRANSFORMERS_ONLY_IN = ("autopar.capture._transformers", "autopar.capture._transformers_caches", "autopar.hf.building")
OPTIONAL_ONLY_IN = ("cli", "training")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed module: dotted name, whether it is a package's `__init__`, its syntax tree and number of lines."""

    name: str
    is_package: bool
    tree: ast.Module
    num_lines: int

    @property
    def unit(self) -> str:
        """The first name below the root package; empty for the root's own `__init__` and `__main__`."""
        parts = self.name.split(".")
        return "" if len(parts) < 2 or parts[1] == "__main__" else parts[1]


@dataclass(frozen=True, slots=True)
class Import:
    """A module that is imported, the names taken from it (none where the module itself is), and where."""

    target: str
    names: tuple[str, ...]
    line: int


def read_modules(root: Path, package: str = "autopar") -> dict[str, Module]:
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, is_package, ast.parse(text, str(path)), text.count("\n"))
    return modules


def imports_of(module: Module) -> Iterator[Import]:
    """All imports, those inside functions and under TYPE_CHECKING included: a late import is an import."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.name.split(".")
                kept = parts[: len(parts) - node.level + (1 if module.is_package else 0)]
                base = ".".join([*kept, *([base] if base else [])])
            yield Import(base, tuple(alias.name for alias in node.names), node.lineno)


def attributes_of(module: Module) -> Iterator[tuple[str, int]]:
    """Dotted attribute chains on a plain name, ``torch.distributed.init_process_group``, longest form only."""
    inner = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                names, value = [value.attr, *names], value.value
            if isinstance(value, ast.Name):
                yield ".".join([value.id, *names]), node.lineno


def internal_targets(modules: Mapping[str, Module], imported: Import) -> list[str]:
    """The autopar modules that an import loads: ``from autopar.rules import table`` loads ``autopar.rules.table``."""
    if imported.target.split(".")[0] != "autopar":
        return []
    found = [f"{imported.target}.{name}" for name in imported.names if f"{imported.target}.{name}" in modules]
    plain = len(found) < max(len(imported.names), 1)
    return found + ([imported.target] if plain else [])


def floor_of(name: str) -> int | None:
    parts = name.split(".")
    return TOP if len(parts) < 2 or parts[1] == "__main__" else FLOOR.get(parts[1])


def check_floors(modules: Mapping[str, Module]) -> list[str]:
    problems = []
    for module in modules.values():
        own = floor_of(module.name)
        if own is None:
            problems.append(f"{module.name} has no floor: add {module.unit!r} to FLOORS")
            continue
        for imported in imports_of(module):
            for target in internal_targets(modules, imported):
                other = floor_of(target)
                if target.split(".")[1:2] == [module.unit] and module.unit:
                    continue
                if other is None or other >= own:
                    problems.append(f"{module.name}:{imported.line} (floor {own}) imports {target} (floor {other})")
    return problems


def _torch_uses(module: Module) -> Iterator[tuple[str, int]]:
    """Every dotted torch name that a module imports or spells out."""
    for imported in imports_of(module):
        for name in imported.names or ("",):
            yield f"{imported.target}.{name}".rstrip("."), imported.line
    yield from attributes_of(module)


CAPTURE_PRIVATE = ("torch._dynamo", "torch._functorch", "torch._subclasses", "torch._guards", "torch._export", "torch._inductor.compile_fx")


def check_foreign_imports(modules: Mapping[str, Module]) -> list[str]:
    """pulp and highspy only in solve/, torch's private capture modules only in capture/_torch, and so on."""
    problems = []
    for module in modules.values():
        for target, line in _torch_uses(module):
            first = target.split(".")[0]
            where = f"{module.name}:{line} uses {target}"
            if first in ("pulp", "highspy") and module.unit != "solve":
                problems.append(f"{where}: only solve/ may")
            if _is_under(target, CAPTURE_PRIVATE) and not _is_under(module.name, (PRIVATE_TORCH_ONLY_IN,)):
                problems.append(f"{where}: only capture/_torch may")
            if first == "transformers" and module.name not in TRANSFORMERS_ONLY_IN and module.unit not in OPTIONAL_ONLY_IN:
                problems.append(f"{where}: only capture/_transformers.py, training and cli may")
            if first in ("accelerate", "peft", "lightning") and module.unit != "training":
                problems.append(f"{where}: only training/ may")
            distributed = _is_under(target, ("torch.distributed",))
            if distributed and not _is_under(target, PLACEMENT_MODULES) and module.unit not in PROCESS_GROUP_UNITS:
                problems.append(f"{where}: only {sorted(PROCESS_GROUP_UNITS)} touch process groups")
    return sorted(set(problems))


def _is_under(target: str, roots: Iterable[str]) -> bool:
    return any(target == root or target.startswith(root + ".") for root in roots)


def check_cycles(modules: Mapping[str, Module]) -> list[str]:
    """Imports at module level make no circle (imports inside functions do not run at load time)."""
    graph: dict[str, set[str]] = {}
    for module in modules.values():
        top_level = Module(module.name, module.is_package, ast.Module(_load_time(module.tree.body), []), 0)
        targets = {target for imported in imports_of(top_level) for target in internal_targets(modules, imported)}
        graph[module.name] = targets & modules.keys() - {module.name}
    done: set[str] = set()
    problems = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            problems.append("import circle: " + " → ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
    return problems


def _load_time(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that run when the module is loaded, without function bodies and TYPE_CHECKING blocks."""
    kept: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            continue
        if isinstance(statement, ast.ClassDef):
            kept += _load_time(statement.body)
        else:
            kept.append(statement)
    return kept


def check_lengths(modules: Mapping[str, Module]) -> list[str]:
    problems = []
    for module in modules.values():
        if module.num_lines > MAX_FILE_LINES:
            problems.append(f"{module.name}: {module.num_lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    problems.append(f"{module.name}:{node.lineno} {node.name}: {length} lines, at most {MAX_FUNCTION_LINES}")
    return problems


def check_packages(root: Path, package: str = "autopar") -> list[str]:
    """A folder with modules but without ``__init__.py`` would be left out of the wheel."""
    folders = {path.parent for path in (root / package).rglob("*.py")}
    return [f"{folder.relative_to(root)} has no __init__.py" for folder in sorted(folders) if not (folder / "__init__.py").is_file()]


@pytest.fixture(scope="module")
def house() -> dict[str, Module]:
    modules = read_modules(ROOT)
    assert "autopar.errors" in modules
    return modules


def test_a_module_imports_only_from_lower_floors(house: dict[str, Module]) -> None:
    assert check_floors(house) == []


def test_only_the_named_modules_touch_the_solver_private_torch_and_process_groups(house: dict[str, Module]) -> None:
    assert check_foreign_imports(house) == []


def test_imports_make_no_circle(house: dict[str, Module]) -> None:
    assert check_cycles(house) == []


def test_files_and_functions_are_short(house: dict[str, Module]) -> None:
    assert check_lengths(house) == []


def test_every_package_has_an_init() -> None:
    assert check_packages(ROOT) == []


def test_every_unit_stands_on_one_floor() -> None:
    assert len(FLOOR) == sum(len(units) for units in FLOORS)


Checker = Callable[[Mapping[str, Module]], list[str]]
PLANTED: list[tuple[str, Checker, dict[str, str], str]] = [
    ("upward", check_floors, {"mesh.py": "from autopar.layout import Layout", "layout.py": ""}, "1) imports autopar.layout (floor 2)"),
    ("sideways", check_floors, {"mesh.py": "import autopar.hardware", "hardware.py": ""}, "autopar.mesh:1"),
    ("submodule", check_floors, {"rules/a.py": "from autopar.solve import b", "solve/b.py": ""}, "imports autopar.solve.b"),
    ("the root", check_floors, {"mesh.py": "from autopar import layout", "layout.py": ""}, "imports autopar.layout"),
    ("late", check_floors, {"mesh.py": "def f():\n    from autopar import cli", "cli.py": ""}, "autopar.mesh:2"),
    ("relative", check_floors, {"rules/a.py": "from ..solve import b", "rules/__init__.py": "", "solve/b.py": ""}, "autopar.solve.b"),
    ("unknown", check_floors, {"helpers.py": ""}, "has no floor"),
    ("pulp", check_foreign_imports, {"cost/a.py": "import pulp"}, "only solve/ may"),
    ("highspy", check_foreign_imports, {"planning.py": "from highspy import Highs"}, "only solve/ may"),
    ("dynamo", check_foreign_imports, {"capture/b.py": "import torch._dynamo"}, "only capture/_torch may"),
    ("functorch", check_foreign_imports, {"emit/b.py": "from torch._functorch.aot_autograd import x"}, "only capture/_torch may"),
    ("spelt", check_foreign_imports, {"emit/b.py": "import torch\ntorch._dynamo.reset()"}, "only capture/_torch may"),
    ("transformers", check_foreign_imports, {"capture/b.py": "from transformers import X"}, "only capture/_transformers.py"),
    ("accelerate", check_foreign_imports, {"run/b.py": "import accelerate"}, "only training/ may"),
    ("peft", check_foreign_imports, {"api/b.py": "from peft import PeftModel"}, "only training/ may"),
    ("lightning", check_foreign_imports, {"run/b.py": "import lightning.pytorch"}, "only training/ may"),
    ("group", check_foreign_imports, {"emit/b.py": "import torch.distributed as dist"}, "process groups"),
    ("group from", check_foreign_imports, {"emit/b.py": "from torch.distributed import barrier"}, "process groups"),
    ("group spelt", check_foreign_imports, {"mesh.py": "import torch\ntorch.distributed.barrier()"}, "process groups"),
    ("circle", check_cycles, {"rules/a.py": "from autopar.rules import b", "rules/b.py": "import autopar.rules.a"}, "import circle"),
    ("long file", check_lengths, {"mesh.py": "x = 1\n" * 401}, "401 lines"),
    ("long function", check_lengths, {"mesh.py": "def f():\n" + "    x = 1\n" * 60}, "f: 61 lines"),
]


def _plant(root: Path, files: Mapping[str, str]) -> dict[str, Module]:
    for name, text in files.items():
        path = root / "autopar" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_modules(root)


@pytest.mark.parametrize(("checker", "files", "message"), [case[1:] for case in PLANTED], ids=[case[0] for case in PLANTED])
def test_a_planted_violation_is_found(tmp_path: Path, checker: Checker, files: dict[str, str], message: str) -> None:
    problems = checker(_plant(tmp_path, files))
    assert any(message in problem for problem in problems), problems


ALLOWED: list[tuple[str, Checker, dict[str, str]]] = [
    ("downward", check_floors, {"layout.py": "from autopar.errors import LayoutError", "errors.py": ""}),
    ("own package", check_floors, {"rules/a.py": "from autopar.rules import b", "rules/b.py": ""}),
    ("placements", check_foreign_imports, {"layout.py": "from torch.distributed.tensor import Shard"}),
    ("placement module", check_foreign_imports, {"layout.py": "from torch.distributed import tensor"}),
    ("run", check_foreign_imports, {"run/a.py": "import torch.distributed as dist\ndist.barrier()"}),
    ("late circle", check_cycles, {"rules/a.py": "def f():\n    import autopar.rules.b", "rules/b.py": "import autopar.rules.a"}),
    ("long enough", check_lengths, {"mesh.py": "x = 1\n" * 400}),
]


@pytest.mark.parametrize(("checker", "files"), [case[1:] for case in ALLOWED], ids=[case[0] for case in ALLOWED])
def test_what_is_allowed_is_not_reported(tmp_path: Path, checker: Checker, files: dict[str, str]) -> None:
    assert checker(_plant(tmp_path, files)) == []


def test_a_package_without_an_init_is_found(tmp_path: Path) -> None:
    _plant(tmp_path, {"__init__.py": "", "rules/a.py": ""})
    assert check_packages(tmp_path) == ["autopar/rules has no __init__.py"]
