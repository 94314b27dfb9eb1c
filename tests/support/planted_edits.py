"""Changes of emitted programs, each at one node: what a fault of emission would have left there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from planted import nodes, placeholders, results, returns, stage, with_stage
from torch import fx

from autopar.program.program import Program, StageProgram

Edit = Callable[[Program], Program]


def _graph(program: Program, where: str, number: int = 0) -> fx.Graph:
    found: fx.Graph = getattr(stage(program, number), where).graph
    return found


def changed(name: str, where: str = "forward", at: int = 0, number: int = 0, **how: Any) -> Edit:
    """Another argument, or another function, of one node: ``arg_1=…``, ``target=…``, or a keyword;
    a value may be a function of the node.
    """

    def edit(program: Program) -> Program:
        node = nodes(_graph(program, where, number), name)[at]
        for what, value in how.items():
            made = value(node) if callable(value) and what != "target" else value
            if what == "target":
                node.target = made
            elif what == "args":
                node.args = made
            elif what.startswith("arg_"):
                node.update_arg(int(what[4:]), made)
            else:
                node.kwargs = {**node.kwargs, what: made}
        return program

    return edit


def without(name: str, keyword: str, where: str = "forward", at: int = 0) -> Edit:
    """A node without one of its keywords."""

    def edit(program: Program) -> Program:
        node = nodes(_graph(program, where), name)[at]
        assert keyword in node.kwargs, f"{name} has no {keyword}"
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != keyword}
        return program

    return edit


def dropped(name: str, where: str = "forward", at: int = 0, number: int = 0) -> Edit:
    """What reads a node reads its first operand instead."""

    def edit(program: Program) -> Program:
        graph = _graph(program, where, number)
        node = nodes(graph, name)[at]
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
        return program

    return edit


def repeated(name: str, where: str = "forward", at: int = 0) -> Edit:
    """A node once more, behind itself, on what it made."""

    def edit(program: Program) -> Program:
        graph = _graph(program, where)
        node = nodes(graph, name)[at]
        with graph.inserting_after(node):
            again = graph.call_function(node.target, node.args, dict(node.kwargs))
        again.meta.update(node.meta)
        node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
        again.update_arg(0, node)
        return program

    return edit


def between(
    name: str, where: str, calls: Sequence[tuple[Any, dict[str, Any]]], at: int = 0
) -> Edit:
    """Calls, one on what the other made, between a node and what reads it."""

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
    """An argument of two nodes, one for the other's."""

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
    """A graph that returns its results otherwise."""

    def edit(program: Program) -> Program:
        graph = _graph(program, where, number)
        returns(graph, order(results(graph)))
        return program

    return edit


def first_two_exchanged(made: list[fx.Node]) -> list[fx.Node]:
    """Results in another order."""
    return [made[1], made[0], *made[2:]]


def first_for_second(made: list[fx.Node]) -> list[fx.Node]:
    """The first result twice."""
    return [made[0], made[0], *made[2:]]


def reading(name: str, where: str, argument: int, of: int, at: int = 0) -> Edit:
    """A node that reads what its graph was given as number `of`."""
    return changed(
        name, where, at, **{f"arg_{argument}": lambda node: placeholders(node.graph)[of]}
    )


def saying(number: int = 0, **changes: Any) -> Edit:
    """A program that says something else of itself; a change may be a function of the program."""

    def edit(program: Program) -> Program:
        own = stage(program, number)
        made = {k: v(own) if callable(v) else v for k, v in changes.items()}
        return with_stage(program, number, **made)

    return edit


def tensor(kind: str, at: int = 0, **changes: Any) -> dict[str, Any]:
    """For `saying`: one tensor at the border, changed."""

    def change(program: StageProgram) -> Any:
        tensors = list(getattr(program, kind))
        tensors[at] = replace(tensors[at], **changes)
        return tuple(tensors)

    return {kind: change}


def microbatched(**changes: Any) -> Edit:
    """A program that works through its batch otherwise; a change may be a function of
    `Microbatches`."""

    def edit(program: Program) -> Program:
        made = {k: v(program.microbatches) if callable(v) else v for k, v in changes.items()}
        return replace(program, microbatches=replace(program.microbatches, **made))

    return edit
