"""Collective-overlap kernels on offer (`autopar.cost.kernel_times` says what they are and what each
saves).

On offer is a kernel along axes whose ranks reach each other's memory; where it saves more than a
launch takes, and nothing has slack anyway; where parts are even; where what is split belongs to
rows or columns of the product, not to what it sums over; and where the product's other factor is
there whenever what it reads is: a parameter, or in backward what forward made, so that the product
can stand where its operand is read first. What is gathered is there afterwards, for all who read
it. Where partial sums of several products are added up before they are scattered, the last addend's
product does that (`autopar.analysis.fusable`). Where what is scattered is only added to something,
and the sum normed, a product of forward may do that as well (`autopar.analysis.fusable`), if all of
it lies in whole rows as the part does.

What crosses between stages counts as made in its phase, as in the model without stages, and is
gathered by no kernel in backward, when it has slack there. So a stage has no kernel that the whole
model lacks, but where it may run again what the whole may not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar import ops
from autopar.analysis.fusable import normed_after, product_added, products_added
from autopar.capture.trace import Trace
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import Arc
from autopar.core.mesh import Mesh
from autopar.core.problem import Hidden, Kernel, Kernels, Problem, is_early
from autopar.core.solution import Choices
from autopar.cost.kernel_times import ADDITION, NAMES, TAIL, Region, Site, seconds_saved, terms_of
from autopar.cost.priced import Priced, Source
from autopar.rules import Call, operands_of
from autopar.sharding import Cluster, ClusterClass, ClusterStrategy, Ref, pattern_of

# --------------------------------------------------------------------------------------------------
# Products at an end of a tensor's collectives, and what kernels do with them beside
# (`autopar.cost.kernels`).

Place = tuple[int, ClusterClass]  # an op of the problem, and what it may do
Strategies = tuple[tuple[int, tuple[int, ...]], ...]
"""Ops, each with some of its strategies."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The op that adds something to a product's partial sums."""

    op: int
    classes: ClusterClass

    def strategies(self, layout: Layout) -> tuple[int, ...]:
        """With which it has both, and what it makes, in a layout."""
        return tuple(
            s for s, head in _heads(self.classes) if {*head.inputs, *head.outputs} == {layout}
        )


@dataclass(frozen=True, slots=True)
class NormedSum:
    """What comes after a product in its instances.

    Attributes:
        total: the sum. norms: the squares and the norm of it, of several pairs where some instances
            have other ones.
    """

    total: Sum
    norms: tuple[tuple[Place, Place], ...]

    def strategies(self, layout: Layout) -> Strategies:
        """Those with which all of it has whole rows in a layout; nothing where an op has none."""
        found = [(self.total.op, self.total.strategies(layout))]
        for (squares, squaring), (norm, norming) in self.norms:
            sums = {
                s: head.outputs[0]
                for s, head in _heads(squaring)
                if head.inputs[0] == layout and not head.outputs[0].has_partial
            }
            reads = [
                (layout, squared) for squared in set(sums.values()) if len(set(sums.values())) == 1
            ]
            rows = ((s, head.inputs, head.outputs[0]) for s, head in _heads(norming))
            normed = [
                s
                for s, (*read, weight), y in rows
                if tuple(read) in reads and weight.is_replicated and y == layout
            ]
            found += [(squares, tuple(sums)), (norm, tuple(normed))]
        return tuple(found) if all(strategies for _, strategies in found) else ()

    def calls(self, layout: Layout) -> tuple[tuple[Call, Strategy], ...]:
        """What it is in one instance, with whole rows in a layout."""
        first = dict(self.strategies(layout))
        places = (self.total.op, self.total.classes), *self.norms[0]
        return tuple(
            (classes.first.members[0].call, classes.strategies[first[op][0]].members[0])
            for op, classes in places
        )


@dataclass(frozen=True, slots=True)
class Product:
    """A product at an end of a tensor's collectives: its op, `again` as backward runs it again, and
    which factor the tensor is; None where it is the result, or the sum of that and more. `normed`:
    what it does after that."""

    op: int
    again: bool
    classes: ClusterClass
    factor: int | None
    total: Sum | None = None
    normed: NormedSum | None = None

    @property
    def cluster(self) -> Cluster:
        return self.classes.first

    def layout(self, strategy: ClusterStrategy) -> Layout:
        """In which the product has the tensor."""
        own = strategy.members[0]
        return own.outputs[0] if self.factor is None else own.inputs[self.factor]

    def result_dim(self, dim: int) -> int | None:
        """Of the product's result, what a dim of the tensor is; None where that is summed over,
        or both factors have it."""
        if self.factor is None:
            return dim
        mine, other, made = (
            terms_of(self.cluster.members[0].call)[i] for i in (self.factor, 1 - self.factor, 2)
        )
        return made.index(mine[dim]) if mine[dim] in made and mine[dim] not in other else None


