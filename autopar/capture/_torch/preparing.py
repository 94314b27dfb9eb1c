"""A model and a call of it, made fake for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.capture._torch.fakes import FakeMode, fake_like, faked, give_value, new_fake_mode, no_modes
from autopar.capture._torch.flex import flex_attention_refused
from autopar.capture._torch.origins import Origins, may_be_known
from autopar.capture._torch.replaced import functions_replaced
from autopar.capture._transformers import transformers_under_capture
from autopar.capture.distributions import known_divergences
from autopar.capture.precision import narrowed
from autopar.capture.ties import Aliases, aliases_of
from autopar.capture.trees import flatten_call, unflatten


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that can be captured: its arguments as fake tensors, beside the leaves they were made of.

    Attributes:
        precision: what wider floating parameters and inputs are read in. stored: such a parameter's name → its own dtype.
        on_gpu: whether a tensor of the model or the call is on a GPU. inference: whether nothing has a gradient, whatever the model says.
        known: flat position → what the input there holds, where the graph is for these values alone.
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
    known: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def origins(self) -> Origins:
        """Follows the inputs of one capture."""
        fakes = enumerate(tree_leaves((self.args, self.kwargs)))
        return Origins({position: fake for position, fake in fakes if isinstance(fake, torch.Tensor)}, self.known)

    def knowable(self, origins: Origins) -> frozenset[int]:
        """Of the inputs that decide numbers, shapes or branches by themselves those that may be known, and are not yet."""
        read = frozenset().union(*origins.of_inputs_alone()) - self.known.keys()
        return frozenset(position for position in read if may_be_known(self.in_leaves[position][1]))

    def knowing(self, positions: Iterable[int]) -> Prepared:
        """The same call, whose inputs there are known, too."""
        with no_modes():
            values = {position: self.in_leaves[position][1].detach().cpu().clone() for position in positions}
        leaves = tree_leaves((self.args, self.kwargs))
        for position, value in values.items():
            give_value(leaves[position], value)
        return replace(self, known={**self.known, **values})

    def arguments_anew(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Like args and kwargs, for a run of forward, which may change them."""
        made: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(torch.Tensor, _anew, (self.args, self.kwargs))
        return made

    def run(self, model: nn.Module) -> Any:
        """What `model`, this one or a copy, returns of the call."""
        with self.mode:
            args, kwargs = self.arguments_anew()
            return model(*args, **kwargs)


def _anew(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def prepared(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], precision: torch.dtype | None = None, *, inference: bool = False
) -> Iterator[Prepared]:
    """Make `model` and a call of it fake for a while; afterwards the model is as before.

    Args:
        precision: the dtype that wider floating parameters and inputs have meanwhile.
        inference: whether no parameter, nor input, requires a gradient meanwhile.
    """
    mode = new_fake_mode()
    in_leaves, in_spec = flatten_call(args, kwargs)
    # Each leaf gets its own fake tensor: Dynamo would merge equal objects (labels=ids), and the graph would read only one.
    fakes = [_fake_input(leaf, mode, precision, frozen=inference) if isinstance(leaf, torch.Tensor) else leaf for _, leaf in in_leaves]
    fake_args, fake_kwargs = unflatten(fakes, in_spec)
    named = model.named_parameters(remove_duplicate=False)
    stored = {name: p.dtype for name, p in named if narrowed(p.dtype, precision) != p.dtype}
    on_gpu = any(getattr(held, "is_cuda", False) for held in (*model.parameters(), *model.buffers(), *(leaf for _, leaf in in_leaves)))
    with contextlib.ExitStack() as stack:
        stack.enter_context(known_divergences())
        stack.enter_context(_fake_weights(model, mode, precision, frozen=inference))
        stack.enter_context(transformers_under_capture(model, args, kwargs))
        stack.enter_context(torch.set_grad_enabled(not inference))
        stack.enter_context(_ops_of_training())
        stack.enter_context(functions_replaced())
        stack.enter_context(flex_attention_refused())
        stack.enter_context(_unchecked_distributions())
        aliases = aliases_of(model)  # captured, a tensor is another object
        yield Prepared(mode, fake_args, fake_kwargs, in_leaves, in_spec, aliases, precision, stored, on_gpu, inference)


def _fake_input(tensor: torch.Tensor, mode: FakeMode, precision: torch.dtype | None, *, frozen: bool) -> torch.Tensor:
    return faked(tensor, mode, precision).requires_grad_(tensor.requires_grad and not frozen)


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


@contextlib.contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """Distributions do not look at the values of their parameters, which has no place in a graph: torch.compile leaves it out, too."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
