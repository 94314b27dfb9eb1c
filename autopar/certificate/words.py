"""What a plan calls things, on which its explanations and pictures stand: decisions, modules, ops, and the bars of its time line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from torch import fx

from autopar.capture.trace import Trace
from autopar.certificate.facts import Facts
from autopar.certificate.report import NEAR, Finding
from autopar.plans import Entry, Plan
from autopar.rules import call_of, is_discovered, is_fallback
from autopar.rules.call import op_name

_FIELD = re.compile(r"\{\d+\}")  # the index of a layer
_OUTSIDE = ("", "inputs", "from the stage before", "from the stage behind", "parameters", "optimizer", "priced, and not run")
_LANES = ("compute", "communication")
_PHASES = ("forward", "backward", "step")


def words(plan: Plan, trace: Trace, facts: Facts) -> Iterator[Finding]:
    """Every word that differs from what follows from the nodes it is said of."""
    yield from _decisions(plan, facts.nodes)
    for c in plan.communications:
        if c.module != _module(c.node):
            yield Finding("words", f"a collective of {_module(c.node) or 'the model'} is said to be of {c.module or 'the model'}", c.node)
    yield from _bars(plan, trace, facts)


def _decisions(plan: Plan, nodes: Mapping[str, fx.Node]) -> Iterator[Finding]:
    seen: Counter[str] = Counter()
    for entry in plan.entries:
        key = _FIELD.sub("*", entry.nodes[0].node)
        seen[key] += 1
        unique = key if seen[key] == 1 else f"{key} ({seen[key]})"
        said = {"key": unique, "module": _module(key), "op": key.split("/")[1], **_rules(entry, nodes)}
        for name, derived in said.items():
            if getattr(entry, name) != derived:
                yield Finding("words", f"its {name} is {derived!r}, not {getattr(entry, name)!r}", entry.key)


def _rules(entry: Entry, nodes: Mapping[str, fx.Node]) -> dict[str, object]:
    """Whether a decision wants for a rule, and which rules were found by experiment."""
    keys = (choice.node.format(*entry.instances[0]) for choice in entry.nodes)
    calls = [call_of(nodes[key]) for key in keys if key in nodes]
    found = dict.fromkeys(op_name(call.target) for call in calls if is_discovered(call))
    return {"replicated": any(map(is_fallback, calls)), "discovered": tuple(found)}


def _module(pattern: str) -> str:
    return _FIELD.sub("*", pattern.partition("/")[0])


def _bars(plan: Plan, trace: Trace, facts: Facts) -> Iterator[Finding]:
    """Each bar is of a part of the model, or of what is given to it, and follows the last of its lane."""
    modules = {key.partition("/")[0] for key in facts.keys} | {str(node.meta.get("module", "")) for node in trace.graph.nodes}
    known = {*_OUTSIDE, *(".".join(parts[:n]) for parts in (m.split(".") for m in modules) for n in range(len(parts) + 1))}
    ends = dict.fromkeys(_LANES, 0.0)
    for label, phase, kind, start_s, duration_s in plan.prediction.timeline:
        bar = f"{kind} of {label or 'the model'} in {phase} on the time line"
        if label not in known or kind not in _LANES or phase not in _PHASES:
            yield Finding("words", f"there is no {bar}")
        elif duration_s < 0.0 or start_s < ends[kind] * (1.0 - NEAR):
            yield Finding("words", f"{bar} begins at {start_s:.6g} s, before the one before it ends")
        else:
            ends[kind] = start_s + duration_s
