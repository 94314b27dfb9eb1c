"""Edits of emitted programs, each at one node. They imitate faults of emission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from planted import nodes, placeholders, results, returns, stage, with_stage
from torch import fx

from autopar.program.program import Program, StageProgram

Edit = Callable[[Program], Program]


def _graph(program: Program, where: str, number: int = 0) -> fx.Graph:
    graph: fx.Graph = getattr(stage(program, number), where).graph
    return graph


def changed(name: str, where: str = "forward", at: int = 0, number: int = 0, **how: Any) -> Edit:
    """Change an argument, a keyword or the function of a node: ``arg_1=…``, ``target=…``, or a
    keyword. A value may be a function of the node."""

    def edit(program: Program) -> Program:
        node = nodes(_graph(program, where, number), name)[at]
        for what, value in how.items():
            values = value(node) if callable(value) and what != "target" else value
            if what == "target":
                node.target = values
            elif what == "args":
                node.args = values
            elif what.startswith("arg_"):
                node.update_arg(int(what[4:]), values)
            else:
                node.kwargs = {**node.kwargs, what: values}
        return program

    return edit


def without(name: str, keyword: str, where: str = "forward", at: int = 0) -> Edit:
    """Remove a keyword from a node."""

    def edit(program: Program) -> Program:
        node = nodes(_graph(program, where), name)[at]
        assert keyword in node.kwargs, f"{name} has no {keyword}"
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != keyword}
        return program

    return edit


def dropped(name: str, where: str = "forward", at: int = 0, number: int = 0) -> Edit:
    """Remove a node. Its readers read its first operand instead."""

    def edit(program: Program) -> Program:
        graph = _graph(program, where, number)
        node = nodes(graph, name)[at]
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
        return program

    return edit


def repeated(name: str, where: str = "forward", at: int = 0) -> Edit:
    """Insert a second copy of a node that reads the result of the first."""

    def edit(program: Program) -> Program:
        graph = _graph(program, where)
        node = nodes(graph, name)[at]
        with graph.inserting_after(node):
            second = graph.call_function(node.target, node.args, dict(node.kwargs))
        second.meta.update(node.meta)
        node.replace_all_uses_with(second, delete_user_cb=lambda user: user is not second)
        second.update_arg(0, node)
        return program

    return edit


def between(
    name: str, where: str, calls: Sequence[tuple[Any, dict[str, Any]]], at: int = 0
) -> Edit:
    """Insert a chain of calls between a node and its readers."""

    def edit(program: Program) -> Program:
        graph = _graph(program, where)
        node = last = nodes(graph, name)[at]
        own = set[fx.Node]()
        for target, kwargs in calls:
            with graph.inserting_after(last):
                last = graph.call_function(target, (last,), kwargs)
            last.meta.update(node.meta)
            own.add(last)
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in own)
        return program

    return edit


def exchanged(name: str, where: str, at: Sequence[int], argument: int = 0) -> Edit:
    """Exchange an argument between two nodes."""

    def edit(program: Program) -> Program:
        one, other = (nodes(_graph(program, where), name)[n] for n in at)
        first, second = one.args[argument], other.args[argument]
        one.update_arg(argument, second)
        other.update_arg(argument, first)
        return program

    return edit


def returning(
    where: str, order: Callable[[list[fx.Node]], Sequence[fx.Node]], number: int = 0
) -> Edit:
    """Change the order of the results of a graph."""

    def edit(program: Program) -> Program:
        graph = _graph(program, where, number)
        returns(graph, order(results(graph)))
        return program

    return edit


def first_two_exchanged(values: list[fx.Node]) -> list[fx.Node]:
    """Exchange the first two results."""
    return [values[1], values[0], *values[2:]]


def first_for_second(values: list[fx.Node]) -> list[fx.Node]:
    """Return the first result in place of the second."""
    return [values[0], values[0], *values[2:]]


def reading(name: str, where: str, argument: int, of: int, at: int = 0) -> Edit:
    """Let a node read the placeholder with index `of` of its graph."""
    return changed(
        name, where, at, **{f"arg_{argument}": lambda node: placeholders(node.graph)[of]}
    )


def saying(number: int = 0, **changes: Any) -> Edit:
    """Change attributes of a stage program. A value may be a function of the program."""

    def edit(program: Program) -> Program:
        own = stage(program, number)
        values = {k: v(own) if callable(v) else v for k, v in changes.items()}
        return with_stage(program, number, **values)

    return edit


def tensor(kind: str, at: int = 0, **changes: Any) -> dict[str, Any]:
    """Return a change for `saying`: one changed input, output or parameter."""

    def change(program: StageProgram) -> Any:
        tensors = list(getattr(program, kind))
        tensors[at] = replace(tensors[at], **changes)
        return tuple(tensors)

    return {kind: change}


def microbatched(**changes: Any) -> Edit:
    """Change the microbatches of a program. A value may be a function of `Microbatches`."""

    def edit(program: Program) -> Program:
        values = {k: v(program.microbatches) if callable(v) else v for k, v in changes.items()}
        return replace(program, microbatches=replace(program.microbatches, **values))

    return edit
