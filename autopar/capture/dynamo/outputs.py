"""The results of a captured forward, those that are differentiated, and its other effects: changed
inputs, inner gradients, checks, logs and prints."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import TensorVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.misc import IgnoredFunctionVariable
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput
from torch._library import simple_registry

from autopar.capture.diagnostics import user_line
from autopar.capture.hugging_face import model_loggers
from autopar.capture.trace import recorded_module
from autopar.capture.trees import argument_name, flatten_with_paths, leaves_of
from autopar.errors import CaptureError, Where

# --------------------------------------------------------------------------------------------------
# Which results are differentiated: the loss of the model, or without one all that have gradients.


@dataclass(frozen=True, slots=True)
class Differentiated:
    """Flat positions in a model's return value.

    Attributes:
        loss: position of the loss; None if the model returns no loss.
        positions: what is differentiated: the loss alone, or without one everything that has a
            gradient; empty if nothing has one.
    """

    loss: int | None
    positions: tuple[int, ...]


def select_differentiated(
    returned: Any, leaves: tuple[tuple[str, Any], ...], computed: Callable[[torch.Tensor], bool]
) -> Differentiated:
    """Select the results that are differentiated.

    The loss is the return value itself if it is a scalar; else its ``loss`` entry or attribute;
    else the first scalar floating tensor of a tuple that depends on parameters and on the batch
    (not the scale of logits, or a penalty on weights). It must depend on a parameter that requires
    a gradient, unless nothing does.

    Args:
        returned: what the model returns.
        leaves: its (path, value) pairs in flat order.
        computed: whether a tensor depends on a parameter and on the batch.
    """
    tensors = {
        position: leaf
        for position, (_, leaf) in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
    }
    having = tuple(position for position, leaf in tensors.items() if leaf.requires_grad)
    candidates = {id(tensor) for tensor in _candidates(returned, leaves, computed)}
    for position in having or tensors:
        leaf = tensors[position]
        if id(leaf) in candidates and leaf.dim() == 0 and leaf.is_floating_point():
            return Differentiated(position, (position,) if having else ())
    return Differentiated(None, having)


def _candidates(
    returned: Any, leaves: tuple[tuple[str, Any], ...], computed: Callable[[torch.Tensor], bool]
) -> list[torch.Tensor]:
    named = (
        returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    )
    if isinstance(named, torch.Tensor):
        return [named]
    if isinstance(returned, torch.Tensor):
        return [returned]
    scalars = (leaf for _, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() == 0)
    return (
        [leaf for leaf in scalars if computed(leaf)] if isinstance(returned, tuple | list) else []
    )


def _knows_builtins(captured: Any) -> None:
    """Add builtins (`type`) to the globals of Dynamo's bytecode, which lacks them before torch
    2.13."""
    for part in (captured._dynamo_bytecode_flatten, captured._dynamo_bytecode_unflatten):
        part.f_globals = {**vars(builtins), **part.f_globals}


def others_detached(
    captured: Any, inputs: tuple[Any, ...]
) -> tuple[tuple[tuple[str, Any], ...], Any, Differentiated]:
    """Make the Dynamo graph return the flat leaves of the model's return value, and detach those
    that are not differentiated.

    Copies keep AOTAutograd from treating results as views of each other. Cleaning removes them, and
    the detaching ops.

    Args:
        captured: Dynamo's graph module.
        inputs: the call's arguments.

    Returns:
        (path, value) of each leaf, the pytree spec, and what is differentiated.

    Raises:
        CaptureError: the model returns a tensor that its forward does not compute.
    """
    graph: fx.Graph = captured.graph
    output = next(iter(reversed(graph.nodes)))
    results = {
        id(node.meta["example_value"]): node for node in output.args[0] if isinstance(node, fx.Node)
    }
    values = tuple(
        node.meta["example_value"] if isinstance(node, fx.Node) else node for node in output.args[0]
    )
    _knows_builtins(captured)
    flat_inputs = captured._dynamo_bytecode_flatten(*inputs)
    arguments = _read_arguments(graph, len(flat_inputs))
    results.update(
        {
            id(value): node
            for value, node in zip(flat_inputs, arguments, strict=True)
            if id(value) not in results
        }
    )
    leaves, spec = flatten_with_paths(captured._dynamo_bytecode_unflatten(values, inputs))
    given = {id(leaf) for leaf in leaves_of(inputs)}
    batch = {node for value, node in zip(flat_inputs, arguments, strict=True) if id(value) in given}

    def is_computed(tensor: torch.Tensor) -> bool:
        """Return whether a result follows from both the batch and a parameter."""
        node = results.get(id(tensor))
        sources = _sources(node) if node is not None else set()
        return not sources.isdisjoint(batch) and any(
            isinstance(n.meta.get("example_value"), nn.Parameter) for n in sources
        )

    found = select_differentiated(
        captured._dynamo_bytecode_unflatten(values, inputs), leaves, is_computed
    )
    returned: list[Any] = []
    with graph.inserting_before(output):
        for position, (path, leaf) in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                returned.append(None)
                continue
            if id(leaf) not in results:
                raise CaptureError(
                    f"the model returns a tensor at {path!r} that its forward does not compute",
                    remedy=(
                        "return a copy (`self.name.clone()`), or leave it out and read it of the"
                        " model"
                    ),
                )
            node = results[id(leaf)]
            if position not in found.positions:
                node = graph.call_method("detach", (node,))
            returned.append(node if position == found.loss else graph.call_method("clone", (node,)))
    output.args = (tuple(returned),)
    graph._codegen.dynamo_bytecode_unflatten = lambda results, _inputs: results
    return leaves, spec, found


def _read_arguments(graph: fx.Graph, num: int) -> list[fx.Node]:
    """Return the placeholders of `num` inputs.

    Tensors that an earlier call left in a list, and that forward does not read, have a placeholder
    without a source; these are erased.
    """
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    unread = [
        node
        for node in arguments
        if not node.users and getattr(node, "_dynamo_source", None) is None
    ]
    if len(arguments) == num or len(arguments) - len(unread) != num:
        return arguments
    for node in unread:
        graph.erase_node(node)
    return [node for node in arguments if node not in unread]


def _sources(node: fx.Node) -> set[fx.Node]:
    """Return the placeholders that a node depends on."""
    seen, stack = {node}, [node]
    while stack:
        new = set(stack.pop().all_input_nodes) - seen
        seen |= new
        stack += new
    return {each for each in seen if each.op == "placeholder"}


# --------------------------------------------------------------------------------------------------
# Inputs that forward changes in place: tensors of the caller, of which ranks have parts or copies.


def refuse_changed_inputs(
    graph: fx.Graph, leaves: Sequence[tuple[str, Any]], model: nn.Module
) -> None:
    """Raise CaptureError at the first input that forward changes in place.

    Args:
        graph: the joint graph.
        leaves: (path, value) of the call's arguments.
        model: the model, whose forward names the arguments.
    """
    output = next(iter(reversed(graph.nodes)))
    returned: Any = output.args[0]
    for desc, node in zip(output.meta["desc"], returned, strict=True):
        if isinstance(desc, InputMutationAOTOutput) and isinstance(
            desc.mutated_input, PlainAOTInput
        ):
            name = argument_name(
                leaves[desc.mutated_input.idx][0], list(inspect.signature(model.forward).parameters)
            )
            held = "x" if "." in name else name
            raise CaptureError(
                f"forward changes its input {name!r} in place: the caller's tensor, which no"
                " program writes to",
                where=Where(
                    module=recorded_module(node.meta),
                    source=user_line(node.meta.get("stack_trace") or ""),
                ),
                remedy=(
                    f"let forward change a copy (`{held} = {held}.clone()` before), or compute a"
                    " new tensor: x.masked_fill(...) in place of x.masked_fill_(...), a module"
                    " with `inplace=False`"
                ),
            )


# --------------------------------------------------------------------------------------------------
# Gradients that forward computes: `torch.autograd.grad` is part of the graph, and differentiated.

# Refuses results that follow from a tensor on which forward called requires_grad_(), since
# torch.compile's own results would lack what that did to them. A program's results have the
# gradients of the joint graph alone, which begin at parameters and inputs.
_CHECK = "_check_requires_grad_intermediate_outputs"


@contextlib.contextmanager
def gradients_within() -> Iterator[None]:
    """Let Dynamo trace `torch.autograd.grad` into the graph; `Tensor.backward`, which writes into
    parameters, stays refused."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(trace_autograd_ops=True))
        if hasattr(OutputGraph, _CHECK):  # since torch 2.13
            stack.enter_context(mock.patch.object(OutputGraph, _CHECK, lambda *_: None))
        stack.enter_context(mock.patch.object(TensorVariable, "method_backward", _as_ever))
        stack.enter_context(
            mock.patch.object(TorchInGraphFunctionVariable, "call_function", _made_first)
        )
        yield


