"""`HeldTensor`: a DTensor with the semantics of the full tensor, for parameters, gradients and
results computed from them.

A plain DTensor computes most functions of torch as on the full tensor. Other functions give wrong
results without an error, or raise an error: ``item()`` reads this rank's local value, a write into
a slice of a sharded dim changes a copy, random numbers repeat in every shard, plain tensors and
DTensors of other meshes cannot be mixed with it, and some ops have no sharding rule. `HeldTensor`
handles these cases as follows:

    reads of values              return the values of the full tensor (`full_tensor`)
    plain tensor operands        are treated as replicated; whether they are equal on all ranks is
                                 checked as for batches
    lists for one kernel         are split by mesh, with plain tensors in a separate list
    random draws                 are made for the full tensor by the first rank of the mesh
    functions without a rule,    are computed from full tensors, and every rank keeps its shard;
    writes into a shard          each function is logged once

Each of these cases is collective: every rank must execute it.

An assignment to ``data`` is refused, for parameters, sharded buffers and gradients. torch accepts
it, but all ops continue to read the previous local tensor.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils

from autopar.errors import RuntimeStateError
from autopar.runtime import changes, gather_fallback
from autopar.runtime.dtensor_checkpoints import (
    has_stages,
    is_of_one_stage,
    reduce_whole,
    refuse_parts,
)
from autopar.runtime.gather_fallback import (
    ACCESS,
    ASIDE,
    OF_SEVERAL,
    VIEW_ATTRIBUTES,
    VIEWS,
    computes_in_place,
    draws,
    is_of_elements,
    tensors_in,
    written_by,
)
from autopar.runtime.guarded_outputs import READS
from autopar.runtime.rank_agreement import announced
from autopar.runtime.rank_consistency import PlainTensorCheck

_ORIGIN = "_autopar_origin"
_plain_tensor_check = PlainTensorCheck()


class HeldTensor(DTensor):
    """A DTensor that torch's functions treat as the full tensor. `hold_value` converts a DTensor
    in place."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch as on full tensors. Results are of this class.

        Raises:
            RuntimeStateError: if tensors of a single stage are combined, or plain operands differ
                between ranks.
        """
        kwargs, name = kwargs or {}, func.__name__
        if name in ACCESS:
            return _access_attribute(func, args, kwargs)
        if name in _SUMS and has_stages():
            _refuse_sum_of_stage(args)
        if name not in ASIDE and name not in VIEWS and (mesh := _mesh_of_sums(args)) is not None:
            with announced(f"computes {name.strip('_')} over the values of all ranks", mesh):
                result = cls._run_function(func, types, args, kwargs)
        else:
            result = cls._run_function(func, types, args, kwargs)
        _record(func, result, args, kwargs)
        return result

    @classmethod
    def _run_function(cls, func: Any, types: Iterable[type], args: Any, kwargs: Any) -> Any:
        """Run a function that is not an attribute access; see `__torch_function__`."""
        name = func.__name__
        if func in READS or name == "__format__":
            return gather_fallback.read_whole(func, args, kwargs)
        if _takes_fast_path(name, args, kwargs):
            first = args[0] if args and isinstance(args[0], tuple | list) else args[:1]
            result, refusal = _try_dtensor(func, types, args, kwargs, first)
            if refusal is None:
                return _hold_each(result)
        if name in _METHODS:
            return _METHODS[name](args[0])
        leaves = tensors_in((args, kwargs))
        if name in ASIDE:
            return _hold_new(_call_disabled(func, types, _as_aside(name, args), kwargs), leaves)
        if name in OF_SEVERAL:
            _refuse_one_stage(name, leaves)
        if name.startswith(_LIST_KERNELS):
            # DTensor's implementation of `_amp_foreach_*` shares non-finite values with all ranks
            compute = _call_disabled if name.startswith("_amp_") else _compute_with_dtensor
            return gather_fallback.by_mesh(
                func, args, kwargs, lambda a, k: compute(func, types, a, k)
            )
        return _compute_with_dtensor(func, types, args, kwargs)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """Return the full tensor. Every rank must call this, unless the tensor is replicated."""
        if all(placement.is_replicate() for placement in self._spec.placements):
            return super().full_tensor(**kwargs)
        with announced(f"gathers a tensor of shape {tuple(self.shape)}", self._spec.mesh):
            return super().full_tensor(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor as a plain tensor.

        Raises:
            RuntimeStateError: if this process does not hold the full tensor.
        """
        return reduce_whole(self, protocol)

    def __copy__(self) -> Any:
        return hold_value(_as_dtensor(self, lambda: copy.copy(self)))

    def __deepcopy__(self, memo: Any) -> Any:
        return hold_value(_as_dtensor(self, lambda: DTensor.__deepcopy__(self, memo)))


