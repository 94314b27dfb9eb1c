"""The structure of the package: who may import whom, what an import may load, sizes, complexity.

A module imports only from a strictly lower floor, and imports make no circle. Rules say what
importing a package must not load through all modules that it reaches. Files and functions are
short. The number of functions and classes that are too complex may only fall.

Each checker takes parsed modules and returns sentences about what is wrong. Planted violations show
that it fails.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from complexity import check_ratchet, classes_over, complexity, functions_over, num_parameters
from import_rules import Rule, check_rules, unused_exceptions
from planted_structure import COMPLEX, OTHER_LOADS, PERMITTED_LOADS, SIMPLE, forbidden_loads
from source_modules import (
    Module,
    all_nodes,
    executed_nodes,
    imports_of,
    internal_targets,
    is_under,
    read_modules,
    uses_of,
)

ROOT = Path(__file__).parent.parent

# The unit is the first name below `autopar`: a module of that name, or a package, whose modules
# share its floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "version"),
    ("core",),
    ("constraints", "hf", "ops", "solve"),
    ("option_checks",),
    ("capture", "kernels", "plans", "request", "rules"),
    ("analysis", "breakdown", "cache", "profiler", "program", "stages"),
    ("runtime", "sharding", "validation", "verification"),  # validation shares nothing with emit
    ("checkpoint", "cost", "emit"),
    ("certificate", "explanation", "planner"),
    ("report",),
    ("api",),
    ("integrations",),
    ("cli",),
)
FLOOR = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}
TOP = len(FLOORS)  # autopar/__init__.py and __main__.py see everything

PROCESS_GROUP_UNITS = {
    "kernels",
    "program",
    "profiler",
    "runtime",
    "checkpoint",
    "api",
    "integrations",
    "cli",
}
# Placement and tensor types, which make no process group, are words of the vocabulary.
PLACEMENT_MODULES = ("torch.distributed.tensor",)
PRIVATE_TORCH_ONLY_IN = "autopar.capture.dynamo"
TRANSFORMERS_ONLY_IN = ("autopar.capture.hugging_face", "autopar.hf.models")
OPTIONAL_ONLY_IN = ("cli", "integrations")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 110
MAX_COLUMNS = 100  # ruff does not count comments for tools, such as those for the type checker
MAX_COMPLEXITY = 12  # of a function; `complexity` defines it
MAX_PARAMETERS = 7
MAX_MUTABLE_FIELDS = 10

# Today's numbers of functions and classes above these limits. They may only fall.
MOST_COMPLEX_FUNCTIONS = 0
MOST_LONG_PARAMETER_LISTS = 31
MOST_LARGE_MUTABLE_CLASSES = 3


def units_except(*excluded: str) -> tuple[str, ...]:
    """All units with a floor, without `excluded`."""
    return tuple(unit for unit in FLOOR if unit not in excluded)


SOLVER = ("autopar.solve", "highspy", "pulp")
# Imports that run only when a process group, or an interleaved order, is used.
LATE_PROCESS_GROUPS = {
    "autopar.program.schedule": (
        "asks torch for the order of interleaved stages, and makes no process group"
    ),
    "autopar.kernels.peers": "maps the memory of a running group; planning reads only sizes",
}
RULES = {
    "only the planner, and what calls it, needs the solver": Rule(
        units_except("solve", "planner", "report", "api", "integrations", "cli"), SOLVER
    ),
    "planning touches no process groups": Rule(
        units_except(*PROCESS_GROUP_UNITS, "certificate", "validation"),
        ("torch.distributed",),
        permitted=PLACEMENT_MODULES,
        late_uses=LATE_PROCESS_GROUPS,
    ),
    "a plan and its program are checked without process groups": Rule(
        ("certificate", "validation"),
        ("torch.distributed",),
        permitted=PLACEMENT_MODULES,
        late_uses=LATE_PROCESS_GROUPS,
        uses={
            "autopar.program.transfers": "validation runs the transfers of stages between symbols"
        },
    ),
    "validation shares nothing with emission and the search": Rule(
        ("validation",), ("autopar.emit", "autopar.planner", *SOLVER)
    ),
}
# What is imported in a fresh interpreter, where no module of SOLVER may be loaded then.
WITHOUT_SOLVER = (
    "autopar.certificate",
    "autopar.verification",
    "autopar.validation",
    "autopar.explanation",
    "autopar.runtime.module",
)


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
        for imported in imports_of(module, all_nodes(module)):
            for target in internal_targets(modules, imported):
                other = floor_of(target)
                if target.split(".")[1:2] == [module.unit] and module.unit:
                    continue
                if other is None or other >= own:
                    problems.append(
                        f"{module.name}:{imported.line} (floor {own}) imports {target} (floor"
                        f" {other})"
                    )
    return problems


CAPTURE_PRIVATE = (
    "torch._dynamo",
    "torch._functorch",
    "torch._subclasses",
    "torch._guards",
    "torch._export",
    "torch._inductor.compile_fx",
)


def check_foreign_imports(modules: Mapping[str, Module]) -> list[str]:
    """pulp and highspy only in solve/, torch's private capture modules only in capture/dynamo,
    and so on."""
    problems = []
    for module in modules.values():
        for target, line in uses_of(module, all_nodes(module)):
            first = target.split(".")[0]
            where = f"{module.name}:{line} uses {target}"
            if first in ("pulp", "highspy") and module.unit != "solve":
                problems.append(f"{where}: only solve/ may")
            if is_under(target, CAPTURE_PRIVATE) and not is_under(
                module.name, (PRIVATE_TORCH_ONLY_IN,)
            ):
                problems.append(f"{where}: only capture/dynamo may")
            if (
                first == "transformers"
                and module.name not in TRANSFORMERS_ONLY_IN
                and module.unit not in OPTIONAL_ONLY_IN
            ):
                problems.append(
                    f"{where}: only capture/hugging_face.py, hf/models.py, integrations and cli may"
                )
            if first in ("accelerate", "peft", "lightning") and module.unit != "integrations":
                problems.append(f"{where}: only integrations/ may")
            distributed = is_under(target, ("torch.distributed",))
            if (
                distributed
                and not is_under(target, PLACEMENT_MODULES)
                and module.unit not in PROCESS_GROUP_UNITS
            ):
                problems.append(f"{where}: only {sorted(PROCESS_GROUP_UNITS)} touch process groups")
    return sorted(set(problems))


def check_cycles(modules: Mapping[str, Module]) -> list[str]:
    """Imports at module level make no circle (imports inside functions do not run at load time)."""
    graph: dict[str, set[str]] = {}
    for module in modules.values():
        imported = imports_of(module, executed_nodes(module, late=False))
        targets = {target for each in imported for target in internal_targets(modules, each)}
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


def check_lengths(modules: Mapping[str, Module]) -> list[str]:
    problems = []
    for module in modules.values():
        if module.num_lines > MAX_FILE_LINES:
            problems.append(f"{module.name}: {module.num_lines} lines, at most {MAX_FILE_LINES}")
        if module.num_columns > MAX_COLUMNS:
            problems.append(f"{module.name}: {module.num_columns} columns, at most {MAX_COLUMNS}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    problems.append(
                        f"{module.name}:{node.lineno} {node.name}: {length} lines, at most"
                        f" {MAX_FUNCTION_LINES}"
                    )
    return problems


def check_complexity(
    modules: Mapping[str, Module], complex: int, parameters: int, fields: int
) -> list[str]:
    """Sentences if the numbers of offenders differ from those that are allowed.

    Args:
        modules: by dotted name.
        complex: how many functions may have more than `MAX_COMPLEXITY`.
        parameters: how many functions may have more than `MAX_PARAMETERS`.
        fields: how many mutable classes may have more than `MAX_MUTABLE_FIELDS`.
    """
    return [
        *check_ratchet(
            functions_over(modules, MAX_COMPLEXITY, complexity),
            complex,
            f"functions with a complexity over {MAX_COMPLEXITY}",
            "MOST_COMPLEX_FUNCTIONS",
        ),
        *check_ratchet(
            functions_over(modules, MAX_PARAMETERS, num_parameters),
            parameters,
            f"functions with more than {MAX_PARAMETERS} parameters",
            "MOST_LONG_PARAMETER_LISTS",
        ),
        *check_ratchet(
            classes_over(modules, MAX_MUTABLE_FIELDS),
            fields,
            f"mutable classes with more than {MAX_MUTABLE_FIELDS} fields",
            "MOST_LARGE_MUTABLE_CLASSES",
        ),
    ]


def check_packages(root: Path, package: str = "autopar") -> list[str]:
    """A folder with modules but without ``__init__.py`` would be left out of the wheel."""
    folders = {path.parent for path in (root / package).rglob("*.py")}
    return [
        f"{folder.relative_to(root)} has no __init__.py"
        for folder in sorted(folders)
        if not (folder / "__init__.py").is_file()
    ]


@pytest.fixture(scope="module")
def house() -> dict[str, Module]:
    modules = read_modules(ROOT)
    assert "autopar.errors" in modules
    return modules


def test_a_module_imports_only_from_lower_floors(house: dict[str, Module]) -> None:
    assert check_floors(house) == []


def test_only_the_named_modules_touch_the_solver_private_torch_and_process_groups(
    house: dict[str, Module],
) -> None:
    assert check_foreign_imports(house) == []


def test_imports_make_no_circle(house: dict[str, Module]) -> None:
    assert check_cycles(house) == []


def test_files_and_functions_are_short(house: dict[str, Module]) -> None:
    assert check_lengths(house) == []


def test_an_import_loads_nothing_that_a_rule_forbids(house: dict[str, Module]) -> None:
    assert check_rules(house, RULES) == []


def test_every_exception_of_a_rule_is_needed(house: dict[str, Module]) -> None:
    assert unused_exceptions(house, RULES) == []


def test_every_rule_names_units_and_modules_that_exist(house: dict[str, Module]) -> None:
    units = {module.unit for module in house.values()}
    for rule in RULES.values():
        assert set(rule.units) <= units
        own = [name for name in rule.forbidden if name.startswith("autopar.")]
        assert set(own) <= set(house)


def test_what_runs_and_checks_a_plan_loads_no_solver_in_a_fresh_interpreter() -> None:
    code = f"import sys, {', '.join(WITHOUT_SOLVER)}; print(*sorted(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    loaded = run.stdout.split()
    assert set(WITHOUT_SOLVER) <= set(loaded)
    assert [name for name in loaded if is_under(name, SOLVER)] == []


def test_the_number_of_complex_functions_and_classes_only_falls(house: dict[str, Module]) -> None:
    problems = check_complexity(
        house, MOST_COMPLEX_FUNCTIONS, MOST_LONG_PARAMETER_LISTS, MOST_LARGE_MUTABLE_CLASSES
    )
    assert problems == []


def test_every_package_has_an_init() -> None:
    assert check_packages(ROOT) == []


def test_every_unit_stands_on_one_floor() -> None:
    assert len(FLOOR) == sum(len(units) for units in FLOORS)


Checker = Callable[[Mapping[str, Module]], list[str]]
PLANTED: list[tuple[str, Checker, dict[str, str], str]] = [
    (
        "upward",
        check_floors,
        {"core/mesh.py": "from autopar.ops import Layout", "ops/__init__.py": ""},
        "1) imports autopar.ops (floor 2)",
    ),
    (
        "sideways",
        check_floors,
        {"rules/a.py": "import autopar.capture", "capture.py": ""},
        "autopar.rules.a:1",
    ),
    (
        "submodule",
        check_floors,
        {"rules/a.py": "from autopar.cost import b", "cost/b.py": ""},
        "imports autopar.cost.b",
    ),
    (
        "the root",
        check_floors,
        {"core/mesh.py": "from autopar import plans", "plans.py": ""},
        "imports autopar.plans",
    ),
    (
        "late",
        check_floors,
        {"core/mesh.py": "def f():\n    from autopar import cli", "cli.py": ""},
        "autopar.core.mesh:2",
    ),
    (
        "relative",
        check_floors,
        {"rules/a.py": "from ..cost import b", "rules/__init__.py": "", "cost/b.py": ""},
        "autopar.cost.b",
    ),
    ("unknown", check_floors, {"helpers.py": ""}, "has no floor"),
    ("pulp", check_foreign_imports, {"cost/a.py": "import pulp"}, "only solve/ may"),
    (
        "highspy",
        check_foreign_imports,
        {"planner.py": "from highspy import Highs"},
        "only solve/ may",
    ),
    (
        "dynamo",
        check_foreign_imports,
        {"capture/b.py": "import torch._dynamo"},
        "only capture/dynamo may",
    ),
    (
        "functorch",
        check_foreign_imports,
        {"emit/b.py": "from torch._functorch.aot_autograd import x"},
        "only capture/dynamo may",
    ),
    (
        "spelt",
        check_foreign_imports,
        {"emit/b.py": "import torch\ntorch._dynamo.reset()"},
        "only capture/dynamo may",
    ),
    (
        "transformers",
        check_foreign_imports,
        {"capture/b.py": "from transformers import X"},
        "only capture/hugging_face.py",
    ),
    (
        "accelerate",
        check_foreign_imports,
        {"runtime/b.py": "import accelerate"},
        "only integrations/ may",
    ),
    (
        "peft",
        check_foreign_imports,
        {"api/b.py": "from peft import PeftModel"},
        "only integrations/ may",
    ),
    (
        "lightning",
        check_foreign_imports,
        {"runtime/b.py": "import lightning.pytorch"},
        "only integrations/ may",
    ),
    (
        "group",
        check_foreign_imports,
        {"emit/b.py": "import torch.distributed as dist"},
        "process groups",
    ),
    (
        "group from",
        check_foreign_imports,
        {"emit/b.py": "from torch.distributed import barrier"},
        "process groups",
    ),
    (
        "group spelt",
        check_foreign_imports,
        {"emit/b.py": "import torch\ntorch.distributed.barrier()"},
        "process groups",
    ),
    (
        "circle",
        check_cycles,
        {"rules/a.py": "from autopar.rules import b", "rules/b.py": "import autopar.rules.a"},
        "import circle",
    ),
    ("long file", check_lengths, {"mesh.py": "x = 1\n" * 601}, "601 lines"),
    ("wide line", check_lengths, {"mesh.py": "x = 1  # " + "type" * 23 + "\n"}, "101 columns"),
    (
        "long function",
        check_lengths,
        {"mesh.py": "def f():\n" + "    x = 1\n" * 110},
        "f: 111 lines",
    ),
]


LOADS = [*forbidden_loads(), *OTHER_LOADS]
rules = partial(check_rules, rules=RULES)
exceptions = partial(unused_exceptions, rules=RULES)
no_complexity = partial(check_complexity, complex=0, parameters=0, fields=0)
some_complexity = partial(check_complexity, complex=1, parameters=1, fields=1)
PLANTED += [(f"loads: {name}", rules, files, message) for name, files, message in LOADS]
PLANTED += [
    (f"complex: {name}", no_complexity, {"mesh.py": text}, message)
    for name, text, message in COMPLEX
]
PLANTED += [
    ("fewer " + constant, some_complexity, {"mesh.py": ""}, f": 0: lower {constant} from 1 to 0")
    for constant in (
        "MOST_COMPLEX_FUNCTIONS",
        "MOST_LONG_PARAMETER_LISTS",
        "MOST_LARGE_MUTABLE_CLASSES",
    )
]
PLANTED += [
    (
        "an exception of nothing",
        exceptions,
        {"program/schedule.py": ""},
        "autopar.program.schedule needs no",
    ),
    (
        "an exception of no module",
        exceptions,
        {"mesh.py": ""},
        "autopar.program.transfers needs no",
    ),
]


def _plant(root: Path, files: Mapping[str, str]) -> dict[str, Module]:
    for name, text in files.items():
        path = root / "autopar" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_modules(root)


@pytest.mark.parametrize(
    ("checker", "files", "message"),
    [case[1:] for case in PLANTED],
    ids=[case[0] for case in PLANTED],
)
def test_a_planted_violation_is_found(
    tmp_path: Path, checker: Checker, files: dict[str, str], message: str
) -> None:
    problems = checker(_plant(tmp_path, files))
    assert any(message in problem for problem in problems), problems


ALLOWED: list[tuple[str, Checker, dict[str, str]]] = [
    (
        "downward",
        check_floors,
        {"core/layout.py": "from autopar.errors import LayoutError", "errors.py": ""},
    ),
    ("own package", check_floors, {"rules/a.py": "from autopar.rules import b", "rules/b.py": ""}),
    (
        "placements",
        check_foreign_imports,
        {"core/layout.py": "from torch.distributed.tensor import Shard"},
    ),
    (
        "placement module",
        check_foreign_imports,
        {"core/layout.py": "from torch.distributed import tensor"},
    ),
    (
        "run",
        check_foreign_imports,
        {"runtime/a.py": "import torch.distributed as dist\ndist.barrier()"},
    ),
    (
        "late circle",
        check_cycles,
        {
            "rules/a.py": "def f():\n    import autopar.rules.b",
            "rules/b.py": "import autopar.rules.a",
        },
    ),
    ("long enough", check_lengths, {"mesh.py": "x = 1\n" * 600}),
]


ALLOWED += [(f"loads: {name}", rules, files) for name, files in PERMITTED_LOADS]
ALLOWED += [(f"simple: {name}", no_complexity, {"mesh.py": text}) for name, text in SIMPLE]


@pytest.mark.parametrize(
    ("checker", "files"), [case[1:] for case in ALLOWED], ids=[case[0] for case in ALLOWED]
)
def test_what_is_allowed_is_not_reported(
    tmp_path: Path, checker: Checker, files: dict[str, str]
) -> None:
    assert checker(_plant(tmp_path, files)) == []


def test_a_package_without_an_init_is_found(tmp_path: Path) -> None:
    _plant(tmp_path, {"__init__.py": "", "rules/a.py": ""})
    assert check_packages(tmp_path) == ["autopar/rules has no __init__.py"]
