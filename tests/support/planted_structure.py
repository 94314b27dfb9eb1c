"""Small packages that violate or satisfy the rules of imports and the limits of complexity.

A package maps the path of a file below ``autopar`` to its text.
"""

from __future__ import annotations

from collections.abc import Iterator

Files = dict[str, str]

_SOLVER_FREE = ("runtime", "certificate", "verification")
_PLANNING = (
    "capture",
    "rules",
    "sharding",
    "constraints",
    "cost",
    "solve",
    "planner",
    "plans",
)


def forbidden_loads() -> Iterator[tuple[str, Files, str]]:
    """Return one package per way to violate each rule.

    Yields:
        A name, the package, and the start of the expected sentence.
    """
    cases = [(unit, name) for unit in _SOLVER_FREE for name in ("autopar.solve", "highspy", "pulp")]
    cases += [(unit, "torch.distributed") for unit in (*_PLANNING, "certificate", "validation")]
    cases += [("validation", name) for name in ("autopar.emit", "autopar.planner", "pulp")]
    for unit, name in cases:
        for way, files in _ways(unit, f"import {name}").items():
            how = "can load, by a late import," if "late" in way else "loads"
            root = {"solve/__init__.py": "", "emit/__init__.py": "", "planner/__init__.py": ""}
            yield f"{unit}, {name}, {way}", {**root, **files}, f"{unit} {how} {name} ("


def _ways(unit: str, statement: str) -> dict[str, Files]:
    module = f"{unit}/a.py"
    through = {module: "from autopar.core.b import x"}
    late = f"def f():\n    {statement}"
    return {
        "direct": {module: statement},
        "through a module": {**through, "core/b.py": statement},
        "through two modules": {
            **through,
            "core/b.py": "from autopar import errors",
            "errors.py": statement,
        },
        "through the __init__ of a package": {
            **through,
            "core/__init__.py": statement,
            "core/b.py": "",
        },
        "through the root": {module: "", "__init__.py": statement},
        "late": {module: late},
        "late, through a module": {**through, "core/b.py": late},
        "late, to a module": {
            module: "def f():\n    from autopar.core.b import x",
            "core/b.py": statement,
        },
    }


# Name, package, and a part of the expected sentence.
OTHER_LOADS: list[tuple[str, Files, str]] = [
    (
        "path",
        {
            "certificate/a.py": "from autopar.cost import b",
            "cost/b.py": "\nfrom autopar.solve import c",
            "solve/c.py": "",
        },
        "(autopar.certificate.a → autopar.cost.b:2)",
    ),
    (
        "named",
        {
            "runtime/a.py": (
                'from autopar.core.lazy import import_in_thread\nimport_in_thread("pulp")'
            )
        },
        "runtime loads pulp",
    ),
    (
        "named late",
        {"runtime/a.py": 'import importlib\ndef f():\n    importlib.import_module("pulp")'},
        "runtime can load, by a late import, pulp",
    ),
    (
        "on first access",
        {
            "runtime/a.py": "from autopar.hf import x",
            "hf/__init__.py": 'get = lazily("autopar.hf", {"x": "pulp"})',
        },
        "runtime loads pulp",
    ),
    (
        "in a method",
        {"runtime/a.py": "class A:\n    def f(self):\n        import pulp"},
        "runtime can load, by a late import, pulp",
    ),
    ("in a class", {"runtime/a.py": "class A:\n    import pulp"}, "runtime loads pulp"),
    (
        "in a branch",
        {"runtime/a.py": "try:\n    import pulp\nexcept ImportError:\n    raise"},
        "runtime loads pulp",
    ),
    (
        "beside types",
        {"runtime/a.py": "if TYPE_CHECKING:\n    x = 1\nelse:\n    import pulp"},
        "runtime loads pulp",
    ),
    (
        "not for types",
        {"runtime/a.py": "if not TYPE_CHECKING:\n    import pulp"},
        "runtime loads pulp",
    ),
    (
        "an exception that is for late imports only",
        {
            "cost/a.py": "import autopar.program.schedule",
            "program/schedule.py": "import torch.distributed",
        },
        "cost loads torch.distributed (autopar.cost.a → autopar.program.schedule:1)",
    ),
    (
        "an exception of other units",
        {
            "cost/a.py": "import autopar.program.transfers",
            "program/transfers.py": "import torch.distributed",
        },
        "cost loads torch.distributed (autopar.cost.a → autopar.program.transfers:1)",
    ),
    (
        "spelled out",
        {"cost/a.py": "import torch\nx = torch.distributed.barrier"},
        "cost loads torch.distributed.barrier",
    ),
]

