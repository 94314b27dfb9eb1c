"""Tables of results in the benchmarks' README. The benchmark that measured them writes them between
two comments with the name of the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from benchmarks.common import ROOT, Row

README = ROOT / "benchmarks" / "README.md"
_RESULTS = ROOT / "benchmarks" / "results"
(
    ZOO_RESULTS,
    UNSEEN_RESULTS,
    LIBRARIES_RESULTS,
    RIVALS_RESULTS,
    JOINT_RESULTS,
    BLOCKS_RESULTS,
    PUBLISHED_RESULTS,
) = (
    _RESULTS / f"{name}.json"
    for name in ("zoo", "unseen", "libraries", "memory_rivals", "joint", "blocks", "published")
)


def parity_table(rows: Sequence[Row]) -> str:
    """Return a table with one line per model and one column per mesh: the number of plans that
    equal the model, the number of plans tried, and their largest relative error.

    The error is that against the model. If the model computes parts in float32 (marked ``*``), it
    is that against the traced graph in float64 throughout.
    """
    meshes = list(dict.fromkeys(row["mesh"] for row in rows))
    lines = [
        f"| model | {' | '.join(f'mesh {mesh}' for mesh in meshes)} |",
        f"|---|{'---|' * len(meshes)}",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        here = [row for row in rows if row["model"] == model]
        mark = "*" if any(row.get("note") for row in here) else ""
        lines.append(
            f"| {model}{mark} |"
            f" {' | '.join(_cell([r for r in here if r['mesh'] == mesh]) for mesh in meshes)} |"
        )
    return "\n".join(lines)


def _cell(rows: Sequence[Row]) -> str:
    good = [row for row in rows if row["ok"]]
    worst = max((_error(row) for row in good), default=None)
    return f"{len(good)} of {len(rows)}" + (f", {worst:.0e}" if worst is not None else "")


def _error(row: Row) -> Any:
    return (
        row["max_rel_err"]
        if row["traced_rel_err"] is None or not row["note"]
        else row["traced_rel_err"]
    )


def put_zoo() -> None:
    """Write the table of the zoo from its results."""
    put(
        "benchmarks.parity --zoo",
        parity_table(json.loads(ZOO_RESULTS.read_text(encoding="utf-8"))["rows"]),
    )


def put(name: str, table: str, readme: Path = README) -> None:
    """Replace the table of a name.

    Raises:
        AutoparError: if the file has no place for it.
    """
    text = readme.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if begin not in text or end not in text:
        raise AutoparError(
            f"{readme.name} has no table {name!r}",
            remedy=f"add the lines {begin.strip()} and {end} at its place",
        )
    head, rest = text.split(begin, 1)
    readme.write_text(f"{head}{begin}{table}\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")
