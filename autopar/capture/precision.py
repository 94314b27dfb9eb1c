"""Mixed precision: parameters are stored in one dtype and read in a narrower one.

The trace is the same for both ways to request it:

- With a precision, the call is captured as if every wider floating parameter and input had that
  dtype, except buffers. `MixedPrecisionPolicy(param_dtype=...)` of FSDP does the same.
- Under `torch.autocast`, the model contains a cast per op.

If all users of a placeholder read it in one narrower dtype, the placeholder has this dtype in the
graph (`compute_dtype`). The parameter is cast before it is communicated, so that all-gathers move
the narrow dtype. The graph casts gradients back: they have the stored dtype of the parameter before
they are summed over devices. A gradient that is only accumulated over microbatches keeps the dtype
it is computed in, if that dtype suffices (`autopar.cost.gradient_dtypes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.graphs import cast, dtype_of, emit, is_tensor, shape_of
from autopar.core.autocast_state import as_written
from autopar.errors import CaptureError, Where

_cast = torch.ops.aten._to_copy.default


def narrow_dtype(dtype: torch.dtype, precision: torch.dtype | None) -> torch.dtype:
    """Return `precision` if `dtype` is a wider floating dtype, else `dtype`."""
    if precision is None or not dtype.is_floating_point or dtype.itemsize <= precision.itemsize:
        return dtype
    return precision


def cast_input(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> None:
    """Set the dtype of a placeholder to the wider dtype of the input; its users read a cast.

    Args:
        graph: the graph.
        node: the placeholder, in the dtype that its users read.
        dtype: the dtype of the input.
    """
    users, narrow = list(node.users), dtype_of(node)
    last = [other for other in graph.nodes if other.op == "placeholder"][-1]
    node.meta["val"] = node.meta["val"].to(dtype)
    with graph.inserting_after(last):
        read = cast(node, node, narrow)
    for user in users:
        user.replace_input_with(node, read)


def widen_gradient(gradient: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return the gradient cast to `dtype`, the stored dtype of its parameter; the terms of a sum
    are cast before they are added."""
    if dtype_of(gradient) == dtype:
        return gradient
    terms = (
        gradient.args[:2]
        if gradient.target is torch.ops.aten.add.Tensor
        and not gradient.kwargs
        and len(gradient.users) == 1
        else ()
    )
    if len(terms) == 2 and all(
        is_tensor(term) and shape_of(term) == shape_of(gradient) for term in terms
    ):
        with gradient.graph.inserting_after(gradient):
            return emit(
                gradient,
                gradient.target,
                tuple(widen_gradient(term, dtype) for term in terms),
                shape_of(gradient),
                dtype=dtype,
            )
    with gradient.graph.inserting_after(gradient):
        return cast(gradient, gradient, dtype)


def absorb_casts(graph: fx.Graph, parameter: fx.Node) -> None:
    """If all users of a placeholder cast it to one narrower floating dtype, set its dtype and
    remove the casts."""
    dtypes = {user.kwargs.get("dtype") if _is_cast(user) else None for user in parameter.users}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    if (
        not isinstance(dtype, torch.dtype)
        or not dtype.is_floating_point
        or narrow_dtype(dtype_of(parameter), dtype) == dtype_of(parameter)
    ):
        return
    parameter.meta["val"] = parameter.meta["val"].to(dtype)
    for user in list(parameter.users):
        user.replace_all_uses_with(parameter)
        graph.erase_node(user)


def before_cast(gradient: fx.Node) -> fx.Node:
    """Return the operand of `gradient` if it is a cast between floating dtypes with one user, else
    `gradient`."""
    alone = _is_cast(gradient) and len(gradient.users) == 1
    return gradient.args[0] if alone and dtype_of(gradient.args[0]).is_floating_point else gradient


def _is_cast(node: fx.Node) -> bool:
    """Return whether a node only changes the dtype, and not the device or the memory layout."""
    return node.target is _cast and _names_given(node.kwargs) <= {"dtype"}


def _names_given(kwargs: Mapping[str, Any]) -> set[str]:
    return {name for name, value in kwargs.items() if value not in (None, False)}


