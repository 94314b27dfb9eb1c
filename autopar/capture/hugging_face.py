"""Adaptations of Hugging Face transformers for tracing.

Without transformers nothing here has an effect.

- Caches of keys and values are left out (see the section below).
- Speech encoders (wav2vec2 and similar) switch `requires_grad` of their input on. This is disabled
  during a capture.
- Models that record outputs install hooks at their first forward. Dynamo cannot trace the
  installation, so it is done before. The hooks read a context variable, which Dynamo cannot trace
  either, so a plain variable replaces it.
- Products of shapes. Dynamo makes a tensor of what numpy computes from plain numbers, and a branch
  on it cannot be traced.
- Selected hidden states. A wrapper determines the requested ones by binding a signature, which
  Dynamo cannot trace after a dict was changed.
- Experts. A setting of transformers decides how a layer of experts is computed: by a loop over
  values, which cannot be traced; by a copy of an expert's weights for each token that picks it; or
  by a sort of all picks, after which samples depend on each other. All give the same result. So for
  any setting, experts of the common kind (no biases, gated as usual or not at all) are one op,
  `autopar.ops.experts`. Others stay as they are.
- Branches. Some models make a mask in eager mode that they expect from the caller under tracing. If
  a model cannot be captured as it is traced, the branches of eager mode are tried.
- Masks. In eager mode, a batch without attention mask and position ids is one sequence per row and
  needs no mask: attention runs with ``is_causal=True``. Under tracing, transformers does not look
  at values and builds a ``[batch, 1, seq, seq]`` mask in every layer. A capture knows the values of
  positions that a model makes itself, so it leaves the mask out if they count up by one. A mask
  that the user passes stays data.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autopar import ops
from autopar.errors import CaptureError, Where

# --------------------------------------------------------------------------------------------------
# Caches of keys and values are not part of a capture, and what the model computes does not change.
#
# Transformers' decoders make an empty cache in each forward, unless told not to. A training graph
# does not need one, so `use_cache` is off during a capture. One result depends on it: with a cache
# (even an empty one) transformers ignores that `position_ids` may describe several documents in a
# row; only without a cache does it mask the documents from each other. Therefore:
#
# - If the positions are known to count up by one, there is one document, and no mask.
# - Otherwise the model is captured with `use_cache` as the user set it. If the model makes a cache,
#   it gets one that keeps nothing: `EmptyCache` replaces `DynamicCache`.

_MOST_POSITIONS = 1 << 14  # longer sequences are not compared: a capture does not know their values
_CACHES = ("past_key_values", "past_key_value", "cache_params")
_FINDER = "find_packed_sequence_indices"  # of transformers.masking_utils


@contextlib.contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Set `use_cache` to False in every configuration of `model`; restore it on exit."""
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if config is not None}
    on = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    try:
        for config in on:
            config.use_cache = False
        yield
    finally:
        for config in on:
            config.use_cache = True


def refuse_caches(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise CaptureError at an argument that is a cache of keys and values, by its class or, in a
    transformers model, by its name."""
    is_theirs = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    for name, value in arguments.items():
        kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(value).__mro__}
        if "transformers.cache_utils.Cache" in kinds or (
            is_theirs and name in _CACHES and value is not None
        ):
            raise CaptureError(
                f"the argument {name!r} is a cache of keys and values ({type(value).__name__}), "
                "which forward changes: it is for generating token by token, "
                "and a program has nothing that stays from one call to the next",
                remedy=(
                    f"leave {name} out, and pass the whole sequence in each call, with the tokens"
                    " for which the cache stands; to generate token by token, use the plain model"
                ),
            )


def asks_for_documents(refusal: CaptureError) -> bool:
    """Whether a capture stopped where transformers looks for several documents in
    `position_ids`."""
    return isinstance(refusal.where, Where) and f"{_FINDER}(" in refusal.where.source


@contextlib.contextmanager
def documents_if_known(positions_are_default: bool) -> Iterator[None]:
    """Let transformers find no documents in positions that count up by one, and branch on others.

    A branch on positions that are data stops the capture (`asks_for_documents`).

    Args:
        positions_are_default: whether the model is a transformers model that makes its own
            positions; sequences too long to be known then count as one document.
    """
    find = _finder()
    if find is None:
        yield
        return

    def find_if_known(position_ids: Tensor) -> Tensor | None:
        """Return the packed sequences' indices; None for one document of consecutive positions."""
        if positions_are_default and position_ids.numel() > _MOST_POSITIONS:
            return None
        if (position_ids[:, 1:] - position_ids[:, :-1] == 1).all():
            return None
        return find(position_ids)

    with mock.patch.object(_masking_utils(), _FINDER, find_if_known):
        yield


@contextlib.contextmanager
def empty_caches(model: nn.Module) -> Iterator[None]:
    """Let `model` use caches as the user set it, of a class that keeps nothing, and look for
    documents."""
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
    """Return transformers' own function, looked up once, before it is replaced."""
    return getattr(_masking_utils(), _FINDER, None)


@functools.cache
def _empty_cache() -> type:
    """Return a `DynamicCache` class without contents; in results of the model None replaces it."""
    from transformers import DynamicCache

    class EmptyCache(DynamicCache):
        """A cache that returns the keys and values of the present call alone."""

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


_ACTS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}


