"""Check every entry of a plan against the problem: its nodes, its strategy and its time.

A strategy is legal if the rule of each node offers it. The bound covers a strategy if the problem
offers it: under the plan's constraints, and without collectives inside a decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.capture.trace import Parameter, Trace
from autopar.certificate.facts import Context, Facts
from autopar.certificate.intra_op import call_s
from autopar.certificate.rates import Rates, sent_s
from autopar.certificate.redistributions import held_so
from autopar.certificate.report import Finding, near
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.core.mesh import Mesh
from autopar.core.stored_placements import storable
from autopar.cost.priced import OPTIMIZERS, Priced
from autopar.cost.zero_stages import in_plan_form
from autopar.emit.context import buffer_key, input_key, output_key, parameter_key, storage_key
from autopar.errors import AutoparError, HardwareError
from autopar.plans import Entry, NodeChoice, Plan
from autopar.rules import call_of, is_strategy
from autopar.validation.shards import held_bytes

_KEYS = {"parameter": parameter_key, "buffer": buffer_key, "input": input_key, "output": output_key}


def keys_of(priced: Priced, op: int) -> tuple[tuple[str, ...], ...]:
    """Return the keys of the nodes of an op of the problem, one tuple per instance."""
    source = priced.sources[op]
    if source.cluster is None:
        return tuple((_KEYS[source.kind](name),) for name in source.names)
    return tuple(tuple(m.key for m in cluster.members) for cluster in source.cluster.instances)


def crossing_keys(trace: Trace) -> frozenset[str]:
    """Return the keys of the values that arrive from, or leave for, other stages."""
    arriving = {input_key(i.path) for i in trace.inputs if i.crosses}
    return frozenset(arriving | {output_key(o.path) for o in trace.outputs if o.crosses})


@dataclass
class Decisions:
    """All entries of a plan, with the problem and the rules that they are checked against."""

    plan: Plan
    trace: Trace
    facts: Facts
    priced: Priced
    mesh: Mesh
    profile: HardwareProfile
    context: Context

    def __post_init__(self) -> None:
        self.parameters: Mapping[str, Parameter] = {
            parameter_key(p.name): p for p in self.trace.parameters
        }
        self._crossing = crossing_keys(self.trace)
        ops = range(len(self.priced.problem.ops))
        self.owner = {
            key: op for op in ops for instance in keys_of(self.priced, op) for key in instance
        }
        self._rests = (
            {storage_key(p.name): p for p in self.trace.parameters}
            if self.context.accumulates
            else {}
        )
        self.rates = Rates(self.mesh, self.profile)

    def strangers(self) -> Iterator[Finding]:
        """Yield the nodes that only the model or only the plan has, and nodes that the plan lists
        twice.

        If there are any, no other claim can be checked.
        """
        keys = [c.node.format(*i) for e in self.plan.entries for c in e.nodes for i in e.instances]
        recomputed_keys = {
            c.node.format(*i) for e in self.plan.entries for c in e.recompute for i in e.instances
        }
        for key in sorted(self.facts.keys - set(keys)):
            yield Finding("layouts", "the plan has no decision for this node of the model", key)
        for key in sorted((set(keys) | recomputed_keys) - self.facts.keys - self._rests.keys()):
            yield Finding("layouts", "the model has no such node", key)
        for key in sorted(
            {key for key in keys if keys.count(key) > 1} if len(set(keys)) < len(keys) else ()
        ):
            yield Finding("layouts", "the plan has two decisions for this node", key)
        yield from (f for e in self.plan.entries for f in self._check_arity(e))

    def _check_arity(self, entry: Entry) -> Iterator[Finding]:
        """Yield a finding for each strategy that does not have one layout per tensor of its node,
        so that layouts cannot be looked up."""
        if not entry.instances:
            yield Finding("layouts", "it has no nodes", entry.key)
            return
        for choice in (*entry.nodes, *entry.recompute):
            key = choice.node.format(*entry.instances[0])
            if key in self.facts.nodes:
                call = call_of(self.facts.nodes[key])
                expected = (len(call.inputs), len(call.outputs))
            elif key in self.facts.keys:
                op = self.priced.problem.ops[self.owner[key]]
                expected = (
                    len(op.strategies[0].layouts.inputs),
                    len(op.strategies[0].layouts.outputs),
                )
            elif key in self._rests:
                expected = (int(self._rests[key].gradient is not None), 1)
            else:
                continue
            if (len(choice.strategy.inputs), len(choice.strategy.outputs)) != expected:
                yield Finding(
                    "layouts", f"{choice.strategy} does not have one layout per tensor", key
                )

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each claim of an entry that does not hold."""
        for entry in self.plan.entries:
            op = self.owner[entry.nodes[0].node.format(*entry.instances[0])]
            together = {tuple(c.node.format(*i) for c in entry.nodes) for i in entry.instances}
            if together not in self._listed_nodes(op):
                yield Finding(
                    "layouts",
                    "the nodes of this entry do not form one decision of the problem",
                    entry.key,
                )
                continue
            stated = self.priced.problem.ops[op]
            if (entry.kind, entry.phase) != (stated.kind, stated.phase):
                yield Finding(
                    "layouts",
                    f"it is a {stated.kind} node of {stated.phase}, not a {entry.kind} node of"
                    f" {entry.phase}",
                    entry.key,
                )
            yield from self._check_strategies(entry, op, entry.nodes, "")
            if entry.recompute:
                yield from self._check_again(entry, op)
            if entry.runner_up and entry.runner_up.strategy not in {
                str(s.layouts) for s in stated.strategies
            }:
                yield Finding(
                    "layouts",
                    f"the problem does not offer {entry.runner_up.strategy}, its runner-up",
                    entry.key,
                )
            yield from self._check_times(entry)

    def _listed_nodes(self, op: int) -> tuple[set[tuple[str, ...]], ...]:
        """Return the nodes of an op for which the plan has an entry. A parameter is returned
        together with its storage."""
        listed_keys = set(keys_of(self.priced, op))
        source = self.priced.sources[op]
        return (
            (listed_keys, {(parameter_key(n), storage_key(n)) for n in source.names})
            if source.kind == "parameter" and self._rests
            else (listed_keys,)
        )

    def _check_again(self, entry: Entry, op: int) -> Iterator[Finding]:
        if [c.node for c in entry.recompute] != [c.node for c in entry.nodes]:
            yield Finding(
                "layouts", "the nodes that backward recomputes differ from the entry's", entry.key
            )
        elif not self.priced.problem.ops[op].recomputable:
            yield Finding(
                "layouts",
                "backward cannot recompute it: it is not an op of forward, or another layer reads"
                " it",
                entry.key,
            )
        else:
            yield from self._check_strategies(entry, op, entry.recompute, "again ")

    def _check_strategies(
        self, entry: Entry, op: int, choices: Sequence[NodeChoice], when: str
    ) -> Iterator[Finding]:
        """Yield a finding if the rules do not allow an entry's strategies, or if the problem does
        not offer them, so that the bound does not cover them."""
        illegal = [*self._find_illegal(entry, choices, when)]
        yield from illegal
        strategies = tuple(c.strategy for c in choices)
        if not illegal and not self._is_offered(op, strategies):
            shown = "; ".join(map(str, strategies))
            yield Finding(
                "layouts",
                f"the problem does not offer {shown} {when}for it: the bound does not cover it",
                entry.key,
            )

    def _find_illegal(
        self, entry: Entry, choices: Sequence[NodeChoice], when: str
    ) -> Iterator[Finding]:
        """Yield strategies that no rule allows, and layouts in which a parameter and its gradient
        cannot be stored."""
        strategies, sizes = tuple(c.strategy for c in choices), self.mesh.shape
        for choice in choices:
            key = choice.node.format(*entry.instances[0])
            if key in self.facts.nodes and not is_strategy(
                call_of(self.facts.nodes[key]), choice.strategy.plain, sizes
            ):
                yield Finding("layouts", f"no rule allows {choice.strategy}{when}", key)
            if key in self.parameters:
                p, at = self.parameters[key], strategies[-1].outputs[0]
                fits = (
                    at.fits(p.view, sizes)
                    and not at.has_partial
                    and not at.special
                    and storable(p.shape, p.view, at, sizes)
                )
                if not fits or not held_so(at, strategies, accumulates=self.context.accumulates):
                    message = (
                        f"it cannot be stored as {at} with its gradient as"
                        f" {_list_inputs(choice.strategy)}"
                    )
                    yield Finding("layouts", message, key)

    def _is_offered(self, op: int, strategies: tuple[Strategy, ...]) -> bool:
        """Return whether the problem offers these strategies of the nodes of an op together."""
        cluster = self.priced.sources[op].cluster
        if cluster is not None:
            return any(s.members == strategies for s in cluster.strategies)
        return any(in_plan_form(s) == strategies for s in self.priced.problem.ops[op].strategies)

    def _check_times(self, entry: Entry) -> Iterator[Finding]:
        for choices, said_s, when in (
            (entry.nodes, entry.time_s, ""),
            (entry.recompute, entry.again_s, " when recomputed"),
        ):
            try:
                derived = self.time_s(entry, choices) if choices else 0.0
            except AutoparError as error:
                yield Finding("time", error.what, entry.key)
                return
            if not near(derived, said_s):
                yield Finding(
                    "time",
                    f"one instance takes {derived:.6g} s{when}, not {said_s:.6g} s",
                    entry.key,
                )

    def time_s(self, entry: Entry, choices: Sequence[NodeChoice]) -> float:
        """Return the seconds of one instance of an entry under these strategies of its nodes."""
        key = choices[0].node.format(*entry.instances[0])
        layouts = choices[0].strategy
        if key in self.parameters:
            p = self.parameters[key]
            _, traffic = (
                OPTIMIZERS[str(self.plan.options.get("optimizer"))]
                if p.gradient is not None
                else (0, 0)
            )
            rests = held_bytes(p.view, p.dtype, choices[-1].strategy.outputs[0], self.mesh.shape)
            step_s = (
                traffic
                * rests
                / self._bandwidth(choices[-1].strategy.outputs[0])
                / self.context.num_microbatches
            )
            step_s += (
                self._cast_s(p, choices[-1].strategy.outputs[0]) / self.context.num_microbatches
            )
            return step_s + (
                self._added_s(p, layouts.inputs[0])
                if self.context.accumulates and p.gradient is not None
                else 0.0
            )
        if entry.kind == "compute":
            return sum(
                self._node_time_s(c.node.format(*entry.instances[0]), c.strategy) for c in choices
            )
        if (entry.kind == "input" and key != input_key("tangent")) or (
            key in self._crossing and layouts.outputs
        ):
            tensor = self.facts.tensors[key, 0]  # of a crossing output: its gradient
            size = held_bytes(tensor.shape, tensor.dtype, layouts.outputs[0], self.mesh.shape)
            wire = (
                self.context.crossing.before
                if entry.kind == "input"
                else self.context.crossing.behind
            )
            return (
                sent_s(wire, size)
                if key in self._crossing
                else size / self.profile.memory_bandwidth_bytes_per_s
            )
        return 0.0

    def _cast_s(self, p: Parameter, rests: Layout) -> float:
        """Return the seconds of reading and writing a parameter that ops read in another dtype,
        once per step."""
        if p.compute_dtype == p.dtype:
            return 0.0
        moved = sum(
            held_bytes(p.view, dtype, rests, self.mesh.shape)
            for dtype in (p.dtype, p.compute_dtype)
        )
        if rests.host:
            return moved / self._bandwidth(rests)
        return self.rates.op_s("elementwise", 0, moved, p.compute_dtype)

    def _bandwidth(self, rests: Layout) -> float:
        """Return the bandwidth (bytes/s) of the memory in which a parameter is stored."""
        if not rests.host:
            return self.profile.memory_bandwidth_bytes_per_s
        if self.profile.host is None:
            raise HardwareError(
                f"it is stored in host memory, for which profile {self.profile.name!r} has no"
                " figures"
            )
        return self.profile.host.memory_bandwidth_bytes_per_s

    def _added_s(self, p: Parameter, sums: Layout) -> float:
        """Return the seconds of adding a gradient to its sum.

        The gradient, or the operand of its cast, is read. The sum is written and, except for the
        first microbatch, also read.
        """
        dtype = p.dtype
        if sums.uncast:
            maker = next(
                t.key
                for t in self.facts.tensors.values()
                if any(r.key == parameter_key(p.name) for r in t.readers)
            )
            dtype = call_of(self.facts.nodes[maker]).inputs[0].dtype
        wide = torch.float32 if p.dtype.itemsize < 4 else p.dtype
        read, total = (
            held_bytes(p.view, dtype, sums, self.mesh.shape),
            held_bytes(p.view, wide, sums, self.mesh.shape),
        )
        written_s = self.rates.op_s("elementwise", 0, read + total, torch.float32)
        added_s = self.rates.op_s("elementwise", 0, read + 2 * total, torch.float32)
        return added_s - (added_s - written_s) / self.context.num_microbatches

    def crosses(self, entry: Entry) -> bool:
        """Return whether an entry is a value that crosses between stages."""
        return entry.nodes[0].node.format(*entry.instances[0]) in self._crossing

    def _node_time_s(self, key: str, strategy: Strategy) -> float:
        return call_s(call_of(self.facts.nodes[key]), strategy, self.rates)


def _list_inputs(strategy: Strategy) -> str:
    return ", ".join(map(str, strategy.inputs)) or "nothing"
