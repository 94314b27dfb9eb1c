"""Notebook view of a plan: model and hardware, step time and peak memory as bars, and a table of
modules.

The HTML is self-contained, without scripts or images. It uses the text colours of the page, and
colours for marks that are visible on light and dark backgrounds. All names are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from autopar.breakdown import ModulePart, in_words, peak_kinds, rank_memory, step_parts
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.core.units import seconds, share, size
from autopar.explanation import Explanation, explain
from autopar.plans import Plan
from autopar.plans.plan import shown_by
from autopar.report.charts import COLOURS, INK, LIGHT, MEMORY_COLOURS, shown

_STYLE = """
.autopar-plan{font:13px/1.45 system-ui,sans-serif;max-width:1150px}
.autopar-plan .name{font-size:15px;font-weight:600}
.autopar-plan .head{font-weight:600;margin:.9em 0 .25em}
.autopar-plan .row{display:flex;align-items:center;gap:.6em;margin:.15em 0}
.autopar-plan .row .of{flex:0 0 11em;white-space:nowrap}
.autopar-plan .bar{position:relative;flex:1 1 auto;display:flex;height:1.15em;\
background:rgba(128,128,128,.16);border-radius:2px}
.autopar-plan .bar i{display:block;height:100%}
.autopar-plan .bar b{position:absolute;top:-.2em;bottom:-.2em;border-left:2px dashed #d1605e}
.autopar-plan .key{display:inline-block;margin-right:1.2em;white-space:nowrap}
.autopar-plan .key i,.autopar-plan .chip{display:inline-block;border-radius:2px}
.autopar-plan .key i{width:.8em;height:.8em;margin-right:.4em}
.autopar-plan .chip{padding:0 .45em;margin-right:.25em;font-size:11px}
.autopar-plan table{border-collapse:collapse;margin:.3em 0}
.autopar-plan th,.autopar-plan td{text-align:left;vertical-align:top;padding:.15em .7em .15em 0;\
background:none;color:inherit}
.autopar-plan th,.autopar-plan td{border:0;border-bottom:1px solid rgba(128,128,128,.28)}
.autopar-plan details{overflow-x:auto}
.autopar-plan .as{white-space:nowrap}
.autopar-plan .num{text-align:right;white-space:nowrap}
.autopar-plan code{font-size:12px;background:none;color:inherit;white-space:nowrap}
"""
_GREY = "rgba(128,128,128,.55)"
_HATCHED = f"repeating-linear-gradient(45deg,{_GREY} 0,{_GREY} 2px,transparent 2px,transparent 6px)"
_STEP_COLOURS = (
    "#5b8db8",
    "#a77bb5",
    "#8fb4d6",
    "#d1605e",
    "#e8924a",
    "#c9a227",
    _HATCHED,
)  # in the order of `StepParts.named`
_ROUNDING = 1e-9  # share of a bar below which a part is not drawn
_TELLS_MORE = "autopar.explain(plan) shows all costs and alternatives; autopar.report draws them."


def card(plan: Plan) -> str:
    """Return a plan as HTML for notebooks."""
    explained = explain(plan)
    name, *lines = explained.summary()
    body = "".join(f"<div>{escape(line)}</div>" for line in lines)
    tables = "".join(_tables(explained))
    return (
        f'<div class="autopar-plan"><style>{_STYLE}</style><div'
        f' class="name">{escape(name)}</div>{body}'
        f"{_step(plan)}{_memory(plan)}{tables}<div>{escape(_TELLS_MORE)}</div></div>"
    )


def _step(plan: Plan) -> str:
    """Return the emitted step as a bar of its parts; with stages, that of the busiest devices."""
    parts = step_parts(plan)
    colours = {name: colour for (name, _), colour in zip(parts.items(), _STEP_COLOURS, strict=True)}
    there = {name: time_s for name, time_s in parts.items() if time_s > _ROUNDING * parts.total_s}
    names_of_parts = {
        name: f"{name} {seconds(time_s)}, {share(time_s / parts.total_s)}"
        for name, time_s in there.items()
    }
    of = "" if parts.rank is None else f" of {plan.as_pipeline.rank_word} {parts.rank}, the busiest"
    bar = _bar(
        {name: time_s / parts.total_s for name, time_s in there.items()}, colours, names_of_parts
    )
    return (
        f'<div class="head">Step{of}, simulated as emitted: '
        f"{seconds(parts.total_s)}</div>{_row('', bar)}{_keys(names_of_parts, colours)}"
    )


def _memory(plan: Plan) -> str:
    """Return the peak memory of a device, or of each rank (consecutive equal ranks merged), by
    kind, on a scale that includes the budget.
    """
    rows = list(_peaks(plan))
    scale = max(max(peak, budget) for _, peak, _, budget in rows)
    kinds_shown = dict.fromkeys(
        kind for _, peak, kinds, _ in rows for kind in peak_kinds(kinds, peak)
    )
    bars = []
    for of, peak, kinds, budget in rows:
        sizes = peak_kinds(kinds, peak)
        texts = {kind: f"{kind} {size(num_bytes)}" for kind, num_bytes in sizes.items()}
        bar = _bar(
            {kind: num_bytes / scale for kind, num_bytes in sizes.items()},
            MEMORY_COLOURS,
            texts,
            budget / scale,
        )
        bars.append(_row(of, bar, f"{size(peak)} of {size(budget)}" if budget else size(peak)))
    alone = peak_kinds(rows[0][2], rows[0][1]) if len(rows) == 1 else {}
    keys = {kind: f"{kind} {size(alone[kind])}" if kind in alone else kind for kind in kinds_shown}
    return (
        '<div class="head">Peak memory per device, and the '
        f"budget</div>{''.join(bars)}{_keys(keys, MEMORY_COLOURS)}"
    )


def _peaks(plan: Plan) -> Iterator[tuple[str, int, Mapping[str, int], int]]:
    """Return for each row its name, its peak, the peak by kind, and its budget; 0 if there is no
    budget.
    """
    pipeline = plan.as_pipeline
    rank_rows = [
        (*rank_memory(pipeline, rank), plan.budget_of(rank)) for rank in range(pipeline.num_ranks)
    ]
    first = 0
    for rank in range(1, len(rank_rows) + 1):
        if rank == len(rank_rows) or rank_rows[rank] != rank_rows[first]:
            several = f"{pipeline.rank_word}s {first} to {rank - 1}"
            ranks_text = several if rank > first + 1 else f"{pipeline.rank_word} {first}"
            yield ranks_text if pipeline.axis else "", *rank_rows[first]
            first = rank


def _tables(explained: Explanation) -> Iterator[str]:
    """Return one table per stage, with equal consecutive stages merged; the first is open."""
    for number, section in enumerate(explained.sections):
        stage, prefix = section.explanation, f"{section.name}; " if section.name else ""
        title = f"Modules, {prefix}per device and {stage.of}"
        yield _fold_parts(title, stage.plan.mesh, stage.parts, is_open=not number)


def _fold_parts(title: str, mesh: Mesh, parts: Sequence[ModulePart], *, is_open: bool) -> str:
    columns = (
        "module",
        "×",
        *mesh.names,
        "weights: storage → as used",
        "activations",
        ">compute",
        ">communication",
        ">kept",
        ">run again",
    )
    heads = "".join(
        f"<th{' class=num' * name.startswith('>')}>{escape(name.lstrip('>'))}</th>"
        for name in columns
    )
    rows = "".join(f"<tr>{''.join(_cells(part, mesh))}</tr>" for part in shown(parts))
    opened = " open" if is_open else ""
    return (
        f"<details{opened}><summary"
        f' class="head">{escape(title)}</summary><table><tr>{heads}</tr>{rows}</table></details>'
    )


def _cells(part: ModulePart, mesh: Mesh) -> Iterator[str]:
    yield f"<td><code>{escape(part.name)}</code></td><td>{len(part.instances)}</td>"
    for kind in part.parallelism:
        yield f"<td>{_chip(kind) if kind else ''}</td>"
    weights = [w for w in part.weights if w.name != "bias"] or part.weights
    named = (f"{escape(w.name)} " if len(weights) > 1 else "" for w in weights)
    stored = [
        name + _layouts((w.storage, *w.compute), mesh, "weight")
        for name, w in zip(named, weights, strict=True)
    ]
    gathered = "".join(_chip(kind) for kind in dict.fromkeys(filter(None, part.sharded)))
    yield f'<td class="as">{"<br>".join(stored)} {gathered}</td>'
    passing = tuple(layout for layout in (part.enters, part.leaves) if layout is not None)
    yield f"<td>{_layouts(passing, mesh, part.role) if passing else ''}</td>"
    numbers = (
        seconds(part.compute_s),
        seconds(part.communication_s),
        size(part.kept_bytes),
        seconds(part.recompute_s),
    )
    yield from (
        f'<td class="num">{"" if said.startswith("0 ") else escape(said)}</td>' for said in numbers
    )


def _layouts(layouts: Iterable[Layout], mesh: Mesh, role: str) -> str:
    """Return the codes of layouts, with their words as a tooltip."""
    steps = tuple(dict.fromkeys(layouts))
    words = " → ".join(in_words(layout, mesh.names, role) for layout in steps)
    return f'<code title="{escape(words)}">{escape(" → ".join(map(str, steps)))}</code>'


def _chip(kind: str) -> str:
    ink = INK if kind in LIGHT else "white"
    return (
        f'<span class="chip" style="background:{COLOURS[kind]};color:{ink}">{escape(kind)}</span>'
    )


def _bar(
    shares: Mapping[str, float],
    colours: Mapping[str, str],
    told: Mapping[str, str],
    mark: float = 0.0,
) -> str:
    """Return a bar of shares of a whole; a dashed line marks the share `mark`, if any."""
    pieces = (
        f'<i style="width:{100 * part:.3f}%;background:{colours[name]}"'
        f' title="{escape(told[name])}"></i>'
        for name, part in shares.items()
    )
    line = f'<b style="left:calc({100 * mark:.3f}% - 2px)" title="budget"></b>' if mark else ""
    return (
        '<div class="bar" role="img"'
        f' aria-label="{escape("; ".join(told.values()))}">{"".join(pieces)}{line}</div>'
    )


def _row(of: str, bar: str, said: str = "") -> str:
    before, after = (
        f'<span class="of">{escape(text)}</span>' if text else "" for text in (of, said)
    )
    return f'<div class="row">{before}{bar}{after}</div>'


def _keys(told: Mapping[str, str], colours: Mapping[str, str]) -> str:
    return "".join(
        f'<span class="key"><i style="background:{colours[name]}"></i>{escape(said)}</span>'
        for name, said in told.items()
    )


shown_by(card)
