"""Run a normal-form graph: on fake tensors to determine shapes and strides, and on real tensors to
compute reference results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from autopar.capture.diagnostics import of_changing_shapes
from autopar.capture.dynamo.fakes import new_fake_mode
from autopar.capture.normalize.tangents import tangent_of
from autopar.capture.trace import Parameter, Trace
from autopar.core.autocast_state import as_written
from autopar.errors import CaptureError, Where
from autopar.ops.blocks import shapes_only
from autopar.ops.score_functions import promoted_text


def propagate(graph: fx.Graph) -> None:
    """Set ``val`` of every node by running the graph on fake tensors; placeholders keep their
    shapes, strides and dtypes.

    Raises:
        CaptureError: torch cannot run an op on fake tensors, or the shape or dtype of a result
            differs from that during the capture.
    """
    with new_fake_mode(), as_written(), shapes_only():
        for node in graph.nodes:
            before = node.meta.get("val")
            if node.op == "placeholder":
                node.meta["val"] = torch.empty_strided(
                    before.shape, before.stride(), dtype=before.dtype
                )
            elif node.op == "call_function":
                if node.target is torch.ops.aten.view.default:
                    _make_viewable(node)
                node.meta["val"] = _fake_call(node)
                if isinstance(before, torch.Tensor):
                    _check_alike(node, before)


def _check_alike(node: fx.Node, before: torch.Tensor) -> None:
    after = node.meta["val"]
    if after.shape != before.shape or after.dtype != before.dtype:
        results = (
            f"{before.dtype} {tuple(before.shape)} in the capture, {after.dtype}"
            f" {tuple(after.shape)} in the normalized graph"
        )
        remedy = "cast the operands of the op to one dtype; if the plain model runs, report it"
        raise CaptureError(f"the op returns {results}", where=_location_of(node), remedy=remedy)


def _location_of(node: fx.Node) -> Where:
    return Where(
        op=str(node.target), module=node.meta.get("module", ""), source=node.meta.get("source", "")
    )


def _fake_call(node: fx.Node) -> Any:
    try:
        return call_node(node, lambda operand: operand.meta["val"])
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if node.target is torch.ops.aten.bincount.default:
            raise of_changing_shapes(_location_of(node)) from error
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        message = f"the op cannot run on tensors without data: {reason}"
        raise CaptureError(message, where=_location_of(node), remedy="use another op") from error


def _make_viewable(node: fx.Node) -> None:
    """Copy the operand of a view if its strides do not allow the view; the passes consider shapes
    only."""
    source, shape = node.args
    try:
        torch.ops.aten.view.default(source.meta["val"], shape)
    except (RuntimeError, ValueError):
        with node.graph.inserting_before(node):
            order = {"memory_format": torch.contiguous_format}
            copy = node.graph.call_function(torch.ops.aten.clone.default, (source,), order)
        copy.meta = {name: node.meta[name] for name in ("phase", "module", "source")}
        copy.meta["val"] = call_node(copy, lambda operand: operand.meta["val"])
        node.args = (copy, shape)


def execute(
    trace: Trace,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    tangent: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    observe: Callable[[fx.Node, Any], None] | None = None,
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Run the traced forward and backward node by node.

    Args:
        trace: the trace.
        parameters: values by name, in the shapes of the model; other names are ignored.
        buffers: values by name, in the shapes of the model; other names are ignored.
        inputs: values in the order of `trace.inputs`.
        tangent: scalar factor of the loss, or of the tangents of a model without a loss
            (`tangent_of`); 1 by default.
        dtype: dtype to compute in: floating tensors and casts use `dtype`, complex ones the
            corresponding complex dtype. None keeps the dtypes of the trace.
        observe: called with every node except the output, and its value.

    Returns:
        - the outputs in the order of `trace.outputs`,
        - the gradients: of parameters by name, in the shapes of the model, and of inputs by
          `Input.gradient_name`,
        - the new values of mutated buffers by name.
    """
    scale = 1.0 if tangent is None else float(tangent)
    seeds = [
        tangent_of(o.path, o.shape, promoted_dtype(o.dtype, dtype), is_loss=o.is_loss, scale=scale)
        for o in trace.differentiable
    ]
    read = [(parameters[entry.name], entry) for entry in trace.parameters]
    device = device_of((*inputs, *parameters.values()))
    values = [
        x.detach().reshape(entry.view).to(x.dtype if dtype else entry.compute_dtype)
        for x, entry in read
    ]
    values += [buffers[entry.name].detach().reshape(entry.view) for entry in trace.buffers]
    values += [*inputs, *(seed.to(device) for seed in seeds)]
    with as_written():
        results = _run(
            trace.graph, [promote(value, dtype) for value in values], dtype, observe, device
        )
    outputs = tuple(results[: len(trace.outputs)])
    gradients = {
        entry.name: _cast_to_stored(results[entry.gradient], entry)
        for entry in trace.parameters
        if entry.gradient is not None
    }
    gradients |= {
        i.gradient_name: results[i.gradient] for i in trace.given_back if i.gradient is not None
    }
    return outputs, gradients, {name: results[position] for name, position in trace.mutated.items()}


