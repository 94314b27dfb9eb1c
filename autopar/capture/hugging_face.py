"""Adaptations of Hugging Face transformers for tracing.

They have no effect if transformers is not imported.

- Key/value caches: they are disabled (see the section below).
- Speech encoders (wav2vec2 and similar) set `requires_grad` of their input. This is disabled during
  a capture.
- Recorded outputs: models that record outputs install hooks in their first forward. Dynamo cannot
  trace the installation, so the hooks are installed before the capture. The hooks read a context
  variable, which Dynamo cannot trace either; a plain variable replaces it.
- Products of shapes: Dynamo turns the result of a numpy function of plain numbers into a tensor,
  and a branch on that tensor cannot be traced.
- Selected hidden states: a wrapper finds the requested states by binding a signature. Dynamo cannot
  trace this after a dict has changed.
- Experts: a setting of transformers selects the implementation of an expert layer. It is a loop
  over values, which cannot be traced; or it copies the weights of an expert for each token routed
  to it; or it sorts the tokens of the whole batch, so that samples depend on each other. All give
  the same result. Therefore, with any setting, the common form of experts (no biases, the usual
  gate or none) becomes one op, `autopar.ops.experts`. Other forms are not changed.
- Branches: some models create a mask in eager mode that they expect from the caller under tracing.
  If the capture fails with the branches for tracing, it is repeated with those of eager mode.
- Masks: in eager mode, a batch without attention mask and position ids is one sequence per row and
  needs no mask: attention runs with ``is_causal=True``. Under tracing, transformers does not read
  values and builds a ``[batch, 1, seq, seq]`` mask in every layer. A capture knows the values of
  positions that the model creates itself, so it omits the mask if they increase by one. A mask that
  the user passes remains an input.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autopar import ops
from autopar.capture.trace import Constant, ModuleAttribute
from autopar.errors import CaptureError, Where

# --------------------------------------------------------------------------------------------------
# A capture omits key/value caches. The results of the model do not change.
#
# Decoders of transformers create an empty cache in each forward unless `use_cache` is False. A
# training graph does not need a cache, so `use_cache` is False during a capture. One behaviour
# depends on the cache: with a cache (even an empty one), transformers ignores that `position_ids`
# may describe several documents per row. Without a cache, it masks the documents from each other.
# Therefore:
#
# - If the positions are known to increase by one, there is one document and no mask.
# - Otherwise the model is captured with the user's `use_cache`. If the model creates a cache, it
#   gets one that stores nothing: `EmptyCache` replaces `DynamicCache`.

_MOST_POSITIONS = 1 << 14  # a capture does not know the values of longer sequences
_CACHES = ("past_key_values", "past_key_value", "cache_params")
_CONFIGURATIONS = frozenset(  # the class has another name since transformers 5
    f"transformers.configuration_utils.{name}" for name in ("PretrainedConfig", "PreTrainedConfig")
)
_FINDER = "find_packed_sequence_indices"  # of transformers.masking_utils


@contextlib.contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Set `use_cache` to False in every configuration of transformers that `model` has; restore it
    on exit."""
    all_configs: Iterator[Any] = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in all_configs if _is_configuration(config)}
    on = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    try:
        for config in on:
            config.use_cache = False
        yield
    finally:
        for config in on:
            config.use_cache = True


def _is_configuration(value: Any) -> bool:
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(value).__mro__}
    return not kinds.isdisjoint(_CONFIGURATIONS)


def without_use_of_caches(attributes: Iterable[Constant], model: nn.Module) -> tuple[Constant, ...]:
    """Return the constants of a capture under `without_caches`, except `use_cache` of
    configurations of transformers, which does not change the results of the program.

    Args:
        attributes: the constants.
        model: the captured model.
    """

    def is_of_cache(each: Constant) -> bool:
        """Return whether a constant is `use_cache` of a configuration."""
        if not isinstance(each, ModuleAttribute) or not each.name.endswith("config.use_cache"):
            return False
        holder: Any = model.get_submodule(each.path)
        for name in each.name.split(".")[:-1]:
            holder = getattr(holder, name, None)
        return _is_configuration(holder)

    return tuple(each for each in attributes if not is_of_cache(each))


