"""A program writes results in place only into memory that no live value uses. Most models have such
writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import zoo_small
from torch import fx
from torch.utils import _pytree as pytree

from autopar.capture.graphs import IN_PLACE
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.program import abstract_executor
from autopar.program.abstract_executor import AbstractStorage, AbstractValue, Effect
from autopar.program.peak_memory import trace_peak

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import zoo
from benchmarks.random_plans import Prepared, prepare, random_plan

SMALL = ("gpt2", "llama", "bert", "vit")
OTHERS = ("t5", "swin")
CASES: list[Any] = [(name, mesh) for name in SMALL for mesh in ("1", "a=2,b=2")] + [
    (name, "a=2,b=2") for name in OTHERS
]
CASES += [
    pytest.param(name, "a=2,b=2", marks=pytest.mark.slow)
    for name in zoo.NAMES
    if name not in (*SMALL, *OTHERS)
]


def storages(value: Any) -> set[AbstractStorage]:
    return {leaf.storage for leaf in pytree.tree_leaves(value) if isinstance(leaf, AbstractValue)}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.Node]]:
    """Record and check the nodes of rehearsed programs that write into an operand."""
    found: list[fx.Node] = []
    called = abstract_executor._Run._call_node

    def looked_at(
        run: abstract_executor._Run,
        node: fx.Node | abstract_executor._Part,
        env: Mapping[fx.Node, Any],
        known: dict[Any, Effect],
    ) -> tuple[Any, int]:
        if isinstance(node, fx.Node) and IN_PLACE in node.meta:
            operand = node.args[node.meta[IN_PLACE]]
            others = set().union(
                *(storages(value) for other, value in env.items() if other is not operand)
            )
            assert not storages(env[operand]) & others, (
                f"{node} writes into {operand}, whose memory something else has"
            )  # type: ignore[index]
            found.append(node)
        return called(run, node, env, known)

    monkeypatch.setattr(abstract_executor._Run, "_call_node", looked_at)
    yield found


def built(name: str, mesh: str) -> Prepared:
    model, batch = getattr(zoo_small, name)() if name in SMALL else zoo.build(name)
    return prepare(model, batch, Mesh.parse(mesh), HardwareProfile.load("cpu-gloo"))


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_no_live_value_shares_memory_with_an_in_place_result(
    name: str, mesh: str, written: list[fx.Node]
) -> None:
    made = built(name, mesh)
    for seed in range(2):
        _, program = random_plan(made, seed, recompute_share=0.3)
        trace_peak(program.stages[0])
    assert written


@pytest.mark.slow
def test_in_place_writes_without_a_check_of_other_readers_are_detected(
    written: list[fx.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant does not check for other readers of a tensor, such as a redistribution for another
    reader."""
    monkeypatch.setattr("autopar.analysis.gradients._may_be_written", lambda operand, node: True)
    monkeypatch.setattr("autopar.emit.phase._may_be_overwritten", lambda *_: True)
    made = built("llama", "a=2,b=2")
    with pytest.raises(AssertionError, match="something else has"):
        trace_peak(random_plan(made, 1, recompute_share=0.3)[1].stages[0])
