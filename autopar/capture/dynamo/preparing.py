"""Replace the weights of a model and the arguments of a call with fake tensors during a capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.capture.dynamo.constants import Key, Origins, buffer_may_be_known, may_be_known
from autopar.capture.dynamo.fakes import (
    FakeMode,
    fake_like,
    give_value,
    make_fake,
    new_fake_mode,
    no_modes,
)
from autopar.capture.dynamo.flex_attention import flex_attention_on_cpu, run_uncompiled
from autopar.capture.dynamo.python_forms import functions_replaced, known_divergences
from autopar.capture.hugging_face import transformers_under_capture
from autopar.capture.precision import narrow_dtype
from autopar.capture.trees import Aliases, aliases_of, flatten_call, unflatten


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of the model, and the fake tensor that replaces it."""

    own: torch.Tensor
    fake: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that can be captured: its arguments as fake tensors, and the original leaves.

    Attributes:
        mode: the mode of the fake tensors.
        args: fake positional arguments.
        kwargs: fake keyword arguments.
        in_leaves: flat (path, value) of the original (args, kwargs).
        in_spec: their pytree spec.
        aliases: other names of tied tensors, by first name.
        precision: dtype in which wider floating parameters and inputs are read.
        stored: name of each such parameter → its stored dtype.
        on_gpu: whether a tensor of the model or the call is on a GPU.
        inference: whether no parameter or input requires a gradient during the capture.
        buffers: name → buffer of the model.
        known: flat position of an input or name of a buffer → its values, if the graph is
            specialized to them.
        is_reading: whether forward reads a value that is only known with more work (`Origins`).
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
    buffers: Mapping[str, Buffer] = field(default_factory=dict)
    known: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    is_reading: bool = False

    def origins(self) -> Origins:
        """Return a new record of the inputs and buffers of one capture."""
        return Origins(self._fakes(), self.known, is_reading=self.is_reading)

    def _fakes(self) -> dict[Key, torch.Tensor]:
        leaves = enumerate(tree_leaves((self.args, self.kwargs)))
        inputs: dict[Key, torch.Tensor] = {
            position: fake for position, fake in leaves if isinstance(fake, torch.Tensor)
        }
        return inputs | {name: buffer.fake for name, buffer in self.buffers.items()}

    def knowable(self, origins: Origins) -> frozenset[Key] | None:
        """Return the unknown inputs and buffers that may be known and on which alone a number, a
        shape or a branch depends; None if knowing more values would not help."""
        candidates = [
            keys - self.known.keys()
            for keys in origins.unknown()
            if all(map(self._may_be_known, keys))
        ]
        return (
            frozenset().union(*candidates)
            if any(candidates) or (candidates and not self.is_reading)
            else None
        )

    def _may_be_known(self, key: Key) -> bool:
        return (
            buffer_may_be_known(self.buffers[key].own)
            if isinstance(key, str)
            else may_be_known(self.in_leaves[key][1])
        )

    def with_known(self, keys: Iterable[Key]) -> Prepared:
        """Return the same call with these inputs and buffers also known."""
        fakes = self._fakes()
        with no_modes():
            known_tensors = {
                key: self.buffers[key].own if isinstance(key, str) else self.in_leaves[key][1]
                for key in keys
            }
            values = {key: tensor.detach().cpu().clone() for key, tensor in known_tensors.items()}
        for key, value in values.items():
            give_value(fakes[key], value)
        return replace(self, known={**self.known, **values}, is_reading=True)

    def arguments_anew(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of args and kwargs for one run of forward, which may change them."""
        copied: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(
            torch.Tensor, _fresh_copy, (self.args, self.kwargs)
        )
        return copied

    def run(self, model: nn.Module) -> Any:
        """Call the model or a copy of it and return its results."""
        with self.mode, run_uncompiled():
            args, kwargs = self.arguments_anew()
            return model(*args, **kwargs)


def _fresh_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def prepare_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    precision: torch.dtype | None = None,
    *,
    inference: bool = False,
) -> Iterator[Prepared]:
    """Replace the tensors of a model and of a call with fake tensors; restore the model on exit.

    Args:
        model: the model.
        args: positional arguments.
        kwargs: keyword arguments.
        precision: dtype of wider floating parameters and inputs within the context.
        inference: whether no parameter or input requires a gradient within the context.
    """
    mode = new_fake_mode()
    in_leaves, in_spec = flatten_call(args, kwargs)
    # Each leaf gets its own fake tensor: Dynamo would merge equal objects (labels=ids), and the
    # graph would read only one.
    fakes = [
        _fake_input(leaf, mode, precision, frozen=inference)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for _, leaf in in_leaves
    ]
    fake_args, fake_kwargs = unflatten(fakes, in_spec)
    named = model.named_parameters(remove_duplicate=False)
    stored = {name: p.dtype for name, p in named if narrow_dtype(p.dtype, precision) != p.dtype}
    on_gpu = any(
        getattr(held, "is_cuda", False)
        for held in (*model.parameters(), *model.buffers(), *(leaf for _, leaf in in_leaves))
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(known_divergences())
        real_buffers = dict(model.named_buffers(remove_duplicate=False))
        stack.enter_context(_fake_weights(model, mode, precision, frozen=inference))
        buffers = {name: Buffer(real_buffers[name], fake) for name, fake in model.named_buffers()}
        stack.enter_context(transformers_under_capture(model, args, kwargs))
        stack.enter_context(torch.set_grad_enabled(not inference))
        stack.enter_context(_ops_of_training())
        stack.enter_context(functions_replaced())
        stack.enter_context(flex_attention_on_cpu())
        stack.enter_context(_unchecked_distributions())
        aliases = aliases_of(model)  # of the fake tensors
        yield Prepared(
            mode,
            fake_args,
            fake_kwargs,
            in_leaves,
            in_spec,
            aliases,
            precision,
            stored,
            on_gpu,
            inference,
            buffers,
        )


def _fake_input(
    tensor: torch.Tensor, mode: FakeMode, precision: torch.dtype | None, *, frozen: bool
) -> torch.Tensor:
    return make_fake(tensor, mode, precision).requires_grad_(tensor.requires_grad and not frozen)


@contextlib.contextmanager
def _fake_weights(
    model: nn.Module, mode: FakeMode, precision: torch.dtype | None, *, frozen: bool
) -> Iterator[None]:
    """Replace every parameter and buffer with a fake tensor on the CPU (tied ones with the same);
    restore the originals on exit."""
    swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    fakes: dict[int, torch.Tensor] = {}
    try:
        for module in model.modules():
            for entries in (module._parameters, module._buffers):
                for name, tensor in entries.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in fakes:
                        fakes[id(tensor)] = _fake_weight(tensor, mode, precision).requires_grad_(
                            tensor.requires_grad and not frozen
                        )
                    swapped.append((entries, name, tensor))
                    entries[name] = fakes[id(tensor)]
        yield
    finally:
        for entries, name, tensor in swapped:
            entries[name] = tensor


def _fake_weight(
    tensor: torch.Tensor, mode: FakeMode, precision: torch.dtype | None
) -> torch.Tensor:
    """Return a fake parameter or buffer; parameters wider than `precision` get that dtype, buffers
    keep theirs."""
    dtype = (
        narrow_dtype(tensor.dtype, precision) if isinstance(tensor, nn.Parameter) else tensor.dtype
    )
    sample = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=dtype, device="meta"
    )  # each has its own storage
    fake = fake_like(sample, torch.device("cpu"), mode)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


@contextlib.contextmanager
def _ops_of_training() -> Iterator[None]:
    """Disable the fused ops that torch's transformer layers use without gradients; the regular ops
    compute the same."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """Disable the ops of mkldnn for recurrent layers, which exist only on CPUs. A model that reads
    ``torch.backends.mkldnn.enabled`` still gets the user's value."""
    module_class, value = type(torch.backends.mkldnn), torch.backends.mkldnn.enabled
    before = vars(module_class)["enabled"]  # a descriptor that reads the current value
    with torch.backends.mkldnn.flags(enabled=False):
        setattr(module_class, "enabled", property(lambda _: value))  # noqa: B010
        try:
            yield
        finally:
            setattr(module_class, "enabled", before)  # noqa: B010


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Make distributions skip the check of their parameters' values, which a graph cannot contain;
    torch.compile skips it too."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def changed_settings() -> dict[str, Any]:
    """Return the settings of Dynamo and AOTAutograd that differ from their defaults, except aliases
    and deprecated settings."""
    return {
        f"{config.__name__}.{name}": getattr(config, name)
        for config in (torch._dynamo.config, torch._functorch.config)
        for name, entry in sorted(config._config.items())
        if entry.alias is None and not getattr(entry, "deprecated", False)
        if getattr(config, name) != entry.default
    }
