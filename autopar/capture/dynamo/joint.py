"""Capture the joint graph of a prepared call with Dynamo and AOTAutograd."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo import eval_frame, symbolic_convert
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.output_graph import OutputGraph, trace_call_log
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

from autopar.capture.autocast import gpu_autocast, tell_of_disabled
from autopar.capture.call_constants import without_constants
from autopar.capture.calls import argument_of, module_of, refused_by_forward
from autopar.capture.diagnostics import (
    ReadsInputs,
    as_capture_error,
    changes_parameter,
    draws_of_python,
    of_inputs,
    quiet,
)
from autopar.capture.dynamo.constants import Origins, known_values, settle_known
from autopar.capture.dynamo.fakes import make_fake, views_of_one_mode
from autopar.capture.dynamo.flex_attention import join_flex_attention, refuse_flex_attention
from autopar.capture.dynamo.gradient_mode import noted_gradient_mode
from autopar.capture.dynamo.numpy_scalars import constant_scalars
from autopar.capture.dynamo.outputs import (
    checks_in_no_order,
    gradients_within,
    logging_functions,
    others_detached,
    refuse_changed_inputs,
)
from autopar.capture.dynamo.preparing import Prepared, without_mkldnn
from autopar.capture.dynamo.python_forms import (
    computed_attributes,
    keep_class,
    know_operators,
    tensors_given_twice,
    unlocked_properties,
    without_graph,
)
from autopar.capture.formulas import join_activations, join_norms
from autopar.capture.graphs import drop_checks, plain_copy
from autopar.capture.python_attributes import settle_attributes
from autopar.capture.ragged_rows import settle_rows
from autopar.capture.refused_ops import refuse_branches, refuse_kinds, refuse_miscompiled
from autopar.capture.side_effects import Notes, note_before
from autopar.capture.stamps import Trait
from autopar.capture.tensor_kinds import is_of_kinds
from autopar.capture.trace import ModuleAttribute, OutsideValue, held_elsewhere
from autopar.errors import CaptureError, Where

# By default, a number that differs from an earlier capture becomes symbolic. Captures must not
# depend on each other. Sizes that depend on values are symbols; `autopar.capture.ragged_rows`
# replaces them with fixed sizes.
_STATIC = {
    "capture_dynamic_output_shape_ops": True,
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "specialize_int": True,
    "specialize_float": True,
    "use_numpy_random_stream": True,
}


@dataclass(frozen=True, slots=True)
class RawJoint:
    """The joint graph as torch returns it, and the meaning of its placeholders and results.

    Attributes:
        graph: graph of ATen ops; its output is one flat list.
        constants: name → tensor of each `get_attr` node.
        placeholders: (kind, name or flat index) per placeholder; kind is parameter, buffer, input
            or tangent (of the result with that index).
        results: (kind, name or flat index) per result; kind is output, gradient (of a parameter),
            input gradient, mutation or none.
        loss: flat position of the loss in the returned structure; None if there is no loss.
        in_leaves: flat (path, value) of (args, kwargs).
        known: flat position of an input or name of a buffer → its values, if the graph is
            specialized to them.
        in_spec: pytree spec of (args, kwargs).
        out_leaves: flat (path, value) of the returned structure; tensors are fake.
        out_spec: pytree spec of the returned structure.
        attributes: values of modules that forward reads.
        outside: values outside the modules that forward reads.
        unkept: names of attributes that forward writes and a program does not.
        held_elsewhere: other paths by which forward may access a module → the path under which the
            module is registered.
        code: (file, qualified name, first line) of the functions that Dynamo traced.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    placeholders: tuple[tuple[str, Any], ...]
    results: tuple[tuple[str, Any], ...]
    loss: int | None
    in_leaves: tuple[tuple[str, Any], ...]
    known: Mapping[int | str, torch.Tensor]
    in_spec: Any
    out_leaves: tuple[tuple[str, Any], ...]
    out_spec: Any
    attributes: tuple[ModuleAttribute, ...]
    outside: tuple[OutsideValue, ...]
    unkept: tuple[str, ...]
    held_elsewhere: Mapping[str, str]
    code: tuple[tuple[str, str, int], ...]