# --------------------------------------------------------------------------------------------------
# Calls whose operands have several floating dtypes.
#
# Fake tensors promote dtypes that kernels reject. Some of their results also differ in dtype from
# those of the kernels, such as the statistics of a norm of 16-bit values with float32 weights.
# Therefore each distinct call is run on small real tensors: first with all operands in the widest
# of their dtypes, to check that the small call is valid, and then with the original dtypes. If no
# small call is valid, the call is not checked.

Dtypes = tuple[torch.dtype | None, ...]  # of the results of a call; None for a non-tensor
Size = Callable[[int], int]
_OWN = ("aten", "autopar")
_ATOMS = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device)
)  # types of most arguments without tensors
_SMALL = 8  # size of a dim of a small tensor
_MOST_ELEMENTS = 2**22  # of all operands and results of a small call
_known: dict[Any, KernelTrial | None] = {}


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """The result of running a kernel on operands of several dtypes.

    Attributes:
        dtypes: dtypes of the results; empty if the kernel raises an error.
        widest: dtypes of the results with all operands in the widest of their dtypes.
        refusal: first line of the error; ``""`` if there is none.
    """

    dtypes: Dtypes
    widest: Dtypes
    refusal: str = ""


def is_mixed(arguments: Any) -> bool:
    """Return whether the arguments of a call contain tensors of several floating or complex
    dtypes."""
    return len(_dtypes_among(arguments)) > 1


