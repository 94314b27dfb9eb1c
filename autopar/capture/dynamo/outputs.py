"""Results of a captured forward: which are differentiated, and its other effects: changed inputs,
gradients computed in forward, checks, log messages and prints."""

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
# Which results are differentiated: the loss, or without one all results that require gradients.


@dataclass(frozen=True, slots=True)
class DifferentiatedOutputs:
    """Flat positions in a model's return value.

    Attributes:
        loss: position of the loss; None if the model returns no loss.
        positions: positions of the differentiated results: of the loss, or without one of all
            results that require a gradient; empty if no result does.
    """

    loss: int | None
    positions: tuple[int, ...]


def select_differentiated(
    returned: Any, leaves: tuple[tuple[str, Any], ...], computed: Callable[[torch.Tensor], bool]
) -> DifferentiatedOutputs:
    """Select the results that are differentiated.

    The loss is the return value itself if it is a scalar; else its ``loss`` entry or attribute;
    else the first scalar floating tensor of a tuple that depends on parameters and on the batch,
    which excludes a scale of logits or a penalty on weights. The loss must require a gradient,
    unless no result does.

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
            return DifferentiatedOutputs(position, (position,) if having else ())
    return DifferentiatedOutputs(None, having)


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
    """Add builtins such as `type` to the globals of Dynamo's bytecode; torch before 2.13 omits
    them."""
    for part in (captured._dynamo_bytecode_flatten, captured._dynamo_bytecode_unflatten):
        part.f_globals = {**vars(builtins), **part.f_globals}


def others_detached(
    captured: Any, inputs: tuple[Any, ...]
) -> tuple[tuple[tuple[str, Any], ...], Any, DifferentiatedOutputs]:
    """Make the Dynamo graph return the flat leaves of the model's return value, and detach those
    that are not differentiated.

    The results are cloned so that AOTAutograd does not treat them as views of each other. A later
    pass removes the clones and the detach ops.

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
    input_ids = {id(leaf) for leaf in leaves_of(inputs)}
    batch = {
        node for value, node in zip(flat_inputs, arguments, strict=True) if id(value) in input_ids
    }

    def is_computed(tensor: torch.Tensor) -> bool:
        """Return whether a result depends on both the batch and a parameter."""
        node = results.get(id(tensor))
        sources = _sources(node) if node is not None else set()
        return not sources.isdisjoint(batch) and any(
            isinstance(n.meta.get("example_value"), nn.Parameter) for n in sources
        )

    differentiated = select_differentiated(
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
                    f"the model returns a tensor at {path!r} that forward does not compute",
                    remedy=(
                        "return a copy (`self.name.clone()`), or do not return it and read it from"
                        " the model"
                    ),
                )
            node = results[id(leaf)]
            if position not in differentiated.positions:
                node = graph.call_method("detach", (node,))
            returned.append(
                node if position == differentiated.loss else graph.call_method("clone", (node,))
            )
    output.args = (tuple(returned),)
    graph._codegen.dynamo_bytecode_unflatten = lambda results, _inputs: results
    return leaves, spec, differentiated


def _read_arguments(graph: fx.Graph, num: int) -> list[fx.Node]:
    """Return the placeholders of `num` inputs.

    A tensor that an earlier call stored in a list, and that forward does not read, has a
    placeholder without a source. These placeholders are erased.
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
    visited, stack = {node}, [node]
    while stack:
        new = set(stack.pop().all_input_nodes) - visited
        visited |= new
        stack += new
    return {each for each in visited if each.op == "placeholder"}


# --------------------------------------------------------------------------------------------------
# Inputs that forward changes in place. They belong to the caller; ranks only have parts or copies.


def refuse_changed_inputs(
    graph: fx.Graph, leaves: Sequence[tuple[str, Any]], model: nn.Module
) -> None:
    """Raise CaptureError at the first input that forward changes in place.

    Args:
        graph: the joint graph.
        leaves: (path, value) of the call's arguments.
        model: the model; its forward defines the names of the arguments.
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
            local_name = "x" if "." in name else name
            raise CaptureError(
                f"forward changes its input {name!r} in place; a program does not write to the"
                " caller's tensors",
                where=Where(
                    module=recorded_module(node.meta),
                    source=user_line(node.meta.get("stack_trace") or ""),
                ),
                remedy=(
                    f"change a copy (`{local_name} = {local_name}.clone()` before), or use an "
                    "out-of-place op:"
                    " x.masked_fill(...) instead of x.masked_fill_(...), a module with"
                    " `inplace=False`"
                ),
            )


