"""What a plan, or one stage of it, does, module by module, what it costs, and why not otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

from autopar.breakdown import CROSSING, INPUTS, Part, Transfer, in_words, label
from autopar.explanation.buckets import buckets_of, in_buckets
from autopar.explanation.kernels import kernels_considered
from autopar.explanation.prices import Worth, longer_step_s
from autopar.explanation.rendering import Readable, table
from autopar.layout import Layout
from autopar.plans import RESTING, Entry, Flip, Plan, RunnerUp
from autopar.units import seconds, share, size

_ROUNDING = 1e-12
_SAME = 1e-4  # of the objective: bounds that are no farther apart are told as one
_EITHER = ("activations", "gradients")  # activations are gone when the last gradient is there


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Readable):
    """A plan in words: prints, renders in rich and in notebooks.

    Attributes:
        plan: what is explained. parts: its parts, or those that were asked for.
        pattern: the module pattern asked for, or None for all.
        worth: what faster links are worth.
        of: what times and shares are of: the step, or, for a stage, a microbatch.
        flips: at which change of the hardware choices turn, where that was asked for.
        stage_of: of a stage, the plan that it belongs to and its number.
    """

    plan: Plan
    parts: tuple[Part, ...]
    pattern: str | None = None
    of: str = "step"
    worth: Worth = Worth()  # noqa: RUF009 - frozen
    flips: tuple[Flip, ...] = ()
    stage_of: tuple[Plan, int] | None = None

    def renderables(self) -> Iterator[RenderableType]:
        """Header, parallelism, layouts, costs, runner-ups; for a pattern every decision of its modules."""
        if self.pattern is None:
            yield from map(Text, self.header())
        yield from self.tables()

    def tables(self) -> Iterator[RenderableType]:
        """All but the header."""
        names = self.plan.mesh.names
        if self.pattern is None:
            yield from table("Parallelism", ("found", f">share of the {self.of}'s work", "modules"), self._parallelism())
        columns: tuple[str, ...] = ("<module", ">×", "weights: storage → as used", "activations: in → out")
        yield from table("Layouts", columns, [_layouts(p, names) for p in self.parts])
        columns = ("<module", ">compute", ">communication", "of which, with the bytes that a device puts in", ">kept", "run again")
        yield from table(
            f"Costs, per device and {self.of}, all copies of a module together", columns, [_costs(p, names) for p in self.parts]
        )
        if self.pattern is None:
            columns = ("<module", "op", "chosen", "runner-up, all else equal", *self._longer())
            yield from table("Why not otherwise", columns, list(self._runner_ups()))
            yield from kernels_considered(self.plan)
            yield from buckets_of(self.plan)
            yield from self.worth.renderables()
        else:
            columns = ("decision", "layouts", ">time", "runner-up, all else equal", *self._longer(), "line")
            for part in self.parts:
                yield from table(f"Decisions of {part.name}", columns, [self._decision(e) for e in part.entries])
        if self.flips:
            columns = ("decision", "would take", f">{self.of} now", "from")
            title = "What would turn close choices, each alone"
            rows = [(escape(f.key), f.strategy, seconds(f.delta_s, signed=True), f.change) for f in self.flips]
            yield from table(title, columns, rows)
        yield from self._replicated()

    def header(self) -> Iterator[str]:
        """What was planned, its time, memory and proof, one line each."""
        plan, prediction = self.plan, self.plan.prediction
        yield made_for(plan)
        serial_s = max(prediction.serial_s, 1e-30)
        saved_s = serial_s - prediction.step_s
        yield (
            f"step {seconds(prediction.step_s)} = compute {seconds(prediction.compute_s)}"
            f" + communication {seconds(prediction.communication_s)} ({share(prediction.communication_s / serial_s)})"
            + (f" − {seconds(saved_s)} that both save by running at once" if saved_s > _ROUNDING * serial_s else "")
        )
        yield from beside(plan)
        yield from in_buckets((plan,), "step")
        yield f"peak {memory(plan)}"
        yield from of_loss(plan)
        yield from of_dispatch(plan)
        yield objective(plan)
        yield self._price()
        yield from covered(plan)

    def _price(self) -> str:
        """What memory is worth."""
        price = self.plan.proof.memory_price_s_per_gib
        if price > 0:
            return f"memory is worth about {seconds(price)} a step per GiB more on each device (dual of the relaxation, not solved again)"
        return "memory does not bind: more of it would not make the step faster"

    def summary(self) -> Iterator[str]:
        """The header in five lines: what was planned, how long a step takes, what it holds, how good that is, what memory is worth."""
        plan, prediction = self.plan, self.plan.prediction
        yield made_for(plan)
        saved_s = max(prediction.serial_s - prediction.step_s, 0.0)
        at_once = f", {seconds(saved_s)} saved by doing both at once" if saved_s > _ROUNDING * prediction.serial_s else ""
        parts = f"compute {seconds(prediction.compute_s)}, communication {seconds(prediction.communication_s)}{at_once}"
        yield f"step {seconds(prediction.step_s)}: {parts}{as_emitted(plan)}"
        yield f"peak {memory(plan)}"
        yield at_best(plan)
        yield self._price()

    def _parallelism(self) -> list[tuple[str, str, str]]:
        """Per kind of parallelism its share of the step and its modules, the largest share first."""
        found: dict[str, list[Part]] = {}
        for part in self.parts:
            if part.module not in (INPUTS, *CROSSING):
                found.setdefault(label(part, self.plan.mesh.names), []).append(part)
        whole = max(self.plan.prediction.serial_s, 1e-30)
        rows = [(sum(p.compute_s + p.communication_s for p in parts) / whole, said, parts) for said, parts in found.items()]
        rows.sort(key=lambda row: -row[0])
        return [(said, share(part_of), escape(", ".join(p.name for p in parts))) for part_of, said, parts in rows]

    def _runner_ups(self) -> Iterator[tuple[str, ...]]:
        for part in self.parts:
            if part.runner_up is not None and part.main is not None and part.main in part.entries:
                chosen = _chosen(part.main)
                yield escape(part.name), part.main.op, chosen, *self._other(part.runner_up)

    def _decision(self, entry: Entry) -> tuple[str, ...]:
        again = " (and again in backward)" if entry.recompute else ""
        source = entry.source.partition(": ")[2] or entry.source
        op = f"{entry.op} {entry.phase}{again}" if entry.kind == "compute" else f"{entry.module.rpartition('.')[2]} {entry.kind}"
        return escape(op), _chosen(entry), seconds(entry.time_s * len(entry.instances)), *self._other(entry.runner_up), escape(source)

    def _longer(self) -> tuple[str, ...]:
        """Names of the columns that say what a runner-up costs."""
        if self.stage_of is None:
            return (f">{self.of}",)
        pipeline = self.stage_of[0].pipeline
        return f">{self.of}", ">step, about" if pipeline is not None and pipeline.num_chunks > 1 else ">step"

    def _other(self, runner_up: RunnerUp | None) -> tuple[str, ...]:
        """A runner-up and by how much longer a step, or a microbatch and the step, would take with it."""
        if runner_up is None:
            return "", *("" for _ in self._longer())
        longer = [runner_up.delta_s]
        if self.stage_of is not None:
            longer.append(longer_step_s(*self.stage_of, runner_up.delta_s))
        return runner_up.strategy, *(seconds(delta_s, signed=True) for delta_s in longer)

    def _replicated(self) -> Iterator[RenderableType]:
        entries = [entry for part in self.parts for entry in part.entries]
        columns = ("op", "module", f">share of the {self.of}'s work", "line")
        if rows := [self._cost(entry.op, entry) for entry in entries if entry.replicated]:
            yield from table("Ops that run replicated because no rule is known", columns, rows)
        elif self.pattern is None:
            yield Text("Every op has a rule: none runs replicated for want of one.")
        if rows := [self._cost(op, entry) for entry in entries for op in entry.discovered]:
            yield from table("Ops whose rule was found by experiment", columns, rows)

    def _cost(self, op: str, entry: Entry) -> tuple[str, ...]:
        whole = max(self.plan.prediction.serial_s, 1e-30)
        return op, escape(entry.module), share(entry.time_s * len(entry.instances) / whole), escape(entry.source)


def made_for(plan: Plan) -> str:
    """Model, mesh, hardware and optimizer."""
    model = plan.fingerprint.model_name or "model"
    optimizer, precision = plan.options.get("optimizer", "none"), plan.options.get("precision")
    read = f", parameters read in {precision}" if precision else ""
    return f"{model} on mesh {plan.mesh} ({plan.mesh.num_devices} devices), {plan.fingerprint.profile}, optimizer {optimizer}{read}"


def beside(plan: Plan) -> Iterator[str]:
    """What runs beside compute, and how long the step takes then; nothing where nothing can."""
    overlap, prediction = plan.overlap, plan.prediction
    if prediction.in_kernels_s:
        yield f"{seconds(prediction.in_kernels_s)} are saved by {num_kernels(plan)} collective-overlap kernels"
    if overlap.slowdown >= 1.0:
        return
    by_slack, counted_s = {slack: 0.0 for slack in ("prefetchable", "deferrable")}, 0.0
    for c in plan.communications:
        if c.slack in by_slack and c.collective.kind != "slice" and c.kernel is None:
            by_slack[c.slack] += len(c.instances) * c.time_s
            counted_s += len(c.instances) * c.time_s if c.beside else 0.0
    kinds = " and ".join(f"{seconds(time_s)} {slack}" for slack, time_s in by_slack.items())
    yield (
        f"{kinds} of communication, of which {seconds(counted_s)} count so in the objective; {seconds(prediction.hidden_s)} run beside "
        f"compute, where a second costs it {overlap.slowdown:g} s, {seconds(prediction.exposed_s)} do not: "
        f"simulated, the emitted step takes {seconds(prediction.simulated_s)}"
    )
    less = ", and less where the step's own peak leaves less" if overlap.forward_room or overlap.backward_room else ""
    yield f"early steps hold at most {size(overlap.forward_bytes)} in forward, {size(overlap.backward_bytes)} in backward{less}"


def num_kernels(plan: Plan) -> int:
    """Of a plan without stages, or of a stage."""
    return sum(len(c.instances) for c in plan.communications if c.kernel is not None)


def of_loss(plan: Plan) -> Iterator[str]:
    """How the loss is computed, where that is not all at once."""
    if plan.loss_rows:
        yield f"the loss has {plan.loss_rows} rows of logits at a time on a device, and forward makes its gradients"


def of_dispatch(plan: Plan) -> Iterator[str]:
    """What is assumed of experts whose tokens are dispatched, where any are."""
    stages = plan.pipeline.stages if plan.pipeline else (plan,)
    own = [(c, stage.mesh.names[c.collective.axis]) for stage in stages for c in stage.communications if c.own]
    if own:
        nodes = len({c.node.format(*at) for c, _ in own if c.phase == "forward" for at in c.instances})
        axes, time_s = " and ".join(dict.fromkeys(name for _, name in own)), sum(len(c.instances) * c.time_s for c, _ in own)
        yield (
            f"tokens are dispatched to their experts over {axes} in {nodes} {'layers' if nodes > 1 else 'layer'}: {seconds(time_s)} of "
            "communication, and the memory, of the rows that are expected where all experts are picked alike; where they are not, all wait "
            "for the device whose experts are picked most, which holds more"
        )


def objective(plan: Plan) -> str:
    """What was proven, and by what: of what the search proves beyond arithmetic there is its word alone."""
    proof = plan.proof
    by_search = f" by the search's word, {share(proof.certified_gap)} by arithmetic alone"
    by = by_search if proof.certified_gap - proof.gap > _SAME else ", by arithmetic alone"
    return (
        f"objective {seconds(proof.objective_s)}, proven bound {seconds(proof.bound_s)}, gap {share(proof.gap)}{by}"
        f" ({proof.solver}: {proof.num_variables} variables, {proof.num_constraints} constraints)"
    )


def as_emitted(plan: Plan) -> str:
    """How long the emitted program takes, simulated, where that is told apart."""
    simulated = seconds(plan.prediction.simulated_s)
    return f"; simulated as emitted {simulated}" if simulated not in ("0 s", seconds(plan.prediction.step_s)) else ""


def at_best(plan: Plan) -> str:
    """The bound in short."""
    proof = plan.proof
    apart = proof.certified_gap - proof.gap > _SAME
    said = f"{share(proof.certified_gap)} as `autopar check` proves" if apart else "`autopar check` proves"
    return f"no plan that the bound covers takes less than {seconds(proof.bound_s)}: gap {share(proof.gap)} ({said} it, without a solver)"


def covered(plan: Plan) -> Iterator[str]:
    """What the bound covers, one line each, and how repeated layers were captured."""
    for position, what in enumerate(plan.proof.covers):
        yield f"{'the bound covers: ' if not position else ' ' * 18}{what}"
    if plan.capture:
        yield f"capture {plan.capture}"


def memory(plan: Plan) -> str:
    """The peak, and the kinds that make it up."""
    memory, budget = plan.prediction.memory_bytes, plan.options.get("memory_bytes")
    kinds = {kind: size(memory[kind]) for kind in (*RESTING, *_EITHER, "transient") if memory.get(kind)}
    resting = " + ".join(f"{kind} {kinds[kind]}" for kind in RESTING if kind in kinds)
    either = " or ".join(f"{kind} {kinds[kind]}" for kind in _EITHER if kind in kinds)
    passing = f"transient {kinds['transient']}" if "transient" in kinds else ""
    of = f" of {size(budget)}" if budget else ""
    return f"{size(plan.prediction.peak_bytes)}{of} per device: {' + '.join(filter(None, (resting, either, passing)))}"


_OVER_SPACE = ("convolution", "max_pool", "avg_pool", "upsample")


def _layouts(part: Part, names: tuple[str, ...]) -> tuple[str, ...]:
    large = [w for w in part.weights if w.name != "bias"] or list(part.weights)
    weights = [f"{w.name}: {_change((w.storage, *w.compute), names, 'weight')}" for w in large]
    shown = tuple(layout for layout in (part.enters, part.leaves) if layout is not None)
    role = "image" if part.main_op.startswith(_OVER_SPACE) else "activation"
    return escape(part.name), str(len(part.instances)), "\n".join(weights), _change(shown, names, role) if shown else ""


def _change(layouts: tuple[Layout, ...], names: tuple[str, ...], role: str) -> str:
    """Codes, and in a second line words; one of each where nothing changes."""
    steps = tuple(dict.fromkeys(layouts))
    return f"{' → '.join(map(str, steps))}\n  {' → '.join(in_words(layout, names, role) for layout in steps)}"


def _costs(part: Part, names: tuple[str, ...]) -> tuple[str, ...]:
    transfers = sorted(part.transfers, key=lambda t: (t.phase != "forward", -t.time_s))
    again = f"{', '.join(part.recomputed)} ({seconds(part.recompute_s)})" if part.recomputed else ""
    lines = "\n".join(_transfer(t, names) for t in transfers if t.kind != "slice")
    return escape(part.name), seconds(part.compute_s), seconds(part.communication_s), lines, size(part.kept_bytes), again


def _transfer(t: Transfer, names: tuple[str, ...]) -> str:
    if t.axis < 0:
        return f"{t.phase} {t.kind}: {seconds(t.time_s)}"
    return f"{t.phase} {t.kind} over {names[t.axis]}: {seconds(t.time_s)} ({t.num}×, {size(t.bytes)})"


def _chosen(entry: Entry) -> str:
    """The layouts that cross the decision's border: what the first op reads and the last makes."""
    first, last = entry.nodes[0].strategy, entry.nodes[-1].strategy
    return f"{', '.join(map(str, first.inputs))} -> {', '.join(map(str, last.outputs))}"
