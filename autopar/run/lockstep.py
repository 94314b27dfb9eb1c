"""The lockstep interpreter: all ranks of a program in one process (`autopar.run.lockstep_ranks`), and what they computed, joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ambient import as_written
from autopar.capture.execute import device_of, promoted, promoted_dtype
from autopar.capture.tangents import tangent_of
from autopar.errors import AutoparError, VerificationError
from autopar.mesh import Mesh
from autopar.rules import where_of
from autopar.run.lockstep_ranks import Observer, Ranks, Record, node_name
from autopar.run.program import Program, ProgramTensor
from autopar.run.splitting import join, split


@dataclass(frozen=True, slots=True)
class Lockstep:
    """What a program computed, joined to full tensors.

    Attributes:
        outputs: by output path. buffers: new values of mutated buffers, by name.
        gradients: by parameter name, in the stored shape; of inputs, as `autopar.capture.trace.gradient_name` calls them.
        records: the communication steps that ran, as (phase, node key, Collective).
    """

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    records: tuple[Record, ...]


def run_lockstep(
    program: Program,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor] | Sequence[Tensor],
    *,
    tangent: float = 1.0,
    dtype: torch.dtype | None = None,
    observe: Observer | None = None,
    tolerance: float | None = None,
) -> Lockstep:
    """Run forward and, where a parameter or an input has a gradient, backward.

    Args:
        parameters, buffers: full tensors in their stored shapes, by name.
        inputs: full tensors by path, or in the order of ``program.inputs``.
        tangent: gradient of the loss; factor of what stands for one where the model has none (`autopar.capture.tangents`).
        dtype: promotes every floating tensor, and every floating dtype that a node names, to this one, and complex ones to its
            complex counterpart.
        observe: called with (phase, node, results by rank) after each node.
        tolerance: largest difference between replicas relative to the largest magnitude; by default 1e-11 in
            double precision, else 1e-5 (1e-2 for 16-bit types).

    Raises:
        VerificationError: where replicas differ, or a node fails; names the node, its module and source.
    """
    by_path = inputs if isinstance(inputs, Mapping) else {t.name: x for t, x in zip(program.inputs, inputs, strict=True)}
    values = [parameters[t.name] for t in program.parameters] + [buffers[t.name] for t in program.buffers]
    values += [by_path[t.name] for t in program.inputs]
    borders = (*program.parameters, *program.buffers, *program.inputs)
    operands = [split(promoted(x, dtype), t.layout, program.mesh, t.view) for x, t in zip(values, borders, strict=True)]
    device = device_of(values)
    run = Ranks(program.mesh, dtype, observe, device)
    with as_written():
        results = run(program.forward, "forward", operands)
        mutated = [t for name in program.mutated for t in program.buffers if t.name == name]
        first, last = len(program.outputs), len(program.outputs) + len(mutated)
        outputs = joined(program.forward, results[:first], program.outputs, program.mesh, tolerance)
        new_buffers = joined(program.forward, results[first:last], mutated, program.mesh, tolerance, first)
        trained = [*(t for t in program.parameters if t.has_gradient), *program.input_gradients]
        gradients: dict[str, Tensor] = {}
        if trained:
            saved = results[len(results) - program.num_saved :]
            del results, operands
            saved += [_tangent(t, program.mesh, tangent, dtype, device) for t in program.outputs if t.has_gradient]
            gradients = joined(program.backward, run(program.backward, "backward", saved), trained, program.mesh, tolerance)
    return Lockstep(outputs, gradients, new_buffers, tuple(run.records))


def _tangent(border: ProgramTensor, mesh: Mesh, scale: float, dtype: torch.dtype | None, device: torch.device) -> list[Tensor]:
    whole = tangent_of(border.name, border.shape, promoted_dtype(border.dtype, dtype), is_loss=border.is_loss, scale=scale)
    return split(whole.to(device), border.layout, mesh, border.view)


def joined(
    graph_module: fx.GraphModule,
    results: Sequence[list[Any]],
    borders: Sequence[ProgramTensor],
    mesh: Mesh,
    tolerance: float | None,
    offset: int = 0,
) -> dict[str, Tensor]:
    """The named full tensors; an error names the node that made the result."""
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    found = {}
    for index, (border, locals) in enumerate(zip(borders, results, strict=True)):
        try:
            found[border.name] = join(locals, border.layout, mesh, border.shape, _tolerance(locals[0], tolerance))
        except (AutoparError, RuntimeError) as error:
            node = output.args[0][index + offset]
            raise VerificationError(f"{border.name!r} cannot be joined from {node_name(node)}: {error}", where=where_of(node)) from error
    return found


def _tolerance(x: Tensor, tolerance: float | None) -> float:
    if tolerance is not None:
        return tolerance
    return {torch.float64: 1e-11, torch.float32: 1e-5}.get(x.dtype.to_real(), 1e-2)