# --------------------------------------------------------------------------------------------------
# Gradients that forward computes: `torch.autograd.grad` is part of the graph and is differentiated.

# Dynamo's check rejects results that depend on a tensor on which forward called requires_grad_(),
# since the results of torch.compile would not have their gradient history. A program does not need
# it: its gradients are those of the joint graph, with respect to parameters and inputs.
_CHECK = "_check_requires_grad_intermediate_outputs"


@contextlib.contextmanager
def gradients_within() -> Iterator[None]:
    """Let Dynamo trace `torch.autograd.grad` into the graph; `Tensor.backward`, which writes to
    parameters, remains refused."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(trace_autograd_ops=True))
        if hasattr(OutputGraph, _CHECK):  # since torch 2.13
            stack.enter_context(mock.patch.object(OutputGraph, _CHECK, lambda *_: None))
        stack.enter_context(
            mock.patch.object(TensorVariable, "method_backward", _backward_untraced)
        )
        stack.enter_context(
            mock.patch.object(
                TorchInGraphFunctionVariable, "call_function", _call_then_require_grad
            )
        )
        yield


_BACKWARD = TensorVariable.method_backward


_CALL = TorchInGraphFunctionVariable.call_function


def _call_then_require_grad(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """Trace ``torch.zeros(4, requires_grad=True)``, which Dynamo does not support, as
    ``torch.zeros(4).requires_grad_()``."""
    flag = kwargs.get("requires_grad")
    if flag is None or not flag.is_python_constant() or flag.as_python_constant() is not True:
        return _CALL(self, tx, args, kwargs)
    created = _CALL(
        self, tx, args, {name: value for name, value in kwargs.items() if name != "requires_grad"}
    )
    return created.call_method(tx, "requires_grad_", [], {})


def _backward_untraced(*args: Any, **kwargs: Any) -> Any:
    with torch._dynamo.config.patch(trace_autograd_ops=False):
        return _BACKWARD(*args, **kwargs)


# --------------------------------------------------------------------------------------------------
# Ops that check their results at run time, such as torch.linalg.inv, cholesky and solve. A program
# runs their unchecked variants.

_CHECKED = "aten::_linalg_check_errors"


@contextlib.contextmanager
def checks_in_no_order() -> Iterator[None]:
    """Trace checks of results as plain calls without users; since torch 2.13 they are effects that
    are ordered by tokens."""
    effect_entry = getattr(simple_registry.singleton.find(_CHECKED), "effect", None)
    before = getattr(effect_entry, "effect", None)
    if effect_entry is None or before is None:
        yield
        return
    effect_entry.register(None)
    try:
        yield
    finally:
        effect_entry.register(before)


# --------------------------------------------------------------------------------------------------
# Log messages and prints of forward, which a program omits.

_METHODS = ("debug", "info", "warning", "warning_once", "error", "log", "info_once")


def logging_functions() -> set[Callable[..., Any]]:
    """Return the functions whose calls Dynamo skips: methods of loggers, `warnings.warn` and
    `print`."""
    loggers = [logging.getLogger(), *model_loggers()]
    methods = {
        getattr(logger, name) for logger in loggers for name in _METHODS if hasattr(logger, name)
    }
    functions = {getattr(method, "__func__", method) for method in methods}
    return functions | {warnings.warn, print, *torch._dynamo.config.ignore_logging_functions}


@contextlib.contextmanager
def prints_left_out() -> Iterator[list[str]]:
    """Yield a list that collects the source lines of the calls of `print` that Dynamo traces."""
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
