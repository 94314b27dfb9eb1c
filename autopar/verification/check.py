"""`verify_program`: compare a program with the plain model.

The program must equal the model in the loss, outputs, mutated buffers and every gradient. Four
cases need more than one comparison in the requested dtype:

- The model computes a part in a smaller dtype than requested (``logits.float()`` in a float64 run).
  The plain result is then less precise, and the tolerance is wider. The program is also compared
  with the traced graph, which computes everything in the requested dtype, with the tolerance of
  this dtype.
- The model magnifies the rounding of such a part. The model then runs once more with these parts in
  the requested dtype (`_compare_widened`). If this is not possible, the program must equal the
  traced graph in the requested dtype, and the comparison with the model is in the model's own
  dtype, which the result states (`_compare_magnified`).
- The plain model cannot run in the requested dtype, since an op has no kernel for it or a constant
  overflows. The comparison is in the model's own dtype, which the result states. If only the
  program's sums round too much in this dtype, the program runs in the requested dtype
  (`_compare_across_dtypes`).
- No dtype is requested. The result is only as precise as the smallest dtype that the model computes
  in, such as a 16-bit dtype under autocast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.capture import Trace
from autopar.capture.execute import device_of, execute
from autopar.core.layout import Layout
from autopar.errors import LayoutError, VerificationError
from autopar.kernels.packing import from_bucket
from autopar.program.interpreter import node_name
from autopar.program.lockstep import Lockstep, parts_in
from autopar.program.program import Program
from autopar.program.splitting import join
from autopar.rules import where_of
from autopar.verification.case import OF_INTEGERS, Case, PlainModelError, UndeterminedError
from autopar.verification.comparison import (
    Errors,
    Results,
    Verification,
    compare,
    floor_share_of,
    floor_share_with,
    magnitude,
    relative_error,
    tolerance_of,
    tolerance_with,
)
from autopar.verification.rounding import (
    depends_on_rounding,
    noise_of_rounding,
    scale_of_zeros,
    scales_of_sums,
)

# --------------------------------------------------------------------------------------------------
# Find the wrong node: join the values of every emitted node to a full tensor, and compare it with
# the traced node.


def diagnose(case: Case, summary: str) -> None:
    """Run the program again and compare each emitted node with its node of the traced graph. Return
    if none differs.

    Args:
        case: the comparison.
        summary: the last line of the message: what differs.

    Raises:
        VerificationError: for the first emitted node that differs.
    """
    values: dict[str, tuple[Any, ...]] = {}

    def remember(node: fx.Node, value: Any) -> None:
        """Record the results of a traced node."""
        values[node.name] = tuple(value) if isinstance(value, tuple | list) else (value,)

    trace = _run_reference(case, remember)
    floors = _floors(trace, values, case.compute_dtype)
    limit = tolerance_of(case.compute_dtype)
    mesh = case.program.stages[0].mesh
    traced = {node.name: node for node in trace.graph.nodes}
    compared: set[fx.Node] = set()

    def check(phase: str, node: fx.Node, locals: list[Any]) -> None:
        """Compare the ranks' results of an emitted node with the results of its traced node.

        Args:
            phase: name of the graph.
            node: the emitted node.
            locals: its result on each rank.

        Raises:
            VerificationError: if they differ by more than rounding explains.
        """
        if node in compared:  # the node runs again for a later microbatch
            return
        compared.add(node)
        if (
            node.op == "placeholder"
            or "holds" not in node.meta
            or not isinstance(locals[0], Tensor)
            or "empty" in str(node.target)
        ):
            return  # an uninitialised tensor may hold any value
        (name, result), layout = node.meta["holds"]
        if name not in values:  # one stage's part of a shared gradient
            return
        reference = values[name][result]
        try:
            error = relative_error(
                join(locals, layout, mesh, reference.shape, limit), reference, floors[name]
            )
            difference = f"its relative error is {error:.2e}"
        except (VerificationError, LayoutError, RuntimeError) as failure:
            error, difference = float("inf"), str(failure)
        if error > limit:
            _refuse_undetermined(
                traced[name],
                values,
                case.dtype,
                lambda found: (
                    relative_error(
                        found[result] if isinstance(found, tuple | list) else found,
                        reference,
                        floors[name],
                    )
                    > limit
                ),
            )
            raise VerificationError(
                _describe_difference(phase, node, layout, difference, summary),
                where=where_of(node),
                remedy=_REMEDY,
            )

    case.run_program(check)


def _refuse_undetermined(
    node: fx.Node,
    values: Mapping[str, tuple[Any, ...]],
    dtype: torch.dtype | None,
    differs: Callable[[Any], bool],
) -> None:
    """Raise an error if the result of a traced node depends on rounding.

    Args:
        node, values, dtype, differs: see `depends_on_rounding`.

    Raises:
        UndeterminedError: if it depends on rounding.
    """
    if depends_on_rounding(node, values, dtype, differs):
        raise UndeterminedError(
            "the model has no reproducible result to compare with: the result of"
            f" {node_name(node)} changes if its operands change by their rounding, as it does with"
            " another batch size or device",
            where=where_of(node),
            remedy=(
                "verify with weights and a batch for which this op does not choose between nearly"
                " equal numbers"
            ),
        )


_REMEDY = (
    "if the program was changed by hand, check this node and its operands; otherwise report the"
    " model"
)


def _run_reference(case: Case, remember: Callable[[fx.Node, Any], None]) -> Trace:
    """Run the traced graph of the first microbatch, and return its trace."""
    how, part = case.program.microbatches, case.program.trace
    parts = parts_in(how, case.by_path, case.tensors, case.dtype)
    tangent = torch.tensor(how.weight, dtype=case.compute_dtype)
    inputs = [parts[0][i.path] for i in part.inputs]
    execute(part, case.tensors, case.tensors, inputs, tangent, dtype=case.dtype, observe=remember)
    return part


def _floors(
    trace: Trace, values: dict[str, tuple[Any, ...]], dtype: torch.dtype
) -> dict[str, float]:
    """Return, by node name, the magnitude below which errors of a node do not count.

    A difference of large numbers is only as precise as its operands. So the floor is a share of the
    largest magnitude that a node reads.
    """

    def largest(parts: Iterable[Any]) -> float:
        """Return the largest magnitude among the tensors."""
        return max((magnitude(part) for part in parts if isinstance(part, Tensor)), default=0.0)

    sizes, share = {name: largest(parts) for name, parts in values.items()}, floor_share_of(dtype)
    nodes = [node for node in trace.graph.nodes if node.op != "output"]
    return {
        node.name: share * max((sizes[n.name] for n in node.all_input_nodes), default=0.0)
        for node in nodes
    }


def _describe_difference(
    phase: str, node: fx.Node, layout: Layout, difference: str, summary: str
) -> str:
    operands = [n for n in node.all_input_nodes if "holds" in n.meta or n.target is from_bucket]
    reads = ", ".join(
        f"{node_name(n)} as {n.meta['holds'][1]}" if "holds" in n.meta else node_name(n)
        for n in operands
    )
    note = " (run again in backward)" if node.meta.get("recomputed") else ""
    return (
        "the program computes a different value from the model; the first node that differs is"
        f" {node_name(node)} in {phase}{note}\n  its layout is {layout}, and {difference}\n  its"
        f" operands: {reads or 'none'}\n  {summary}"
    )


# least ratio of the error in a larger dtype to the error in the model's own dtype;
# the error of a wrong capture would be the same in both
_MAGNIFIED = 3.0
# largest difference of two programs as a multiple of the noise of rounding: all sums add to it
_NOISES = 4.0


def verify_program(
    trace: Trace,
    program: Program,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
) -> Verification:
    """Run all ranks of `program` in one process, and compare the loss, outputs, buffers and every
    gradient with the plain model.

    The model runs in its current mode. A copy of it runs; the model never changes. If it returns no
    loss, backward begins with the same tangents on both sides, which replace the gradients of a
    user's loss (`autopar.capture.normalize.tangents`).

    Args:
        trace: the traced call of the model.
        program: the program emitted from a plan for `trace`.
        model: the plain model, with values.
        args, kwargs: arguments of the call, with values.
        dtype: dtype to which floating tensors are converted on both sides; None computes in the
            model's own dtype.
        tolerance: largest relative error (see `autopar.verification.comparison`). The default is
            1e-9 in float64, 2e-6 if the model computes a part in float32, 1e-4 in float32, and 5e-2
            in 16-bit dtypes and if a part is in one.

    Returns:
        The errors, all within the tolerance.

    Raises:
        UndeterminedError: if that node's result depends on rounding, as a top-k of nearly equal
            numbers does.
        VerificationError: for the first node that differs; if the model or the batch has no values
            (meta); or if the plain loss is not finite.
    """
    case = Case.of(trace, program, model, args, kwargs, dtype)
    with _exact_on_a_gpu() if device_of(case.tensors.values()).type == "cuda" else nullcontext():
        return _check_case(case, dtype, tolerance)


@contextmanager
def _exact_on_a_gpu() -> Iterator[None]:
    """Make convolutions deterministic, and do not round float32 to TF32."""
    kinds = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul)
    deterministic, precisions = (
        torch.backends.cudnn.deterministic,
        [kind.fp32_precision for kind in kinds],
    )
    try:
        torch.backends.cudnn.deterministic = True
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        torch.backends.cudnn.deterministic = deterministic
        for kind, precision in zip(kinds, precisions, strict=True):
            kind.fp32_precision = precision


def _check_case(case: Case, dtype: torch.dtype | None, tolerance: float | None) -> Verification:
    try:
        return _compare_case(case, *_plain(case), tolerance)
    except PlainModelError as error:
        if dtype is None or dtype == case.own_dtype:
            raise
        try:
            return _compare_in_own_dtype(case, error.what, tolerance)
        except VerificationError:
            if (exact := _compare_across_dtypes(case, error.what, tolerance)) is None:
                raise
            return exact


def _compare_across_dtypes(
    case: Case, why_not: str, tolerance: float | None
) -> Verification | None:
    """Compare the program in the requested dtype with the model in its own dtype, and strictly with
    the traced graph. Return None if they differ.

    In the model's own dtype a correct program may have a larger error. It sums in another order,
    and torch's kernels may accumulate in a larger dtype, as batch norms on CPUs do.
    """
    plain, lower = _plain(replace(case, dtype=None, compute_dtype=case.own_dtype))
    smallest = min((case.own_dtype, *lower.values()), key=lambda d: d.itemsize)
    limit = tolerance_of(smallest) if tolerance is None else tolerance
    try:
        result = _judge(case, case.run_program(), plain, {"all of the model": smallest}, limit)
    except (
        VerificationError,
        RuntimeError,
        ValueError,
        TypeError,
    ):  # the program may have no kernel in this dtype either
        return None
    dtype, own_dtype = (str(d).removeprefix("torch.") for d in (case.compute_dtype, smallest))
    return (
        replace(
            result,
            lower_parts=(),
            instead_of=f"{dtype}: {why_not}; it ran in {own_dtype}, the program in {dtype}",
        )
        if result.ok
        else None
    )


def _compare_in_own_dtype(case: Case, why_not: str, tolerance: float | None) -> Verification:
    """Return the comparison in the model's own dtype, with the reason why it is not in the
    requested dtype."""
    own_case = replace(case, dtype=None, compute_dtype=case.own_dtype)
    return replace(
        _compare_case(own_case, *_plain(own_case), tolerance),
        instead_of=f"{str(case.compute_dtype).removeprefix('torch.')}: {why_not}",
    )


def _plain(case: Case) -> tuple[Results, Mapping[str, torch.dtype]]:
    plain, lower = case.run_plain()
    if case.loss is not None and not bool(plain.outputs[case.loss].isfinite().all()):
        raise PlainModelError(
            f"the plain model's loss is {plain.outputs[case.loss].item()}: the comparison would be"
            " meaningless",
            remedy="verify with a batch and weights that give a finite loss",
        )
    return plain, lower


def _compare_case(
    case: Case, plain: Results, lower: Mapping[str, torch.dtype], tolerance: float | None
) -> Verification:
    if case.dtype is None and lower:
        case, lower = replace(case, compute_dtype=min(lower.values(), key=lambda d: d.itemsize)), {}
    try:
        ran = case.run_program()
    except VerificationError as error:
        diagnose(case, str(error))
        raise
    result = _judge(case, ran, plain, lower, tolerance)
    # the default dtype of an op on integers is not a choice of the model
    if (not result.ok or any(OF_INTEGERS in part for part in lower)) and (
        widened := _compare_widened(case, ran, result, lower, tolerance)
    ) is not None:
        return widened
    if not result.ok and (magnified := _compare_magnified(case, result, tolerance)) is not None:
        return magnified
    if not result.ok:
        diagnose(case, str(result))
        raise VerificationError(
            "every node matches the traced graph, but the plain model computes a different"
            f" value\n{result}",
            remedy=(
                "report the model: the capture is wrong, or the model computes different values"
                " in each call"
            ),
        )
    return result


def _compare_widened(
    case: Case,
    ran: Lockstep,
    result: Verification,
    lower: Mapping[str, torch.dtype],
    tolerance: float | None,
) -> Verification | None:
    """Return the comparison with a model that computes in the requested dtype throughout
    (`Widened`).

    Return None if they differ, if the model cannot run so, or if the error in `result` is larger
    than if the whole model ran in the smaller dtype.
    """
    off = result.traced is None or result.traced > result.traced_tolerance
    if (
        off
        or tolerance is not None
        or result.max_error > max(tolerance_of(d) for d in lower.values())
    ):
        return None
    try:
        plain, _ = _plain(replace(case, widened=True))
    except VerificationError:
        return None
    strict = _judge(case, ran, plain, {}, tolerance)
    return (
        replace(strict, lower_parts=result.lower_parts, apart=result.max_error)
        if strict.ok
        else None
    )


def _compare_magnified(
    case: Case, result: Verification, tolerance: float | None
) -> Verification | None:
    """Return the comparison in the model's own dtype if the model magnifies its rounding in a
    larger dtype; None otherwise.

    The program must equal the traced graph in the larger dtype. In the model's own dtype its error
    must be within the same tolerance, or smaller by `_MAGNIFIED`. A wrong capture has the same
    error in every dtype. A magnified rounding only separates the model with parts in a smaller
    dtype from the model in the larger dtype throughout.
    """
    if (
        result.traced is None
        or result.traced > result.traced_tolerance
        or case.dtype in (None, case.own_dtype)
    ):
        return None
    magnified = (
        f"the ops in {', '.join(result.lower_parts[:2])} and the rest of the model differ by"
        f" {result.max_error:.0e}"
    )
    try:
        own_comparison = _compare_in_own_dtype(
            case,
            f"{magnified}; the program is within {result.traced:.0e} of the traced graph",
            tolerance,
        )
    except VerificationError:
        return None
    return (
        own_comparison
        if own_comparison.max_error <= max(result.tolerance, result.max_error / _MAGNIFIED)
        else None
    )


def _worst_value(errors: Errors) -> float:
    """Return the largest error of outputs and buffers."""
    return max((*errors.outputs.values(), *errors.buffers.values()), default=0.0)


def _noise(case: Case, plain: Results, limit: float) -> dict[str, float]:
    """Return the noise of rounding in each gradient of the plain model.

    It is limited to the largest gradient, as the noise of a weight at a kink would hide any error.

    Args:
        case: the comparison.
        plain: results of the plain model.
        limit: the tolerance.
    """
    most = max(magnitude(x) for x in plain.gradients.values())
    noises = noise_of_rounding(case).items()
    return {name: min(_NOISES * size / limit, most) for name, size in noises}


def _compare_with_plain(
    case: Case, ours: Results, plain: Results, limit: float, share: float
) -> tuple[Errors, tuple[float, Mapping[str, float], Mapping[str, float]]]:
    """Compare the results of a program with those of the plain model.

    Args:
        case: the comparison.
        ours: results of the program.
        plain: results of the plain model.
        limit: the tolerance. Floors take further runs of the model, so they are only determined for
            results with a larger error.
        share: as in `compare`.

    Returns:
        The errors, and the scale, scales of sums, and noise with which they were computed.
    """
    errors, noise = compare(ours, plain, share), dict[str, float]()
    may_be_zero = max(errors.gradients.values(), default=0.0) > limit
    scale = scale_of_zeros(case, plain, limit * share) if may_be_zero else 0.0
    summed = scales_of_sums(case) if _worst_value(errors) > limit else {}
    if errors.worst > limit:
        errors = compare(ours, plain, share, scale, summed)
    # In a smaller dtype noise may hide an error. `_compare_across_dtypes` compares in a larger one.
    if (
        case.compute_dtype == torch.float64
        and _worst_value(errors) <= limit < errors.worst < math.inf
    ):
        noise = _noise(case, plain, limit)
        errors = compare(ours, plain, share, scale, summed, noise)
    return errors, (scale, summed, noise)


def _judge(
    case: Case,
    ran: Lockstep,
    plain: Results,
    lower: Mapping[str, torch.dtype],
    tolerance: float | None,
) -> Verification:
    ours, strict = (
        Results(ran.outputs, ran.buffers, ran.gradients),
        tolerance_of(case.compute_dtype),
    )
    limit = tolerance if tolerance is not None else max(strict, tolerance_with(lower.values()))
    share = floor_share_of(case.compute_dtype)
    wide = max(share, floor_share_with(lower.values()))
    errors, floors = _compare_with_plain(case, ours, plain, limit, wide)
    traced: float | None = None
    if lower and case.num_separate_draws == 1:
        traced = compare(ours, case.run_traced(), share, *floors).worst
    return Verification(
        ok=errors.worst <= limit and (traced is None or traced <= strict),
        tolerance=limit,
        dtype=str(case.compute_dtype).removeprefix("torch."),
        loss=None if case.loss is None else errors.outputs[case.loss],
        outputs={name: error for name, error in errors.outputs.items() if name != case.loss},
        buffers=errors.buffers,
        gradients=errors.gradients,
        lower_parts=tuple(lower),
        traced=traced,
        traced_tolerance=strict,
        num_collectives=sum(c.kind != "slice" for _, _, c in ran.records),
    )