def _run(
    graph: fx.Graph,
    values: Sequence[torch.Tensor],
    dtype: torch.dtype | None,
    observe: Callable[[fx.Node, Any], None] | None,
    device: torch.device,
) -> tuple[Any, ...]:
    last_use = {operand: node for node in graph.nodes for operand in node.all_input_nodes}
    supply = iter(values)
    known: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], known.__getitem__)
        known[node] = (
            next(supply)
            if node.op == "placeholder"
            else call_node(node, known.__getitem__, dtype, device)
        )
        if observe is not None:
            observe(node, known[node])
        for operand in node.all_input_nodes:
            if last_use[operand] is node:
                del known[operand]
    raise AssertionError("the last node of a graph is its output")


def call_node(
    node: fx.Node,
    value_of: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Any:
    """Run a traced node.

    Args:
        node: the node.
        value_of: returns the value of an operand's node.
        dtype: dtype to compute in, as in `execute`.
        device: device on which factory ops create tensors; None keeps the recorded one.
    """
    args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    target: Any = node.target
    if device is not None:
        kwargs = place_on_device(kwargs, device)
        if (
            target is torch.ops.aten.view.default
        ):  # the strides were computed for the CPU; kernels of other devices may use others
            target = torch.ops.aten.reshape.default
    if dtype is None:
        return target(*args, **kwargs)
    args = tuple(promoted_dtype(argument, dtype) for argument in args)
    kwargs = {name: promoted_dtype(argument, dtype) for name, argument in kwargs.items()}
    # an op on integers returns torch's default floating dtype
    return tree_map(lambda value: promote(value, dtype), target(*args, **kwargs))


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device of the first tensor; the CPU if there is none."""
    return next((x.device for x in tensors), torch.device("cpu"))


def place_on_device(kwargs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of a factory op with its device, the CPU of the capture,
    replaced by `device`."""
    return {**kwargs, "device": device} if kwargs.get("device") is not None else dict(kwargs)


def promote(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a floating tensor cast to `dtype`, or a complex tensor cast to the corresponding
    complex dtype; return other values unchanged, and all values if `dtype` is None."""
    return (
        value.to(promoted_dtype(value.dtype, dtype)) if isinstance(value, torch.Tensor) else value
    )


def promoted_dtype(argument: Any, dtype: torch.dtype | None) -> Any:
    """Return `dtype` for a floating dtype and the corresponding complex dtype for a complex one,
    also within the text of score functions; return other arguments unchanged."""
    if dtype is not None and isinstance(argument, str):
        return promoted_text(argument, dtype)
    if (
        dtype is not None
        and isinstance(argument, torch.dtype)
        and (argument.is_floating_point or argument.is_complex)
    ):
        return dtype.to_complex() if argument.is_complex else dtype
    return argument


def _cast_to_stored(gradient: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    return gradient.reshape(parameter.shape)
