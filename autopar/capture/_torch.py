"""The only file of capture that leans on torch's private modules: a model in, a raw joint graph out.

`prepared` makes the model and its arguments fake. `raw_joint` captures with Dynamo, detaches the results that no backward goes through
(`autopar.capture.outputs`), and lets AOTAutograd trace forward and backward together, or forward alone where nothing has a gradient.
Everything runs on FakeTensors on the cpu, whatever device the weights are on: a fake ``meta`` model silently loses its backward, and
fake ``cuda`` tensors need a CUDA build.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.output_graph import OutputGraph
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from autopar.capture._transformers import model_loggers, transformers_under_capture
from autopar.capture.activations import join_activations
from autopar.capture.attributes import settled
from autopar.capture.gpu_autocast import gpu_autocast, tell_of_disabled
from autopar.capture.mixed import as_kernels_give
from autopar.capture.norms import join_norms
from autopar.capture.notes import Notes, noting
from autopar.capture.outputs import Differentiated, differentiated
from autopar.capture.precision import narrowed
from autopar.capture.raw_graphs import drop_checks, plain_copy
from autopar.capture.refusals import as_capture_error, quiet, refuse_miscompiled
from autopar.capture.ties import Aliases, aliases_of
from autopar.capture.trace import ModuleAttribute
from autopar.capture.trees import flatten_call, flatten_with_paths, unflatten
from autopar.errors import CaptureError

# A number that differs from an earlier capture would otherwise become symbolic: captures must not depend on each other.
_STATIC = {"automatic_dynamic_shapes": False, "assume_static_by_default": True, "specialize_int": True, "specialize_float": True}
FakeMode: TypeAlias = FakeTensorMode


@dataclass(frozen=True, slots=True)
class RawJoint:
    """The joint graph as torch gives it, and what its border means.

    Attributes:
        graph: ATen nodes; its output is one flat list.
        constants: tensors that `get_attr` nodes name.
        placeholders: (kind, name or flat index) per placeholder; kind is parameter, buffer, input or tangent (of the result there).
        results: (kind, name or flat index) per result; kind is output, gradient, mutation or none.
        loss: flat position of the loss in the returned structure, None where there is none.
        in_leaves: flat (path, value) of (args, kwargs); out_leaves: of the returned structure, tensors fake.
        attributes: plain values that forward looked at. unkept: attributes that forward writes and a program does not.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    placeholders: tuple[tuple[str, Any], ...]
    results: tuple[tuple[str, Any], ...]
    loss: int | None
    in_leaves: tuple[tuple[str, Any], ...]
    in_spec: Any
    out_leaves: tuple[tuple[str, Any], ...]
    out_spec: Any
    attributes: tuple[ModuleAttribute, ...]
    unkept: tuple[str, ...]


def new_fake_mode() -> FakeMode:
    """A mode in which tensors have no data, and the shapes, strides and dtypes that kernels give them; others become such."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Not a subclass, which higher-order operators would not know.
    mode.dispatch = partial(_dispatched, mode, mode.dispatch)  # type: ignore[method-assign]
    return mode


def _dispatched(mode: FakeMode, dispatch: Callable[..., Any], func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    result = dispatch(func, types, args, kwargs or {})
    return as_kernels_give(func, args, kwargs or {}, result, lambda sample, device: fake_like(sample, device, mode))


def is_fake(value: Any) -> bool:
    """Whether `value` is a tensor of such a mode."""
    return isinstance(value, FakeTensor)


def fake_like(sample: torch.Tensor, device: torch.device, mode: FakeMode) -> torch.Tensor:
    """A new fake tensor on `device`, which looks like `sample`, a plain one on meta, and shares its storage."""
    return FakeTensor(mode, sample, device)


def no_modes() -> contextlib.AbstractContextManager[None]:
    """Plain tensors for a while, whatever modes are on."""
    return no_dispatch()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that can be captured: its arguments as fake tensors, beside the leaves they were made of.

    Attributes:
        precision: what wider floating parameters and inputs are read in. stored: such a parameter's name → its own dtype.
        on_gpu: whether a tensor of the model or the call is on a GPU. inference: whether nothing has a gradient, whatever the model says.
    """

    mode: FakeMode
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    in_leaves: tuple[tuple[str, Any], ...]
    in_spec: Any
    aliases: Aliases
    precision: torch.dtype | None
    stored: Mapping[str, torch.dtype]
    on_gpu: bool
    inference: bool


