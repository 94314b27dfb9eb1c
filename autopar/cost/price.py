"""Build the optimization problem of a trace: every strategy and every collective in seconds and
bytes.

Gradients of 16-bit parameters are reduced over ranks in fp32, and priced so. A tensor that is cast
to the gradient of a wider parameter is not reduced before the cast. Other partial sums are reduced
in their own dtype. `Priced` keeps the map between the ops of the problem and the trace, so that
solutions can be stated as node keys and layouts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar.analysis.gradients import asked_again, cast_alone
from autopar.capture.trace import Input, Output, Parameter, Trace
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import LayoutGraph, all_layouts, layout_graph, local_bytes
from autopar.core.mesh import Mesh
from autopar.core.problem import Op, OpKind, OpStrategy, Phase, Problem, Use, Value, Variant
from autopar.core.stored_placements import storable
from autopar.cost.expert_routes import with_routes
from autopar.cost.gradient_dtypes import Uncast, left_uncast
from autopar.cost.keeping import borders_of, is_never_kept, may_run_again, split_furthest
from autopar.cost.kernel_offers import with_kernels
from autopar.cost.offload import away, host_budget
from autopar.cost.op_times import CollectivePrices, call_time, own_collectives
from autopar.cost.priced import Crossing, Priced, Source
from autopar.cost.zero_costs import HeldPrices, Making, adding_partial, resting_strategy
from autopar.cost.zero_stages import StepMoves, cannot_rest
from autopar.rules import TensorInfo
from autopar.sharding import ClusterClass, ClusterStrategy, Forced, Ref, group_of

# --------------------------------------------------------------------------------------------------
# The ops and values of a problem, one kind after the other.

_DIGITS = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass
class Builder:
    """Collects the ops and values of a problem. The fields are the arguments of `price`."""

    trace: Trace
    mesh: Mesh
    profile: HardwareProfile
    optimizer: str
    forced: Forced
    crossing: Crossing
    moves: StepMoves
    accumulates: bool
    exposed: Collection[str]
    uncast: Mapping[str, Uncast]
    all_ways: bool
    ops: list[Op] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    made: dict[Ref, tuple[int, int]] = field(default_factory=dict)  # tensor → (op, result)
    readers: dict[Ref, list[Use]] = field(default_factory=dict)
    infos: dict[Ref, TensorInfo] = field(default_factory=dict)
    graphs: dict[tuple[object, ...], LayoutGraph] = field(
        default_factory=dict
    )  # by the arguments of `layout_graph`
    only_cast: Mapping[str, torch.dtype] = field(
        init=False
    )  # gradients that are cast before they are reduced
    asked: frozenset[str] = field(init=False)  # nodes of forward that backward may run again

    def __post_init__(self) -> None:
        self.only_cast = cast_alone(self.trace)
        self.asked = asked_again(self.trace)

    def add(self, op: Op, source: Source) -> int:
        """Add an op with what it stands for, and return its index."""
        self.ops.append(op)
        self.sources.append(source)
        return len(self.ops) - 1

    def _add_reader(
        self, ref: Ref, op: int, operand: int, phase: Phase, *, again: bool = True
    ) -> None:
        """Record that an op reads a tensor; `again` tells whether it does when it is recomputed."""
        self.readers.setdefault(ref, []).append(Use(op, operand, phase, again))

    def parameters(self) -> None:
        """Add one op per class of equal parameters; its strategies are the storage layouts."""
        held = HeldPrices(self.profile, self.optimizer, self.moves, self.all_ways)
        outputs = _output_nodes(self.trace)
        for (pattern, *_), members in self._group_parameters().items():
            first = members[0]
            possible = self._storage_layouts(first)
            if self.accumulates:
                stages = self.forced.named.stages_of(first.name)
                strategies = held.strategies(first, possible, stages, self.uncast.get(first.name))
            else:
                strategies = tuple(
                    resting_strategy(first, layout, self.mesh.shape, self.optimizer, self.profile)
                    for layout in possible
                )
            op = Op(str(pattern), "parameter", "forward", len(members), (), strategies)
            names, nodes = tuple(p.name for p in members), tuple(p.node for p in members)
            index = self.add(
                op,
                Source(
                    "parameter", names, nodes, copies=first.is_narrowed and not self.accumulates
                ),
            )
            for p in members:
                self.made[p.node, 0] = (index, 0)
                self.infos[p.node, 0] = TensorInfo(p.view, p.compute_dtype)
                if p.gradient is not None:
                    self._add_reader((outputs[p.gradient].name, 0), index, 0, "backward")

    def _group_parameters(self) -> dict[tuple[object, ...], list[Parameter]]:
        """Group parameters that are equal in all layers; a key begins with their common name."""
        groups: dict[tuple[object, ...], list[Parameter]] = {}
        for p in self.trace.parameters:
            rest = (
                self.forced.storage.get(p.name),
                self.forced.rests(p.name),
                group_of(p.name, self.forced.starts),
                self.uncast.get(p.name),
            )
            alike = (
                _DIGITS.sub("*", p.name),
                p.view,
                p.dtype,
                p.compute_dtype,
                p.requires_grad,
                p.gradient is None,
                rest,
            )
            groups.setdefault(alike, []).append(p)
        return groups

    def _storage_layouts(self, p: Parameter) -> Sequence[Layout]:
        """The layouts in which a parameter may rest.

        Raises:
            ConstraintError: if there is none.
        """
        wanted = self.forced.storage.get(p.name)
        layouts = all_layouts(p.view, self.mesh.shape)
        if wanted is not None:
            fits = not wanted.has_partial and wanted.fits(p.view, self.mesh.shape)
            layouts = (wanted,) if fits else ()
        storing = [at for at in layouts if storable(p.shape, p.view, at, self.mesh.shape)]
        if wanted is None and self.forced.offload is not None and self.forced.offload.parameters:
            storing += [layout.on_host() for layout in storing]
        possible = self.forced.filter_storage(p.name, storing)
        if not possible:
            raise cannot_rest(p, self.forced, layouts, self.mesh)
        return possible

    def placeholders(self) -> None:
        """Add buffers, inputs and the tangent of the loss.

        Buffers and the tangent are replicated. Inputs arrive in any layout, since a rank copies
        only its own part; their gradients go to every rank. Inputs that cross between stages arrive
        in the layout in which their gradient goes back.
        """
        replicated = Layout.replicated(len(self.mesh.axes))
        for b in self.trace.buffers:
            size = local_bytes(b.view, b.dtype, replicated, self.mesh.shape)
            self._placeholder(
                "buffer",
                b.name,
                b.node,
                TensorInfo(b.view, b.dtype),
                (OpStrategy(Strategy((), (replicated,)), 0.0, size),),
            )
        gradients = _output_nodes(self.trace)
        for i in self.trace.inputs:
            self._placeholder(
                "input",
                i.path,
                i.node,
                TensorInfo(i.shape, i.dtype),
                self._arrival_strategies(i),
                crosses=i.crosses,
            )
            if i.gradient is not None:
                self._add_reader((gradients[i.gradient].name, 0), len(self.ops) - 1, 0, "backward")
        for loss in (o for o in self.trace.differentiable if o.is_loss):
            tangent = (OpStrategy(Strategy((), (replicated,)), 0.0),)
            self._placeholder(
                "input",
                "tangent",
                loss.tangent,
                TensorInfo(loss.shape, loss.dtype),
                tangent,
                phase="backward",
            )

    def _arrival_strategies(self, i: Input) -> tuple[OpStrategy, ...]:
        """One strategy per layout in which an input may arrive."""
        strategies, replicated = [], Layout.replicated(len(self.mesh.axes))
        for layout in (
            self._crossing_layouts(i) if i.crosses else all_layouts(i.shape, self.mesh.shape)
        ):
            size = local_bytes(i.shape, i.dtype, layout, self.mesh.shape)
            if i.crosses:  # held like an activation, not like the batch
                arrives_s, back = (
                    self.crossing.before.time_s(size),
                    (layout,) if i.gradient is not None else (),
                )
                strategies.append(
                    OpStrategy(Strategy(back, (layout,)), arrives_s, communication_s=arrives_s)
                )
            else:
                layouts = Strategy((replicated,) if i.gradient is not None else (), (layout,))
                strategies.append(
                    OpStrategy(layouts, size / self.profile.memory_bandwidth_bytes_per_s, size)
                )
        return tuple(strategies)

    def _crossing_layouts(self, border: Input | Output) -> Iterable[Layout]:
        """The layouts in which a tensor may cross between stages, or leave the model: the decided
        one, or all."""
        if isinstance(border, Output) and border.whole:
            return (Layout.replicated(len(self.mesh.axes)),)
        wanted = self.crossing.layouts.get(border.path)
        return all_layouts(border.shape, self.mesh.shape) if wanted is None else (wanted,)

    def _placeholder(
        self,
        kind: OpKind,
        name: str,
        node: str,
        info: TensorInfo,
        strategies: tuple[OpStrategy, ...],
        *,
        phase: Phase = "forward",
        crosses: bool = False,
    ) -> None:
        index = self.add(
            Op(name, kind, phase, 1, (), strategies),
            Source(kind, (name,), (node,), crosses=crosses),
        )
        self.made[node, 0] = (index, 0)
        self.infos[node, 0] = info

    def clusters(self, classes: Sequence[ClusterClass]) -> None:
        """Add one op per class of equal clusters."""
        for cluster_class in classes:
            first = cluster_class.first
            strategies = tuple(
                self._cluster_strategy(cluster_class, s) for s in cluster_class.strategies
            )
            phase: Phase = "forward" if first.phase == "forward" else "backward"
            op = Op(
                first.members[0].pattern,
                "compute",
                phase,
                len(cluster_class.instances),
                (),
                strategies,
                phase == "forward",
            )
            index = self.add(op, Source("compute", cluster=cluster_class))
            for cluster in cluster_class.instances:
                calls = {
                    r: info
                    for m in cluster.members
                    for r, info in zip(m.makes, m.call.outputs, strict=True)
                }
                for result, ref in enumerate(cluster.results):
                    self.made[ref] = (index, result)
                    self.infos[ref] = calls[ref]
                asked = {ref for m in cluster.members if m.node in self.asked for ref in m.reads}
                for operand, ref in enumerate(cluster.operands):
                    self._add_reader(
                        ref, index, operand, phase, again=phase == "backward" or ref in asked
                    )

    def settle_sums(self) -> None:
        """Keep only strategies that add up partial sums, for parameters whose gradients are made as
        partial sums along an axis on which ZeRO stage 1 is forced."""
        axes = [axis for axis, stage in self.forced.named.zero.items() if stage == 1]
        gradients = {
            use.op: ref
            for ref, uses in self.readers.items()
            for use in uses
            if self.ops[use.op].kind == "parameter"
        }
        making = Making(self.ops, self.sources, self.made)
        for i, ref in gradients.items() if axes else ():
            partial = [axis for axis in axes if making.partial(ref, axis)]
            self.ops[i] = replace(
                self.ops[i], strategies=adding_partial(self.ops[i].strategies, partial)
            )

    def settle_recomputation(self, classes: Sequence[ClusterClass]) -> None:
        """Decide which ops backward may run again."""
        leaving = ((o.node, 0) for o in self.trace.outputs if o.crosses)
        borders = {self.made[ref][0] for ref in borders_of(classes, leaving)}
        for i, (op, source) in enumerate(zip(self.ops, self.sources, strict=True)):
            may = (
                op.recomputable
                and i not in borders
                and source.cluster is not None
                and may_run_again(source.cluster, self.forced)
            )
            self.ops[i] = replace(op, recomputable=may)

    def _cluster_strategy(
        self, cluster_class: ClusterClass, strategy: ClusterStrategy
    ) -> OpStrategy:
        members = list(zip(cluster_class.first.members, strategy.members, strict=True))
        done = [(m, s) for m, s in members if not any(at.uncast for at in s.outputs)]
        compute_s = sum(call_time(m.call, s, self.mesh.shape, self.profile) for m, s in done)
        moved_s = sum(map(self.moves.price, own_collectives(members, self.mesh.shape)))
        return OpStrategy(strategy.outer, compute_s + moved_s, communication_s=moved_s)

    def outputs(self) -> None:
        """Add outputs and new values of buffers.

        The loss and new values of buffers are replicated. Other outputs have any layout without
        partial sums; their tangents arrive in the same layout.
        """
        replicated = Layout.replicated(len(self.mesh.axes))
        nodes = _output_nodes(self.trace)
        leaving = [o for o in self.trace.outputs if o.crosses or o.is_answered]
        for o in leaving:
            self._add_leaving_output(o)
        wanted = [
            (o.path, nodes[i].name, o.is_loss or o.whole)
            for i, o in enumerate(self.trace.outputs)
            if o not in leaving
        ]
        wanted += [(name, nodes[i].name, True) for name, i in self.trace.mutated.items()]
        for path, node, whole in wanted:
            layouts = (
                (replicated,) if whole else all_layouts(self.infos[node, 0].shape, self.mesh.shape)
            )
            strategies = tuple(OpStrategy(Strategy((layout,), ()), 0.0) for layout in layouts)
            index = self.add(
                Op(path, "output", "forward", 1, (), strategies), Source("output", (path,), (node,))
            )
            self._add_reader((node, 0), index, 0, "forward")

    def _add_leaving_output(self, o: Output) -> None:
        strategies = []
        for layout in self._crossing_layouts(o):
            crosses = o.crosses and o.tangent
            arrives_s = (
                self.crossing.behind.time_s(local_bytes(o.shape, o.dtype, layout, self.mesh.shape))
                if crosses
                else 0.0
            )
            layouts = Strategy((layout,), (layout,) if o.tangent else ())
            strategies.append(OpStrategy(layouts, arrives_s, communication_s=arrives_s))
        source = Source("output", (o.path,), (o.node,), crosses=o.crosses)
        index = self.add(Op(o.path, "output", "forward", 1, (), tuple(strategies)), source)
        self._add_reader((o.node, 0), index, 0, "forward")
        if o.tangent:
            self.made[o.tangent, 0] = (index, 0)
            self.infos[o.tangent, 0] = TensorInfo(o.shape, o.dtype)

    def values(self) -> tuple[list[Value], list[Variant], list[tuple[Ref, ...]]]:
        """Fold tensors into values by what makes them, and into variants by what reads them."""
        groups: dict[tuple[int, int], dict[tuple[Use, ...], list[Ref]]] = {}
        for ref, made in self.made.items():
            uses = self._uses(ref)
            if uses:
                groups.setdefault(made, {}).setdefault(uses, []).append(ref)
        values: list[Value] = []
        variants: list[Variant] = []
        refs: list[tuple[Ref, ...]] = []
        price = CollectivePrices(self.mesh, self.profile)
        for (op, result), by_uses in groups.items():
            refs_here = [ref for members in by_uses.values() for ref in members]
            ref = next((r for r in refs_here if r[0] in self.exposed), refs_here[0])
            graph = self._layout_graph(
                op, result, ref, {u for uses in by_uses for u in uses}, price
            )
            copied = self.sources[op].copies
            resident = (
                self.sources[op].kind not in ("compute", "output")
                and not self.sources[op].crosses
                and not copied
            )
            key = f"{self.ops[op].key}#{result}"
            phase: Phase = "backward" if self.ops[op].kind == "output" else self.ops[op].phase
            readers = [use for uses in by_uses for use in uses if use.phase == "forward"]
            keepable, info = self._keepable(op, result, graph, readers), self.infos[ref]
            dtype, away_s = (
                str(info.dtype).removeprefix("torch."),
                self._away(op, phase, info, graph, keepable),
            )
            values.append(
                Value(key, op, result, phase, graph, resident, keepable, copied, dtype, away_s)
            )
            for uses, members in by_uses.items():
                variants.append(Variant(len(values) - 1, len(members), uses))
                refs.append(tuple(members))
        return values, variants, refs

    def _uses(self, ref: Ref) -> tuple[Use, ...]:
        """The readers of a tensor, one per op, operand and phase.

        Of several instances of an op the one counts that reads the tensor again in backward, if
        there is one.
        """
        readers = sorted(
            self.readers.get(ref, ()), key=lambda u: (u.op, u.operand, u.phase, u.again)
        )
        return tuple({(u.op, u.operand, u.phase): u for u in readers}.values())

    def _keepable(
        self, op: int, result: int, graph: LayoutGraph, uses: Sequence[Use]
    ) -> frozenset[int] | None:
        """Indices of the layouts in which a value may be kept; None allows all.

        Empty if constraints force recomputation. On a grid: of the layouts in which forward makes
        or reads the value, those that are split over the most devices.
        """
        cluster, named = self.sources[op].cluster, self.forced.named
        if (
            cluster is not None
            and self.ops[op].recomputable
            and is_never_kept(cluster, result, self.forced)
        ):
            return frozenset()
        free = cluster is not None and cluster.first.results[result][0] not in named.rows
        if (
            not named.grid
            or free
            or self.sources[op].kind in ("input", "buffer")
            or self.ops[op].phase == "backward"
        ):
            return None
        layouts = [s.layouts.outputs[result] for s in self.ops[op].strategies]
        layouts += [s.layouts.inputs[u.operand] for u in uses for s in self.ops[u.op].strategies]
        return split_furthest(graph, layouts, named.grid, self.mesh.shape)

    def _away(
        self,
        op: int,
        phase: Phase,
        info: TensorInfo,
        graph: LayoutGraph,
        keepable: frozenset[int] | None,
    ) -> tuple[float, ...]:
        """`Value.away_s` of a value that forward makes or that arrives from another stage; empty
        without offload of activations."""
        offload, source = self.forced.offload, self.sources[op]
        if (
            offload is None
            or not offload.activations
            or phase == "backward"
            or not (source.kind == "compute" or source.crosses)
        ):
            return ()
        return away(info, graph, keepable, self.mesh.shape, self.moves.price)

    def _layout_graph(
        self, op: int, result: int, ref: Ref, uses: set[Use], price: CollectivePrices
    ) -> LayoutGraph:
        info = self.infos[ref]
        produced = [s.layouts.outputs[result] for s in self.ops[op].strategies]
        ordered = sorted(uses, key=lambda u: (u.op, u.operand))
        wanted = [s.layouts.inputs[u.operand] for u in ordered for s in self.ops[u.op].strategies]
        wanted += all_layouts(info.shape, self.mesh.shape) if ref[0] in self.exposed else ()
        gradient = any(self.ops[u.op].kind == "parameter" for u in uses)
        wide = (
            torch.float32
            if gradient and info.dtype.is_floating_point and info.dtype.itemsize < 4
            else None
        )
        reduces = (
            ref[0] not in self.only_cast or ref[0] in self.exposed
        )  # partial sums do not cross between stages
        key = (
            tuple(info.shape),
            info.dtype,
            wide,
            reduces,
            tuple(dict.fromkeys(produced)),
            tuple(dict.fromkeys(wanted)),
        )
        if key not in self.graphs:
            self.graphs[key] = layout_graph(
                info.shape,
                info.dtype,
                self.mesh.shape,
                produced,
                wanted,
                price,
                wide,
                reduces=reduces,
                share=price.share,
            )
        return self.graphs[key]


def _output_nodes(trace: Trace) -> list[fx.Node]:
    output = next(iter(reversed(trace.graph.nodes)))
    return list(output.args[0])  # type: ignore[arg-type]


def price(
    trace: Trace,
    classes: Sequence[ClusterClass],
    mesh: Mesh,
    profile: HardwareProfile,
    *,
    budget_bytes: int,
    optimizer: str = "adamw",
    forced: Forced | None = None,
    crossing: Crossing | None = None,
    num_microbatches: int = 1,
    num_in_flight: int = 1,
    exposed: Collection[str] = (),
    all_ways: bool = False,
) -> Priced:
    """Build the optimization problem of a trace.

    Args:
        trace: the trace of the model, or of one of its stages.
        classes: its classes of clusters, with their strategies.
        mesh: the mesh of the trace.
        profile: the hardware.
        budget_bytes: bytes of memory per device that a plan may use.
        optimizer: a key of `autopar.cost.priced.OPTIMIZERS`.
        forced: the constraints; None forces nothing.
        crossing: how tensors cross between stages, for the trace of a stage.
        num_microbatches: microbatches of one optimizer step, among which its time is divided.
        num_in_flight: number of microbatches whose kept values a stage holds at once.
        exposed: nodes whose results may cross between stages, in any layout without partial sums.
            Their layout graphs contain all layouts.
        all_ways: include dominated ways to hold a parameter. A plan for other hardware may use
            them.

    Returns:
        The problem, and what its ops and variants stand for.

    Raises:
        ConstraintError: if a parameter can rest in no layout that the constraints allow.
        HardwareError: if the profile lacks a figure that is needed.
    """
    forced = forced or Forced.nothing()
    host_budget_bytes = host_budget(forced, profile)
    accumulates = num_microbatches > 1 or forced.named.holds
    moves = StepMoves(mesh.shape, CollectivePrices(mesh, profile), num_microbatches)
    classes, uncast = left_uncast(classes, trace) if accumulates else (classes, {})
    builder = Builder(
        trace,
        mesh,
        profile,
        optimizer,
        forced,
        crossing or Crossing(),
        moves,
        accumulates,
        exposed,
        uncast,
        all_ways,
    )
    builder.parameters()
    builder.placeholders()
    builder.clusters(classes)
    builder.outputs()
    builder.settle_sums()
    builder.settle_recomputation(classes)
    values, variants, refs = builder.values()
    results: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        results.setdefault(value.op, []).append(index)
    ops = tuple(replace(op, results=tuple(results.get(i, ()))) for i, op in enumerate(builder.ops))
    problem = Problem(
        ops,
        tuple(values),
        tuple(variants),
        budget_bytes,
        (),
        num_in_flight,
        accumulates,
        profile.overlap_slowdown,
        host_budget_bytes=host_budget_bytes,
    )
    problem = with_kernels(trace, problem, builder.sources, mesh, profile)
    problem = with_routes(problem, builder.sources, moves.price, profile)
    return Priced(
        problem,
        tuple(builder.sources),
        tuple(refs),
        optimizer,
        moves,
        profile,
        forced.starts,
        forced.named.notes,
    )