for _supported in (
    torch_optimizer._foreach_supported_types,
    _foreach_utils._foreach_supported_types,
):
    _supported.append(HeldTensor)


def hold_value(value: Any) -> Any:
    """Convert a DTensor to a `HeldTensor` in place, and return it. Other values are returned
    unchanged."""
    if type(value) is DTensor:
        value.__class__ = HeldTensor
    return value


def _hold_each(result: Any) -> Any:
    """Convert a result, or each value of a list of results, to `HeldTensor`."""
    for x in result if isinstance(result, tuple | list) else (result,):
        hold_value(x)
    return result


def shard_like(like: DTensor, value: Tensor) -> Any:
    """Return this rank's shard of a full tensor as a `HeldTensor` with the placements of `like`."""
    shard = torch.empty_like(like.detach(), dtype=value.dtype)
    gather_fallback.put_whole(shard, value.detach())
    return hold_value(shard)


def _mesh_of_sums(args: Any) -> DeviceMesh | None:
    """Return the mesh of the first argument that is a partial sum; None if there is none. The
    function may have to reduce such an argument."""
    for argument in args:
        x = argument[0] if isinstance(argument, tuple | list) and argument else argument
        if type(x) is HeldTensor:
            # a plain loop for speed, since every op of an optimizer step calls this
            for placement in x._spec.placements:
                if placement.is_partial():
                    return x._spec.mesh
    return None


_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


def _as_aside(name: str, args: Any) -> Any:
    """Return the arguments of a function of `ASIDE`. A registered hook is replaced."""
    return (args[0], _without_absent(name, args[1])) if name in _HOOKS else args


