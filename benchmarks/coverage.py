"""Models that can be captured, and their ops with rules: ``python -m benchmarks.coverage [--zoo
NAME ...]``.

The graph is that of planning: forward and backward in normal form. An op runs replicated if it has
no rule and experiments find none. A node without a choice has a rule that only offers replication,
although one of its operands could be split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.planner.plan_assembly import portable_line
from autopar.rules import Call, axis_options, call_of, is_discovered, is_fallback
from autopar.rules.call import op_name
from benchmarks import zoo
from benchmarks.common import ROOT, parser, run_rows, specs_of
from benchmarks.models import ModelSpec

COLUMNS = (
    "num_nodes",
    "num_without_rule",
    "ops_without_rule",
    "ops_discovered",
    "num_without_choice",
    "capture_s",
)
RESULTS = ROOT / "benchmarks" / "results" / "coverage.json"


def row(spec: dict[str, str], mesh: str, batch: int, seq: int) -> dict[str, Any]:
    """Return the coverage of one model. It is ok if the model is captured and every op has a
    rule."""
    model, example = ModelSpec(**spec).build(batch=batch, seq=seq)
    start = time.perf_counter()
    try:
        graph = capture(model, (), example).graph
    except AutoparError as error:
        return {"ok": False, "error": str(error), "captured": False}
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    without_rule, without_choice, discovered = (
        _ops(nodes, wanted) for wanted in (is_fallback, _has_no_choice, is_discovered)
    )
    return {
        "ok": not without_rule,
        "error": None,
        "captured": True,
        "capture_s": round(time.perf_counter() - start, 2),
        "num_nodes": len(nodes),
        "num_without_rule": sum(entry["count"] for entry in without_rule),
        "num_without_choice": sum(entry["count"] for entry in without_choice),
        "ops_without_rule": " ".join(entry["op"] for entry in without_rule),
        "ops_discovered": " ".join(entry["op"] for entry in discovered),
        "without_rule": without_rule,
        "without_choice": without_choice,
    }


def _has_no_choice(call: Call) -> bool:
    splittable = any(size > 1 for info in call.inputs for size in info.shape)
    return not is_fallback(call) and splittable and len(axis_options(call)) == 1


def _ops(nodes: Iterable[fx.Node], wanted: Callable[[Call], bool]) -> list[dict[str, Any]]:
    """Return a row per op, the most frequent first: its number of nodes, and the module and source
    line of the first one."""
    found: dict[str, dict[str, Any]] = {}
    for node in nodes:
        if wanted(call_of(node)):
            name = op_name(node.target)
            first = {
                "op": name,
                "count": 0,
                "module": node.meta["module"],
                "source": portable_line(node.meta["source"]),
            }
            found.setdefault(name, first)["count"] += 1
    return sorted(found.values(), key=lambda entry: -entry["count"])


def main() -> int:
    """Run the command."""
    options = parser("coverage", __doc__ or "", meshes=("none",)).parse_args()
    specs = specs_of(options, ()) or [ModelSpec.of("zoo", name) for name in zoo.NAMES]
    cases = [
        {"spec": spec.to_json(), "mesh": "", "batch": options.batch, "seq": options.seq}
        for spec in specs
    ]
    return run_rows("coverage", cases, COLUMNS, options.json or str(RESULTS))


if __name__ == "__main__":
    raise SystemExit(main())
