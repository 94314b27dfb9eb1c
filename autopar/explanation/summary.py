"""Lines about a whole plan: what it is for, how long a step takes, what it holds, and how close to
the best it is."""

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

_SAME = 1e-4  # of the objective: bounds that are no farther apart are told as one
_ROUNDING = 1e-9  # of a step: what is no longer is none
_LEAST = 1e-30  # seconds of a step, so that shares of it are numbers
_EITHER = ("activations", "gradients")  # activations are gone when the last gradient is there


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
    """Return the number of devices, and the size of nodes if several axes do not tell it by
    name."""
    per_node, total = mesh.devices_per_node, mesh.num_devices
    told = len(mesh.axes) == 1 or "node" in mesh.names
    nodes = (
        ""
        if told or total % per_node
        else ", one node"
        if total == per_node
        else f", {total // per_node} nodes of {per_node}"
    )
    return f"{total} devices{nodes}"


def beside(plan: Plan) -> Iterator[str]:
    """Yield what runs beside compute, and the time of the step with it; nothing if nothing can."""
    overlap, prediction = plan.overlap, plan.prediction
    if prediction.in_kernels_s:
        yield (
            f"{seconds(prediction.in_kernels_s)} are saved by {num_kernels(plan)}"
            " collective-overlap kernels"
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
        f"{kinds} of communication, of which {seconds(counted_s)} count so in the objective;"
        f" {seconds(prediction.hidden_s)} run beside compute, where a second costs it"
        f" {overlap.slowdown:g} s, {seconds(prediction.exposed_s)} do not: simulated, the emitted"
        f" step takes {seconds(prediction.simulated_s)}"
    )
    less = (
        ", and less where the step's own peak leaves less"
        if overlap.forward_room or overlap.backward_room
        else ""
    )
    yield (
        f"early steps hold at most {size(overlap.forward_bytes)} in forward,"
        f" {size(overlap.backward_bytes)} in backward{less}"
    )


def idle(plan: Plan) -> Iterator[str]:
    """Yield the axes along which all devices do the same, if there are any."""
    if names := idle_axes(plan):
        costs = f"on {plan.fingerprint.profile} communication would cost more than it saves"
        named = (
            ""
            if len(names) == sum(axis.size > 1 for axis in plan.mesh.axes)
            else repr(names[0] if len(names) == 1 else list(names))
        )
        stages = f" beside stages along {plan.stage_axis}" if plan.stage_axis else ""
        force = f"To force it{stages}: constraints=[autopar.constraints.fsdp({named})]"
        yield f"not parallelized over {' and '.join(names)}: {costs}. {force}"


def num_kernels(plan: Plan) -> int:
    """Return the number of overlap kernels of a plan without stages, or of a stage."""
    return sum(len(c.instances) for c in plan.communications if c.kernel is not None)


def of_loss(plan: Plan) -> Iterator[str]:
    """Yield how the loss is computed, unless it is computed at once."""
    if plan.loss_rows:
        yield (
            f"the loss has {plan.loss_rows} rows of logits at a time on a device, and forward makes"
            " its gradients"
        )


def of_dispatch(plan: Plan) -> Iterator[str]:
    """Yield what is assumed of experts whose tokens are dispatched, if there are any."""
    own = [
        (c, stage.mesh.names[c.collective.axis])
        for stage in plan.stages
        for c in stage.communications
        if c.own
    ]
    if own:
        nodes = len(
            {c.node.format(*at) for c, _ in own if c.phase == "forward" for at in c.instances}
        )
        axes, time_s = (
            " and ".join(dict.fromkeys(name for _, name in own)),
            sum(len(c.instances) * c.time_s for c, _ in own),
        )
        yield (
            f"tokens are dispatched to their experts over {axes} in {nodes}"
            f" {'layers' if nodes > 1 else 'layer'}: {seconds(time_s)} of communication, and the"
            " memory, of the rows that are expected where all experts are picked alike; where they"
            " are not, all wait for the device whose experts are picked most, which holds more"
        )


def objective(plan: Plan) -> str:
    """Return what is proven, and by what. What only the search proves, and not arithmetic, is
    reported as its word."""
    proof = plan.proof
    by_search = f" by the search's word, {share(proof.certified_gap)} by arithmetic alone"
    by = by_search if proof.certified_gap - proof.gap > _SAME else ", by arithmetic alone"
    asked = plan.options.get("gap", proof.gap)
    by += f", where {share(asked)} was asked for" if proof.gap - asked > _SAME else ""
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
    apart = prediction.simulated_s and simulated != seconds(prediction.step_s)
    return f"; simulated as emitted {simulated}" if apart else ""


def spent(plan: Plan) -> Iterator[str]:
    """Yield the parts of the emitted step on the devices that are busy longest."""
    parts = step_parts(plan)
    there = {name: time_s for name, time_s in parts.named() if time_s > _ROUNDING * parts.total_s}
    told = [
        f"{name}"
        f" {seconds(time_s)}{f' ({share(time_s / parts.total_s)})' if name == WAITING else ''}"
        for name, time_s in there.items()
    ]
    who = "" if parts.rank is None else f"{plan.as_pipeline.rank_word} {parts.rank}, busy longest: "
    yield f"{who}{' + '.join(told)} = {seconds(parts.total_s)} as emitted"


