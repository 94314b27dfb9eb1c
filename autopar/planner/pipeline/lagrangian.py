"""Lower bounds of the parts of a model for all cuts: the Lagrangian of the whole model, part by
part.

Terms. A *unit* is the part of the model between neighbouring cut points; a *border* is before a
unit. An *instance* is one op or tensor of the unfolded model; the problem folds equal instances.
Rows and multipliers are those of `autopar.solve.formulation`; π of rows (3) are totals over all
instances of a variant, and are divided among them.

**Instances.** The problem with separate decisions for each instance has the same rows for each
instance. By weak duality the shared multipliers prove a lower bound of it. The bound of an instance
of an op is the least reduced cost of its strategies,

    d[x]  = time + Σ π of what it reads − Σ π of what it supplies − Σ κ of what it makes or reads
    d[rc] = min(0, time + Σ π of what it reads again − Σ π of what backward reads of it)
    κ[l]  = Σ π[l] of backward readers

Equal instances with equal neighbours have equal costs. Negative reduced costs of collectives are
added to the bound. For a tensor that crosses a border, those of both stages are added.

**Borders.** A stage's problem consists of its units, with an op in place of the rest of the model
for each crossing tensor. Let tensor v leave the stage before a border in layout L and arrive behind
it, and let G(L) be Σ π(L) of v's readers of its own phase behind the border. The op that replaces
these readers gets the multipliers G. For each collective, max(0, ΔG) ≤ Σ max(0, Δπ), so no reduced
cost decreases. Hence

    stage before   ≥ its units' least + G(L) − κ(L) of backward readers before the border
    stage behind   ≥ its units' least − G(L) − κ(L) of backward readers behind the border + time of
                   arriving in L

since leaving adds a forward reader, and arriving adds a result. Gradients cross in the other
direction and are not kept. G cancels in the sum over all stages. The layouts of crossing tensors
are chosen separately in forward and backward, and κ in a unit counts all backward readers,
including those in other stages. Both can only lower the bound.

**Copied ops and shared parameters.** Stages have copies of masks, positions and inputs, which
supply each unit separately. The multipliers of their backward readers and of their operands are 0,
and so are those of a gradient that is a sum over several holders of a parameter. The time of such
an op is divided among the units.

**Overlap.** A stage takes at least the cost of its work if compute hides all early communication
(`autopar.solve.prices`, λ = 1). Collectives here have this cost, at its minimum over the whole
model and all stages.

**Kernels.** With rows (10) and (11) for the kernels that any stage may offer
(`autopar.cost.kernel_offers`), each kernel lowers d[x], or d[rc], of its product by what it saves
beyond the cost of its collective minus the worth of the collective, which is the maximum over a of

    max(0, saved − max(0, time − Σ max(0, Δπ) − μ[head]))

since a stage that offers the kernel counts the collective in full, and has no more readers. For
copied ops it is lowered by everything that the kernel saves.

Any multipliers ≥ 0 prove a bound if a stage's problem has no choice that the problem of the whole
model lacks. Therefore the whole model must be priced with `readers` and `exposed` of `seams`: no
cluster crosses a border, and crossing tensors can have any layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.core.layout_graph import all_layouts
from autopar.core.problem import Kernels, OverlapKernel
from autopar.core.solution import Multipliers
from autopar.cost.priced import Crossing, Wire
from autopar.planner.pipeline.cuts import Pair, Parts, join_pairs, pareto_front
from autopar.planner.pipeline.unfold import Floats, Instance, Instances, UnfoldedRead, Worths
from autopar.sharding import Ref


@dataclass
class UnitLagrangian:
    """Computes the bounds of the parts of one problem.

    Args:
        instances: instances of the problem of the whole model, see the module.
        num_units: number of units.
        mesh_shape: shape of the mesh of a stage.
        crossing: the links to a stage's neighbours.
        multipliers: multipliers of the problem.
        exposed: nodes whose results may cross.
        kernels: the kernels that any stage may offer.
    """

    instances: Instances
    num_units: int
    mesh_shape: Sequence[int]
    crossing: Crossing
    multipliers: Multipliers
    exposed: frozenset[str]
    kernels: Kernels = field(default_factory=dict)
    _least: dict[object, float] = field(default_factory=dict)
    _fronts: dict[object, tuple[Pair, ...]] = field(default_factory=dict)
    _borders: dict[object, tuple[Floats, Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.problem = self.instances.priced.problem
        self.worths = Worths(self.instances, self.multipliers, self.exposed)
        self._kernels_by_op: dict[int, list[tuple[int, bool, OverlapKernel]]] = {}
        for (v, late), kernels in self.kernels.items():
            for kernel in kernels:
                self._kernels_by_op.setdefault(kernel.op, []).append((v, late, kernel))
        self._nodes = {n.name: n for n in self.instances.trace.graph.nodes}

    def parts(self, behind: UnitLagrangian | None = None, wire: Wire | None = None) -> Parts:
        """Compute the seconds of units, and of borders to the next stage.

        Args:
            behind: the parts of the next stage, if it has other devices.
            wire: the link to the next stage; by default that of `crossing`.
        """
        behind, wire = behind or self, wire or self.crossing.behind
        units = [0.0] * self.num_units
        borders: list[tuple[Pair, ...]] = [((0.0, 0.0),)] * (self.num_units - 1)
        for instance in self.instances.instances:
            units[instance.unit] += self.least(instance)
            for ref in instance.results:
                if ref in self.instances.variant:
                    units[instance.unit] += self.worths.of(ref).loss_s
                    for border, pairs in (
                        () if instance.alone else self._crosses(ref, instance.unit, behind, wire)
                    ):
                        borders[border - 1] = join_pairs(borders[border - 1], pairs)
        return Parts(tuple(units), tuple(borders))

    # ops

    def least(self, instance: Instance) -> float:
        """Return the least reduced cost of an instance, in seconds."""
        key, supplied = self.kind(instance), self.readers_of(instance)
        if key not in self._least:
            self._least[key] = self._least_of(instance, supplied)
        return self._least[key]

    def kind(self, instance: Instance) -> object:
        """Return a key of an instance's reduced costs. Instances with equal keys have equal
        costs."""
        supplied = self.readers_of(instance)
        return (
            instance.op,
            instance.recomputable,
            instance.share,
            tuple((k, self.worths.kind(ref)) for k, ref in instance.operands),
            tuple(
                (self.worths.kind(ref), tuple(sorted(Counter(r.use for r in reads).items())))
                for ref, reads in supplied.items()
            ),
        )

    def readers_of(self, instance: Instance) -> dict[Ref, list[UnfoldedRead]]:
        """Find the readers of each result of an instance. If several units have a copy of the op,
        only readers in the instance's unit count."""
        refs = [ref for ref in instance.results if ref in self.instances.variant]
        reads = {ref: self.instances.reads.get(ref, []) for ref in refs}
        return {
            ref: [r for r in each if not instance.alone or r.unit == instance.unit]
            for ref, each in reads.items()
        }

    def _least_of(
        self, instance: Instance, supplied: Mapping[Ref, Sequence[UnfoldedRead]]
    ) -> float:
        x, again = self.reduced_costs(instance, supplied)
        return float(x.min()) + (min(float(again.min()), 0.0) if instance.recomputable else 0.0)

    def reduced_costs(
        self,
        instance: Instance,
        supplied: Mapping[Ref, Sequence[UnfoldedRead]],
        inside: Collection[Ref] = (),
    ) -> tuple[Floats, Floats]:
        """Compute the reduced costs of an instance's strategies.

        Args:
            instance: the instance.
            supplied: the readers of its results, as from `readers_of`.
            inside: tensors whose rows are not relaxed.

        Returns:
            Seconds by strategy, in the op's own phase and as recomputed in backward.
        """
        x = instance.share * np.array([s.time_s for s in self.problem.ops[instance.op].strategies])
        again = x.copy()
        for operand, ref in instance.operands:
            if ref in inside:
                continue
            worth, layouts = self.worths.of(ref), self.worths.reads(ref, instance.op, operand)
            use = self.instances.use(instance.op, operand, ref)
            if use in worth.now:
                later_worth = worth.sum_of(worth.later, self.instances.reads[ref])
                x += worth.now[use][layouts] - worth.kappa(later_worth)[layouts]
                again += worth.later[use][layouts] if use in worth.later else 0.0
            elif use in worth.later:
                x += worth.later[use][layouts]
        for ref, reads in supplied.items():
            if ref in inside:
                continue
            worth, value = self.worths.of(ref), self.worths.value(ref)
            layouts = self.worths.layouts_made(ref)
            later = worth.sum_of(worth.later, reads)
            x -= (
                worth.sum_of(worth.now, reads)[layouts]
                + (later if value.resident else np.where(worth.versions, later, 0.0))[layouts]
            )
            again -= later[layouts]
        for kernel, most in self._kernel_savings(instance):
            (again if kernel.recomputed else x)[list(kernel.strategies)] -= most
        return x, again

    def _kernel_savings(self, instance: Instance) -> Iterator[tuple[OverlapKernel, float]]:
        """Generate the most that each kernel of an op's product saves, beyond the cost of its
        collectives minus their worth."""
        touched = [
            *(ref for _, ref in instance.operands),
            *(ref for ref in instance.results if ref in self.instances.variant),
        ]
        for v, late, kernel in self._kernels_by_op.get(instance.op, ()):
            if instance.alone:
                yield kernel, max(hidden.saved_s for hidden in kernel.hides)
            for ref in touched:
                if (
                    not instance.alone
                    and self.instances.variant[ref] == v
                    and not self.worths.narrower(v, ref[0] in self.exposed)
                ):
                    remaining_costs = self.worths.of(ref).remaining_costs[late]
                    yield (
                        kernel,
                        max(
                            0.0,
                            *(
                                hidden.saved_s - max(0.0, float(remaining_costs[hidden.arc]))
                                for hidden in kernel.hides
                            ),
                        ),
                    )

    # borders

    def _crosses(
        self, ref: Ref, maker: int, behind: UnitLagrangian, wire: Wire
    ) -> Iterator[tuple[int, tuple[Pair, ...]]]:
        """Generate the borders that a tensor may cross, with the cost of each layout: that of the
        stage before at the prices of these parts, and that of the stage behind at its own."""
        units = [r.unit for r in self.instances.reads.get(ref, [])]
        forward = self.worths.value(ref).phase == "forward"
        for border in (
            range(maker + 1, max(units) + 1)
            if units and forward
            else range(min(units, default=maker) + 1, maker + 1)
        ):
            key = (
                self._sides(ref, border),
                wire,
                *(() if behind is self else (id(behind), behind._sides(ref, border))),
            )
            if key not in self._fronts:
                before_s, behind_s = (
                    self._at_border(ref, border, wire)[0],
                    behind._at_border(ref, border, wire)[1],
                )
                self._fronts[key] = pareto_front(
                    zip(map(float, before_s), map(float, behind_s), strict=True)
                )
            yield border, self._fronts[key]

    def _sides(self, ref: Ref, border: int) -> object:
        """Return a key of a tensor's costs at a border: its kind, and its readers on either
        side."""
        reads = self.instances.reads.get(ref, [])
        sides = [r for r in reads if r.unit < border], [r for r in reads if r.unit >= border]
        return self.worths.kind(ref), tuple(
            tuple(sorted(Counter(r.use for r in side).items())) for side in sides
        )

    def _at_border(self, ref: Ref, border: int, wire: Wire) -> tuple[Floats, Floats]:
        """Return the seconds of the stage before and of the stage behind a border at these prices,
        by layout of the crossing tensor."""
        key = self._sides(ref, border), wire
        if key not in self._borders:
            reads = self.instances.reads.get(ref, [])
            self._borders[key] = self._costs(
                ref,
                [r for r in reads if r.unit < border],
                [r for r in reads if r.unit >= border],
                wire,
            )
        return self._borders[key]

    def _costs(
        self, ref: Ref, before: Sequence[UnfoldedRead], behind: Sequence[UnfoldedRead], wire: Wire
    ) -> tuple[Floats, Floats]:
        value, worth, node = self.worths.value(ref), self.worths.of(ref), self._nodes[ref[0]]
        forward = value.phase == "forward"
        gains = worth.sum_of(worth.now, behind if forward else before)
        later = worth.sum_of(worth.later, before), worth.sum_of(worth.later, behind)
        later_costs, arrives = np.maximum(later[0] - worth.made_s, 0.0), later[1]
        further_s = worth.crossing_loss_s - worth.loss_s  # in the stage of its producer
        at = np.array(
            [
                value.graph.index[layout]
                for layout in all_layouts(tuple(node.meta["val"].shape), self.mesh_shape)
            ]
        )
        arrives_s = np.array([wire.time_s(value.graph.bytes[n]) for n in at])
        if forward:
            return (
                gains[at] - later_costs[at] + further_s,
                arrives_s - gains[at] - arrives[at] + worth.crossing_loss_s,
            )
        return arrives_s - gains[at] + worth.crossing_loss_s, gains[at] + further_s
