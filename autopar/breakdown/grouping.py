"""Which module each decision of a plan belongs to, and which copies of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from autopar.plans import Entry, NodeChoice, Plan

INPUTS = "(inputs)"  # the part that stands for the batch
BEFORE, BEHIND = "(from the stage before)", "(from the stage behind)"  # the parts that stand for what crosses between stages
CROSSING = (BEFORE, BEHIND)
Instances = tuple[tuple[int, ...], ...]
_FIELD = re.compile(r"\{\d+\}")
_CROSSES = re.compile(r"/(forward|backward)/\d+(/.+)?/(input|output)$")


@dataclass(slots=True)
class Group:
    """Decisions and forward nodes of one part, while they are gathered."""

    module: str
    instances: Instances
    entries: list[Entry] = field(default_factory=list)
    nodes: list[tuple[NodeChoice, Entry]] = field(default_factory=list)


def starred(path: str) -> str:
    """A node's path with ``*`` for every index of repeated layers."""
    return _FIELD.sub("*", path)


def crosses(node: str) -> bool:
    """Tell whether a node pattern stands for what comes from another stage, or goes there.

    Such are named by the node that makes them. A tensor of the batch may have slashes in its name,
    too, and what each microbatch is given of the batch is named by a node and the words for that.
    """
    return _CROSSES.search(node) is not None


def owner(node: str) -> str:
    """Module pattern, with ``*``, of a node pattern: of a parameter or buffer the module that holds it."""
    if crosses(node):
        return BEFORE if node.endswith("/input") else BEHIND
    border = node.rpartition("/")[2]
    if border in ("input", "output"):
        return INPUTS if border == "input" else ""
    path, kind = node.split("/")[:2]
    if kind in ("parameter", "buffer", "storage"):
        path = path.rpartition(".")[0]
    return starred(path)


def grouped(plan: Plan) -> list[Group]:
    """One group per module and set of copies, computing modules in forward order first."""
    groups: list[Group] = []
    for entry in sorted(plan.entries, key=lambda e: (e.kind != "compute", e.phase != "forward")):
        _group_of(groups, owner(entry.nodes[0].node), entry.instances).entries.append(entry)
        if entry.kind == "compute" and entry.phase == "forward":
            for choice in entry.nodes:
                _group_of(groups, owner(choice.node), entry.instances).nodes.append((choice, entry))
    return groups


def _group_of(groups: list[Group], module: str, instances: Instances) -> Group:
    for group in groups:
        if group.module == module and set(instances) <= set(group.instances):
            return group
    for group in groups:
        if group.module == module and set(instances) >= set(group.instances):
            group.instances = instances
            return group
    groups.append(Group(module, instances))
    return groups[-1]


def _decides(group: Group, node: str) -> bool:
    """Tell whether one of a group's decisions is about a node.

    Args:
        group: of the plan.
        node: pattern of the node.

    Returns:
        Whether it is.
    """
    return any(choice.node == node for entry in group.entries for choice in entry.nodes)


def index_of(groups: list[Group], node: str, instances: Instances) -> int:
    """Find the group that a node's communication or kept value is counted with.

    A module that decides nothing by itself has no group: one that only reshapes, say, whose nodes
    follow another module's decision. What its nodes move is counted with that decision.

    Args:
        groups: of the plan, as `grouped` gives them; a module that the plan decides nothing for is added.
        node: pattern of the node.
        instances: copies of it.

    Returns:
        The index of the group that has the copies, or most of them.
    """
    module = owner(node)
    mine = [i for i, group in enumerate(groups) if group.module == module]
    mine = mine or [i for i, group in enumerate(groups) if _decides(group, node)]
    if not mine:
        groups.append(Group(module, instances))
        return len(groups) - 1
    return max(mine, key=lambda i: (len(set(instances) & set(groups[i].instances)), -i))
