"""Check the proof of a plan: look up its multipliers in the problem by their stored names, and
derive its figures."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar import ops
from autopar.analysis.gradients import operand_written
from autopar.analysis.work import is_view
from autopar.capture.trace import Trace
from autopar.certificate.bound import MemoryRow, Prices, Versions, lower_bound
from autopar.certificate.cases import UnprovenCases, ruled_out_by_case
from autopar.certificate.decisions import keys_of
from autopar.certificate.facts import Facts, Tensor, TensorKey
from autopar.certificate.report import NEAR, Finding, near
from autopar.core.layout import Layout
from autopar.core.problem import Value, at_best
from autopar.cost.priced import Priced
from autopar.plans import Plan, Potential, Proof, ProofCase
from autopar.rules import call_of
from autopar.sharding import Ref
from autopar.validation.shards import held_bytes, local_lengths

# --------------------------------------------------------------------------------------------------
# Memory that is certainly live at a point of the step, under every plan: the memory rows of the
# bound.
#
# start of backward        stored tensors, and all kept values of every microbatch in flight
# end of backward          stored tensors, and every gradient, or the sums of gradients
# a backward node runs     stored tensors; the results of its op; the operands of the op's first
#                          node in the layouts in which it reads them; the op's scratch memory; all
#                          other kept values that no node has needed yet; returned outputs that
#                          backward will not read
# just after a node with partial sums that are reduced in a wider dtype
#                          stored tensors; the sums and their wide copy; kept values and outputs as
#                          above; each complete gradient and each tensor that still has a reader, in
#                          their fewest bytes
#
# A backward node needs a forward result if it reads it, if it needs a view of it from forward, or
# if it needs the results of an op that may be recomputed, which then reads its operands. After the
# result of a recomputed op is read, an operand that nothing else reads may be freed. If the operand
# is kept in several layouts, this also holds for the version that the op read. With several
# microbatches, the values of the others in flight are held in full at every point, and so are the
# sums of gradients. A gradient itself is freed when it is added.

_WIDENED = "/widen"


@dataclass
class Moments:
    """The memory rows of one priced model: the tensors that are certainly live at a moment of the
    step."""

    trace: Trace
    facts: Facts
    priced: Priced
    mesh_shape: tuple[int, ...]
    _position: dict[str, int] = field(default_factory=dict)
    _needed_at: dict[str, float] = field(default_factory=dict)
    _read_at: dict[str, float] = field(default_factory=dict)
    _reread_at: dict[str, float] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.priced.problem
        self._position = {node.name: place for place, node in enumerate(self.trace.graph.nodes)}
        self._owner = {
            key: n
            for n in range(len(problem.ops))
            for keys in keys_of(self.priced, n)
            for key in keys
        }
        for node in reversed(self.trace.graph.nodes):
            (
                self._needed_at[node.name],
                self._read_at[node.name],
                self._reread_at[node.name],
            ) = self._first_needed(node)
            self._last[node.name] = self._last_needed(node)

    def _first_needed(self, node: fx.Node) -> tuple[float, float, float]:
        """Return the positions of the first backward node that could need a forward result, of the
        first that itself reads it or a view of it, and of the first for which a recomputed op could
        read it; infinite if there is none."""
        asked, read, through = [math.inf], [math.inf], [math.inf]
        for user in node.users:
            if user.op != "call_function":
                continue
            is_recomputable = self.priced.problem.ops[self._owner[user.meta["key"]]].recomputable
            if user.meta["phase"] == "backward":
                read.append(self._position[user.name])
            elif _shares_memory(user):
                read.append(self._read_at[user.name])
                asked.append(self._needed_at[user.name])
                through.append(self._reread_at[user.name])
            elif is_recomputable:
                asked.append(self._needed_at[user.name])
                through.append(self._needed_at[user.name])
        return min(*asked, *read), min(read), min(through)

    def _last_needed(self, node: fx.Node) -> float:
        """Return the position of the last backward node that could need the result of a node, or a
        view of it; −∞ if there is none."""
        positions, in_backward = [-math.inf], node.meta.get("phase") == "backward"
        for user in node.users:
            if user.op != "call_function":
                continue
            if user.meta["phase"] == "backward":
                positions += [
                    self._position[user.name],
                    self._last[user.name] if in_backward and _is_view(user) else -math.inf,
                ]
            elif (
                _is_view(user)
                or self.priced.problem.ops[self._owner[user.meta["key"]]].recomputable
            ):
                positions.append(self._last[user.name])
        return max(positions)

    def _waits(self, name: str, now: int, value: Value) -> bool:
        """Return whether all kept versions are certainly live: no node has needed the value yet, or
        the nodes that have needed it read the only version."""
        one = len(value.graph.layouts if value.keepable is None else value.keepable) == 1
        is_kept = self._read_at[name] < math.inf and (one or self._reread_at[name] != now)
        return now < self._needed_at[name] < math.inf or (now == self._needed_at[name] and is_kept)

    def row(self, place: str, worth_s: float) -> MemoryRow | None:
        """Return the row of a point of the step; None if there is no such point."""
        problem = self.priced.problem
        gradients = {
            n: [op.count * s.gradient_bytes for s in op.strategies]
            for n, op in enumerate(problem.ops)
        }
        sums = gradients if problem.accumulates else {}
        if place == "start of backward":
            return MemoryRow(
                {
                    v: variant.count * problem.num_in_flight
                    for v, variant in enumerate(problem.variants)
                },
                sums,
                worth_s,
            )
        if place == "end of backward":
            return MemoryRow({}, gradients, worth_s)
        node = self.facts.nodes.get(place.removesuffix(_WIDENED))
        if node is None or node.meta["phase"] != "backward":
            return None
        row = (
            self._row_at_widening(node, worth_s)
            if place.endswith(_WIDENED)
            else self._while(node, worth_s)
        )
        others = problem.num_in_flight - 1
        num_waiting = (
            {
                v: row.kept.get(v, 0) + others * variant.count
                for v, variant in enumerate(problem.variants)
            }
            if others
            else row.kept
        )
        return MemoryRow(num_waiting, _both(row.live, sums), worth_s)

    def _while(self, node: fx.Node, worth_s: float) -> MemoryRow:
        problem, now = self.priced.problem, self._position[node.name]
        num_waiting: dict[int, int] = {}
        live: dict[int, list[int]] = {}
        reads = self._reads(node)
        for v, (variant, refs) in enumerate(zip(problem.variants, self.priced.refs, strict=True)):
            value = problem.values[variant.value]
            if value.phase == "forward":
                waiting = sum(self._waits(ref[0], now, value) for ref in refs if ref not in reads)
                num_waiting |= {v: waiting} if waiting else {}
            elif not _shares_memory(node):
                for name, result in refs:
                    if name == node.name:
                        layouts = [
                            s.layouts.outputs[value.result]
                            for s in problem.ops[value.op].strategies
                        ]
                        self._count(live, value.op, (node.meta["key"], result), layouts)
        for ref, operand in reads.items():
            op = self._owner[node.meta["key"]]
            layouts = [s.layouts.inputs[operand] for s in problem.ops[op].strategies]
            self._count(live, op, (self.facts.names[ref[0]], ref[1]), layouts)
        self._count_scratch(live, node)
        self._count_returned(live, now)
        return MemoryRow(num_waiting, live, worth_s)

    def _count_scratch(self, live: dict[int, list[int]], node: fx.Node) -> None:
        """Add the scratch memory of the gradient of a cross entropy, if it is the first node of its
        op."""
        op = self._owner[node.meta["key"]]
        cluster = self.priced.sources[op].cluster
        if (
            cluster is None
            or node.target is not ops.cross_entropy_backward
            or cluster.first.members[0].call.target is not node.target
        ):
            return
        logits = call_of(node).inputs[0]
        parts = [
            local_lengths(logits.shape, s.members[0].inputs[0], self.mesh_shape)
            for s in cluster.strategies
        ]
        _add(live, op, [ops.cross_entropy_backward_scratch(part, logits.dtype) for part in parts])

    def _row_at_widening(self, node: fx.Node, worth_s: float) -> MemoryRow:
        """Return the memory row just after a node whose result is about to be reduced in a wider
        dtype."""
        problem, now = self.priced.problem, self._position[node.name]
        num_waiting: dict[int, int] = {}
        live: dict[int, list[int]] = {}
        for v, (variant, refs) in enumerate(zip(problem.variants, self.priced.refs, strict=True)):
            value = problem.values[variant.value]
            if value.phase == "forward":
                waiting = sum(now < self._needed_at[name] < math.inf for name, _ in refs)
                num_waiting |= {v: waiting} if waiting else {}
                continue
            fewest = min(value.graph.bytes)
            for name, result in refs:
                tensor = self.facts.tensors[self.facts.names[name], result]
                if name == node.name:
                    _add(live, value.op, self._while_widened(tensor, variant.value))
                elif self._position[name] < now < self._last[name]:
                    maker = self.facts.nodes.get(tensor.key)
                    num = int(maker is None or not _shares_memory(maker))
                    _add(live, value.op, [num * fewest] * len(problem.ops[value.op].strategies))
                elif self._position[name] < now and not problem.accumulates:
                    for n in [
                        self._owner[r.key] for r in tensor.readers if r.key.endswith("/parameter")
                    ][-1:]:
                        _add(
                            live,
                            n,
                            [min(fewest, s.gradient_bytes) for s in problem.ops[n].strategies],
                        )
        self._count_returned(live, now + 0.5)
        return MemoryRow(num_waiting, live, worth_s)

    def _while_widened(self, tensor: Tensor, v: int) -> list[int]:
        """Return the bytes of partial sums and of their copy in the dtype of the reduction, for
        each strategy of the op that computes them. Sums that need no reduction, or are reduced in
        their own dtype, do not count. A tensor that is replicated may be sliced first."""
        ops, value = self.priced.problem.ops, self.priced.problem.values[v]
        uses = (
            use
            for variant in self.priced.problem.variants
            if variant.value == v
            for use in variant.uses
        )
        read = {s.layouts.inputs[use.operand] for use in uses for s in ops[use.op].strategies}
        sizes = []
        for produced in (s.layouts.outputs[value.result] for s in ops[value.op].strategies):
            sums, first = {produced}, set[Layout]()
            while sums - first:
                first |= sums
                steps = (
                    a
                    for a in value.graph.arcs
                    if not a.collective.reduce_op and value.graph.layouts[a.src] in first
                )
                sums = first | {value.graph.layouts[a.dst] for a in steps}
            reduced = {
                value.graph.layouts[a.src] for a in value.graph.arcs if a.collective.reduce_op
            } & first
            narrow = [held_bytes(tensor.shape, tensor.dtype, at, self.mesh_shape) for at in reduced]
            wide = [
                held_bytes(tensor.shape, tensor.sum_dtype, at, self.mesh_shape) for at in reduced
            ]
            counts = (
                produced.has_partial and produced not in read and tensor.sum_dtype != tensor.dtype
            )
            sizes.append(min(map(sum, zip(narrow, wide, strict=True)), default=0) if counts else 0)
        return sizes

    def _count_returned(self, live: dict[int, list[int]], now: float) -> None:
        for name, op in () if self.priced.problem.accumulates else self._returned_nodes().items():
            if self._last[name] < now:
                layouts = [s.layouts.inputs[0] for s in self.priced.problem.ops[op].strategies]
                self._count(live, op, (self.facts.names[name], 0), layouts)

    def _returned_nodes(self) -> dict[str, int]:
        """Return the nodes whose results the model returns in their own memory, each with the op of
        the problem that represents the output."""
        paths = {o.path for o in self.trace.outputs if not o.crosses}
        outputs = (
            (n, s)
            for n, s in enumerate(self.priced.sources)
            if s.kind == "output" and s.names[0] in paths
        )
        nodes = ((self.facts.nodes.get(self.facts.names[s.nodes[0]]), n) for n, s in outputs)
        return {node.name: n for node, n in nodes if node is not None and not _shares_memory(node)}

    def _reads(self, node: fx.Node) -> dict[Ref, int]:
        """Return the tensors that a node reads if its op begins with it, by operand of the op. They
        must have their own memory and not be stored."""
        cluster = self.priced.sources[self._owner[node.meta["key"]]].cluster
        for instance in cluster.instances if cluster else ():
            if instance.members[0].key == node.meta["key"]:
                return {
                    ref: place
                    for place, ref in enumerate(instance.operands)
                    if self._has_memory(ref, node.meta["key"])
                }
        return {}

    def _has_memory(self, ref: Ref, reader: str) -> bool:
        """Return whether only its readers need the memory of a tensor that a node reads."""
        tensor = self.facts.tensors[self.facts.names[ref[0]], ref[1]]
        maker = self.facts.nodes.get(tensor.key)
        shares = maker is not None and _is_view(maker)
        return (
            not (tensor.given and tensor.resident)
            and not shares
            and any(r.key == reader for r in tensor.readers)
        )

    def _count(
        self, live: dict[int, list[int]], op: int, key: TensorKey, layouts: Sequence[Layout]
    ) -> None:
        tensor = self.facts.tensors[key]
        _add(
            live,
            op,
            [
                0 if at.uncast else held_bytes(tensor.shape, tensor.dtype, at, self.mesh_shape)
                for at in layouts
            ],
        )


def _add(live: dict[int, list[int]], op: int, sizes: Sequence[int]) -> None:
    if any(sizes):
        live[op] = [a + b for a, b in zip(live.get(op, [0] * len(sizes)), sizes, strict=True)]


def _both(
    a: Mapping[int, Sequence[int]], b: Mapping[int, Sequence[int]]
) -> dict[int, Sequence[int]]:
    """Return the sums of the bytes per strategy of two mappings."""
    both = {n: [x + y for x, y in zip(a[n], b[n], strict=True)] for n in a.keys() & b.keys()}
    return {**a, **b, **both}


def _shares_memory(node: fx.Node) -> bool:
    """Return whether the result of a node shares the memory of its operand."""
    return operand_written(node) is not None or _is_view(node)


def _is_view(node: fx.Node) -> bool:
    return node.target is not operator.getitem and is_view(node.target)


@dataclass
class StoredMultipliers:
    """The multipliers that a plan stores.

    `findings` lists the stored multipliers that match nothing in the problem. These prove nothing.
    """

    trace: Trace
    plan: Plan
    priced: Priced
    facts: Facts
    findings: list[Finding] = field(default_factory=list)

    @property
    def num_multipliers(self) -> int:
        """The number of stored multipliers."""
        return _count(self.plan.proof) + sum(map(_count, self.plan.proof.cases))

    def bound_s(self) -> float:
        """Return the bound in seconds that they prove for a plan without stages. If the proof has
        cases, it is the least bound of all cases."""
        cases = self.plan.proof.cases
        if not cases:
            return self._bound_of(self.plan.proof, {})
        try:
            ruled_out = ruled_out_by_case(self.priced, cases, len(self.plan.mesh.shape))
        except UnprovenCases as error:
            self.findings.append(Finding("bound", str(error)))
            return 0.0
        bounds = [self._bound_of(*each) for each in zip(cases, ruled_out, strict=True)]
        return min(bounds)

    def _bound_of(self, proof: Proof | ProofCase, ruled_out: Mapping[int, Sequence[int]]) -> float:
        """Return the bound for all solutions without the strategies that are ruled out, by op."""
        balance = proof.balance
        if not all(0.0 <= share <= 1.0 for share in balance):
            self.findings.append(
                Finding("bound", f"balance {balance} is not a pair of shares, so it proves nothing")
            )
            return 0.0
        return lower_bound(
            at_best(self.priced.problem),
            self.prices(proof),
            self._rows(proof),
            balance,
            self.versions(proof),
            ruled_out,
        )

    def prices(self, proof: Proof | ProofCase | None = None) -> Prices:
        """Return the multipliers π by variant, use and phase.

        Args:
            proof: the proof or case with the multipliers; by default the plan's proof.
        """
        proof, num_ops = proof or self.plan.proof, len(self.priced.problem.ops)
        tensors, readers = (
            self._tensors(),
            {keys_of(self.priced, n)[0][0]: n for n in range(num_ops)},
        )
        return dict(
            filter(
                None,
                (self._read_potential(p, tensors, readers) for p in proof.potentials),
            )
        )

    def versions(self, proof: Proof | ProofCase | None = None) -> dict[int, Versions]:
        """Return the multipliers of versions by variant.

        Args:
            proof: the proof or case with the multipliers; by default the plan's proof.
        """
        tensors, versions = self._tensors(), dict[int, Versions]()
        for version in (proof or self.plan.proof).versions:
            v, problem = tensors.get((version.node, version.result), -1), self.priced.problem
            graph = problem.values[problem.variants[v].value].graph
            index = {str(layout): i for i, layout in enumerate(graph.layouts)} if v >= 0 else {}
            worths = version.values_s, version.copies_s, version.once_s
            if set().union(*worths) <= index.keys():
                versions[v] = Versions(
                    *({index[layout]: worth for layout, worth in each.items()} for each in worths)
                )
            else:
                self.findings.append(
                    Finding(
                        "bound",
                        "a multiplier names layouts that the problem does not have",
                        version.node,
                    )
                )
        return versions

    def _tensors(self) -> dict[tuple[str, int], int]:
        return {
            (self.facts.names[refs[0][0]], refs[0][1]): v for v, refs in enumerate(self.priced.refs)
        }

    def _read_potential(
        self, potential: Potential, tensors: dict[tuple[str, int], int], readers: dict[str, int]
    ) -> tuple[tuple[int, int, bool], dict[int, float]] | None:
        """Look up the tensor and the reader of a stored multiplier.

        Returns:
            ((variant, use, whether it is read in the other phase), layout → π); None, with a
            finding, if the problem has no such reader or layout.
        """
        v, problem = tensors.get((potential.node, potential.result), -1), self.priced.problem
        if v >= 0:
            value = problem.values[problem.variants[v].value]
            index = {str(layout): i for i, layout in enumerate(value.graph.layouts)}
            who = readers.get(potential.reader, -1), potential.operand
            for i, use in enumerate(problem.variants[v].uses):
                if (use.op, use.operand) == who and potential.values_s.keys() <= index.keys():
                    by_layout = {
                        index[layout]: worth for layout, worth in potential.values_s.items()
                    }
                    return (v, i, potential.phase != value.phase), by_layout
        message = f"a multiplier of {potential.reader} names layouts that the problem does not have"
        self.findings.append(Finding("bound", message, potential.node))
        return None

    def _rows(self, proof: Proof | ProofCase) -> list[MemoryRow]:
        rows, worth = [], proof.memory_s
        moments = (
            Moments(self.trace, self.facts, self.priced, self.plan.mesh.shape) if worth else None
        )
        for place, seconds in worth.items():
            row = moments.row(place, seconds) if moments else None
            if row is None:
                self.findings.append(
                    Finding(
                        "bound", ("no memory constraint holds for every plan at this point"), place
                    )
                )
            else:
                rows.append(row)
        return rows


def _count(proof: Proof | ProofCase) -> int:
    versions = (each for v in proof.versions for each in (v.values_s, v.copies_s, v.once_s))
    return sum(map(len, (*(p.values_s for p in proof.potentials), *versions, proof.memory_s)))


def check_proof(proof: Proof, bound_s: float) -> Iterator[Finding]:
    """Yield a finding for each figure of a proof that contradicts another.

    The following must hold: certified bound ≤ bound of the multipliers ≤ objective, and searched
    bound ≤ objective. Bound and gap must follow from these figures.

    Args:
        proof: the claimed figures.
        bound_s: the bound that the multipliers prove.
    """
    slack = NEAR * abs(proof.objective_s)
    if not proof.certified_bound_s <= bound_s + slack:
        yield Finding(
            "bound", f"the multipliers prove {bound_s:.9g} s, not {proof.certified_bound_s:.9g} s"
        )
    if not bound_s <= proof.objective_s + slack:
        yield Finding(
            "bound",
            f"the multipliers prove {bound_s:.9g} s, but the objective is only"
            f" {proof.objective_s:.9g} s",
        )
    if not proof.searched_bound_s <= proof.objective_s + slack:
        yield Finding(
            "bound",
            f"the search claims {proof.searched_bound_s:.9g} s, but the objective is only"
            f" {proof.objective_s:.9g} s",
        )
    if not abs(max(proof.certified_bound_s, proof.searched_bound_s) - proof.bound_s) <= slack:
        searched = (
            f"the search claims {proof.searched_bound_s:.9g} s"
            if proof.searched_bound_s
            else "no search any"
        )
        message = (
            f"the multipliers are claimed to prove {proof.certified_bound_s:.9g} s, and {searched}"
        )
        yield Finding("bound", f"the bound is claimed to be {proof.bound_s:.9g} s: {message}")
    gap = (
        max(proof.objective_s - proof.bound_s, 0.0) / proof.objective_s
        if proof.objective_s
        else 0.0
    )
    if not near(1 - gap, 1 - proof.gap):
        yield Finding("bound", f"objective and bound are {gap:.6%} apart, not {proof.gap:.6%}")