def refuse_caches(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise CaptureError if an argument is a key/value cache, by its class or, for a transformers
    model, by its name."""
    is_theirs = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    for name, value in arguments.items():
        kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(value).__mro__}
        if "transformers.cache_utils.Cache" in kinds or (
            is_theirs and name in _CACHES and value is not None
        ):
            raise CaptureError(
                f"the argument {name!r} is a key/value cache ({type(value).__name__}), which"
                " forward updates; a compiled module keeps no state between calls for generation",
                remedy=(
                    f"do not pass {name}; pass the whole sequence in each call, including the"
                    " cached tokens. To generate token by token, use the plain model"
                ),
            )


def asks_for_documents(refusal: CaptureError) -> bool:
    """Return whether a capture failed in the function of transformers that looks for several
    documents in `position_ids`."""
    return isinstance(refusal.where, Where) and f"{_FINDER}(" in refusal.where.source


@contextlib.contextmanager
def documents_if_known(positions_are_default: bool) -> Iterator[None]:
    """Make transformers treat positions that increase by one as one document, without a mask.

    If the positions are inputs, the branch on their values fails the capture
    (`asks_for_documents`).

    Args:
        positions_are_default: whether the model is a transformers model that creates its own
            positions; sequences longer than `_MOST_POSITIONS` then count as one document.
    """
    find = _finder()
    if find is None:
        yield
        return

    def find_if_known(position_ids: Tensor) -> Tensor | None:
        """Return the indices of packed sequences; None for one document of consecutive
        positions."""
        if positions_are_default and position_ids.numel() > _MOST_POSITIONS:
            return None
        if (position_ids[:, 1:] - position_ids[:, :-1] == 1).all():
            return None
        return find(position_ids)

    with mock.patch.object(_masking_utils(), _FINDER, find_if_known):
        yield


@contextlib.contextmanager
def empty_caches(model: nn.Module) -> Iterator[None]:
    """Let `model` create caches as the user configured it, but of a class that stores nothing, and
    restore transformers' search for documents."""
    modules = {type(module).__module__ for module in model.modules()}
    modeling = [sys.modules[name] for name in modules if name.startswith("transformers.")]
    with contextlib.ExitStack() as stack:
        for module in modeling:
            if hasattr(module, "DynamicCache"):
                stack.enter_context(mock.patch.object(module, "DynamicCache", _empty_cache()))
        stack.enter_context(mock.patch.object(_masking_utils(), _FINDER, _finder()))
        yield


def _masking_utils() -> Any:
    return sys.modules.get("transformers.masking_utils")


@functools.cache
def _finder() -> Callable[[Tensor], Tensor | None] | None:
    """Return the original function of transformers; the cache keeps it while it is replaced."""
    return getattr(_masking_utils(), _FINDER, None)


@functools.cache
def _empty_cache() -> type:
    """Return a subclass of `DynamicCache` that stores nothing; results of the model contain None in
    its place."""
    from transformers import DynamicCache

    class EmptyCache(DynamicCache):
        """A cache that returns only the keys and values of the current call."""

        def update(
            self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, Tensor]:
            """Return the keys and values of this call."""
            return key_states, value_states

    pytree.register_pytree_node(
        EmptyCache,
        lambda cache: ([], None),
        lambda values, context: None,
        serialized_type_name="autopar.EmptyCache",
        flatten_with_keys_fn=lambda cache: ([], None),
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda dumped: dumped,
    )
    return EmptyCache


def register_types() -> None:
    """Register the types that captures put into results with pytree, as a capture does. Does
    nothing if transformers is not imported."""
    if "transformers" in sys.modules:
        _empty_cache()


_ACTS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}


def model_loggers() -> list[logging.Logger]:
    """Return a logger of transformers, whose class has additional methods (`warning_once`); empty
    if transformers is not imported."""
    return [logging.getLogger("transformers")] if "transformers" in sys.modules else []


@contextlib.contextmanager
def transformers_under_capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Apply the adaptations of this module; undo them on exit.

    Hooks that record outputs remain, as after a first forward.

    Args:
        model: the model.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_audio_without_gradient(model))
        if "transformers" in sys.modules:
            install_recording_hooks(model)
            stack.enter_context(_recorder_in_a_plain_variable())
            stack.enter_context(_signatures_in_plain_dicts(model))
            stack.enter_context(_products_of_plain_numbers())
            stack.enter_context(_experts_as_one_op(model))
            stack.enter_context(_masks_by_shape(_positions_are_default(model, args, kwargs)))
            stack.enter_context(_padding_in_every_mask(model))
        yield


