"""Overlap kernels that a problem offers, and why a collective has none.

`autopar.cost.kernel_times` describes the kernels and their savings. A kernel is offered if

- the ranks of the axis can access each other's memory,
- it saves more than the time of a launch, and the collective is critical in some plans,
- all parts have the same length,
- the split dim belongs to the rows or columns of the product, not to the dim that it sums over,
- the other factor of the product exists whenever the moved tensor does: it is a parameter, or a
  forward result that backward reads. Then the product can run where its operand is first read.

The gathered tensor exists afterwards for all its readers. If partial sums of several products are
added before they are scattered, the product of the last addend does both. If the scattered tensor
is only added to another one and the sum is normalized, a forward product may do that as well. All
these tensors must then consist of whole rows in the layout of the part
(`autopar.analysis.fusable`).

A tensor that crosses between stages counts as computed in its phase, as in the model without
stages. No kernel gathers it in backward, since the collective has slack there. So a stage has no
kernel that the whole model does not have, unless it may recompute an op that the whole model may
not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar import ops
from autopar.analysis.fusable import normed_after, product_added, products_added
from autopar.capture.trace import Trace
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import Arc
from autopar.core.mesh import Mesh
from autopar.core.problem import Kernels, OverlapKernel, OverlapOption, Problem, is_early
from autopar.core.solution import Solution
from autopar.cost.kernel_times import (
    ADDITION,
    NAMES,
    TAIL,
    KernelSite,
    NormedSum,
    Place,
    Product,
    Region,
    Sum,
    factor_of,
    makes,
    seconds_saved,
    terms_of,
)
from autopar.cost.priced import Priced, Source
from autopar.rules import Call, operands_of
from autopar.sharding import ClusterClass, ClusterStrategy, pattern_of

_TOO_SMALL = "splitting it into chunks costs more time than the overlap saves"
NO_ROOM = "its buffers shared with peers need memory that saves more time elsewhere"


@dataclass(frozen=True, slots=True)
class _NodeIndex:
    """The nodes of a trace by name.

    Attributes:
        nodes: name → node.
        phases: name → phase; for placeholders, only if they cross between stages.
        heads: first node of a cluster → its op.
    """

    nodes: Mapping[str, fx.Node]
    phases: Mapping[str, str]
    heads: Mapping[str, int]

    @staticmethod
    def of(trace: Trace, sources: Sequence[Source]) -> _NodeIndex:
        """Index a trace.

        Args:
            trace: the trace.
            sources: the sources of its problem's ops.
        """
        nodes = {n.name: n for n in trace.graph.nodes}
        clusters = (
            (i, c)
            for i, source in enumerate(sources)
            if source.cluster is not None
            for c in source.cluster.instances
        )
        heads = {cluster.members[0].node: i for i, cluster in clusters}
        phases = {name: n.meta["phase"] for name, n in nodes.items() if n.op == "call_function"}
        phases |= {i.node: "forward" for i in trace.inputs if i.crosses}
        phases |= {o.tangent: "backward" for o in trace.outputs if o.is_answered}
        return _NodeIndex(nodes, phases, heads)


@dataclass
class _Offers:
    """The kernels of a problem, and the reasons why others are not offered.

    Attributes:
        in_any_stage: whether kernels of any stage are offered as well; for bounds only.
        regions: (axis, region) → its number.
    """

    index: _NodeIndex
    problem: Problem
    sources: Sequence[Source]
    mesh: Mesh
    profile: HardwareProfile
    in_any_stage: bool = False
    regions: dict[tuple[int, Region], int] = field(default_factory=dict)
    _saved: dict[object, tuple[float, int]] = field(default_factory=dict)

    @staticmethod
    def of_priced(trace: Trace, priced: Priced, mesh: Mesh) -> _Offers:
        """Return the kernels of a priced problem.

        Args:
            trace: the trace of the problem.
            priced: the problem.
            mesh: the mesh.
        """
        index = _NodeIndex.of(trace, priced.sources)
        return _Offers(index, priced.problem, priced.sources, mesh, priced.profile)

    def all(self) -> Kernels:
        """Return the kernels by variant and phase."""
        kernels_of: dict[tuple[int, bool], tuple[OverlapKernel, ...]] = {}
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
                    kernels_of[v, late] = kernels
        return kernels_of

    def of(self, v: int, late: bool) -> Iterator[OverlapKernel]:
        """Yield the kernels of a variant.

        Args:
            v: index of the variant.
            late: whether backward reads a forward value; otherwise its own phase reads it.
        """
        graph = self.problem.values[self.problem.variants[v].value].graph
        for product in self._products(v, late):
            hides: dict[Layout | None, list[tuple[int, Arc]]] = {}
            for a, arc in enumerate(graph.arcs):
                hides.setdefault(self._ends(arc, product, v), []).append((a, arc))
            groups: dict[tuple[OverlapOption, ...], list[int]] = {}
            for s, strategy in enumerate(product.classes.strategies):
                here = hides.get(product.layout(strategy), ())
                saving = tuple(
                    h for a, arc in here for h in self._find_hidden(v, product, strategy, a, arc)
                )
                groups.setdefault(saving, []).append(s)
            yield from (
                kernel
                for saving, chosen in groups.items()
                for kernel in self._kernels(v, product, tuple(chosen), saving)
            )

    def _kernels(
        self,
        v: int,
        product: Product,
        strategies: tuple[int, ...],
        hides: tuple[OverlapOption, ...],
    ) -> Iterator[OverlapKernel]:
        """Yield one kernel for several collectives. If a norm follows, yield one kernel per
        collective, since the norm needs the layout of the collective's result."""
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
            yield OverlapKernel(product.op, False, strategies, (hidden,), also=also)

    def _kernel(
        self,
        v: int,
        product: Product,
        strategies: tuple[int, ...],
        hides: tuple[OverlapOption, ...],
    ) -> OverlapKernel:
        if product.total is None:
            return OverlapKernel(product.op, product.recomputed, strategies, hides)
        graph = self.problem.values[self.problem.variants[v].value].graph
        adding = product.total.strategies(
            graph.layouts[graph.arcs[hides[0].arc].src]
        )  # the sum has no other operands in partial sums
        return OverlapKernel(
            product.total.op, product.recomputed, adding, hides, (product.op, strategies)
        )

    def why(self, v: int, late: bool, arc: Arc, choices: Solution) -> Iterator[str]:
        """Yield, for each product next to a collective, why it does not compute it.

        Args:
            v: index of the variant.
            late: whether backward reads a forward value.
            arc: the collective.
            choices: the solution.

        Returns:
            One reason per product, with the path of its module.
        """
        graph = self.problem.values[self.problem.variants[v].value].graph
        for product in self._products(v, late):
            s = (
                choices.recomputed.get(product.op)
                if product.recomputed
                else choices.strategies[product.op]
            )
            strategy = None if s is None else product.classes.strategies[s]
            if strategy is not None and self._ends(arc, product, v) == product.layout(strategy):
                name = product.cluster.members[0].key.partition("/")[0]
                refusal = self._refusal(v, product, arc)
                same = product.op, product.recomputed
                kernels = (
                    k
                    for k in self.problem.kernels.get((v, late), ())
                    if (k.product[0], k.recomputed) == same and s in k.product[1]
                )
                hides = (h for k in kernels for h in k.hides)
                offered = next((h for h in hides if h.arc == graph.arcs.index(arc)), None)
                if offered is not None:
                    refusal = _why_not_chosen(offered, choices)
                yield f"{name}: {refusal or _TOO_SMALL}"

    def why_not_normed(self, v: int, arc: Arc, choices: Solution) -> str:
        """Return why a kernel that scatters partial sums does not compute the norm that follows.

        Args:
            v: index of the variant.
            arc: the collective.
            choices: the solution.

        Returns:
            The reason, or "" if no norm follows.
        """
        graph = self.problem.values[self.problem.variants[v].value].graph
        layout = graph.layouts[arc.dst]
        for product in self._products(v, False):
            if product.normed is None:
                continue
            also = product.normed.strategies(layout)
            if not all(choices.strategies[op] in some for op, some in also) or not also:
                return (
                    "the norm runs separately: the norm, or the sum before it, does not use the"
                    " layout in which this is scattered"
                )
            if TAIL not in self.profile.kernels:
                return (
                    f"the norm runs separately: the hardware profile has no measurement of {TAIL}"
                )
            return "the norm runs separately: one fused pass would take longer"
        return ""

    def _products(self, v: int, late: bool) -> Iterator[Product]:
        """Yield the products before or after the collectives of a variant."""
        yield from self._reading_products(v, late)
        yield from self._making_products(v, late)

    def _reading_products(self, v: int, late: bool) -> Iterator[Product]:
        """Yield the products that have a variant as a factor."""
        variant, problem = self.problem.variants[v], self.problem
        value = problem.values[variant.value]
        for use in variant.uses:
            again, classes = late and use.phase == value.phase, self.sources[use.op].cluster
            runs = (
                (use.read_again and problem.ops[use.op].recomputable)
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

    def _making_products(self, v: int, late: bool) -> Iterator[Product]:
        """Yield the products whose result, or a sum that contains it, is a variant."""
        problem = self.problem
        value = problem.values[problem.variants[v].value]
        classes = self.sources[value.op].cluster
        runs = not late or problem.ops[value.op].recomputable
        if classes is None or not runs:
            return
        result = classes.first.results[value.result]
        if makes(classes.first, result, ops.dot):
            yield Product(value.op, late, classes, None)
            for normed in () if late else self._find_normed_sums(classes):
                yield Product(value.op, late, classes, None, normed=normed)
        elif not late and makes(classes.first, result, ADDITION):
            yield from self._added_products(value.op, classes)

    def _find_normed_sums(self, classes: ClusterClass) -> list[NormedSum]:
        """Return the sum and the norms after a product. All instances must have them, and one op
        must be the sum.

        With `in_any_stage`, return the sum and the norm of each instance separately.
        """
        instance_sums = [
            normed_after(self.index.nodes[cluster.members[0].node]) for cluster in classes.instances
        ]
        places = [[self._place(n) for n in nodes] for nodes in instance_sums if nodes is not None]
        complete = [
            (total, squares, norm) for total, squares, norm in places if total and squares and norm
        ]
        totals, pairs = (
            {total[0]: Sum(*total) for total, _, _ in complete},
            {(s[0], n[0]): (s, n) for _, s, n in complete},
        )
        missing = len(complete) < len(instance_sums) or len(totals) != 1
        if self.in_any_stage:
            normed_sums = {
                (t[0], s[0], n[0]): NormedSum(Sum(*t), ((s, n),)) for t, s, n in complete
            }
            return [normed_sums[key] for key in sorted(normed_sums)]
        return (
            [
                NormedSum(
                    next(iter(totals.values())), tuple(pair for _, pair in sorted(pairs.items()))
                )
            ]
            if complete and not missing
            else []
        )

    def _place(self, node: fx.Node) -> Place | None:
        """Return the op whose clusters begin with a node."""
        op = self.index.heads.get(node.name)
        classes = None if op is None else self.sources[op].cluster
        return None if op is None or classes is None else (op, classes)

    def _added_products(self, op: int, classes: ClusterClass) -> Iterator[Product]:
        """Yield the product that is the last addend of a sum, if it is the same op in all
        instances.

        With `in_any_stage`, yield every product that is an addend in an instance.
        """
        totals = [self.index.nodes[cluster.members[0].node] for cluster in classes.instances]
        last = [(total, product_added(total)) for total in totals]
        places = (
            [(total, i) for total in totals for i in products_added(total)]
            if self.in_any_stage
            else last
        )
        products = {
            None if i is None else self.index.heads.get(operands_of(total)[i].name)
            for total, i in places
        }
        for product in (
            sorted(n for n in products if n is not None)
            if self.in_any_stage or len(products) == 1
            else ()
        ):
            source = self.sources[product].cluster
            if source is not None:
                yield Product(product, False, source, None, Sum(op, classes))

    def _is_first(self, product: int, classes: ClusterClass, factor: int) -> bool:
        """Return whether, in every instance, this op has the first product of its pattern that
        reads the gathered tensor. This product would run the kernel."""
        for cluster in classes.instances:
            head = cluster.members[0]
            readers = self.index.nodes[head.reads[factor][0]].users
            first = next(
                r
                for r in readers
                if r.target is ops.dot and pattern_of(r.meta["key"])[0] == head.pattern
            )
            if self.index.heads.get(first.name) != product:
                return False
        return True

    def _ends(self, arc: Arc, product: Product, v: int) -> Layout | None:
        """Return the layout on the product's side of a collective, if a kernel supports this
        collective; else None."""
        graph, kind = self.problem.values[self.problem.variants[v].value].graph, arc.collective.kind
        if product.factor is None:
            return (
                graph.layouts[arc.src]
                if (kind, arc.collective.reduce_op) == ("reduce_scatter", "sum")
                else None
            )
        return graph.layouts[arc.dst] if kind == "all_gather" else None

    def _refusal(self, v: int, product: Product, arc: Arc) -> str:
        """Return why a product cannot compute the collective next to it; "" if it can."""
        head, dim = product.cluster.members[0], arc.collective.dim
        if far := out_of_reach(self.mesh, arc.collective.axis):
            return far
        if product.result_dim(dim) is None:
            return "it sums over the gathered dim, or the gathered dim is in both factors"
        if product.factor is None and arc.collective.dtype != str(
            head.call.outputs[0].dtype
        ).removeprefix("torch."):
            return "its partial sums are reduced in another dtype"
        if product.factor is not None and (late := self._late_operand(product)):
            return f"its {late} may not be computed yet when the gathered tensor is read first"
        graph = self.problem.values[self.problem.variants[v].value].graph
        info = head.call.outputs[0] if product.factor is None else head.call.inputs[product.factor]
        split = graph.layouts[arc.dst if product.factor is None else arc.src]
        return (
            "shards differ in length"
            if info.shape[dim] % split.num_shards(dim, self.mesh.shape)
            else ""
        )

    def _late_operand(self, product: Product) -> str:
        """Return the operand of a product, other than the gathered one, that may be computed too
        late; "" if there is none."""
        head = product.cluster.members[0]
        in_backward = self.index.phases[head.node] == "backward"
        for number, (other, _) in enumerate(head.reads):
            made_in = self.index.phases.get(other) if number != product.factor else None
            if made_in is not None and not (made_in == "forward" and in_backward):
                return "other factor" if number < 2 else "bias"
        return ""

    def _find_hidden(
        self, v: int, product: Product, strategy: ClusterStrategy, a: int, arc: Arc
    ) -> list[OverlapOption]:
        result_dim = product.result_dim(arc.collective.dim)
        if result_dim is None or self._refusal(v, product, arc):
            return []
        sizes, c = tuple(self.mesh.shape), arc.collective
        adds = product.total is not None
        graph = self.problem.values[self.problem.variants[v].value].graph
        normed = self._sum_and_norm_after(product, graph.layouts[arc.dst])
        if product.normed is not None and not normed:
            return []
        site = KernelSite(
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
        if key not in self._saved:
            self._saved[key] = seconds_saved(site, arc.time_s, self.profile)
        saved_s, chunks = self._saved[key]
        if saved_s <= self.profile.launch_overhead_s:
            return []
        region = c.axis, site.region(2 if product.factor is None else product.factor, c.dim, chunks)
        return [
            OverlapOption(a, saved_s, chunks, self.regions.setdefault(region, len(self.regions)))
        ]

    def _sum_and_norm_after(
        self, product: Product, layout: Layout
    ) -> tuple[tuple[Call, Strategy], ...]:
        """Return the sum and the norm after a product, if all can have this layout."""
        after = product.normed
        return after.calls(layout) if after is not None and after.strategies(layout) else ()


def _why_not_chosen(offered: OverlapOption, choices: Solution) -> str:
    """Return why an offered kernel is not chosen."""
    has_room = choices.regions is None or offered.region in choices.regions
    if has_room:
        return (
            "a kernel of the collective with another product, or of the product with another"
            " collective, saves more"
        )
    return NO_ROOM


def out_of_reach(mesh: Mesh, axis: int) -> str:
    """Return why ranks along an axis cannot access each other's memory; "" if they can."""
    return (
        ""
        if mesh.shares_memory(axis)
        else f"axis {mesh.axes[axis].name!r} spans several nodes, which do not share memory"
    )


def with_kernels(
    trace: Trace, problem: Problem, sources: Sequence[Source], mesh: Mesh, profile: HardwareProfile
) -> Problem:
    """Return a problem with overlap kernels and the memory that they share.

    Args:
        trace: the trace of the problem.
        problem: the priced problem.
        sources: the sources of its ops.
        mesh: the mesh.
        profile: the hardware. Without figures for kernels, the problem is returned unchanged.
    """
    if not profile.kernels:
        return problem
    offers = _Offers(_NodeIndex.of(trace, sources), problem, sources, mesh, profile)
    return replace(
        problem,
        kernels=offers.all(),
        regions=tuple(region.num_bytes for _, region in offers.regions),
    )


def in_any_stage(trace: Trace, priced: Priced, again: Collection[int]) -> Kernels:
    """Return the kernels that any stage of a trace may have, by ops and variants of the whole
    trace.

    Args:
        trace: the whole trace.
        priced: its problem, in which tensors that may cross are exposed.
        again: ops that the backward of some stage may recompute.
    """
    if not priced.profile.kernels:
        return {}
    ops = tuple(
        replace(op, recomputable=op.recomputable or n in again)
        for n, op in enumerate(priced.problem.ops)
    )
    mesh = priced.moves.price.mesh
    offers = _Offers.of_priced(
        trace, replace(priced, problem=replace(priced.problem, ops=ops)), mesh
    )
    return replace(offers, in_any_stage=True).all()


def why_none(
    trace: Trace, priced: Priced, mesh: Mesh, where: tuple[int, bool], arc: Arc, choices: Solution
) -> str:
    """Return why no kernel computes a collective that has a product next to it.

    Args:
        trace: the trace of the problem.
        priced: the priced problem.
        mesh: the mesh.
        where: index of the variant, and whether backward reads a forward value.
        arc: the collective.
        choices: the solution.

    Returns:
        The reasons, or "" if no product is next to the collective or the profile has no kernels.
    """
    if not priced.profile.kernels or arc.collective.kind not in NAMES:
        return ""
    offers = _Offers.of_priced(trace, priced, mesh)
    return "; ".join(dict.fromkeys(offers.why(*where, arc, choices)))


def why_not_normed(
    trace: Trace, priced: Priced, mesh: Mesh, v: int, arc: Arc, choices: Solution
) -> str:
    """Return why a kernel that scatters partial sums does not compute the norm that follows.

    Args:
        trace: the trace of the problem.
        priced: the priced problem.
        mesh: the mesh.
        v: index of the variant.
        arc: the collective of the kernel.
        choices: the solution.

    Returns:
        The reason, or "" if no norm follows.
    """
    if arc.collective.kind != "reduce_scatter":
        return ""
    return _Offers.of_priced(trace, priced, mesh).why_not_normed(v, arc, choices)