PERMITTED_LOADS: list[tuple[str, Files]] = [
    (
        "types",
        {"runtime/a.py": "if TYPE_CHECKING:\n    import autopar.solve", "solve/__init__.py": ""},
    ),
    ("the solver", {"solve/a.py": "import highspy", "planner/b.py": "import autopar.solve.a"}),
    ("the runtime", {"runtime/a.py": "import torch.distributed"}),
    ("placements", {"cost/a.py": "from torch.distributed.tensor import Shard"}),
    (
        "an exception",
        {
            "cost/a.py": "import autopar.program.schedule",
            "program/schedule.py": "def f():\n    import torch.distributed",
        },
    ),
    (
        "an exception of these units",
        {
            "validation/a.py": "import autopar.program.transfers",
            "program/transfers.py": "import torch.distributed",
        },
    ),
    (
        "what loads it in turn",
        {"api/a.py": "from autopar.planner import b", "planner/b.py": "import pulp"},
    ),
]

_DECISIONS = """
async def f(x):
    if x and x and x:
        return [y for y in x if y if x]
    async for _ in x:
        pass
    while x:
        for _ in x:
            pass
    try:
        pass
    except ValueError:
        pass
    match x:
        case 1:
            pass
        case _:
            pass
    return 1 if x else 2
"""


def _branches(number: int, indent: str = "") -> str:
    return f"{indent}def f(x):\n" + f"{indent}    if x:\n{indent}        pass\n" * number


def _fields(number: int) -> str:
    return "".join(f"    x{n}: int\n" for n in range(number))


def _initializer(number: int) -> str:
    return "    def __init__(self):\n" + "".join(f"        self.x{n} = 0\n" for n in range(number))


# With none allowed: name, text of a module, and a part of the expected sentence.
COMPLEX: list[tuple[str, str, str]] = [
    ("branches", _branches(12), "complexity over 12: 1, at most 0 allowed: autopar.mesh:1 f (13)"),
    ("each kind of decision", _DECISIONS, "autopar.mesh:2 f (13)"),
    ("inner", "def g():\n" + _branches(12, "    "), "autopar.mesh:2 f (13)"),
    ("outer", "def g():\n" + _branches(12, "    "), "autopar.mesh:1 g (13)"),
    (
        "parameters",
        "def f(a, b, c, d, /, e, f, g, h):\n    pass",
        "more than 7 parameters: 1, at most 0 allowed: autopar.mesh:1 f (8)",
    ),
    (
        "fields",
        "@dataclass\nclass A:\n" + _fields(11),
        "more than 10 fields: 1, at most 0 allowed: autopar.mesh:2 A (11)",
    ),
    ("attributes", "class A:\n" + _initializer(11), "autopar.mesh:1 A (11)"),
]

SIMPLE: list[tuple[str, str]] = [
    ("branches", _branches(11)),
    ("self", "class A:\n    def f(self, a, b, c, d, e, f, g):\n        pass"),
    ("by keyword", "def f(a, b, c, d, e, f, g, *, h, i):\n    pass"),
    ("fields", "@dataclass\nclass A:\n" + _fields(10) + _initializer(10)),
    ("frozen", "@dataclass(frozen=True)\nclass A:\n" + _fields(11)),
    ("tuple", "class A(NamedTuple):\n" + _fields(11)),
]