_BACKWARD = TensorVariable.method_backward


_CALL = TorchInGraphFunctionVariable.call_function


def _made_first(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Trace ``torch.zeros(4, requires_grad=True)``, which Dynamo refuses, as
    ``torch.zeros(4).requires_grad_()``."""
    asked = kwargs.get("requires_grad")
    if asked is None or not asked.is_python_constant() or asked.as_python_constant() is not True:
        return _CALL(self, tx, args, kwargs)
    made = _CALL(
        self, tx, args, {name: value for name, value in kwargs.items() if name != "requires_grad"}
    )
    return made.call_method(tx, "requires_grad_", [], {})


def _as_ever(*args: Any, **kwargs: Any) -> Any:
    with torch._dynamo.config.patch(trace_autograd_ops=False):
        return _BACKWARD(*args, **kwargs)


# --------------------------------------------------------------------------------------------------
# Ops that check their result while they run, as torch.linalg.inv, cholesky and solve do. A program
# computes the unchecked forms.

_CHECKED = "aten::_linalg_check_errors"


@contextlib.contextmanager
def checks_in_no_order() -> Iterator[None]:
    """Let checks of results be plain calls that nothing reads; since torch 2.13 they are effects,
    ordered by tokens."""
    held = getattr(simple_registry.singleton.find(_CHECKED), "effect", None)
    before = getattr(held, "effect", None)
    if held is None or before is None:
        yield
        return
    held.register(None)
    try:
        yield
    finally:
        held.register(before)


# --------------------------------------------------------------------------------------------------
# What forward logs and prints: a program does neither.

_METHODS = ("debug", "info", "warning", "warning_once", "error", "log", "info_once")


def logging_functions() -> set[Callable[..., Any]]:
    """Return the functions that Dynamo skips instead of refusing the graph: loggers' methods,
    warnings and `print`."""
    loggers = [logging.getLogger(), *model_loggers()]
    found = {
        getattr(logger, name) for logger in loggers for name in _METHODS if hasattr(logger, name)
    }
    functions = {getattr(method, "__func__", method) for method in found}
    return functions | {warnings.warn, print, *torch._dynamo.config.ignore_logging_functions}


@contextlib.contextmanager
def prints_left_out() -> Iterator[list[str]]:
    """Yield a list of the source lines at which Dynamo meets a `print`."""
    lines: list[str] = []
    call = IgnoredFunctionVariable.call_function

    def note_print(variable: Any, translator: Any, *args: Any) -> Any:
        """Record the line of a call of `print`."""
        line = f"{translator.f_code.co_filename}:{translator.lineno}"
        if variable.value is print and line not in lines:
            lines.append(line)
        return call(variable, translator, *args)

    with mock.patch.object(IgnoredFunctionVariable, "call_function", note_print):
        yield lines