def raw_joint(model: nn.Module, call: Prepared) -> RawJoint:
    """Capture forward and backward of a prepared call.

    Raises:
        CaptureError: Dynamo or AOTAutograd cannot trace the model.
    """
    know_operators()
    with contextlib.ExitStack() as stack:
        stack.enter_context(gpu_autocast(call.on_gpu))
        stack.enter_context(quiet(model, lambda: _call_again(model, call)))
        stack.enter_context(
            torch._dynamo.config.patch(
                ignore_logging_functions=logging_functions(), allow_rnn=True, **_STATIC
            )
        )
        if hasattr(
            torch._functorch.config, "backward_pass_autocast"
        ):  # users run backward outside of autocast
            stack.enter_context(torch._functorch.config.patch(backward_pass_autocast="off"))
        for context in (
            gradients_within,
            checks_in_no_order,
            unlocked_properties,
            tensors_given_twice,
            constant_scalars,
        ):
            stack.enter_context(context())
        origins = call.origins()
        stack.enter_context(known_values(origins))
        stack.enter_context(_without_record())
        stack.enter_context(_without_headers())
        stack.enter_context(without_mkldnn())
        stack.enter_context(views_of_one_mode())
        stack.enter_context(call.mode)
        mode_reads: list[OutsideValue] = []
        stack.enter_context(noted_gradient_mode(mode_reads))
        try:
            captured, notes = _run_dynamo(model, call)
            unkept = settle_attributes(
                notes,
                lambda: _captured_again(model, call),
                lambda tensor: make_fake(tensor, call.mode, None),
            )
            refuse_kinds(captured.graph)
            refuse_miscompiled(captured.graph)
            refuse_branches(captured.graph)
            tell_of_disabled(captured.graph)
            drop_checks(captured.graph)
            settle_known(captured.graph)
            settle_rows(captured.graph)
            join_activations(captured.graph)
            join_norms(captured.graph)
            out_leaves, out_spec, differentiated = others_detached(
                captured, (*call.args, *call.kwargs.values())
            )
            joint = aot_export_joint_with_descriptors(
                stack, captured, *without_constants((call.args, call.kwargs))
            )
            refuse_changed_inputs(joint.graph_module.graph, call.in_leaves, model)
            refuse_flex_attention(joint.graph_module.graph)
            drop_checks(joint.graph_module.graph)
        except (
            Exception
        ) as error:  # torch raises errors of many classes; each means that the capture failed
            raise _refusal(error, model, call, origins) from error
        _release_model(captured)
        written = {
            (write.place.path, write.place.name) for write in notes.writes
        }  # an attribute that forward sets is not a constant
        module = joint.graph_module
        return RawJoint(
            graph=plain_copy(module.graph),
            constants={
                str(node.target): getattr(module, str(node.target))
                for node in module.graph.find_nodes(op="get_attr")
            },
            placeholders=tuple(
                _placeholder_kind(node.meta["desc"])
                for node in module.graph.nodes
                if node.op == "placeholder"
            ),
            results=_results(next(iter(reversed(module.graph.nodes)))),
            loss=differentiated.loss,
            in_leaves=call.in_leaves,
            known=call.known,
            in_spec=call.in_spec,
            out_leaves=out_leaves,
            out_spec=out_spec,
            attributes=tuple(
                each for each in notes.constants if written.isdisjoint(_names_of(each))
            ),
            outside=(*notes.outside, *mode_reads),
            unkept=unkept,
            held_elsewhere=held_elsewhere(model),
            code=tuple(
                (code.co_filename, code.co_qualname, code.co_firstlineno)
                for code in dict.fromkeys(notes.code)
            ),
        )


def _run_dynamo(model: nn.Module, call: Prepared) -> tuple[Any, Notes]:
    """Return Dynamo's graph, and the notes about values that forward reads and changes."""
    notes: list[Notes] = []
    with (
        computed_attributes(),
        # `refuse_other_objects` has checked the arguments; Dynamo's check would reject dataclasses
        mock.patch.object(eval_frame, "check_user_input_output", lambda *_: None),
        mock.patch.object(OutputGraph, "cleanup", note_before(OutputGraph.cleanup, notes)),
    ):
        root = without_graph(model)
        captured = dynamo_graph_capture_for_export(root)(*call.args, **call.kwargs)
    keep_class(captured, root)
    join_flex_attention(captured.graph)
    if notes[-1].draws:
        raise draws_of_python("random", notes[-1].draws[0])
    return captured, notes[-1]


