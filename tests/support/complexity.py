"""Measures of complexity: decisions and parameters of functions, and fields of mutable classes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from source_modules import Module

Function = ast.FunctionDef | ast.AsyncFunctionDef

# Nodes that count as one decision each.
_BRANCHES = (ast.If, ast.IfExp, ast.match_case, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)


def complexity(function: Function) -> int:
    """Return the cyclomatic complexity of a function: 1, plus 1 for each decision.

    Decisions are branches, cases, loops, exception handlers, conditions of comprehensions, and each
    operand of ``and`` and ``or`` after the first. Decisions of inner functions count as well.
    """
    return 1 + sum(_decisions(node) for node in ast.walk(function))


def _decisions(node: ast.AST) -> int:
    if isinstance(node, ast.comprehension):
        return len(node.ifs)
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    return int(isinstance(node, _BRANCHES))


def num_parameters(function: Function) -> int:
    """Return the number of parameters that can be passed by position, without ``self`` and
    ``cls``."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    return sum(parameter.arg not in ("self", "cls") for parameter in parameters)


def num_mutable_fields(node: ast.ClassDef) -> int:
    """Return the number of fields of a class whose instances can change; 0 for frozen classes and
    named tuples.

    Fields are annotated in the class body or assigned in ``__init__``. The larger number counts.
    """
    marks = [ast.unparse(expression) for expression in (*node.decorator_list, *node.bases)]
    if any("frozen=True" in mark or "NamedTuple" in mark for mark in marks):
        return 0
    annotated = sum(isinstance(statement, ast.AnnAssign) for statement in node.body)
    initializers = [s for s in node.body if isinstance(s, Function) and s.name == "__init__"]
    assigned = {
        inner.attr
        for initializer in initializers
        for inner in ast.walk(initializer)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
    }
    return max(annotated, len(assigned))


def functions_over(
    modules: Mapping[str, Module], most: int, measure: Callable[[Function], int]
) -> list[str]:
    """Return the functions whose measure is above `most`, in descending order, with their
    places."""
    measured = _measured(modules, Function, measure)
    return _over(measured, most)


def classes_over(modules: Mapping[str, Module], most: int) -> list[str]:
    """Return the mutable classes with more than `most` fields, in descending order, with their
    places."""
    return _over(_measured(modules, ast.ClassDef, num_mutable_fields), most)


def _measured(
    modules: Mapping[str, Module], kind: Any, measure: Callable[[Any], int]
) -> Iterator[tuple[int, str]]:
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, kind):
                yield measure(node), f"{module.name}:{node.lineno} {node.name}"


def _over(measured: Iterable[tuple[int, str]], most: int) -> list[str]:
    large = sorted((each for each in measured if each[0] > most), reverse=True)
    return [f"{place} ({size})" for size, place in large]


def check_ratchet(places: Sequence[str], allowed: int, what: str, constant: str) -> list[str]:
    """Return a sentence if the number of offenders differs from the allowed number.

    Args:
        places: the places of the offenders.
        allowed: the allowed number, which is the number when the constant was last changed.
        what: a description of the offenders.
        constant: name of the constant that contains `allowed`.
    """
    count = f"{what}: {len(places)}"
    if len(places) > allowed:
        return [f"{count}, at most {allowed} allowed: {'; '.join(places)}"]
    if len(places) < allowed:
        return [f"{count}: lower {constant} from {allowed} to {len(places)}"]
    return []
