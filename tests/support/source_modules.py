"""Python modules as syntax trees, and their imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Functions that import the module named by their first argument.
_IMPORTERS = ("import_module", "import_in_thread", "__import__")


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed module.

    Attributes:
        name: dotted name, for example ``autopar.rules``.
        is_package: whether it is the ``__init__`` of a package.
        tree: the syntax tree.
        num_lines: number of lines of the source.
        num_columns: length of the longest line.
    """

    name: str
    is_package: bool
    tree: ast.Module
    num_lines: int
    num_columns: int

    @property
    def unit(self) -> str:
        """The first name below the root package; empty for the root itself and ``__main__``."""
        parts = self.name.split(".")
        return "" if len(parts) < 2 or parts[1] == "__main__" else parts[1]


@dataclass(frozen=True, slots=True)
class Import:
    """An import statement.

    Attributes:
        target: dotted name of the imported module.
        names: the names imported from it; empty if the module itself is imported.
        line: line number of the statement.
    """

    target: str
    names: tuple[str, ...]
    line: int


def read_modules(root: Path, package: str = "autopar") -> dict[str, Module]:
    """Parse all modules of the package `package` in the folder `root`. Return them by dotted
    name."""
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        widest = max(map(len, text.splitlines()), default=0)
        tree = ast.parse(text, str(path))
        modules[name] = Module(name, is_package, tree, text.count("\n"), widest)
    return modules


def all_nodes(module: Module) -> list[ast.AST]:
    """Return all nodes of the tree, including function bodies and ``if TYPE_CHECKING`` blocks."""
    return list(ast.walk(module.tree))


def executed_nodes(module: Module, *, late: bool) -> list[ast.AST]:
    """Return the nodes that Python can execute, without ``if TYPE_CHECKING`` blocks.

    Args:
        late: whether to include the bodies of functions. Without them, the result contains what
            runs when the module is imported.
    """
    nodes: list[ast.AST] = []
    todo: list[ast.AST] = [module.tree]
    while todo:
        node = todo.pop()
        nodes.append(node)
        todo += _executed_children(node, late)
    return nodes


def _executed_children(node: ast.AST, late: bool) -> Iterable[ast.AST]:
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        return node.orelse
    if isinstance(node, ast.If) and _is_not_type_checking(node.test):
        return node.body
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not late:
        return [*node.decorator_list, node.args]
    if isinstance(node, ast.Lambda) and not late:
        return [node.args]
    return ast.iter_child_nodes(node)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _is_not_type_checking(test: ast.expr) -> bool:
    if not isinstance(test, ast.UnaryOp) or not isinstance(test.op, ast.Not):
        return False
    return _is_type_checking(test.operand)


def imports_of(module: Module, nodes: Iterable[ast.AST]) -> Iterator[Import]:
    """Return the imports among `nodes` of the module.

    Calls such as ``import_module("pulp")`` count as imports if their first argument is a literal.
    Modules whose names are computed at run time are not found.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(_imported_from(module, node), names, node.lineno)
        elif isinstance(node, ast.Call):
            yield from _imported_by_call(module, node)


def _imported_from(module: Module, node: ast.ImportFrom) -> str:
    """Return the absolute module name of a ``from ... import`` statement."""
    base = node.module or ""
    if not node.level:
        return base
    parts = module.name.split(".")
    prefix = parts[: len(parts) - node.level + (1 if module.is_package else 0)]
    return ".".join([*prefix, *([base] if base else [])])


def _imported_by_call(module: Module, call: ast.Call) -> Iterator[Import]:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in _IMPORTERS:
        arguments = call.args[:1]
    elif name == "lazily" and "." in module.name:
        # Names of a package that are imported on first access. Names of the root are not included:
        # a module below the root that accesses one would import from a higher floor.
        arguments = [
            value for table in call.args if isinstance(table, ast.Dict) for value in table.values
        ]
    else:
        return
    for argument in arguments:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield Import(argument.value, (), call.lineno)


def attributes_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Return the longest dotted names among `nodes`, such as ``torch.distributed.barrier``, with
    lines."""
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in attributes}
    for node in attributes:
        if id(node) in inner:
            continue
        names, value = [node.attr], node.value
        while isinstance(value, ast.Attribute):
            names, value = [value.attr, *names], value.value
        if isinstance(value, ast.Name):
            yield ".".join([value.id, *names]), node.lineno


def uses_of(module: Module, nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Return all dotted names that `nodes` import or spell out, with lines."""
    nodes = list(nodes)
    for imported in imports_of(module, nodes):
        for name in imported.names or ("",):
            yield f"{imported.target}.{name}".rstrip("."), imported.line
    yield from attributes_of(nodes)


def internal_targets(modules: Mapping[str, Module], imported: Import) -> list[str]:
    """Return the modules of autopar that an import loads.

    ``from autopar.rules import table`` loads ``autopar.rules.table`` if that is a module, otherwise
    ``autopar.rules``.
    """
    base = imported.target
    if base.split(".")[0] != "autopar":
        return []
    submodules = [f"{base}.{name}" for name in imported.names if f"{base}.{name}" in modules]
    plain = len(submodules) < max(len(imported.names), 1)
    return submodules + ([base] if plain else [])


def is_under(target: str, roots: Iterable[str]) -> bool:
    """Return whether a dotted name is in `roots` or below one of them."""
    return any(target == root or target.startswith(root + ".") for root in roots)