@contextlib.contextmanager
def _audio_without_gradient(model: nn.Module) -> Iterator[None]:
    """Keep speech encoders from setting `requires_grad` of the audio input, which Dynamo cannot
    trace and only reentrant checkpointing needs."""
    switched = [
        module for module in model.modules() if getattr(module, "_requires_grad", None) is True
    ]
    try:
        for module in switched:
            module._requires_grad = False
        yield
    finally:
        for module in switched:
            module._requires_grad = True


@contextlib.contextmanager
def branches_of_eager(model: nn.Module) -> Iterator[bool]:
    """Make the model's own code take the branches of eager mode.

    Yields:
        Whether the code of the model checks if it is traced.
    """
    asking = [
        sys.modules[name]
        for name in {type(module).__module__ for module in model.modules()}
        if name.startswith("transformers.")
    ]
    asking = [module for module in asking if hasattr(module, "is_torchdynamo_compiling")]
    with contextlib.ExitStack() as stack:
        for module in asking:
            stack.enter_context(
                mock.patch.object(module, "is_torchdynamo_compiling", _not_exporting)
            )
        yield bool(asking)


def install_recording_hooks(model: nn.Module) -> None:
    """Install the hooks that record outputs, as the first forward of a transformers model does.

    Args:
        model: any model; each transformers model in it gets its hooks once.
    """
    if "transformers" not in sys.modules:
        return
    try:
        from transformers import PreTrainedModel
        from transformers.utils import output_capturing
    except ImportError:
        return  # other releases of transformers record outputs without hooks
    install = output_capturing.install_all_output_capturing_hooks

    def install_once(part: nn.Module, prefix: str | None = None) -> None:
        """Install the hooks of a submodule that has none."""
        # A submodule that was called directly has its hooks already. Transformers would install
        # them again with those of the whole model, and every output would be recorded twice.
        if not getattr(part, "_output_capturing_hooks_installed", False):
            install(part, prefix)

    with mock.patch.object(output_capturing, "install_all_output_capturing_hooks", install_once):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                output_capturing.maybe_install_capturing_hooks(module)


class _Variable:
    """A replacement of `contextvars.ContextVar` for one thread."""

    def __init__(self) -> None:
        self.value: Any = None

    def get(self) -> Any:
        """Return the value."""
        return self.value

    def set(self, value: Any) -> tuple[Any]:
        """Set the value; return a token for `reset`."""
        before, self.value = self.value, value
        return (before,)

    def reset(self, token: tuple[Any]) -> None:
        """Restore the value from before the `set` that returned `token`."""
        self.value = token[0]


@contextlib.contextmanager
def _recorder_in_a_plain_variable() -> Iterator[None]:
    """Make the hooks read the recorder from a plain variable, since Dynamo cannot read a context
    variable."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        yield
        return
    with mock.patch.object(_active_collector, "context_var", _Variable()):
        yield


@contextlib.contextmanager
def _products_of_plain_numbers() -> Iterator[None]:
    """Make `numpy.prod` of a shape return a plain number under Dynamo."""
    import numpy

    product = numpy.prod

    def prod(a: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the product of a shape as a plain number while Dynamo traces."""
        if (
            torch.compiler.is_dynamo_compiling()
            and isinstance(a, tuple)
            and not args
            and not kwargs
        ):
            return math.prod(a)
        return product(a, *args, **kwargs)

    with mock.patch.object(numpy, "prod", prod):
        yield


class _Signature:
    """A replacement of `inspect.Signature` that uses plain dicts; calls must match the signature.

    Attributes:
        names: names of the parameters, in order.
        arguments: name → bound value or default.
    """

    def __init__(self, names: tuple[str, ...], arguments: dict[str, Any]) -> None:
        self.names, self.arguments = names, arguments

    def bind(self, *args: Any, **kwargs: Any) -> _Signature:
        """Return a signature whose `arguments` are the bound values and the remaining defaults."""
        return _Signature(
            self.names, {**self.arguments, **dict(zip(self.names, args, strict=False)), **kwargs}
        )

    def apply_defaults(self) -> None:
        """Do nothing: `arguments` contains the defaults."""


