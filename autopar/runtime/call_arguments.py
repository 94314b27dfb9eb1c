"""Conversion between calls of the model and the flat tensors of a program.

Arguments are flattened and checked. Results are put into the structure that the model returns.
Leaves have the same paths as in the program: keyword arguments are named by keyword, positional
arguments by index (``input_ids``, ``past.0``).
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture.call_constants import is_constant, same_constant
from autopar.capture.calls import check_call
from autopar.capture.tensor_kinds import unusual_kind
from autopar.capture.trees import flatten_with_paths, paths_in
from autopar.core.layout import local_shape
from autopar.core.same_values import is_plain, text_of
from autopar.errors import CallError, RuntimeStateError
from autopar.kernels.collectives import Groups
from autopar.program.program import Program, ProgramTensor
from autopar.runtime.guards import Misfit, UnsupportedGradient
from autopar.runtime.rank_consistency import check_batch, check_parts

log = logging.getLogger("autopar")


@dataclass(frozen=True)
class CallForm:
    """The structure of the arguments that a program was compiled for.

    Attributes:
        spec: the structure of ``(args, kwargs)``.
        signature: the signature of forward; None if arguments are compared as they are passed.
        defaults: the result of `defaults_of`.
        paths: the path of each leaf.
        names: the names of the program's arguments in the signature; empty if the arguments do not
            match it.
        named_spec: the structure of the arguments by name; None if they do not match the signature.
        order: for each leaf of `named_spec`, its position among the leaves of `spec`.
    """

    spec: Any
    signature: inspect.Signature | None
    defaults: Mapping[str, Any]
    paths: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    named_spec: Any = None
    order: tuple[int, ...] = ()

    @staticmethod
    def of(spec: Any, signature: inspect.Signature | None, defaults: Mapping[str, Any]) -> CallForm:
        """Return the form of a program's arguments.

        Args:
            spec, signature, defaults: the attributes of the same names.
        """
        args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        paths = tuple(path.split(".", 1)[1] for path in paths_in((args, kwargs)))
        form = CallForm(spec, signature, defaults, paths)
        named = form.by_name(args, kwargs)
        if named is None:
            return form
        order, named_spec = pytree.tree_flatten(named)
        return replace(form, names=tuple(named), named_spec=named_spec, order=tuple(order))

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any] | None:
        """Return the leaves of a call in the order of the program's leaves; None if the structure
        of the call differs."""
        leaves: list[Any]
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec == self.spec:
            return leaves
        named = self.by_name(args, kwargs)
        if named is None or self.named_spec is None:
            return None
        reordered, spec = pytree.tree_flatten(self.with_defaults(named))
        if spec != self.named_spec:
            return None
        pairs = zip(self.order, reordered, strict=True)
        return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by their names in the signature; None if they do not match it."""
        if self.signature is None:
            return None
        try:
            bound = self.signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None
        kinds = {name: parameter.kind for name, parameter in self.signature.parameters.items()}
        return {
            n: dict(sorted(v.items())) if kinds[n] is inspect.Parameter.VAR_KEYWORD else v
            for n, v in bound.items()
        }

    def with_defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the call with exactly the arguments of the program if the difference consists of
        default values; otherwise return the call unchanged."""
        more = [name for name in given if name not in self.names]
        if any(
            name not in self.defaults or not _is_same(given[name], self.defaults[name])
            for name in more
        ):
            return given
        if any(name not in given and name not in self.defaults for name in self.names):
            return given
        return {name: given[name] if name in given else self.defaults[name] for name in self.names}


class Arguments:
    """Flattens and checks the arguments of calls.

    Args:
        program: the program that takes the arguments as inputs.
        signature: the signature of the model's forward, or None. With a signature, an argument may
            be passed by position or by name, in any order.
        batch: ``"global"`` if calls pass full tensors, ``"local"`` if they pass this rank's shards.
        groups: the process group, size and coordinate of this rank along every axis.
        device_type: the type of the devices, such as ``"cuda"``.
        defaults: the result of `defaults_of`. A call that passes a default value is treated like a
            call that omits it.
    """

    def __init__(
        self,
        program: Program,
        signature: inspect.Signature | None,
        batch: Literal["global", "local"],
        groups: Groups,
        device_type: str,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._form = CallForm.of(program.in_spec, signature, defaults)
        self._device_type, self._settings = device_type, program.settings
        self._is_whole, self._num_calls, self._told_of_gpu = batch == "global", 0, False
        self._remedy = _REMEDY if self._is_whole else _OF_PARTS
        positions = {path: position for position, path in enumerate(self._form.paths)}
        self._inputs = [
            (positions[tensor.name], tensor, _expected_shape(tensor, batch, groups))
            for tensor in program.inputs
        ]

    def __deepcopy__(self, memo: Any) -> Arguments:
        # the shared attributes are never changed, and torch warns about copies of tree specs
        return copy.copy(self)

    def tensors(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], devices: DeviceMesh
    ) -> list[Tensor]:
        """Return the input tensors in the program's order.

        Calls 1, 2, 4, 8 and so on also check that ranks pass equal tensors if they should. This
        finds the cause of different batches early.

        Args:
            args, kwargs: the arguments of the call.
            devices: the mesh whose ranks are compared.

        Raises:
            CallError: if the model itself does not accept these arguments.
            Misfit: if the structure, a shape, a dtype or a plain value differs from the program.
            RuntimeStateError: if the device or an argument of another kind differs from the
                program, or ranks pass different batches.
        """
        tensors = self._tensors(args, kwargs)
        self._num_calls += 1
        if self._num_calls & (self._num_calls - 1) == 0:
            names = [tensor.name for _, tensor, _ in self._inputs]
            if self._is_whole:
                check_batch(names, tensors, devices)
            else:
                layouts = [tensor.layout for _, tensor, _ in self._inputs]
                check_parts(names, tensors, layouts, devices)
        return tensors

    def describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Describe the arguments in words. The text is equal on all ranks that make the same call:
        a shard that matches the program is described with the shape of the full tensor."""
        canonical = self._form.by_name(args, kwargs)
        arguments = (args, kwargs) if canonical is None else self._form.with_defaults(canonical)
        leaves, parts = (
            flatten_with_paths(arguments)[0],
            {} if self._is_whole else self._parts(args, kwargs),
        )
        return ", ".join(f"{path} = {_describe_value(x, parts.get(id(x)))}" for path, x in leaves)

    def _parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, tuple[int, ...]]:
        """Return the full shape of each argument that has the shape of this rank's shard, by the id
        of the argument."""
        try:
            leaves = self._leaves(args, kwargs)
        except (CallError, Misfit):  # the call itself reports them
            return {}
        inputs_given = (
            (leaves[position], tensor, shape) for position, tensor, shape in self._inputs
        )
        return {
            id(x): tensor.shape
            for x, tensor, shape in inputs_given
            if isinstance(x, Tensor) and tuple(x.shape) == shape
        }

    def fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the program accepts these arguments."""
        try:
            self._tensors(args, kwargs)
        except Misfit:
            return False
        return True

    def as_whole(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the same call with the global batch. Each shard is replaced by an
        uninitialized tensor of the full shape.

        Raises:
            Misfit: if a shard does not match the program, since its full shape is then unknown.
                Plain values and gradients are not checked.
        """
        if self._is_whole:
            return args, kwargs
        self._check_tensors(self._leaves(args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        parts = {
            id(self._leaves(args, kwargs)[position]): tensor for position, tensor, _ in self._inputs
        }
        full_leaves = [_of_shape(parts[id(x)].shape, x) if id(x) in parts else x for x in leaves]
        full_arguments: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(
            full_leaves, spec
        )
        return full_arguments

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        leaves = self._leaves(args, kwargs)
        self._check_settings(leaves)
        tensors = self._check_tensors(leaves)
        self._check_known(leaves)
        self._check_gradients(tensors)
        return tensors

    def _check_gradients(self, tensors: Sequence[Tensor]) -> None:
        for (_, tensor, _), value in zip(self._inputs, tensors, strict=True):
            if forward_ad.unpack_dual(value).tangent is not None:
                message = (
                    f"argument {tensor.name!r} has a forward-mode tangent: programs support"
                    " backward differentiation only"
                )
                raise RuntimeStateError(
                    message, remedy="differentiate by backward, or call the plain model"
                )
            if value.requires_grad and torch.is_grad_enabled() and not tensor.requires_grad:
                raise UnsupportedGradient(
                    f"argument {tensor.name!r} requires a gradient, but the program does not"
                    " compute one",
                    remedy=(
                        "detach it, or set requires_grad on this argument in example_inputs and"
                        " compile again"
                    ),
                )

    def _check_settings(self, leaves: Sequence[Any]) -> None:
        for position, made_for in self._settings.items():
            argument = leaves[position]
            if isinstance(made_for, Tensor) or same_constant(argument, made_for):
                continue  # tensors are compared by `_check_known`, after the check of their shapes
            message = (
                f"argument {self._form.paths[position]!r} is {_shown(argument)}, but the program"
            )
            if isinstance(argument, Tensor) or is_constant(argument):
                remedy = (
                    "pass the value the program was compiled for, or compile the model again"
                    " for this call"
                )
                raise Misfit(f"{message} was compiled for {_shown(made_for)}", remedy=remedy)
            # an object whose equality is unknown cannot select another program
            how = "another object" if type(argument) is type(made_for) else _shown(made_for)
            raise RuntimeStateError(
                f"{message} was compiled for {how}",
                remedy=(
                    "pass the same object in every call; numbers, strings and enum members are"
                    " compared by value"
                ),
            )

    def _check_known(self, leaves: Sequence[Any]) -> None:
        """Check the values of inputs that forward reads. On a GPU this synchronizes with the
        device, as the plain model does."""
        for position, made_for in self._settings.items():
            if isinstance(made_for, Tensor) and not torch.equal(leaves[position].cpu(), made_for):
                message = (
                    f"argument {self._form.paths[position]!r} has other values than the program"
                    " was compiled for, and forward reads them"
                )
                raise Misfit(
                    message,
                    remedy=("pass the same values, or compile the model again for this call"),
                )

    def _check_tensors(self, leaves: Sequence[Any]) -> list[Tensor]:
        tensors = []
        for position, tensor, shape in self._inputs:
            value = leaves[position]
            if not isinstance(value, Tensor):
                raise Misfit(
                    f"argument {tensor.name!r} is {type(value).__name__}, not a tensor",
                    remedy=self._remedy,
                )
            _check_kind(tensor.name, value)
            if tuple(value.shape) != shape or value.dtype != tensor.dtype:
                part = "" if self._is_whole else f", this rank's shard of {tensor.shape}"
                message = (
                    f"argument {tensor.name!r} is {value.dtype} {tuple(value.shape)}, but the"
                    f" program expects {tensor.dtype} {shape}{part}"
                )
                raise Misfit(message, remedy=self._remedy)
            if value.device.type != self._device_type:
                raise RuntimeStateError(
                    f"argument {tensor.name!r} is on {value.device}, but the mesh is on"
                    f" {self._device_type}",
                    remedy=f"move the batch to {self._device_type}",
                )
            # collectives send the memory without resolving conjugation or negation
            value = value.resolve_conj().resolve_neg()
            tensors.append(
                value if value.device.type != "cuda" else self._on_own_gpu(value, tensor.name)
            )
        return tensors

    def _on_own_gpu(self, value: Tensor, name: str) -> Tensor:
        """Return the tensor on the current GPU of this process. The batch may have been moved to
        ``"cuda"`` before the process selected its GPU."""
        current_device = torch.device("cuda", torch.cuda.current_device())
        if value.device == current_device:
            return value
        if not self._told_of_gpu:
            self._told_of_gpu = True
            of_place = (
                "int(os.environ['LOCAL_RANK'])"
                if "LOCAL_RANK" in os.environ
                else value.device.index
            )
            log.warning(
                "%s is on %s, but this process computes on %s: every call copies it; call"
                " torch.cuda.set_device(%s) before anything else",
                name,
                value.device,
                current_device,
                of_place,
            )
        return value.to(current_device)

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        leaves = self._form.leaves(args, kwargs)
        if leaves is not None:
            return leaves
        if self._form.signature is not None:
            check_call(self._form.signature, args, kwargs)
        passed_names = [path.split(".", 1)[1] for path in paths_in((args, kwargs))]
        raise Misfit(
            f"called with arguments {passed_names}, but the program expects "
            f"{list(self._form.paths)}",
            remedy=self._remedy,
        )


def defaults_of(model: nn.Module) -> dict[str, Any]:
    """Return the defaults of a model's forward that are plain values, by name.

    If forward is wrapped or has a pre-hook that takes keyword arguments, it may replace an omitted
    argument by any value. In that case, only defaults of None are returned, since None usually also
    means that no value was passed.
    """
    forward: Any = model.forward
    is_bare = not hasattr(forward, "__wrapped__") and not model._forward_pre_hooks_with_kwargs
    parameters = inspect.signature(forward).parameters.values()
    defaults = {
        p.name: p.default
        for p in parameters
        if p.default is None or (is_bare and p.default is not p.empty)
    }
    return {
        name: x
        for name, x in defaults.items()
        if all(is_constant(leaf) for leaf in pytree.tree_leaves(x))
    }


def _check_kind(name: str, value: Tensor) -> None:
    if isinstance(value, DTensor):
        message = f"argument {name!r} is a DTensor, but the program expects plain tensors"
        remedy = (
            "pass x.full_tensor(), called on every rank, or compile the module that returns it with"
            " outputs='full'"
        )
        raise RuntimeStateError(message, remedy=remedy)
    kind = unusual_kind(value)
    if kind is not None:
        raise RuntimeStateError(
            f"argument {name!r} is {kind.name}, but the program expects plain tensors",
            remedy=kind.remedy,
        )


def _is_same(given: Any, default: Any) -> bool:
    leaves, spec = pytree.tree_flatten(given)
    default_leaves, same = pytree.tree_flatten(default)
    return spec == same and all(map(same_constant, leaves, default_leaves))


def _of_shape(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
    )


def _describe_value(value: Any, whole: tuple[int, ...] | None) -> str:
    if not isinstance(value, Tensor):
        return _shown(value)
    asks = " that requires a gradient" if value.requires_grad else ""
    return (
        f"{str(value.dtype).removeprefix('torch.')}"
        f" {tuple(value.shape) if whole is None else whole}{asks}"
    )


def _shown(value: Any) -> str:
    """Return a text of a value that is equal on all ranks for equal values."""
    return repr(value) if is_constant(value) and not is_plain(value) else text_of(value)


_REMEDY = "call it as in example_inputs, with a batch of the same shapes and dtypes"
_OF_PARTS = (
    'example_inputs is the whole batch; with batch="local" each rank passes only its shard'
    " (see pm.input_layouts)"
)


class CallResults:
    """Puts the outputs and constants of a program into the structure that the model returns.

    Args:
        program: the program that returns the outputs.
    """

    def __init__(self, program: Program) -> None:
        self._spec, self._constants = program.out_spec, program.constants
        paths = paths_in(pytree.tree_unflatten(list(range(self._spec.num_leaves)), self._spec))
        positions = {path: position for position, path in enumerate(paths)}
        self._positions = [positions[tensor.name] for tensor in program.outputs]

    def __deepcopy__(self, memo: Any) -> CallResults:
        # the attributes are never changed, and torch warns about copies of tree specs
        return copy.copy(self)

    def build(self, outputs: Sequence[Any]) -> Any:
        """Return the model's result for the outputs, given in the program's order."""
        leaves: Mapping[int, Any] = {
            **self._constants,
            **dict(zip(self._positions, outputs, strict=True)),
        }
        return pytree.tree_unflatten(
            [leaves[position] for position in range(self._spec.num_leaves)], self._spec
        )


def _expected_shape(tensor: ProgramTensor, batch: str, groups: Groups) -> tuple[int, ...]:
    if batch == "global":
        return tensor.shape
    return local_shape(
        tensor.shape, tensor.layout, [g.size for g in groups], [g.coordinate for g in groups]
    )
