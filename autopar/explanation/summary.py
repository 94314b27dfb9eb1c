"""Lines about a whole plan: model and hardware, step time, memory, and optimality."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.breakdown import WAITING, step_parts
from autopar.core.mesh import Mesh
from autopar.core.units import seconds, share, size
from autopar.plans import RESTING, Pipeline, Plan, idle_axes

_SAME = 1e-4  # relative to the objective: bounds that differ by less are reported as one
_ROUNDING = 1e-9  # relative to the step: shorter times are not reported
_LEAST = 1e-30  # lower limit of the step in seconds, so that shares are finite
_ON_HOSTS = ("parameters", "optimizer", "gradients", "copies", "activations")
_EITHER = ("activations", "gradients")  # activations are freed when the last gradient exists


def made_for(plan: Plan) -> str:
    """Return model, mesh, hardware and optimizer as text."""
    model = plan.fingerprint.model_name or "model"
    optimizer, precision = plan.options.get("optimizer", "none"), plan.options.get("precision")
    read = f", parameters read in {precision}" if precision else ""
    use = "inference" if plan.options.get("inference") else f"optimizer {optimizer}"
    return (
        f"{model} on mesh {plan.mesh} ({devices_of(plan.mesh)}), {plan.fingerprint.profile},"
        f" {use}{read}"
    )


def devices_of(mesh: Mesh) -> str:
    """Return the number of devices, and the size of nodes unless the axis names show it."""
    per_node, total = mesh.devices_per_node, mesh.num_devices
    shows_nodes = len(mesh.axes) == 1 or "node" in mesh.names
    nodes = (
        ""
        if shows_nodes or total % per_node
        else ", one node"
        if total == per_node
        else f", {total // per_node} nodes of {per_node}"
    )
    return f"{total} devices{nodes}"


def overlap_lines(plan: Plan) -> Iterator[str]:
    """Yield the overlapped communication and the step time with it; nothing if no communication can
    overlap.
    """
    overlap, prediction = plan.overlap, plan.prediction
    if prediction.in_kernels_s:
        yield (
            f"{num_kernels(plan)} collective-overlap kernels save "
            f"{seconds(prediction.in_kernels_s)}"
        )
    if overlap.slowdown >= 1.0:
        return
    by_slack, counted_s = {slack: 0.0 for slack in ("prefetchable", "deferrable")}, 0.0
    for c in plan.communications:
        if c.slack in by_slack and c.collective.kind != "slice" and c.kernel is None:
            by_slack[c.slack] += len(c.instances) * c.time_s
            counted_s += len(c.instances) * c.time_s if c.beside else 0.0
    kinds = " and ".join(f"{seconds(time_s)} {slack}" for slack, time_s in by_slack.items())
    yield (
        f"{kinds} of communication, of which {seconds(counted_s)} count as overlapped in the "
        f"objective; {seconds(prediction.hidden_s)} overlap with compute, which each second slows "
        f"down by {overlap.slowdown:g} s, {seconds(prediction.exposed_s)} do not: simulated, the "
        f"emitted step takes {seconds(prediction.simulated_s)}"
    )
    less = (
        ", and less where the step leaves less memory"
        if overlap.forward_room or overlap.backward_room
        else ""
    )
    yield (
        f"early collectives use at most {size(overlap.forward_bytes)} in forward, "
        f"{size(overlap.backward_bytes)} in backward{less}"
    )


def idle(plan: Plan) -> Iterator[str]:
    """Yield the axes along which all devices do the same work, if any."""
    if names := idle_axes(plan):
        costs = f"on {plan.fingerprint.profile} communication would cost more than it saves"
        named = (
            ""
            if len(names) == sum(axis.size > 1 for axis in plan.mesh.axes)
            else repr(names[0] if len(names) == 1 else list(names))
        )
        stages = f" in addition to stages along {plan.stage_axis}" if plan.stage_axis else ""
        force = f"To force sharding{stages}: constraints=[autopar.constraints.fsdp({named})]"
        yield f"not parallelized over {' and '.join(names)}: {costs}. {force}"


def num_kernels(plan: Plan) -> int:
    """Return the number of overlap kernels of a plan without stages, or of a stage."""
    return sum(len(c.instances) for c in plan.communications if c.kernel is not None)


def of_loss(plan: Plan) -> Iterator[str]:
    """Yield how the loss is computed, if it is computed by rows."""
    if plan.loss_rows:
        yield (
            f"the loss processes {plan.loss_rows} rows of logits at a time per device and "
            "computes their gradients in forward"
        )


def of_dispatch(plan: Plan) -> Iterator[str]:
    """Yield the assumptions about experts whose tokens are dispatched, if any."""
    inner_collectives = [
        (c, stage.mesh.names[c.collective.axis])
        for stage in plan.stages
        for c in stage.communications
        if c.own
    ]
    if inner_collectives:
        nodes = len(
            {
                c.node.format(*at)
                for c, _ in inner_collectives
                if c.phase == "forward"
                for at in c.instances
            }
        )
        axes, time_s = (
            " and ".join(dict.fromkeys(name for _, name in inner_collectives)),
            sum(len(c.instances) * c.time_s for c, _ in inner_collectives),
        )
        yield (
            f"tokens are dispatched to their experts over {axes} in {nodes} "
            f"{'layers' if nodes > 1 else 'layer'}: {seconds(time_s)} of communication. Time and "
            "memory assume that all experts receive the same number of tokens; otherwise all "
            "devices wait for the most loaded one, which needs more memory"
        )


def objective(plan: Plan) -> str:
    """Return the proven bound, and how it was proven. A bound that only the search proves, without
    a certificate, is reported as such.
    """
    proof = plan.proof
    by_search = f" reported by the search, {share(proof.certified_gap)} certified by arithmetic"
    by = by_search if proof.certified_gap - proof.gap > _SAME else ", certified by arithmetic"
    asked = plan.options.get("gap", proof.gap)
    by += f", {share(asked)} was requested" if proof.gap - asked > _SAME else ""
    return (
        f"objective {seconds(proof.objective_s)}, proven bound {seconds(proof.bound_s)}, gap"
        f" {share(proof.gap)}{by} ({proof.solver}: {proof.num_variables} variables,"
        f" {proof.num_constraints} constraints)"
    )


def as_emitted(plan: Plan) -> str:
    """Return the simulated time of the emitted program as text; empty if it equals the predicted
    time."""
    prediction = plan.prediction
    simulated = seconds(prediction.simulated_s)
    differs = prediction.simulated_s and simulated != seconds(prediction.step_s)
    return f"; simulated as emitted {simulated}" if differs else ""


def spent(plan: Plan) -> Iterator[str]:
    """Yield the parts of the emitted step on the busiest devices."""
    parts = step_parts(plan)
    there = {name: time_s for name, time_s in parts.items() if time_s > _ROUNDING * parts.total_s}
    part_texts = [
        f"{name}"
        f" {seconds(time_s)}{f' ({share(time_s / parts.total_s)})' if name == WAITING else ''}"
        for name, time_s in there.items()
    ]
    who = "" if parts.rank is None else f"{plan.as_pipeline.rank_word} {parts.rank}, the busiest: "
    yield f"{who}{' + '.join(part_texts)} = {seconds(parts.total_s)} as emitted"


def at_best(plan: Plan) -> str:
    """Return the bound in one line."""
    proof = plan.proof
    differs = proof.certified_gap - proof.gap > _SAME
    certified = (
        f"`autopar check` proves {share(proof.certified_gap)}"
        if differs
        else "`autopar check` proves it"
    )
    return (
        f"proven lower bound {seconds(proof.bound_s)}: gap {share(proof.gap)} ({certified} without "
        "a solver)"
    )


def describe_coverage(plan: Plan) -> Iterator[str]:
    """Yield the scope of the bound, one line each, and how repeated layers were captured."""
    for position, sentence in enumerate(plan.proof.covers):
        yield f"{'the bound covers: ' if not position else ' ' * 18}{sentence}"
    if plan.capture:
        yield f"capture {plan.capture}"


def memory(plan: Plan) -> str:
    """Return the peak memory and its kinds, as text."""
    memory, budget = plan.prediction.memory_bytes, plan.budget_of(fullest(plan))
    kinds = {
        kind: size(memory[kind]) for kind in (*RESTING, *_EITHER, "transient") if memory.get(kind)
    }
    stored_text = " + ".join(f"{kind} {kinds[kind]}" for kind in RESTING if kind in kinds)
    either = " or ".join(f"{kind} {kinds[kind]}" for kind in _EITHER if kind in kinds)
    passing = f"transient {kinds['transient']}" if "transient" in kinds else ""
    of = f" of {size(budget)}" if budget else ""
    return (
        f"{size(plan.prediction.peak_bytes)}{of} per device:"
        f" {' + '.join(filter(None, (stored_text, either, passing)))}"
    )


def unequal(plan: Plan) -> Iterator[str]:
    """Yield the work, the waiting time and the memory of unequal devices, if any."""
    mark, pipeline = plan.fingerprint, plan.as_pipeline
    if mark.axis and pipeline.axis == mark.axis:
        for rank, (name, _) in enumerate(mark.profiles):
            works_s = sum(stage.prediction.step_s for stage in pipeline.ranks[rank])
            waits = 1 - pipeline.num_microbatches * works_s / max(plan.prediction.step_s, _LEAST)
            peak_text = f"{size(pipeline.peaks[rank])} of {size(plan.budget_of(rank))} at the peak"
            yield (
                f"{_stage_names(pipeline, rank)}, {name}: {seconds(works_s)} per microbatch,"
                f" waits for {share(waits)} of the step; {peak_text}"
            )
        return
    waiting: dict[tuple[str, float], list[int]] = {}
    for index, ((name, _), alone_s) in enumerate(zip(mark.profiles, plan.alone_s, strict=False)):
        waiting.setdefault((name, alone_s), []).append(index)
    for (name, alone_s), indices in waiting.items():
        waits = max(1 - alone_s / max(plan.prediction.step_s, _LEAST), 0.0)
        devices_text = (
            f"{mark.axis} {', '.join(map(str, indices))}, {name}, in lockstep with all other "
            "devices"
        )
        if waits < _SAME:
            yield f"{devices_text}: these set the pace"
        else:
            yield (
                f"{devices_text}: a step of this plan would take {seconds(alone_s)} on such "
                f"devices only, so they wait for {share(waits)} of it"
            )


def _stage_names(pipeline: Pipeline, rank: int) -> str:
    numbers = range(rank, len(pipeline.stages), pipeline.num_ranks)
    return f"stage{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}"


def fullest(plan: Plan) -> int:
    """Return the rank whose devices have the largest peak memory; 0 without stages."""
    peaks = plan.as_pipeline.peaks
    return max(range(len(peaks)), key=peaks.__getitem__)


def on_hosts(plan: Plan) -> Iterator[str]:
    """Yield the tensors in host memory, if any."""
    kinds = plan.prediction.host_bytes
    if kinds:
        # A file lists its keys by name, so the order of the mapping says nothing.
        listed = " + ".join(f"{kind} {size(kinds[kind])}" for kind in _ON_HOSTS if kind in kinds)
        yield f"host memory {size(sum(kinds.values()))} per device: {listed}"


# --------------------------------------------------------------------------------------------------
# Base of explanations: lines and tables that print in a terminal, as text and in a notebook.

WIDTH = 150  # columns of the text form; in a terminal, its width is used instead
_HTML = (
    '<pre style="line-height:1.15;font-family:monospace;white-space:pre;overflow-x:auto">'
    "{code}</pre>"
)


class Readable:
    """An object that renders as a sequence of rich renderables. `str`, `rich.print` and notebooks
    show the same.
    """

    def renderables(self) -> Iterator[RenderableType]:
        """Yield lines and tables from top to bottom."""
        raise NotImplementedError

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(
            file=out,
            width=WIDTH,
            color_system=None,
            highlight=False,
            legacy_windows=False,
            force_jupyter=False,
        )
        console.print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    __repr__ = __str__

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield from self.renderables()

    def _repr_html_(self) -> str:
        console = Console(
            record=True, width=WIDTH, file=io.StringIO(), highlight=False, force_jupyter=False
        )
        console.print(self)
        return console.export_html(inline_styles=True, code_format=_HTML)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> Iterator[RenderableType]:
    """Yield an empty line and a table; nothing if there are no rows.

    Columns without text in any row are omitted.

    Args:
        title: title above the table.
        columns: names of the columns. ``>`` at the start aligns a column to the right; ``<``
            prevents wrapping.
        rows: one text per column.
    """
    if not rows:
        return
    rich_table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        show_edge=False,
    )
    filled = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    for column in (columns[place] for place in filled):
        right, fixed = column.startswith(">"), column.startswith("<")
        rich_table.add_column(
            column.lstrip("<>"),
            justify="right" if right else "left",
            no_wrap=right or fixed,
            overflow="fold",
        )
    for row in rows:
        rich_table.add_row(*(row[place] for place in filled))
    yield Text()
    yield rich_table