def _heads(classes: ClusterClass) -> Iterator[tuple[int, Strategy]]:
    yield from ((s, strategy.members[0]) for s, strategy in enumerate(classes.strategies))


def factor_of(cluster: Cluster, ref: Ref) -> int | None:
    """Which factor of the cluster's product a tensor is, if nothing else in the cluster reads
    it; a bias is none."""
    head = cluster.members[0]
    at = [i for i, read in enumerate(head.reads) if read == ref]
    alone = (
        head.call.target is ops.dot
        and len(at) == 1
        and not any(ref in m.reads for m in cluster.members[1:])
    )
    return at[0] if alone and at[0] < 2 else None


def makes(cluster: Cluster, ref: Ref, target: Callable[..., object]) -> bool:
    """Whether a tensor is what the first op of a cluster makes, `target`, and nothing else in
    the cluster reads it."""
    head = cluster.members[0]
    return (
        head.call.target is target
        and head.makes[0] == ref
        and not any(ref in m.reads for m in cluster.members[1:])
    )


NO_ROOM = "what it would share with its peers takes memory that is worth more elsewhere"


@dataclass
class _Offers:
    trace: Trace
    problem: Problem
    sources: Sequence[Source]
    mesh: Mesh
    profile: HardwareProfile
    in_any_stage: bool = (
        False  # whether what some stage may have is on offer, too: for bounds alone
    )
    phases: dict[str, str] = field(
        init=False
    )  # node → its phase; placeholders have none, but what crosses
    nodes: dict[str, fx.Node] = field(init=False)
    heads: dict[str, int] = field(
        init=False
    )  # node → the op of the clusters that it is the first of
    regions: dict[tuple[int, Region], int] = field(
        default_factory=dict
    )  # axis and region → its number, as they come
    _known: dict[object, tuple[float, int]] = field(
        default_factory=dict
    )  # what is saved, by what that depends on

    def __post_init__(self) -> None:
        self.nodes = {n.name: n for n in self.trace.graph.nodes}
        clusters = (
            (i, c)
            for i, source in enumerate(self.sources)
            if source.cluster is not None
            for c in source.cluster.instances
        )
        self.heads = {cluster.members[0].node: i for i, cluster in clusters}
        self.phases = {
            name: n.meta["phase"] for name, n in self.nodes.items() if n.op == "call_function"
        }
        self.phases |= {i.node: "forward" for i in self.trace.inputs if i.crosses}
        self.phases |= {o.tangent: "backward" for o in self.trace.outputs if o.is_answered}

    def all(self) -> Kernels:
        """By variant and phase."""
        found: dict[tuple[int, bool], tuple[Kernel, ...]] = {}
        for v, variant in enumerate(self.problem.variants):
            value = self.problem.values[variant.value]
            for late in (False, True) if value.phase == "forward" else (False,):
                crossed = late and self.sources[value.op].crosses
                kernels = (
                    ()
                    if crossed or is_early(self.problem, v, late=late)
                    else tuple(self.of(v, late))
                )
                if kernels:
                    found[v, late] = kernels
        return found

    def of(self, v: int, late: bool) -> Iterator[Kernel]:
        """Of a variant, in backward of what forward made or in the phase that makes it."""
        graph = self.problem.values[self.problem.variants[v].value].graph
        for product in self._products(v, late):
            hides: dict[Layout | None, list[tuple[int, Arc]]] = {}
            for a, arc in enumerate(graph.arcs):
                hides.setdefault(self._ends(arc, product, v), []).append((a, arc))
            groups: dict[tuple[Hidden, ...], list[int]] = {}
            for s, strategy in enumerate(product.classes.strategies):
                here = hides.get(product.layout(strategy), ())
                found = tuple(
                    h for a, arc in here for h in self._hidden(v, product, strategy, a, arc)
                )
                groups.setdefault(found, []).append(s)
            yield from (
                kernel
                for found, chosen in groups.items()
                for kernel in self._kernels(v, product, tuple(chosen), found)
            )

    def _kernels(
        self, v: int, product: Product, strategies: tuple[int, ...], hides: tuple[Hidden, ...]
    ) -> Iterator[Kernel]:
        """One for several collectives, or for each where what comes after it has to lie as that
        one's result."""
        if product.normed is None:
            yield from [self._kernel(v, product, strategies, hides)] if hides else []
            return
        graph = self.problem.values[self.problem.variants[v].value].graph
        for hidden in hides:
            also = (
                ()
                if self.in_any_stage
                else product.normed.strategies(graph.layouts[graph.arcs[hidden.arc].dst])
            )
            yield Kernel(product.op, False, strategies, (hidden,), also=also)

    def _kernel(
        self, v: int, product: Product, strategies: tuple[int, ...], hides: tuple[Hidden, ...]
    ) -> Kernel:
        if product.total is None:
            return Kernel(product.op, product.again, strategies, hides)
        graph = self.problem.values[self.problem.variants[v].value].graph
        adding = product.total.strategies(
            graph.layouts[graph.arcs[hides[0].arc].src]
        )  # in partial sums it has nothing but these
        return Kernel(product.total.op, product.again, adding, hides, (product.op, strategies))

    def why(self, v: int, late: bool, arc: Arc, choices: Choices) -> Iterator[str]:
        """What keeps each product at a collective's end from doing it."""
        graph = self.problem.values[self.problem.variants[v].value].graph
        for product in self._products(v, late):
            s = (
                choices.recomputed.get(product.op)
                if product.again
                else choices.strategies[product.op]
            )
            strategy = None if s is None else product.classes.strategies[s]
            if strategy is not None and self._ends(arc, product, v) == product.layout(strategy):
                name = product.cluster.members[0].key.partition("/")[0]
                refusal = self._refusal(v, product, arc)
                a, same = graph.arcs.index(arc), (product.op, product.again)
                kernels = (
                    k
                    for k in self.problem.kernels.get((v, late), ())
                    if (k.product[0], k.again) == same and s in k.product[1]
                )
                offered = [h for k in kernels for h in k.hides if h.arc == a]
                if offered:
                    room = choices.regions is None or offered[0].region in choices.regions
                    refusal = (
                        "another product of it, or another collective of the product, saves more"
                        if room
                        else NO_ROOM
                    )
                yield f"{name}: {refusal or 'to cut it into chunks costs more than that hides'}"

    def why_not_normed(self, v: int, arc: Arc, choices: Choices) -> str:
        """What keeps a kernel that scatters a product's partial sums from norming what they are
        added to; nothing where no norm is."""
        graph = self.problem.values[self.problem.variants[v].value].graph
        layout = graph.layouts[arc.dst]
        for product in self._products(v, False):
            if product.normed is None:
                continue
            also = product.normed.strategies(layout)
            if not all(choices.strategies[op] in some for op, some in also) or not also:
                return (
                    "its norm apart: that, or the sum before it, does not have whole rows as this"
                    " is scattered"
                )
            if TAIL not in self.profile.kernels:
                return f"its norm apart: the hardware's profile has no figure for {TAIL}"
            return "its norm apart: one pass for all would take longer"
        return ""

    def _products(self, v: int, late: bool) -> Iterator[Product]:
        variant, problem = self.problem.variants[v], self.problem
        value = problem.values[variant.value]
        for use in variant.uses:
            again, classes = late and use.phase == value.phase, self.sources[use.op].cluster
            runs = (
                (use.again and problem.ops[use.op].recomputable)
                if again
                else late == (use.phase != value.phase)
            )
            factor = (
                None
                if classes is None
                else factor_of(classes.first, classes.first.operands[use.operand])
            )
            if (
                runs
                and classes is not None
                and factor is not None
                and (self.in_any_stage or self._is_first(use.op, classes, factor))
            ):
                yield Product(use.op, again, classes, factor)
        classes = self.sources[value.op].cluster
        runs = not late or problem.ops[value.op].recomputable
        if classes is None or not runs:
            return
        made = classes.first.results[value.result]
        if makes(classes.first, made, ops.dot):
            yield Product(value.op, late, classes, None)
            for normed in () if late else self._normed(classes):
                yield Product(value.op, late, classes, None, normed=normed)
        elif not late and makes(classes.first, made, ADDITION):
            yield from self._added(value.op, classes)

    def _normed(self, classes: ClusterClass) -> list[NormedSum]:
        """The sum and the norms after a product, if it has some in all instances, of one op the
        sums; in some stage it may be any of them, by itself."""
        found = [normed_after(self.nodes[cluster.members[0].node]) for cluster in classes.instances]
        places = [[self._place(n) for n in each] for each in found if each is not None]
        whole = [
            (total, squares, norm) for total, squares, norm in places if total and squares and norm
        ]
        totals, pairs = (
            {total[0]: Sum(*total) for total, _, _ in whole},
            {(s[0], n[0]): (s, n) for _, s, n in whole},
        )
        missing = len(whole) < len(found) or len(totals) != 1
        if self.in_any_stage:
            each = {(t[0], s[0], n[0]): NormedSum(Sum(*t), ((s, n),)) for t, s, n in whole}
            return [each[key] for key in sorted(each)]
        return (
            [
                NormedSum(
                    next(iter(totals.values())), tuple(pair for _, pair in sorted(pairs.items()))
                )
            ]
            if whole and not missing
            else []
        )

    def _place(self, node: fx.Node) -> Place | None:
        """The op that a node is the first of in its cluster."""
        op = self.heads.get(node.name)
        classes = None if op is None else self.sources[op].cluster
        return None if op is None or classes is None else (op, classes)

    def _added(self, op: int, classes: ClusterClass) -> Iterator[Product]:
        """The last addend of a sum, if it is a product of one op in all instances; in some stage
        it may be any that is in one."""
        totals = [self.nodes[cluster.members[0].node] for cluster in classes.instances]
        last = [(total, product_added(total)) for total in totals]
        places = (
            [(total, i) for total in totals for i in products_added(total)]
            if self.in_any_stage
            else last
        )
        found = {
            None if i is None else self.heads.get(operands_of(total)[i].name) for total, i in places
        }
        for product in (
            sorted(n for n in found if n is not None)
            if self.in_any_stage or len(found) == 1
            else ()
        ):
            source = self.sources[product].cluster
            if source is not None:
                yield Product(product, False, source, None, Sum(op, classes))

    def _is_first(self, product: int, classes: ClusterClass, factor: int) -> bool:
        """Whether of those of its pattern that read what is gathered the first, which would do
        that, is one of its op's, everywhere."""
        for cluster in classes.instances:
            head = cluster.members[0]
            readers = self.nodes[head.reads[factor][0]].users
            first = next(
                r
                for r in readers
                if r.target is ops.dot and pattern_of(r.meta["key"])[0] == head.pattern
            )
            if self.heads.get(first.name) != product:
                return False
        return True

    def _ends(self, arc: Arc, product: Product, v: int) -> Layout | None:
        """The end of a collective at which the product stands, if it is of the kind that the
        product could do."""
        graph, kind = self.problem.values[self.problem.variants[v].value].graph, arc.collective.kind
        if product.factor is None:
            return (
                graph.layouts[arc.src]
                if (kind, arc.collective.reduce_op) == ("reduce_scatter", "sum")
                else None
            )
        return graph.layouts[arc.dst] if kind == "all_gather" else None

    def _refusal(self, v: int, product: Product, arc: Arc) -> str:
        """Why a product cannot do a collective at its border; nothing where it can."""
        head, dim = product.cluster.members[0], arc.collective.dim
        if far := out_of_reach(self.mesh, arc.collective.axis):
            return far
        if product.result_dim(dim) is None:
            return "it sums over what is gathered, or has it in both factors"
        if product.factor is None and arc.collective.dtype != str(
            head.call.outputs[0].dtype
        ).removeprefix("torch."):
            return "its sums are reduced in another dtype"
        if product.factor is not None:
            for number, (other, _) in enumerate(head.reads):
                made_in = self.phases.get(other) if number != product.factor else None
                if made_in is not None and not (
                    made_in == "forward" and self.phases[head.node] == "backward"
                ):
                    return (
                        f"its {'other factor' if number < 2 else 'bias'} may not be there when this"
                        " is read first"
                    )
        graph = self.problem.values[self.problem.variants[v].value].graph
        info = head.call.outputs[0] if product.factor is None else head.call.inputs[product.factor]
        split = graph.layouts[arc.dst if product.factor is None else arc.src]
        return (
            "parts differ in length"
            if info.shape[dim] % split.num_shards(dim, self.mesh.shape)
            else ""
        )

    def _hidden(
        self, v: int, product: Product, strategy: ClusterStrategy, a: int, arc: Arc
    ) -> list[Hidden]:
        result_dim = product.result_dim(arc.collective.dim)
        if result_dim is None or self._refusal(v, product, arc):
            return []
        sizes, c = tuple(self.mesh.shape), arc.collective
        adds = product.total is not None
        graph = self.problem.values[self.problem.variants[v].value].graph
        normed = self._after(product, graph.layouts[arc.dst])
        if product.normed is not None and not normed:
            return []
        site = Site(
            product.cluster.members[0].call,
            strategy.members[0],
            sizes,
            c.kind,
            sizes[c.axis],
            result_dim,
            adds,
            normed,
        )
        key = (
            site.kind,
            site.size,
            result_dim,
            adds,
            arc.time_s,
            terms_of(site.call),
            bool(normed),
            *map(tuple, site.infos()),
        )
        if key not in self._known:
            self._known[key] = seconds_saved(site, arc.time_s, self.profile)
        saved_s, chunks = self._known[key]
        if saved_s <= self.profile.launch_overhead_s:
            return []
        region = c.axis, site.region(2 if product.factor is None else product.factor, c.dim, chunks)
        return [Hidden(a, saved_s, chunks, self.regions.setdefault(region, len(self.regions)))]

    def _after(self, product: Product, layout: Layout) -> tuple[tuple[Call, Strategy], ...]:
        """The sum and the norm after a product, where all can be had in this layout."""
        after = product.normed
        return after.calls(layout) if after is not None and after.strategies(layout) else ()