@contextlib.contextmanager
def prepared(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], precision: torch.dtype | None = None, *, inference: bool = False
) -> Iterator[Prepared]:
    """Make `model` and a call of it fake for a while; afterwards the model is as before.

    Args:
        precision: the dtype that wider floating parameters and inputs have meanwhile.
        inference: whether no parameter requires a gradient meanwhile.
    """
    mode = new_fake_mode()
    in_leaves, in_spec = flatten_call(args, kwargs)
    # Each leaf gets its own fake tensor: Dynamo would merge equal objects (labels=ids), and the graph would read only one.
    fakes = [_fake(leaf, mode, precision) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in in_leaves]
    fake_args, fake_kwargs = unflatten(fakes, in_spec)
    named = model.named_parameters(remove_duplicate=False)
    stored = {name: p.dtype for name, p in named if narrowed(p.dtype, precision) != p.dtype}
    on_gpu = any(getattr(held, "is_cuda", False) for held in (*model.parameters(), *model.buffers(), *(leaf for _, leaf in in_leaves)))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_fake_weights(model, mode, precision, frozen=inference))
        stack.enter_context(transformers_under_capture(model, args, kwargs))
        stack.enter_context(torch.set_grad_enabled(not inference))
        stack.enter_context(_ops_of_training())
        aliases = aliases_of(model)  # captured, a tensor is another object
        yield Prepared(mode, fake_args, fake_kwargs, in_leaves, in_spec, aliases, precision, stored, on_gpu, inference)


def raw_joint(model: nn.Module, call: Prepared) -> RawJoint:
    """Capture forward and backward of a prepared call.

    Raises:
        CaptureError: Dynamo or AOTAutograd cannot trace the model.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(gpu_autocast(call.on_gpu))
        stack.enter_context(quiet(model, lambda: _call_again(model, call)))
        stack.enter_context(torch._dynamo.config.patch(ignore_logging_functions=_logging_functions(), allow_rnn=True, **_STATIC))
        if hasattr(torch._functorch.config, "backward_pass_autocast"):  # outside of autocast, as users run backward; `verify` tells
            stack.enter_context(torch._functorch.config.patch(backward_pass_autocast="off"))
        stack.enter_context(_without_record())
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))  # a recurrent layer is no op of CPUs alone
        stack.enter_context(call.mode)
        try:
            captured, notes = _captured(model, call)
            unkept = settled(notes, lambda: _captured_again(model, call), lambda tensor: _fake(tensor, call.mode, None))
            refuse_miscompiled(captured.graph)
            tell_of_disabled(captured.graph)
            drop_checks(captured.graph)
            join_activations(captured.graph)
            join_norms(captured.graph)
            out_leaves, out_spec, found = _others_detached(captured, (*call.args, *call.kwargs.values()))
            joint = aot_export_joint_with_descriptors(stack, captured, call.args, call.kwargs)
        except CaptureError:
            raise
        except Exception as error:  # torch raises many unrelated classes here; every one is a refusal to capture
            raise as_capture_error(error) from error
        _let_go(captured)
        written = {(write.place.path, write.place.name) for write in notes.writes}  # a setting that is guessed is no constant
        module = joint.graph_module
        names = [node.target for node in module.graph.nodes if node.op == "get_attr"]
        return RawJoint(
            graph=plain_copy(module.graph),
            constants={name: getattr(module, name) for name in names},
            placeholders=tuple(_placeholder_kind(node.meta["desc"]) for node in module.graph.nodes if node.op == "placeholder"),
            results=tuple(_result_kind(desc) for desc in next(iter(reversed(module.graph.nodes))).meta["desc"]),
            loss=found.loss,
            in_leaves=call.in_leaves,
            in_spec=call.in_spec,
            out_leaves=out_leaves,
            out_spec=out_spec,
            attributes=tuple(each for each in notes.constants if (each.path, each.name) not in written),
            unkept=unkept,
        )


def _captured(model: nn.Module, call: Prepared) -> tuple[Any, Notes]:
    """Dynamo's graph, and what it noted of the model's attributes."""
    notes: list[Notes] = []
    with mock.patch.object(OutputGraph, "cleanup", noting(OutputGraph.cleanup, notes)):
        captured = dynamo_graph_capture_for_export(model)(*call.args, **call.kwargs)
    return captured, notes[-1]


def _captured_again(model: nn.Module, call: Prepared) -> Notes:
    captured, notes = _captured(model, call)
    _let_go(captured)
    return notes


def _let_go(captured: Any) -> None:
    """Let Dynamo's graph go of the model, whose weights it would keep: torch (2.13) never lets go of the graph."""
    for part in (captured._dynamo_bytecode_flatten, captured._dynamo_bytecode_unflatten, captured):
        vars(part).clear()


def _fake(tensor: torch.Tensor, mode: FakeMode, precision: torch.dtype | None) -> torch.Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=narrowed(tensor.dtype, precision), device="cpu")


@contextlib.contextmanager
def _fake_weights(model: nn.Module, mode: FakeMode, precision: torch.dtype | None, *, frozen: bool) -> Iterator[None]:
    """Swap every parameter and buffer for a fake one on the cpu, tied ones for one; put the user's own back at the end."""
    swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    fakes: dict[int, torch.Tensor] = {}
    try:
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in fakes:
                        fakes[id(tensor)] = _fake_weight(tensor, mode, precision).requires_grad_(tensor.requires_grad and not frozen)
                    swapped.append((held, name, tensor))
                    held[name] = fakes[id(tensor)]
        yield
    finally:
        for held, name, tensor in swapped:
            held[name] = tensor


