"""When a search tree is not grown any further."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.solve.branching import BranchingVariables, Tree, _Node
from autopar.solve.highs import Point

BOXES = {
    1.0: [2.0, 3.0],
    3.0: [4.0, 5.0],
    4.0: [],
    5.0: [],
}  # the bound of a box → those of the boxes that it falls into
CLOSED = {1.0: 2.0}  # which of them are closed


def grown(best: float, monkeypatch: pytest.MonkeyPatch) -> tuple[float, list[float]]:
    """The bound that a tree of these boxes proves, and the boxes that it looks into."""
    program: Any = SimpleNamespace(x=[], recomputed={}, keep={}, regions={})
    engine: Any = SimpleNamespace(
        column={}, cost=np.zeros(1), rows=SimpleNamespace(lower=np.zeros(1))
    )
    live: Any = SimpleNamespace(num_iterations=0, is_over=False)
    looked_into: list[float] = []

    def node(bound: float) -> _Node:
        return _Node(np.zeros(1), np.ones(1), Point(bound, np.zeros(1), np.zeros(1), np.zeros(1)))

    def children(tree: Tree, box: _Node) -> list[_Node]:
        looked_into.append(box.point.bound)
        closed = CLOSED.get(box.point.bound, np.inf)
        tree._closed = min(tree._closed, closed)
        return [node(bound) for bound in BOXES[box.point.bound] if bound != closed]

    monkeypatch.setattr(Tree, "_branch_node", children)
    monkeypatch.setattr(Tree, "_dive", lambda tree, root: None)
    variables = BranchingVariables.of(program, engine, np.zeros(1))
    tree = Tree(variables, live, lambda values: [], lambda: best, 0.01, 100)
    tree.root = node(1.0)
    return tree.branch().bound, looked_into


def test_it_ends_once_a_closed_box_proves_no_more_than_any_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound, looked_into = grown(10.0, monkeypatch)
    assert bound == 2.0, "what waits cannot raise it"
    assert looked_into == [1.0]


def test_without_a_plan_it_looks_for_one_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, looked_into = grown(np.inf, monkeypatch)
    assert bound == 2.0
    assert sorted(looked_into) == [1.0, 3.0, 4.0, 5.0]


def test_it_tries_no_further_ops_of_a_node_once_its_steps_are_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = np.arange(8, dtype=np.int32)
    variables = BranchingVariables(8, columns.reshape(4, 2), columns[:0], np.zeros(0), 1)
    live: Any = SimpleNamespace(num_iterations=0, is_over=False)
    tree = Tree(variables, live, lambda values: [], lambda: 10.0, 0.01, 100)
    point = Point(1.0, np.full(8, 0.5), np.zeros(1), np.zeros(8))
    pairs: list[Any] = []

    def pair(tree: Tree, node: _Node, key: Any) -> list[_Node | None]:
        pairs.append(key)
        live.num_iterations += 1
        return [node, node]

    monkeypatch.setattr(Tree, "_pair", pair)
    tree._effort.last_step = 2
    tree._branch_node(_Node(np.zeros(8), np.ones(8), point))
    assert len(pairs) == 2, "two of four ops"
