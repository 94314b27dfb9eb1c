"""What a program says of the tensors at its border, against the trace: the runtime goes by that.

A tensor's layout is held against the plan's where states are (`autopar.validation.program`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.capture.trace import Parameter, Trace
from autopar.plans import Plan
from autopar.run.program import Program, ProgramTensor
from autopar.validation.states import invalid

Facts = Mapping[str, object]


def check_borders(trace: Trace, plan: Plan, program: Program) -> None:
    """Compare names, shapes, dtypes and flags of parameters, buffers, inputs and outputs.

    Raises:
        ValidationError: naming the first tensor that is not the trace's, and in what.
    """
    if program.mesh != plan.mesh:
        raise invalid(f"the program is for mesh {program.mesh}, the plan for {plan.mesh}")
    for kind, tensors, due in _pairs(trace, program):
        if len(tensors) != len(due):
            raise invalid(f"the program has {len(tensors)} {kind}s, the model {len(due)}")
        for tensor, facts in zip(tensors, due, strict=True):
            for name, value in facts.items():
                found = getattr(tensor, name)
                if found != value:
                    what = f"{kind} {tensor.name!r} has {name} {found!r}, where {value!r} is due"
                    raise invalid(what)


def _pairs(
    trace: Trace, program: Program
) -> Iterator[tuple[str, Sequence[ProgramTensor], Sequence[Facts]]]:
    yield "parameter", program.parameters, [_held(p) for p in trace.parameters]
    yield "buffer", program.buffers, [_held(b) for b in trace.buffers]
    yield (
        "input",
        program.inputs,
        [
            _whole(i.path, i.shape)
            | {"dtype": i.dtype, "has_gradient": i.gradient is not None}
            | {"requires_grad": i.requires_grad, "crosses": i.crosses, "given": i.given}
            for i in trace.inputs
        ],
    )
    yield (
        "output",
        program.outputs,
        [
            _whole(o.path, o.shape)
            | {"dtype": o.dtype, "has_gradient": bool(o.tangent), "is_loss": o.is_loss}
            | {"requires_grad": o.requires_grad, "crosses": o.crosses}
            for o in trace.outputs
        ],
    )


def _held(p: Parameter) -> Facts:
    return {
        "name": p.name, "shape": p.shape, "view": p.view, "dtype": p.dtype, "aliases": p.aliases,
        "requires_grad": p.requires_grad, "has_gradient": p.gradient is not None,
    }  # fmt: skip


def _whole(path: str, shape: tuple[int, ...]) -> dict[str, object]:
    return {"name": path, "shape": shape, "view": shape}