@contextlib.contextmanager
def _signatures_in_plain_dicts(model: nn.Module) -> Iterator[None]:
    """Replace the signatures in the closures of wrapped methods, which bind them in each call."""
    kinds = {
        base
        for module in model.modules()
        for base in type(module).__mro__
        if base.__module__.startswith("transformers.")
    }
    methods = [
        method for kind in kinds for method in vars(kind).values() if inspect.isfunction(method)
    ]
    cells = {}
    for method in methods:
        inner: Any = method
        while inspect.isfunction(inner):
            named = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
            cells.update({id(cell): cell for name, cell in named if name == "signature"})
            inner = getattr(inner, "__wrapped__", None)
    bound = [
        (cell, cell.cell_contents)
        for cell in cells.values()
        if isinstance(cell.cell_contents, inspect.Signature)
    ]
    try:
        for cell, signature in bound:
            parameters = signature.parameters
            defaults = {
                name: p.default for name, p in parameters.items() if p.default is not p.empty
            }
            cell.cell_contents = _Signature(tuple(parameters), defaults)
        yield
    finally:
        for cell, signature in bound:
            cell.cell_contents = signature


@contextlib.contextmanager
def _experts_as_one_op(model: nn.Module) -> Iterator[None]:
    """Replace forward of each expert class whose modules in the model all have the common form."""
    try:
        from transformers.integrations.moe import _default_apply_gate
    except ImportError:
        yield  # releases without this module have one nn.Module per expert
        return
    modules_by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel") and hasattr(type(module), "_apply_gate"):
            modules_by_class.setdefault(type(module), []).append(module)
    with contextlib.ExitStack() as stack:
        for kind, modules in modules_by_class.items():
            if kind._apply_gate is _default_apply_gate and all(map(_is_common_expert, modules)):
                stack.enter_context(mock.patch.object(kind, "forward", _experts_forward))
        yield


def _is_common_expert(module: Any) -> bool:
    weights = [
        getattr(module, name, None)
        for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    ]
    odd = (
        module._is_expert_parallel
        or module.has_bias
        or module.has_post_expert_norm
        or (module.has_gate and not module.is_concatenated)
    )
    known = type(getattr(module, "act_fn", None)).__name__ in _ACTS
    return known and not odd and all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in weights)


def _experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute an expert layer of transformers by one op.

    Args:
        self: the module of the experts.
        hidden_states: tokens, ``[t, h]``.
        top_k_index: experts of each token, ``[t, p]``.
        top_k_weights: weights of these experts, ``[t, p]``.

    Returns:
        The weighted sums of the experts' outputs, ``[t, h]``.
    """
    up, down = self.gate_up_proj if self.has_gate else self.up_proj, self.down_proj
    if self.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    up = up.unflatten(1, (2 if self.has_gate else 1, -1))
    act = _ACTS[type(self.act_fn).__name__]
    output = ops.experts(
        hidden_states.to(up.dtype), top_k_index, top_k_weights, up, down, act, up.shape[0]
    )
    return output.to(hidden_states.dtype)


def _positions_are_default(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    from transformers import PreTrainedModel

    arguments = (
        inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments if args else kwargs
    )
    return (
        isinstance(model, PreTrainedModel)
        and arguments.get("position_ids", kwargs.get("position_ids")) is None
    )


@contextlib.contextmanager
def _masks_by_shape(positions_are_default: bool) -> Iterator[None]:
    try:
        from transformers import masking_utils
    except ImportError:
        yield  # releases without this module build masks in the models themselves
        return
    with contextlib.ExitStack() as stack:
        if hasattr(masking_utils, "is_torchdynamo_exporting"):
            # If the user passes a mask, these functions keep it: they check for tracing elsewhere.
            stack.enter_context(
                mock.patch.object(masking_utils, "is_torchdynamo_exporting", _not_exporting)
            )
        stack.enter_context(documents_if_known(positions_are_default))
        yield


def _padding_in_every_mask(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the masks of flex_attention contain the padding of a batch, even if
    there is none. Otherwise transformers reads the values of `attention_mask` to decide whether
    they do."""
    configs: Iterator[Any] = (getattr(module, "config", None) for module in model.modules())
    kinds = {getattr(config, "_attn_implementation", None) for config in configs}
    if "flex_attention" not in kinds or not hasattr(_masking_utils(), "fast_all"):
        return contextlib.nullcontext()
    return mock.patch.object(_masking_utils(), "fast_all", _never)


def _not_exporting() -> bool:
    return False


def _never(mask: Tensor) -> bool:
    return False