def _fake_weight(tensor: torch.Tensor, mode: FakeMode, precision: torch.dtype | None) -> torch.Tensor:
    """A parameter in `precision`, where it is wider; buffers stay as they are."""
    dtype = narrowed(tensor.dtype, precision) if isinstance(tensor, nn.Parameter) else tensor.dtype
    sample = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")  # a storage for each
    fake = fake_like(sample, torch.device("cpu"), mode)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


@contextlib.contextmanager
def _ops_of_training() -> Iterator[None]:
    """Without the fused ops that torch's transformer layers take where nothing has a gradient: they compute what the others do."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _call_again(model: nn.Module, call: Prepared) -> None:
    with call.mode, torch.no_grad():
        model(*call.args, **call.kwargs)


def _logging_functions() -> set[Any]:
    """Logger methods that Dynamo shall skip instead of refusing the graph."""
    methods = ("debug", "info", "warning", "warning_once", "error", "log", "info_once")
    loggers = [logging.getLogger(), *model_loggers()]
    found = {getattr(logger, name) for logger in loggers for name in methods if hasattr(logger, name)}
    functions = {getattr(method, "__func__", method) for method in found}
    return functions | {warnings.warn, *torch._dynamo.config.ignore_logging_functions}


def _without_record() -> contextlib.AbstractContextManager[object]:
    """Before torch 2.13 Dynamo's record of its own settings fails at functions among them, which `_logging_functions` puts there."""
    if torch.__version__ >= (2, 13):
        return contextlib.nullcontext()
    return mock.patch.object(torch._dynamo.utils, "_get_dynamo_config_for_logging", lambda: None)


def _knows_builtins(captured: Any) -> None:
    """Dynamo's bytecode may name builtins (`type`), which before torch 2.13 are not among the globals that it runs with."""
    for part in (captured._dynamo_bytecode_flatten, captured._dynamo_bytecode_unflatten):
        part.f_globals = {**vars(builtins), **part.f_globals}


def _others_detached(captured: Any, inputs: tuple[Any, ...]) -> tuple[tuple[tuple[str, Any], ...], Any, Differentiated]:
    """Make the Dynamo graph return the flat leaves of the model's return value, detached but for those that backward goes through.

    Copies keep AOTAutograd from treating results as views of each other; cleaning removes them, and what detaches.
    """
    graph: fx.Graph = captured.graph
    output = next(iter(reversed(graph.nodes)))
    results = {id(node.meta["example_value"]): node for node in output.args[0] if isinstance(node, fx.Node)}
    values = tuple(node.meta["example_value"] if isinstance(node, fx.Node) else node for node in output.args[0])
    _knows_builtins(captured)
    flat_inputs = captured._dynamo_bytecode_flatten(*inputs)
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    results.update({id(value): node for value, node in zip(flat_inputs, arguments, strict=True) if id(value) not in results})
    leaves, spec = flatten_with_paths(captured._dynamo_bytecode_unflatten(values, inputs))
    found = differentiated(captured._dynamo_bytecode_unflatten(values, inputs), leaves)
    returned: list[Any] = []
    with graph.inserting_before(output):
        for position, (path, leaf) in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                returned.append(None)
                continue
            if id(leaf) not in results:
                raise CaptureError(
                    f"the model returns a tensor at {path!r} that its forward does not compute",
                    remedy="return only results of the forward, not stored tensors",
                )
            node = results[id(leaf)]
            if position not in found.positions:
                node = graph.call_method("detach", (node,))
            returned.append(node if position == found.loss else graph.call_method("clone", (node,)))
    output.args = (tuple(returned),)
    graph._codegen.dynamo_bytecode_unflatten = lambda results, _inputs: results
    return leaves, spec, found


def _placeholder_kind(desc: Any) -> tuple[str, Any]:
    match desc:
        case ParamAOTInput():
            return "parameter", desc.target
        case BufferAOTInput():
            return "buffer", desc.target
        case PlainAOTInput():
            return "input", desc.idx
        case TangentAOTInput():
            return "tangent", getattr(desc.output, "idx", None)
    if "Token" in type(desc).__name__:
        raise CaptureError(
            "the model has an op that checks its result while it runs, as torch.linalg.inv, cholesky and solve do",
            remedy="call the form that checks nothing: torch.linalg.inv_ex, cholesky_ex, solve_ex, lu_factor_ex",
        )
    raise CaptureError(f"the captured graph has an argument of an unknown kind: {desc}", remedy="report the model")


def _result_kind(desc: Any) -> tuple[str, Any]:
    match desc:
        case None:
            return "none", None
        case PlainAOTOutput():
            return "output", desc.idx
        case GradAOTOutput():
            return "gradient", getattr(desc.grad_of, "target", None)
        case InputMutationAOTOutput() if isinstance(desc.mutated_input, BufferAOTInput):
            return "mutation", desc.mutated_input.target
    raise CaptureError(f"the captured graph has a result of an unknown kind: {desc}", remedy="do not change inputs in place")