def _names_of(each: ModuleAttribute) -> set[tuple[str, str]]:
    """Return the path and name of a constant, and of the attribute that its trait is about."""
    found = {(each.path, each.name)}
    if isinstance(each.value, Trait) and each.value.kind == "has":
        found.add((each.path, f"{each.name}.{each.value.of}".lstrip(".")))
    return found


def _captured_again(model: nn.Module, call: Prepared) -> Notes:
    captured, notes = _run_dynamo(model, call)
    _release_model(captured)
    return notes


def _release_model(captured: Any) -> None:
    """Remove references to the model from Dynamo's graph: torch 2.13 never frees the graph, which
    would keep the weights in memory."""
    for part in (captured._dynamo_bytecode_flatten, captured._dynamo_bytecode_unflatten, captured):
        vars(part).clear()


def _call_again(model: nn.Module, call: Prepared) -> Any:
    return call.run(model)


def _refusal(error: Exception, model: nn.Module, call: Prepared, origins: Origins) -> CaptureError:
    """Return the error to raise for a failed capture; a `ReadsInputs` if the capture may succeed
    with more known inputs."""
    if (keys := call.knowable(origins)) is not None:
        reading = error if isinstance(error, CaptureError) else as_capture_error(error)
        return ReadsInputs(_locate_refusal(reading, model, call), keys)
    read = [
        key if isinstance(key, str) else argument_of(call.in_leaves[key][0], model)
        for key in sorted(origins.last_read(), key=str)
    ]
    if isinstance(error, CaptureError):
        return of_inputs(error, read)
    refusal = as_capture_error(error)
    if is_of_kinds(refusal):
        return _locate_refusal(refusal, model, call)
    refused = refused_by_forward(model, lambda copied: _call_again(copied, call), call.in_leaves)
    return refused or _locate_refusal(of_inputs(refusal, read), model, call)


def _locate_refusal(refusal: CaptureError, model: nn.Module, call: Prepared) -> CaptureError:
    """Add the module that contains the source line of the refusal; Dynamo only reports lines."""
    if not isinstance(refusal.where, Where) or refusal.where.module:
        return refusal
    module = module_of(refusal.where.source, model, lambda copied: _call_again(copied, call))
    return (
        CaptureError(
            refusal.what, where=replace(refusal.where, module=module), remedy=refusal.remedy
        )
        if module
        else refusal
    )


def _without_record() -> contextlib.AbstractContextManager[object]:
    """Disable Dynamo's log of its settings before torch 2.13, which fails for the functions that
    `logging_functions` adds."""
    if torch.__version__ >= (2, 13):
        return contextlib.nullcontext()
    return mock.patch.object(torch._dynamo.utils, "_get_dynamo_config_for_logging", lambda: None)


def _without_headers() -> contextlib.AbstractContextManager[object]:
    """Omit the names of functions from Dynamo's log of calls. To find them, Dynamo tokenizes each
    source file of the model, even if nothing is logged."""
    if not hasattr(symbolic_convert, "get_funcname") or trace_call_log.isEnabledFor(logging.DEBUG):
        return contextlib.nullcontext()
    return mock.patch.object(symbolic_convert, "get_funcname", lambda *_: None)


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
            "the model has an op with side effects",
            remedy="remove writes and prints from forward",
        )
    raise AssertionError(f"unexpected argument of a joint graph: {desc}")


def _results(output: fx.Node) -> tuple[tuple[str, Any], ...]:
    """Return the kind of each result of the joint graph, in order."""
    returned: Any = output.args[0]
    return tuple(
        _result_kind(desc, node) for desc, node in zip(output.meta["desc"], returned, strict=True)
    )


def _result_kind(desc: Any, node: Any) -> tuple[str, Any]:
    match desc:
        case None:
            return "none", None
        case PlainAOTOutput():
            return "output", desc.idx
        case GradAOTOutput() if isinstance(desc.grad_of, PlainAOTInput):
            return "input gradient", desc.grad_of.idx
        case GradAOTOutput():
            return "gradient", getattr(desc.grad_of, "target", None)
        case InputMutationAOTOutput() if isinstance(desc.mutated_input, BufferAOTInput):
            return "mutation", desc.mutated_input.target
        case InputMutationAOTOutput() if isinstance(desc.mutated_input, ParamAOTInput):
            raise changes_parameter(desc.mutated_input.target, node)
    raise AssertionError(
        f"unexpected result of a joint graph: {desc}; changed inputs are refused earlier"
    )
