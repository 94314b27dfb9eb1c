"""Check that every answer is correct or a refusal, for random models and losses, damaged files and
misbehaving ranks.

Cases are numbered: `--only models:17` runs one of them again. A failing model is reduced to fewer
ops, and its program is written to `--programs`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import console_of, environment
from benchmarks.faults.judging import CRASH, FAILED, HANG, INVALID, REFUSED, refusal_of
from benchmarks.faults.worker import KINDS, REDUCE, Worker

LIMIT_S, SECONDS = 300.0, 600.0
Row = dict[str, Any]


def cases(kinds: list[str], first: int, count: int) -> Iterator[tuple[str, int]]:
    """Yield cases of all kinds in turn, starting from the first seed of each kind."""
    from benchmarks.faults.loss_cases import combinations

    for seed in range(first, first + count):
        for kind in kinds:
            if kind != "losses" or seed < len(combinations()):
                yield kind, seed


def run_cases(listed: Iterator[tuple[str, int]], options: argparse.Namespace) -> list[Row]:
    """Run cases until the time limit. After each case, write all rows so far."""
    console, rows, worker = console_of(), [], Worker(options.limit)
    deadline = time.monotonic() + options.seconds
    try:
        for kind, seed in listed:
            if time.monotonic() > deadline:
                break
            found = worker.run(kind, seed)
            case = {"model": f"{kind}:{seed}", "mesh": "", "kind": kind, "seed": seed}
            rows.append({**case, **found})
            tell(console, rows[-1])
            if rows[-1]["outcome"] == FAILED:
                rows[-1] = reduced(worker, rows[-1])
                if options.programs:
                    write_program(rows[-1], Path(options.programs))
            if options.json:
                write(options.json, rows)
    finally:
        worker.close()
    return rows


def reduced(worker: Worker, row: Row) -> Row:
    """Return the row of a failure, with a smaller program if a model with fewer ops fails in the
    same way."""
    if row["kind"] != "models" or row["why"] in (HANG, CRASH):
        return row
    found = worker.run(REDUCE, row["seed"])
    alike = (found["why"], found["phase"]) == (row["why"], row["phase"])
    return {**row, "program": found["program"], "error": found["error"]} if alike else row


def tell(console: Console, row: Row) -> None:
    """Print a line for a row."""
    said = [row["model"], row.get("loss", ""), row["mesh"], row.get("plan", ""), row["outcome"]]
    last = (row["error"] or "").strip().split("\n")
    words = " ".join(filter(None, (*said, row["why"], last[-1 if row["why"] else 0][:160])))
    console.print(f"{words} ({row['row_s']} s)", markup=False, highlight=False, soft_wrap=True)


def write_program(row: Row, folder: Path) -> None:
    """Write the program of a failing case, with its error."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = "\n".join(f"# {line}" for line in (row["error"] or "").split("\n"))
    text = f"{row.get('program', '')}\n# {row['why']} in {row['phase']}:\n{seen}\n"
    (folder / f"{row['kind']}_{row['seed']}.py").write_text(text, encoding="utf-8")


def summary_of(rows: list[Row]) -> dict[str, Any]:
    """Return the numbers of outcomes by kind, of failures by reason, and of refusals by message."""
    by_kind: dict[str, Any] = {}
    for kind in sorted({row["kind"] for row in rows}):
        outcomes = Counter(row["outcome"] for row in rows if row["kind"] == kind)
        by_kind[kind] = {"tried": outcomes.total(), **outcomes}
    refusals = Counter(refusal_of(row["error"]) for row in rows if row["outcome"] == REFUSED)
    exact = [row for row in rows if row.get("expected") == "exact" and row["outcome"] == REFUSED]
    return {
        "outcomes": by_kind,
        "failures": dict(Counter(row["why"] for row in rows if row["outcome"] == FAILED)),
        "refusals": dict(refusals.most_common()),
        "refused_though_exact": dict(Counter(row["loss"] for row in exact).most_common()),
    }


def write(path: str, rows: list[Row]) -> None:
    """Write the report. It includes the programs of failures."""
    short = [
        row if not row["ok"] else {k: v for k, v in row.items() if k != "program"} for row in rows
    ]
    data = {"env": environment(), "summary": summary_of(rows), "rows": short}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    flags = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    flags.add_argument("--json", metavar="FILE", help="write {env, summary, rows} to this file")
    flags.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    flags.add_argument("--only", action="append", metavar="KIND:SEED", help="only these cases")
    flags.add_argument("--first", type=int, default=0, help="first seed of each kind")
    flags.add_argument("--count", type=int, default=1_000_000, help="number of seeds of each kind")
    flags.add_argument(
        "--seconds", type=float, default=SECONDS, help="start no case after this time"
    )
    flags.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        help="seconds after which a case counts as hung, without the time it waited for a CPU",
    )
    flags.add_argument("--programs", metavar="FOLDER", help="folder for the programs of failures")
    options = flags.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        flags.error(f"kinds {', '.join(unknown)} are not known; pass some of {', '.join(KINDS)}")
    named = [text.partition(":") for text in options.only or ()]
    listed = [(kind, int(seed)) for kind, _, seed in named]
    found = run_cases(
        iter(listed) if listed else cases(kinds, options.first, options.count), options
    )
    console_of().print_json(data=summary_of(found))
    return 1 if any(row["outcome"] in (FAILED, INVALID) for row in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