def out_of_reach(mesh: Mesh, axis: int) -> str:
    """Why ranks along an axis do not reach each other's memory; nothing where they do."""
    return (
        ""
        if mesh.shares_memory(axis)
        else f"axis {mesh.axes[axis].name!r} has ranks of several nodes, which do not share memory"
    )


def with_kernels(
    trace: Trace, problem: Problem, sources: Sequence[Source], mesh: Mesh, profile: HardwareProfile
) -> Problem:
    """The problem with its kernels, by variant and phase, and what they share; none where the
    profile says of no kernel what it reaches."""
    if not profile.kernels:
        return problem
    offers = _Offers(trace, problem, sources, mesh, profile)
    return replace(
        problem,
        kernels=offers.all(),
        regions=tuple(region.num_bytes for _, region in offers.regions),
    )


def in_any_stage(trace: Trace, priced: Priced, again: Collection[int]) -> Kernels:
    """The kernels that some stage of a trace may have, by the ops and variants of the whole.

    Args:
        priced: the whole, with what may cross exposed. again: ops that backward of some stage may
            run again.
    """
    if not priced.profile.kernels:
        return {}
    ops = tuple(
        replace(op, recomputable=op.recomputable or n in again)
        for n, op in enumerate(priced.problem.ops)
    )
    mesh = priced.moves.price.mesh
    return _Offers(
        trace,
        replace(priced.problem, ops=ops),
        priced.sources,
        mesh,
        priced.profile,
        in_any_stage=True,
    ).all()


def why_none(
    trace: Trace, priced: Priced, mesh: Mesh, where: tuple[int, bool], arc: Arc, choices: Choices
) -> str:
    """Why no kernel does a collective of given choices that a product stands at the end of; nothing
    where none does.

    Args:
        where: variant, and whether in backward of what forward made.
    """
    if not priced.profile.kernels or arc.collective.kind not in NAMES:
        return ""
    offers = _Offers(trace, priced.problem, priced.sources, mesh, priced.profile)
    return "; ".join(dict.fromkeys(offers.why(*where, arc, choices)))


def why_not_normed(
    trace: Trace, priced: Priced, mesh: Mesh, v: int, arc: Arc, choices: Choices
) -> str:
    """Of a collective of a variant that a product's kernel does: why that norms nothing; nothing
    where no norm of it follows."""
    if arc.collective.kind != "reduce_scatter":
        return ""
    return _Offers(trace, priced.problem, priced.sources, mesh, priced.profile).why_not_normed(
        v, arc, choices
    )
