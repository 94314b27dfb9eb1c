"""Build the optimization problem of a trace: every strategy and every collective in seconds and
bytes.

Gradients of 16-bit parameters are reduced over ranks in fp32, and priced accordingly. A tensor that
is cast to the gradient of a wider parameter is not reduced before the cast. Other partial sums are
reduced in their own dtype. `Priced` holds the map between the ops of the problem and the trace, so
that solutions can be stated as node keys and layouts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from torch import fx

from autopar.analysis.gradients import needed_by_backward
from autopar.capture.trace import Input, Output, Parameter, Trace
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.core.layout_graph import all_layouts, local_bytes
from autopar.core.mesh import Mesh
from autopar.core.problem import Op, OpKind, OpStrategy, Phase, Problem
from autopar.core.stored_placements import storable
from autopar.cost.expert_routes import with_routes
from autopar.cost.gradient_dtypes import left_uncast
from autopar.cost.kernel_offers import with_kernels
from autopar.cost.offload import host_budget
from autopar.cost.op_times import CollectivePrices, call_time, own_collectives
from autopar.cost.priced import Crossing, Priced, Source
from autopar.cost.tensor_values import (
    OpTables,
    PriceSetting,
    TensorValues,
    borders_of,
    may_run_again,
)
from autopar.cost.zero_costs import HeldPrices, PartialSumSearch, adding_partial, resting_strategy
from autopar.cost.zero_stages import StepMoves, cannot_rest
from autopar.rules import TensorInfo
from autopar.sharding import ClusterClass, ClusterStrategy, Forced, group_of

_DIGITS = re.compile(r"(?<=\.)\d+(?=\.|$)")


class OpBuilder:
    """Adds the ops of a problem to its tables, kind by kind."""

    def __init__(self, setting: PriceSetting) -> None:
        self.setting, self.tables = setting, OpTables()
        # Forward nodes that backward may recompute.
        self._asked = needed_by_backward(setting.trace)

    def parameters(self) -> None:
        """Add one op per class of equal parameters. Its strategies are the storage layouts."""
        held_prices = HeldPrices(
            self.setting.profile, self.setting.optimizer, self.setting.moves, self.setting.all_ways
        )
        outputs = _output_nodes(self.setting.trace)
        for (pattern, *_), members in self._group_parameters().items():
            first = members[0]
            possible = self._storage_layouts(first)
            if self.setting.accumulates:
                stages = self.setting.forced.named.stages_of(first.name)
                strategies = held_prices.strategies(
                    first, possible, stages, self.setting.uncast.get(first.name)
                )
            else:
                strategies = tuple(
                    resting_strategy(
                        first,
                        layout,
                        self.setting.mesh.shape,
                        self.setting.optimizer,
                        self.setting.profile,
                    )
                    for layout in possible
                )
            op = Op(str(pattern), "parameter", "forward", len(members), (), strategies)
            names, nodes = tuple(p.name for p in members), tuple(p.node for p in members)
            index = self.tables.add(
                op,
                Source(
                    "parameter",
                    names,
                    nodes,
                    copies=first.is_narrowed and not self.setting.accumulates,
                ),
            )
            for p in members:
                self.tables.producers[p.node, 0] = (index, 0)
                self.tables.infos[p.node, 0] = TensorInfo(p.view, p.compute_dtype)
                if p.gradient is not None:
                    self.tables.add_reader((outputs[p.gradient].name, 0), index, 0, "backward")

    def _group_parameters(self) -> dict[tuple[object, ...], list[Parameter]]:
        """Return the parameters in groups that are equal in all layers. A key begins with their
        common name."""
        groups: dict[tuple[object, ...], list[Parameter]] = {}
        for p in self.setting.trace.parameters:
            rest = (
                self.setting.forced.storage.get(p.name),
                self.setting.forced.rests(p.name),
                group_of(p.name, self.setting.forced.starts),
                self.setting.uncast.get(p.name),
            )
            key = (
                _DIGITS.sub("*", p.name),
                p.view,
                p.dtype,
                p.compute_dtype,
                p.requires_grad,
                p.gradient is None,
                rest,
            )
            groups.setdefault(key, []).append(p)
        return groups

    def _storage_layouts(self, p: Parameter) -> Sequence[Layout]:
        """Return the layouts in which a parameter may be stored.

        Raises:
            ConstraintError: if there is none.
        """
        forced_layout = self.setting.forced.storage.get(p.name)
        layouts = all_layouts(p.view, self.setting.mesh.shape)
        if forced_layout is not None:
            fits = not forced_layout.has_partial and forced_layout.fits(
                p.view, self.setting.mesh.shape
            )
            layouts = (forced_layout,) if fits else ()
        storing = [at for at in layouts if storable(p.shape, p.view, at, self.setting.mesh.shape)]
        if (
            forced_layout is None
            and self.setting.forced.offload is not None
            and self.setting.forced.offload.parameters
        ):
            storing += [layout.on_host() for layout in storing]
        possible = self.setting.forced.filter_storage(p.name, storing)
        if not possible:
            raise cannot_rest(p, self.setting.forced, layouts, self.setting.mesh)
        return possible

    def placeholders(self) -> None:
        """Add buffers, inputs and the tangent of the loss.

        Buffers and the tangent are replicated. Inputs arrive in any layout, since a rank copies
        only its own part. Their gradients are returned in full on every rank. Inputs that cross
        between stages arrive in the layout in which their gradient returns.
        """
        replicated = Layout.replicated(len(self.setting.mesh.axes))
        for b in self.setting.trace.buffers:
            size = local_bytes(b.view, b.dtype, replicated, self.setting.mesh.shape)
            self._placeholder(
                "buffer",
                b.name,
                b.node,
                TensorInfo(b.view, b.dtype),
                (OpStrategy(Strategy((), (replicated,)), 0.0, size),),
            )
        gradients = _output_nodes(self.setting.trace)
        for i in self.setting.trace.inputs:
            self._placeholder(
                "input",
                i.path,
                i.node,
                TensorInfo(i.shape, i.dtype),
                self._arrival_strategies(i),
                crosses=i.crosses,
            )
            if i.gradient is not None:
                self.tables.add_reader(
                    (gradients[i.gradient].name, 0), len(self.tables.ops) - 1, 0, "backward"
                )
        for loss in (o for o in self.setting.trace.differentiable if o.is_loss):
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
        """Return one strategy per layout in which an input may arrive."""
        strategies, replicated = [], Layout.replicated(len(self.setting.mesh.axes))
        for layout in (
            self._crossing_layouts(i)
            if i.crosses
            else all_layouts(i.shape, self.setting.mesh.shape)
        ):
            size = local_bytes(i.shape, i.dtype, layout, self.setting.mesh.shape)
            if i.crosses:  # stored like an activation, not like the batch
                arrives_s, back = (
                    self.setting.crossing.before.time_s(size),
                    (layout,) if i.gradient is not None else (),
                )
                strategies.append(
                    OpStrategy(Strategy(back, (layout,)), arrives_s, communication_s=arrives_s)
                )
            else:
                layouts = Strategy((replicated,) if i.gradient is not None else (), (layout,))
                strategies.append(
                    OpStrategy(
                        layouts, size / self.setting.profile.memory_bandwidth_bytes_per_s, size
                    )
                )
        return tuple(strategies)

    def _crossing_layouts(self, border: Input | Output) -> Iterable[Layout]:
        """Return the layouts in which a tensor may cross between stages or leave the model: the
        decided layout, or all."""
        if isinstance(border, Output) and border.whole:
            return (Layout.replicated(len(self.setting.mesh.axes)),)
        forced_layout = self.setting.crossing.layouts.get(border.path)
        return (
            all_layouts(border.shape, self.setting.mesh.shape)
            if forced_layout is None
            else (forced_layout,)
        )

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
        index = self.tables.add(
            Op(name, kind, phase, 1, (), strategies),
            Source(kind, (name,), (node,), crosses=crosses),
        )
        self.tables.producers[node, 0] = (index, 0)
        self.tables.infos[node, 0] = info

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
            index = self.tables.add(op, Source("compute", cluster=cluster_class))
            for cluster in cluster_class.instances:
                calls = {
                    r: info
                    for m in cluster.members
                    for r, info in zip(m.makes, m.call.outputs, strict=True)
                }
                for result, ref in enumerate(cluster.results):
                    self.tables.producers[ref] = (index, result)
                    self.tables.infos[ref] = calls[ref]
                asked = {ref for m in cluster.members if m.node in self._asked for ref in m.reads}
                for operand, ref in enumerate(cluster.operands):
                    self.tables.add_reader(
                        ref, index, operand, phase, again=phase == "backward" or ref in asked
                    )

    def settle_sums(self) -> None:
        """Keep only strategies that accumulate partial sums, for parameters whose gradients are
        partial sums along an axis with a forced ZeRO stage 1."""
        axes = [axis for axis, stage in self.setting.forced.named.zero.items() if stage == 1]
        gradients = {
            use.op: ref
            for ref, uses in self.tables.readers.items()
            for use in uses
            if self.tables.ops[use.op].kind == "parameter"
        }
        search = PartialSumSearch(self.tables.ops, self.tables.sources, self.tables.producers)
        for i, ref in gradients.items() if axes else ():
            partial = [axis for axis in axes if search.partial(ref, axis)]
            self.tables.ops[i] = replace(
                self.tables.ops[i],
                strategies=adding_partial(self.tables.ops[i].strategies, partial),
            )

    def settle_recomputation(self, classes: Sequence[ClusterClass]) -> None:
        """Decide which ops backward may recompute."""
        leaving = ((o.node, 0) for o in self.setting.trace.outputs if o.crosses)
        borders = {self.tables.producers[ref][0] for ref in borders_of(classes, leaving)}
        for i, (op, source) in enumerate(zip(self.tables.ops, self.tables.sources, strict=True)):
            may = (
                op.recomputable
                and i not in borders
                and source.cluster is not None
                and may_run_again(source.cluster, self.setting.forced)
            )
            self.tables.ops[i] = replace(op, recomputable=may)

    def _cluster_strategy(
        self, cluster_class: ClusterClass, strategy: ClusterStrategy
    ) -> OpStrategy:
        members = list(zip(cluster_class.first.members, strategy.members, strict=True))
        timed = [(m, s) for m, s in members if not any(at.uncast for at in s.outputs)]
        compute_s = sum(
            call_time(m.call, s, self.setting.mesh.shape, self.setting.profile) for m, s in timed
        )
        moved_s = sum(
            map(self.setting.moves.price, own_collectives(members, self.setting.mesh.shape))
        )
        return OpStrategy(strategy.outer, compute_s + moved_s, communication_s=moved_s)

    def outputs(self) -> None:
        """Add outputs and new values of buffers.

        The loss and new values of buffers are replicated. Other outputs have any layout without
        partial sums; their tangents arrive in the same layout.
        """
        replicated = Layout.replicated(len(self.setting.mesh.axes))
        nodes = _output_nodes(self.setting.trace)
        leaving = [o for o in self.setting.trace.outputs if o.crosses or o.is_answered]
        for o in leaving:
            self._add_leaving_output(o)
        outputs = [
            (o.path, nodes[i].name, o.is_loss or o.whole)
            for i, o in enumerate(self.setting.trace.outputs)
            if o not in leaving
        ]
        outputs += [(name, nodes[i].name, True) for name, i in self.setting.trace.mutated.items()]
        for path, node, is_replicated in outputs:
            layouts = (
                (replicated,)
                if is_replicated
                else all_layouts(self.tables.infos[node, 0].shape, self.setting.mesh.shape)
            )
            strategies = tuple(OpStrategy(Strategy((layout,), ()), 0.0) for layout in layouts)
            index = self.tables.add(
                Op(path, "output", "forward", 1, (), strategies), Source("output", (path,), (node,))
            )
            self.tables.add_reader((node, 0), index, 0, "forward")

    def _add_leaving_output(self, o: Output) -> None:
        strategies = []
        for layout in self._crossing_layouts(o):
            crosses = o.crosses and o.tangent
            arrives_s = (
                self.setting.crossing.behind.time_s(
                    local_bytes(o.shape, o.dtype, layout, self.setting.mesh.shape)
                )
                if crosses
                else 0.0
            )
            layouts = Strategy((layout,), (layout,) if o.tangent else ())
            strategies.append(OpStrategy(layouts, arrives_s, communication_s=arrives_s))
        source = Source("output", (o.path,), (o.node,), crosses=o.crosses)
        index = self.tables.add(Op(o.path, "output", "forward", 1, (), tuple(strategies)), source)
        self.tables.add_reader((o.node, 0), index, 0, "forward")
        if o.tangent:
            self.tables.producers[o.tangent, 0] = (index, 0)
            self.tables.infos[o.tangent, 0] = TensorInfo(o.shape, o.dtype)


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
        num_microbatches: number of microbatches of an optimizer step, which share its time.
        num_in_flight: largest number of microbatches whose kept values a stage holds at once.
        exposed: nodes whose results may cross between stages, in any layout without partial sums.
            Their layout graphs contain all layouts.
        all_ways: whether to include dominated ways to hold a parameter. A plan for other hardware
            may use them.

    Returns:
        The problem, and the sources of its ops and variants.

    Raises:
        ConstraintError: if the constraints allow no storage layout of a parameter.
        HardwareError: if a required figure is missing in the profile.
    """
    forced = forced or Forced.nothing()
    host_budget_bytes = host_budget(forced, profile)
    accumulates = num_microbatches > 1 or forced.named.holds
    moves = StepMoves(mesh.shape, CollectivePrices(mesh, profile), num_microbatches)
    classes, uncast = left_uncast(classes, trace) if accumulates else (classes, {})
    setting = PriceSetting(
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
    builder = OpBuilder(setting)
    builder.parameters()
    builder.placeholders()
    builder.clusters(classes)
    builder.outputs()
    builder.settle_sums()
    builder.settle_recomputation(classes)
    tables = builder.tables
    values, variants, refs = TensorValues(setting, tables).all()
    results: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        results.setdefault(value.op, []).append(index)
    ops = tuple(replace(op, results=tuple(results.get(i, ()))) for i, op in enumerate(tables.ops))
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
    problem = with_kernels(trace, problem, tables.sources, mesh, profile)
    problem = with_routes(problem, tables.sources, moves.price, profile)
    return Priced(
        problem,
        tuple(tables.sources),
        tuple(refs),
        optimizer,
        moves,
        profile,
        forced.starts,
        forced.named.notes,
    )