def try_kernel(
    target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> KernelTrial | None:
    """Run the kernel of a call with several floating dtypes on small tensors.

    Args:
        target: the op; custom ops are not run.
        args: positional arguments, with fake tensors.
        kwargs: keyword arguments, with fake tensors.
        result: the fake result.

    Returns:
        The dtypes of the results or the error; None if no small call is valid.
    """
    if isinstance(target, torch._ops.OpOverload) and target.namespace not in _OWN:
        return None
    key = target, _symbolic_token(args), _symbolic_token(tuple(kwargs.items()))
    if key not in _known:
        with as_written(), torch.random.fork_rng(devices=()):
            _known[key] = next(
                (
                    trial
                    for size in _sizes(args, result)
                    if (trial := _trial(target, args, kwargs, result, size))
                ),
                None,
            )
    return _known[key]


def as_kernels_give(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    fake: Callable[[Tensor, torch.device], Tensor],
) -> Any:
    """Return the fake result of a call, with the dtypes that its kernel returns.

    Args:
        target: the op.
        args: positional arguments, with fake tensors.
        kwargs: keyword arguments, with fake tensors.
        result: the fake result, with the dtypes that fake tensors promote to.
        fake: creates a fake tensor from a meta tensor and a device.
    """
    trial = try_kernel(target, args, kwargs, result) if is_mixed((args, kwargs)) else None
    if trial is None or trial.refusal or trial.dtypes == _dtypes_of(result):
        return result

    def with_dtype(x: Any, dtype: torch.dtype | None) -> Any:
        """Return a fake tensor with another dtype; return a non-tensor unchanged."""
        if not isinstance(x, Tensor) or x.dtype == dtype:
            return x
        return fake(torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta"), x.device)

    several = isinstance(result, list | tuple)
    results = [
        with_dtype(x, dtype)
        for x, dtype in zip(result if several else (result,), trial.dtypes, strict=True)
    ]
    return (results if isinstance(result, list) else tuple(results)) if several else results[0]


def settle_dtypes(
    graph: fx.Graph, resting: Iterable[fx.Node], precision: torch.dtype | None
) -> None:
    """Ensure that no call has a combination of operand dtypes that its kernel rejects.

    With a precision, values that depend only on parameters and buffers, such as spectral norms, are
    computed in the widest dtype of their operands.

    Args:
        graph: the graph; ``val`` of its nodes is set.
        resting: the placeholders of parameters and buffers.
        precision: the requested precision; None if none was requested.

    Raises:
        CaptureError: the kernel of another call rejects its operands.
    """
    alone = set(resting)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if all(operand in alone for operand in node.all_input_nodes):
            alone.add(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        trial = (
            try_kernel(node.target, args, kwargs, node.meta["val"])
            if is_mixed((args, kwargs))
            else None
        )
        if trial is None or not trial.refusal:
            continue
        if precision is None or node not in alone or trial.widest != _dtypes_of(node.meta["val"]):
            raise _mixed_error(node, (args, kwargs), trial.refusal, precision)
        _widen_operands(node, _widest(args))


def _widen_operands(node: fx.Node, dtype: torch.dtype) -> None:
    with node.graph.inserting_before(node):
        for operand in node.all_input_nodes:
            if is_tensor(operand) and _is_number(dtype_of(operand)):
                node.replace_input_with(operand, cast(node, operand, dtype))


def _mixed_error(
    node: fx.Node, arguments: Any, refusal: str, precision: torch.dtype | None
) -> CaptureError:
    names = " and ".join(
        sorted(str(dtype).removeprefix("torch.") for dtype in _dtypes_among(arguments))
    )
    remedy_start = (
        "a precision does not change the dtype of buffers and of tensors that forward creates: cast"
        " them before they are combined with other tensors, as in "
    )
    op = (
        str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target.__name__
    )
    return CaptureError(
        f"an op has operands in {names}, which torch rejects: {refusal}",
        where=Where(op=op, module=node.meta["module"], source=node.meta["source"]),
        remedy=(
            "cast the operands of the op to one dtype; pass an argument in the dtype of the"
            " parameters that it is combined with"
            if precision is None
            else f"{remedy_start}`x + self.table.to(x.dtype)`"
        ),
    )


def _trial(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    size: Size,
) -> KernelTrial | None:
    dtype = _widest((args, kwargs))
    if (
        sum(math.prod(map(size, x.shape)) for x in _tensors((args, kwargs, result)))
        > _MOST_ELEMENTS
    ):
        return None

    def run(device: str, dtype: torch.dtype | None) -> Any:
        """Run the op on small operands.

        Args:
            device: their device.
            dtype: dtype of the floating operands; None for their own dtypes.
        """
        return target(*_small(args, size, device, dtype), **_small(kwargs, size, device, dtype))

    try:
        # Run on meta first: kernels may read out of bounds if the shapes do not fit each other.
        shapes = [x.shape for x in _tensors(run("meta", dtype))]
        if shapes != [tuple(map(size, x.shape)) for x in _tensors(result)]:
            return None
        widest = _dtypes_of(run("cpu", dtype))
    except Exception:  # any error is possible: sizes may not fit, or a dtype may have no kernel
        return None
    try:
        return KernelTrial(_dtypes_of(run("cpu", None)), widest)
    except Exception as error:
        return KernelTrial((), widest, next(iter(str(error).splitlines()), type(error).__name__))


def _sizes(args: Any, result: Any) -> Iterator[Size]:
    """Yield functions that reduce sizes of dims, and integer arguments, which may be sizes; the
    last function is the identity."""
    batch = max(
        (x.shape for x in _tensors((args, result)) if x.dim()), key=math.prod, default=(1,)
    )[0]
    yield lambda n: min(n, _SMALL)
    yield lambda n: 1 if n == batch else n
    yield lambda n: n


def _small(x: Any, size: Size, device: str, dtype: torch.dtype | None) -> Any:
    if isinstance(x, Tensor):
        build = (
            torch.ones if _is_number(x.dtype) or x.dtype == torch.bool else torch.zeros
        )  # integers are valid indices
        return build(
            tuple(map(size, x.shape)),
            dtype=dtype if dtype and _is_number(x.dtype) else x.dtype,
            device=device,
        )
    if isinstance(x, Mapping):
        return {name: _small(value, size, device, dtype) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_small(each, size, device, dtype) for each in x]
    return size(x) if type(x) is int else x


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple, dict)) or (type(x) not in _ATOMS and isinstance(x, Mapping)):
        for item in x.values() if isinstance(x, Mapping) else x:
            yield from _tensors(item)


def _dtypes_among(x: Any) -> set[torch.dtype]:
    return {tensor.dtype for tensor in _tensors(x) if _is_number(tensor.dtype)}


def _widest(x: Any) -> torch.dtype:
    first, *others = _dtypes_among(x)
    for other in others:
        first = torch.promote_types(first, other)
    return first


def _dtypes_of(result: Any) -> Dtypes:
    return tuple(
        x.dtype if isinstance(x, Tensor) else None
        for x in (result if isinstance(result, list | tuple) else (result,))
    )


def _is_number(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _symbolic_token(x: Any) -> Any:
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype
    return tuple(map(_symbolic_token, x)) if isinstance(x, list | tuple) else (type(x), x)
