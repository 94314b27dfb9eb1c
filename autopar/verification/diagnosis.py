"""Which node is wrong: every emitted node is joined to a full tensor and compared with the traced node it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture import Trace
from autopar.capture.execute import execute
from autopar.errors import LayoutError, VerificationError
from autopar.kernels.bucketed import from_bucket
from autopar.layout import Layout
from autopar.rules import where_of
from autopar.run.lockstep_ranks import node_name
from autopar.run.lockstep_staged import parts_in
from autopar.run.program import StagedProgram
from autopar.run.splitting import join
from autopar.verification.case import Case
from autopar.verification.comparison import floor_share_of, magnitude, relative_error, tolerance_of


def diagnose(case: Case, summary: str) -> None:
    """Run the program again beside the traced graph.

    Raises:
        VerificationError: naming the first emitted node that differs from what it stands for; nothing where none does.
    """
    values: dict[str, tuple[Any, ...]] = {}

    def remember(node: fx.Node, value: Any) -> None:
        values[node.name] = tuple(value) if isinstance(value, tuple | list) else (value,)

    trace = _run_reference(case, remember)
    floors = _floors(trace, values, case.computed)
    limit = tolerance_of(case.computed)
    mesh = case.program.stages[0].mesh if isinstance(case.program, StagedProgram) else case.program.mesh
    seen: set[fx.Node] = set()

    def check(phase: str, node: fx.Node, locals: list[Any]) -> None:
        if node in seen:  # in a later microbatch
            return
        seen.add(node)
        if node.op == "placeholder" or "holds" not in node.meta or not isinstance(locals[0], Tensor) or "empty" in str(node.target):
            return  # an empty tensor holds anything
        (name, result), layout = node.meta["holds"]
        if name not in values:  # a part of a gradient that stages share
            return
        reference = values[name][result]
        try:
            error = relative_error(join(locals, layout, mesh, reference.shape, limit), reference, floors[name])
            told = f"its relative error is {error:.2e}"
        except (VerificationError, LayoutError, RuntimeError) as failure:
            error, told = float("inf"), str(failure)
        if error > limit:
            raise VerificationError(_story(phase, node, layout, told, summary), where=where_of(node), remedy=_REMEDY)

    case.run_program(check)


_REMEDY = "if the program was changed by hand, look at this node and at what it reads; if not, report the model"


def _run_reference(case: Case, remember: Callable[[fx.Node, Any], None]) -> Trace:
    """Run the traced graph, of the first microbatch where there are several; the graph that was run."""
    if not isinstance(case.program, StagedProgram):
        case.run_traced(remember)
        return case.trace
    how, part = case.program.microbatches, case.program.trace
    parts = parts_in(how, {i.path: x for i, x in zip(case.trace.inputs, case.inputs, strict=True)}, case.tensors, case.dtype)
    tangent = torch.tensor(how.weight, dtype=case.computed)
    inputs = [parts[0][i.path] for i in part.inputs]
    execute(part, case.tensors, case.tensors, inputs, tangent, dtype=case.dtype, observe=remember)
    return part


def _floors(trace: Trace, values: dict[str, tuple[Any, ...]], dtype: torch.dtype) -> dict[str, float]:
    """What cancels is only as precise as what went in: a share of the largest magnitude that a node reads."""

    def largest(parts: Iterable[Any]) -> float:
        return max((magnitude(part) for part in parts if isinstance(part, Tensor)), default=0.0)

    sizes, share = {name: largest(parts) for name, parts in values.items()}, floor_share_of(dtype)
    nodes = [node for node in trace.graph.nodes if node.op != "output"]
    return {node.name: share * max((sizes[n.name] for n in node.all_input_nodes), default=0.0) for node in nodes}


def _story(phase: str, node: fx.Node, layout: Layout, told: str, summary: str) -> str:
    operands = [n for n in node.all_input_nodes if "holds" in n.meta or n.target is from_bucket]
    reads = ", ".join(f"{node_name(n)} as {n.meta['holds'][1]}" if "holds" in n.meta else node_name(n) for n in operands)
    again = " (run again in backward)" if node.meta.get("recomputed") else ""
    return (
        f"the program computes something else than the model; the first node that differs is {node_name(node)} in {phase}{again}"
        f"\n  its layout is {layout}, and {told}\n  it reads {reads or 'nothing'}\n  {summary}"
    )