def model_loggers() -> list[logging.Logger]:
    """Return a logger of transformers, which has methods of its own (`warning_once`); empty without
    transformers."""
    return [logging.getLogger("transformers")] if "transformers" in sys.modules else []


@contextlib.contextmanager
def transformers_under_capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Apply the adaptations of this module; undo them on exit.

    Hooks that record outputs stay: the first forward would have installed them too.

    Args:
        model: the model.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_sounds_without_gradient(model))
        if "transformers" in sys.modules:
            install_recording_hooks(model)
            stack.enter_context(_recorder_in_a_plain_variable())
            stack.enter_context(_signatures_in_plain_dicts(model))
            stack.enter_context(_products_of_plain_numbers())
            stack.enter_context(_experts_as_one_op(model))
            stack.enter_context(_masks_by_shape(_positions_are_default(model, args, kwargs)))
        yield


@contextlib.contextmanager
def _sounds_without_gradient(model: nn.Module) -> Iterator[None]:
    """Keep speech encoders from switching `requires_grad` of the sound on, which Dynamo cannot
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
    """Let the model's own code take the branches of eager mode; yields whether it asks if it is
    traced."""
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
    """Install the hooks that record outputs, as the first forward of a transformers model would.

    Args:
        model: any model; only models of transformers get hooks, each once.
    """
    if "transformers" not in sys.modules:
        return
    try:
        from transformers import PreTrainedModel
        from transformers.utils import output_capturing
    except ImportError:
        return  # releases that record outputs in another way need no hooks
    install = output_capturing.install_all_output_capturing_hooks

    def install_once(part: nn.Module, prefix: str | None = None) -> None:
        """Install the hooks of a part that has none."""
        # A part that was called on its own has its hooks; transformers installs them again with the
        # whole's: all is recorded twice.
        if not getattr(part, "_output_capturing_hooks_installed", False):
            install(part, prefix)

    with mock.patch.object(output_capturing, "install_all_output_capturing_hooks", install_once):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                output_capturing.maybe_install_capturing_hooks(module)


class _Variable:
    """Replaces `contextvars.ContextVar` in one thread."""

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
        """Restore the value before the `set` that returned `token`."""
        self.value = token[0]


@contextlib.contextmanager
def _recorder_in_a_plain_variable() -> Iterator[None]:
    """Let the hooks read the recorder from a plain variable; Dynamo cannot read a context
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
    """Let `numpy.prod` of a shape be a plain number under Dynamo."""
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
    """Replaces `inspect.Signature` for calls that fit, with plain dicts; `bind` returns another
    one, with its `arguments`."""

    def __init__(self, names: tuple[str, ...], arguments: dict[str, Any]) -> None:
        self.names, self.arguments = names, arguments

    def bind(self, *args: Any, **kwargs: Any) -> _Signature:
        """Return the bound arguments, over the defaults."""
        return _Signature(
            self.names, {**self.arguments, **dict(zip(self.names, args, strict=False)), **kwargs}
        )

    def apply_defaults(self) -> None:
        """Do nothing: the defaults are present from the start."""


@contextlib.contextmanager
def _signatures_in_plain_dicts(model: nn.Module) -> Iterator[None]:
    """Replace the signatures in closures of method wrappers, which bind them to calls."""
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
    """Replace forward of classes of experts whose modules in the model are all of the common
    kind."""
    try:
        from transformers.integrations.moe import _default_apply_gate
    except ImportError:
        yield  # releases without this module have a module for each expert
        return
    found: dict[type[nn.Module], list[nn.Module]] = {}
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel") and hasattr(type(module), "_apply_gate"):
            found.setdefault(type(module), []).append(module)
    with contextlib.ExitStack() as stack:
        for kind, modules in found.items():
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
    """Compute transformers' experts by one op: tokens ``[t, h]``, picks and their weights ``[t,
    p]`` → ``[t, h]``."""
    up, down = self.gate_up_proj if self.has_gate else self.up_proj, self.down_proj
    if self.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    up = up.unflatten(1, (2 if self.has_gate else 1, -1))
    act = _ACTS[type(self.act_fn).__name__]
    made = ops.experts(
        hidden_states.to(up.dtype), top_k_index, top_k_weights, up, down, act, up.shape[0]
    )
    return made.to(hidden_states.dtype)


def _positions_are_default(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    from transformers import PreTrainedModel

    given = (
        inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments if args else kwargs
    )
    return (
        isinstance(model, PreTrainedModel)
        and given.get("position_ids", kwargs.get("position_ids")) is None
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
            # With a mask passed the functions still see that it is traced, and keep it.
            stack.enter_context(
                mock.patch.object(masking_utils, "is_torchdynamo_exporting", _not_exporting)
            )
        stack.enter_context(documents_if_known(positions_are_default))
        yield


def _not_exporting() -> bool:
    return False