def _without_absent(name: str, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a hook that is not called if the parameter has no gradient.

    A step is one autograd function of all parameters, and autograd calls the hooks of parameters
    for which it returns None. The plain model has no path to such a parameter, and does not call
    its hooks.

    Args:
        name: the function that registers the hook.
        hook: takes the gradient, or after accumulation the parameter.
    """

    @functools.wraps(hook, updated=())
    def call(value: Any) -> Any:
        """Call the hook if there is a gradient."""
        given = value if name == "register_hook" or value is None else value.grad
        return None if given is None else hook(value)

    return call


_LIST_KERNELS = ("_amp_foreach_", "_foreach_", "_fused_")
# Methods that neither DTensor nor the full tensor answers.
_METHODS: Mapping[str, Callable[[Any], Any]] = {
    "__iter__": lambda x: iter(x.unbind(0)),
    # called by safetensors; torch uses untyped storages
    "storage": lambda _: refuse_parts(
        "a distributed tensor has no storage of its own", "safetensors"
    ),
    # scripts detect tied parameters by it; a wrapper has no data
    "data_ptr": lambda x: x._local_tensor.data_ptr(),
}


def _takes_fast_path(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether DTensor can be tried without further checks, as for most of an optimizer's
    step."""
    return (
        is_of_elements(name)
        and not (has_stages() and name in OF_SEVERAL)
        and _are_alike(args, kwargs)
    )


def _are_alike(args: Any, kwargs: Any) -> bool:
    """Return whether all tensors are `HeldTensor` on one mesh and none is a copied view."""
    mesh = None
    for argument in (*args, *kwargs.values()):
        for x in argument if isinstance(argument, tuple | list) else (argument,):
            if type(x) is HeldTensor:
                tensor_mesh = x._spec.mesh
                if _ORIGIN in vars(x) or (
                    mesh is not None and tensor_mesh is not mesh and tensor_mesh != mesh
                ):
                    return False
                mesh = tensor_mesh
            elif isinstance(x, Tensor):
                return False
    return mesh is not None and "out" not in kwargs


def _try_dtensor(
    func: Any, types: Iterable[type], args: Any, kwargs: Any, written: Sequence[Any]
) -> tuple[Any, str | None]:
    """Compute a function with DTensor.

    Args:
        func, types, args, kwargs: the arguments of `__torch_function__`.
        written: tensors that the function may write. If one of them was written before the function
            failed, the error is raised, since the function cannot be computed again.

    Returns:
        The result, and the message of DTensor's error, or None if DTensor computed the function.
        The exception itself is not returned, since it would keep the arguments alive.
    """
    targets = [x for x in written if isinstance(x, DTensor)]
    before = [x._local_tensor._version for x in targets]
    try:
        return _call_disabled(func, types, args, kwargs), None
    except (torch.OutOfMemoryError, RuntimeStateError):
        raise
    except (RuntimeError, ValueError, AssertionError) as refusal:
        if before != [x._local_tensor._version for x in targets]:
            raise
        return None, str(refusal)


def _compute_with_dtensor(func: Any, types: Iterable[type], args: Any, kwargs: Any) -> Any:
    leaves = tensors_in((args, kwargs))
    written = written_by(func, args, kwargs)
    origins = [x for x in written if _ORIGIN in vars(x)]
    mesh = gather_fallback.mesh_of((*written, *leaves))
    if mesh is None:  # only plain tensors, from a list that was split by mesh
        return _call_disabled(func, types, args, kwargs)
    _plain_tensor_check.check(
        func.__name__, [x for x in leaves if not isinstance(x, DTensor)], mesh
    )
    if origins:
        return _write_through(func, args, kwargs, origins[0])
    if _needs_full_tensors(func, args, kwargs, leaves, written):
        result = gather_fallback.compute(func, args, kwargs, mesh)
    else:
        same_mesh_args, same_mesh_kwargs = gather_fallback.on_one_mesh(args, kwargs, mesh)
        result, refusal = _try_dtensor(func, types, same_mesh_args, same_mesh_kwargs, written)
        if refusal is not None:
            result = gather_fallback.compute(func, args, kwargs, mesh, refusal)
    _hold_new(result, leaves)
    is_view = func.__name__ in VIEWS and isinstance(args[0], DTensor)
    return _record_origins(result, func, args, kwargs) if is_view else result


def _needs_full_tensors(
    func: Any, args: Any, kwargs: Any, leaves: Sequence[Tensor], written: Sequence[Tensor]
) -> bool:
    """Return whether a function has to be computed from full tensors.

    Args:
        func, args, kwargs: the arguments of `__torch_function__`.
        leaves: the tensors among the arguments.
        written: the tensors that the function writes.
    """
    # a plain target takes full tensors, and gradients flow through it
    if draws(func) or any(not isinstance(x, DTensor) for x in written):
        return True
    # DTensor computes some functions wrongly without an error if a shard is not one box, for
    # example those of LBFGS's flattened vectors
    is_strided = any(
        isinstance(p, _StridedShard) for x in leaves if isinstance(x, DTensor) for p in x.placements
    )
    return bool(written or is_strided) and not computes_in_place(func, args, kwargs)


def _call_disabled(func: Any, types: Iterable[type], args: Any, kwargs: Any) -> Any:
    return DTensor.__torch_function__(func, types, args, kwargs)


def _access_attribute(func: Any, args: Any, kwargs: Any) -> Any:
    """Access an attribute. Convert gradients to `HeldTensor`, and record the origin of views.

    Raises:
        RuntimeStateError: if other data is assigned to the tensor.
    """
    attribute = getattr(func.__self__, "__name__", "")
    if attribute == "data" and func.__name__ == "__set__":
        _refuse_other_data(*args)
        return None
    with DisableTorchFunctionSubclass():
        value = hold_value(func(*args, **kwargs))
    if attribute in ("grad", "data"):
        changes.keep(value, args[0])
    if isinstance(value, DTensor) and attribute in VIEW_ATTRIBUTES:
        return _record_origins(value, func, args, kwargs)
    return value


def _refuse_other_data(target: HeldTensor, value: Tensor) -> None:
    """Raise RuntimeStateError if the assignment of `value` to ``target.data`` would change the
    target. An assignment of its own data, as in ``p.data = p.data.contiguous()``, is allowed.
    """
    if isinstance(value, DTensor) and value._spec == target._spec:
        new_local, old_local = value._local_tensor, target._local_tensor
        if new_local.is_set_to(old_local):
            return
    raise RuntimeStateError(
        f"a distributed tensor of shape {tuple(target.shape)} cannot be assigned data"
        " (p.data = ...): torch does not transfer the data to its shards, so its value would not"
        " change",
        remedy=(
            "write into it under torch.no_grad(): p.copy_(value), after saved = p.detach().clone()"
            " if the previous value is needed; pm.load_state_dict({...}, strict=False) also takes"
            " full tensors; for a gradient, assign p.grad = value"
        ),
    )


def _hold_new(result: Any, operands: list[Tensor]) -> Any:
    """Convert the tensors of a result to `HeldTensor`, except tensors that the user passed."""
    known = {id(x) for x in operands}
    for x in tensors_in(result):
        if id(x) not in known:
            hold_value(x)
    return result


def _record_origins(result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Record the origin of each view that is a copy, because a sharded dim was split or because its
    base is such a copy."""
    of = args[0]
    several = isinstance(result, tuple | list)
    for place, view in enumerate(result if several else [result]):
        if not isinstance(view, DTensor) or view is of:
            continue
        hold_value(view)
        if (
            _ORIGIN in vars(of)
            or view._local_tensor.untyped_storage()._cdata
            != of._local_tensor.untyped_storage()._cdata
        ):
            setattr(view, _ORIGIN, (of, func, args[1:], kwargs, place if several else None))
    return result


def _write_through(func: Any, args: Any, kwargs: Any, view: Any) -> Any:
    """Apply a write into a view that is a copy to the tensor that the view was taken from."""
    chain, of = list[Any](), view
    while _ORIGIN in vars(of):
        chain.append(vars(of)[_ORIGIN])
        of = chain[-1][0]
    result = of.detach().full_tensor().clone()
    part = result
    for _, take_view, rest, named, place in reversed(chain):
        part = take_view(part, *rest, **named)
        part = part if place is None else part[place]
    gather_fallback.compute(func, args, kwargs, of.device_mesh, into={id(view): part})
    gather_fallback.put_whole(of, result)
    gather_fallback.put_whole(view, part)
    return view


def _refuse_one_stage(name: str, leaves: list[Tensor]) -> None:
    if len(leaves) > 1 and any(
        isinstance(x, DTensor) and is_of_one_stage(x.device_mesh) for x in leaves
    ):
        raise RuntimeStateError(
            f"{name.strip('_')} of several parameters or gradients (as in torch's clip_grad_norm_)"
            " would only include those of this rank's stage",
            remedy=(
                "call pm.clip_grad_norm_(max_norm), which counts every parameter of every stage"
                " once; pm.clip_grad_norm_(float('inf')) returns the norm"
            ),
        )


def _record(func: Any, result: Any, args: Any, kwargs: Any) -> None:
    """Record what a function changed, and from what it computed its result."""
    if written := written_by(func, args, kwargs):
        changes.record(func.__name__, written, args, kwargs)
    elif type(result) is HeldTensor and result._spec.ndim == 0:
        changes.follow(result, args, kwargs)
    if type(result) is HeldTensor and has_stages():
        changes.follow_owners(result, args)


_SUMS = frozenset(
    ("add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__", "__rsub__", "rsub", "sub_")
)


def _refuse_sum_of_stage(args: Any) -> None:
    """Raise RuntimeStateError for a sum of scalars that follow from different parameters of one
    stage, or of such a scalar and a loss."""
    scalars = [x for x in args if isinstance(x, Tensor) and not _shape_of(x)]
    held = [x for x in scalars if type(x) is HeldTensor and is_of_one_stage(x._spec.mesh)]
    if not held or len(scalars) < 2:
        return
    of_parameters = {found for x in held if (found := changes.owners(x))}
    with_loss = any(type(x) is not HeldTensor and x.requires_grad for x in scalars)
    if len(of_parameters) + with_loss > 1:
        raise RuntimeStateError(
            "a sum of values of several parameters or gradients, or of such a value and a loss,"
            " would only include those of this rank's stage",
            remedy=(
                "compute the term in the model's forward, as a part of its loss;"
                " pm.clip_grad_norm_(float('inf')) returns the norm of all gradients"
            ),
        )


def _shape_of(x: Tensor) -> Any:
    return x._spec.shape if isinstance(x, DTensor) else x.shape


def _as_dtensor(value: HeldTensor, do: Any) -> Any:
    origin = value.__dict__.pop(_ORIGIN, None)
    value.__class__ = DTensor
    try:
        return do()
    finally:
        value.__class__ = HeldTensor
        if origin is not None:
            setattr(value, _ORIGIN, origin)