def at_best(plan: Plan) -> str:
    """Return the bound in short."""
    proof = plan.proof
    apart = proof.certified_gap - proof.gap > _SAME
    said = (
        f"{share(proof.certified_gap)} as `autopar check` proves"
        if apart
        else "`autopar check` proves"
    )
    return (
        f"no plan that the bound covers takes less than {seconds(proof.bound_s)}: gap"
        f" {share(proof.gap)} ({said} it, without a solver)"
    )


def describe_coverage(plan: Plan) -> Iterator[str]:
    """Yield what the bound covers, one line each, and how repeated layers were captured."""
    for position, what in enumerate(plan.proof.covers):
        yield f"{'the bound covers: ' if not position else ' ' * 18}{what}"
    if plan.capture:
        yield f"capture {plan.capture}"


def memory(plan: Plan) -> str:
    """Return the peak, and the kinds that make it up, as text."""
    memory, budget = plan.prediction.memory_bytes, plan.budget_of(fullest(plan))
    kinds = {
        kind: size(memory[kind]) for kind in (*RESTING, *_EITHER, "transient") if memory.get(kind)
    }
    resting = " + ".join(f"{kind} {kinds[kind]}" for kind in RESTING if kind in kinds)
    either = " or ".join(f"{kind} {kinds[kind]}" for kind in _EITHER if kind in kinds)
    passing = f"transient {kinds['transient']}" if "transient" in kinds else ""
    of = f" of {size(budget)}" if budget else ""
    return (
        f"{size(plan.prediction.peak_bytes)}{of} per device:"
        f" {' + '.join(filter(None, (resting, either, passing)))}"
    )


def unequal(plan: Plan) -> Iterator[str]:
    """Yield the work, the waiting time and the memory of devices that are not alike; nothing if all
    are alike."""
    mark, pipeline = plan.fingerprint, plan.as_pipeline
    if mark.axis and pipeline.axis == mark.axis:
        for rank, (name, _) in enumerate(mark.profiles):
            works_s = sum(stage.prediction.step_s for stage in pipeline.ranks[rank])
            waits = 1 - pipeline.num_microbatches * works_s / max(plan.prediction.step_s, _LEAST)
            held = f"{size(pipeline.peaks[rank])} of {size(plan.budget_of(rank))} at the peak"
            yield (
                f"{_which(pipeline, rank)}, {name}: {seconds(works_s)} a microbatch, waits"
                f" {share(waits)} of the step; {held}"
            )
        return
    waiting: dict[tuple[str, float], list[int]] = {}
    for index, ((name, _), alone_s) in enumerate(zip(mark.profiles, plan.alone_s, strict=False)):
        waiting.setdefault((name, alone_s), []).append(index)
    for (name, alone_s), indices in waiting.items():
        waits = max(1 - alone_s / max(plan.prediction.step_s, _LEAST), 0.0)
        which = f"{mark.axis} {', '.join(map(str, indices))}, {name}, in lockstep with all others"
        if waits < _SAME:
            yield f"{which}: these set the pace"
        else:
            yield (
                f"{which}: a step of this plan would take {seconds(alone_s)} if all were like"
                f" these, so they wait {share(waits)} of it"
            )


def _which(pipeline: Pipeline, rank: int) -> str:
    numbers = range(rank, len(pipeline.stages), pipeline.num_ranks)
    return f"stage{'s' if len(numbers) > 1 else ''} {' and '.join(map(str, numbers))}"


def fullest(plan: Plan) -> int:
    """Return the rank whose devices hold most at the peak; 0 without stages."""
    peaks = plan.as_pipeline.peaks
    return max(range(len(peaks)), key=peaks.__getitem__)


def on_hosts(plan: Plan) -> Iterator[str]:
    """Yield what lies in the hosts' memory, if anything does."""
    kinds = plan.prediction.host_bytes
    if kinds:
        listed = " + ".join(f"{kind} {size(num_bytes)}" for kind, num_bytes in kinds.items())
        yield f"on the host {size(sum(kinds.values()))} per device: {listed}"


# --------------------------------------------------------------------------------------------------
# The base of explanations: lines and tables that print in a terminal, as text and in a notebook.

WIDTH = 150  # columns of the text form; a terminal's own width is used where there is one
_HTML = (
    '<pre style="line-height:1.15;font-family:monospace;white-space:pre;overflow-x:auto">'
    "{code}</pre>"
)


class Readable:
    """Something that renders as a sequence of rich renderables: `str`, `rich.print` and
    notebooks show the same."""

    def renderables(self) -> Iterator[RenderableType]:
        """Yield lines and tables, from top to bottom."""
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

    A column without text in any row is left out.

    Args:
        title: above the table.
        columns: their names. ``>`` at the start aligns a column to the right; ``<`` prevents
            wrapping.
        rows: one text per column.
    """
    if not rows:
        return
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        show_edge=False,
    )
    told = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    for column in (columns[place] for place in told):
        right, fixed = column.startswith(">"), column.startswith("<")
        made.add_column(
            column.lstrip("<>"),
            justify="right" if right else "left",
            no_wrap=right or fixed,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(row[place] for place in told))
    yield Text()
    yield made
