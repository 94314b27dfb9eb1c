"""The fallback of `HeldTensor`: computes functions of torch from full tensors on every rank, which
then keeps its shard of the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils import swap_tensors
from torch.utils._pytree import tree_map

from autopar.errors import RuntimeStateError
from autopar.runtime.device_mesh import wrap_local
from autopar.runtime.rank_comm import rank

# --------------------------------------------------------------------------------------------------
# Properties of torch's functions by name: the tensors that they write, whether they draw random
# numbers, and whether DTensor computes them correctly.


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ACCESS = _names("__get__ __set__ __delete__")
ASIDE = _names(  # functions that read no elements, or leave reading to autograd
    """untyped_storage storage data_ptr size dim ndimension numel nelement stride storage_offset
    is_contiguous is_floating_point is_complex is_conj is_neg is_inference element_size
    get_device is_shared is_pinned __len__ register_hook register_post_accumulate_grad_hook
    retain_grad backward grad requires_grad_ has_names dim_order"""
)
VIEWS = _names(
    """__getitem__ select narrow chunk split tensor_split hsplit vsplit dsplit unbind view reshape
    flatten unflatten t transpose swapaxes swapdims permute movedim moveaxis squeeze unsqueeze
    expand expand_as view_as reshape_as diagonal detach unfold ravel adjoint"""
)
VIEW_ATTRIBUTES = _names("data T mT H mH real imag")
OF_SEVERAL = _names("_foreach_norm stack cat concat hstack vstack")  # join several tensors
_DRAWS = _names(
    """normal_ uniform_ bernoulli_ random_ exponential_ cauchy_ geometric_ log_normal_ trunc_normal_
    rand_like randn_like randint_like bernoulli dropout alpha_dropout feature_dropout multinomial
    poisson normal kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_ orthogonal_
    sparse_ rrelu gumbel_softmax"""
)
# DTensor computes these elementwise in place, for all placements. It computes some other functions
# on copies, for example `index_add_`.
_ELEMENTWISE = _names(
    """add sub subtract rsub mul multiply div divide true_divide truediv floor_divide remainder fmod
    lerp addcmul addcdiv zero fill copy clone detach clamp clamp_min clamp_max clip abs neg
    negative sqrt rsqrt sign sgn square reciprocal pow exp exp2 expm1 log log2 log10 log1p
    sigmoid tanh relu erf sin cos floor ceil round trunc frac nan_to_num masked_fill where eq ne
    gt ge lt le isnan isinf isfinite logical_and logical_or logical_not logical_xor maximum
    minimum zeros_like ones_like full_like empty_like to type double float half bfloat16 cpu
    contiguous bool and or xor invert"""
)
# these change the shape of a tensor in place, not its elements
_TURNS = _names("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_")
_REDUCTIONS = _names("sum norm vector_norm mean max min amax amin")
_OPERATORS = _names(
    "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__"
    " __ior__ __ixor__"
)
_NO_WRITE = _names("requires_grad_ share_memory_")
_ALONE = (
    _ELEMENTWISE
    | {f"{name}_" for name in _ELEMENTWISE}
    | _OPERATORS
    | {f"__{name}__" for name in _ELEMENTWISE}
)


def is_of_elements(name: str) -> bool:
    """Return whether DTensor computes a function correctly if all tensors are DTensors of one
    mesh."""
    return name in _ALONE or name.startswith(("_foreach_", "_fused_"))


def draws(func: Any) -> bool:
    """Return whether a function draws random numbers."""
    return func.__name__ in _DRAWS


def computes_in_place(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether DTensor computes a function in place and with shards in any order. Writes then
    reach their target.

    Args:
        func, args, kwargs: the function and its arguments.
    """
    name = func.__name__
    if name.startswith(("_foreach_", "_fused_")) or name in _TURNS:
        return True
    if name in _REDUCTIONS:  # only over all elements
        return len(args) == 1 and "dim" not in kwargs and "axis" not in kwargs
    bare = name.strip("_")
    is_operator = name.startswith("__") and name.endswith("__")
    return bare in _ELEMENTWISE or (is_operator and bare[0] in "ir" and bare[1:] in _ELEMENTWISE)


def written_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a function writes.

    Args:
        func, args, kwargs: the function and its arguments.
    """
    name = func.__name__
    if isinstance(kwargs.get("out"), Tensor):
        return [kwargs["out"]]
    if not (
        name in _OPERATORS
        or name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITE)
    ):
        return []
    first = args[0] if args else kwargs.get("tensor", kwargs.get("self"))
    return (
        [first]
        if isinstance(first, Tensor)
        else [x for x in first if isinstance(x, Tensor)]
        if isinstance(first, tuple | list)
        else []
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in arguments or results, nested in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [x for each in value for x in tensors_in(each)]
    return (
        [x for each in value.values() for x in tensors_in(each)] if isinstance(value, dict) else []
    )


log = logging.getLogger("autopar")

_told: set[str] = set()


def mesh_of(tensors: Iterable[Tensor]) -> DeviceMesh | None:
    """Return the mesh of the first DTensor; None if there is none."""
    return next((x.device_mesh for x in tensors if isinstance(x, DTensor)), None)


def on_one_mesh(args: Any, kwargs: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
    """Convert arguments to one mesh. Plain tensors become replicated without a copy. DTensors of
    other meshes are gathered.

    Args:
        args, kwargs: the arguments of a function.
        mesh: the mesh.
    """
    return tree_map(lambda x: _on(x, mesh), args), tree_map(lambda x: _on(x, mesh), kwargs)


def read_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute a function that returns no tensor, for example a number, from full tensors.

    Args:
        func, args, kwargs: the function and its arguments.

    Raises:
        RuntimeStateError: inside `torch.tensor`, where no collective can run.
    """
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
        message = (
            "torch.tensor of values computed from parameters or gradients, of which each rank holds"
            " only a shard"
        )
        raise RuntimeStateError(
            message, remedy="use torch.stack([...]), or torch.tensor([float(x) for x in ...])"
        )
    return func(*tree_map(_gather_full, args), **tree_map(_gather_full, kwargs))


def by_mesh(func: Any, args: Any, kwargs: Any, run: Callable[[Any, Any], Any]) -> Any:
    """Run a function of parallel lists of tensors once per mesh, and once for plain tensors.

    Args:
        func: the function.
        args, kwargs: its arguments; entry i of one list belongs to entry i of the others.
        run: calls the function with the given arguments.

    Returns:
        The results in the order of the lists; None if there are none.
    """
    lists = [
        x
        for x in (*args, *kwargs.values())
        if isinstance(x, tuple | list) and any(isinstance(y, Tensor) for y in x)
    ]
    keys = [x.device_mesh if isinstance(x, DTensor) else None for x in lists[0]] if lists else []
    meshes = list(dict.fromkeys(keys))
    if len(meshes) < 2:
        return run(args, kwargs)
    results: list[Any] = [None] * len(keys)
    nothing = True
    for mesh in meshes:
        places = [place for place, key in enumerate(keys) if key == mesh]
        select = partial(_select, places=places, length=len(keys), is_plain=mesh is None)
        part = run(tuple(select(x) for x in args), {name: select(x) for name, x in kwargs.items()})
        nothing = nothing and part is None
        for place, value in zip(places, part or (), strict=False):
            results[place] = value
    return None if nothing else tuple(results)


def _select(x: Any, *, places: Sequence[int], length: int, is_plain: bool) -> Any:
    """Return the entries at `places` of a list with `length` entries. Other arguments are returned
    unchanged, or as full tensors if the entries are plain tensors."""
    if isinstance(x, tuple | list) and len(x) == length:
        return [x[place] for place in places]
    return _gather_full(x) if is_plain else x


def compute(
    func: Any,
    args: Any,
    kwargs: Any,
    mesh: DeviceMesh,
    refusal: str | None = None,
    into: Mapping[int, Tensor] | None = None,
) -> Any:
    """Compute a function from full tensors. Results are replicated, and every rank writes its
    shards of the function's targets.

    Args:
        func, args, kwargs: the function and its arguments.
        mesh: the mesh of the results.
        refusal: the message of DTensor's error, for the log.
        into: the full tensor that replaces an argument and is written, by the id of the argument.
    """
    written = {id(x): x for x in written_by(func, args, kwargs)}
    replacements: dict[int, Tensor] = dict(into or {})

    def stand(x: Any) -> Any:
        """Return the full tensor of a DTensor; a copy if the function writes it."""
        if not isinstance(x, DTensor):
            return x
        if id(x) not in replacements:
            replacements[id(x)] = _gather_full(x).clone() if id(x) in written else _gather_full(x)
        return replacements[id(x)]

    whole_args, whole_kwargs = tree_map(stand, args), tree_map(stand, kwargs)
    result = func(*whole_args, **whole_kwargs)
    if refusal is not None:
        _log_gathering(func.__name__, refusal)
    drawn = draws(func)
    _write_back(func, written, replacements, into or {})
    if len(written) == 1 and result is not None:
        return next(iter(written.values()))
    return None if result is None else tree_map(lambda x: _replicate_value(x, mesh, drawn), result)


def _write_back(
    func: Any,
    written: Mapping[int, Tensor],
    values: Mapping[int, Tensor],
    skipped: Mapping[int, Tensor],
) -> None:
    """Write the full values into the shards of a function's targets, all by the id of the target.
    Targets in `skipped` are not written."""
    # functions of torch.nn.init also write without gradients
    outside = (
        torch.no_grad() if getattr(func, "__module__", "") == "torch.nn.init" else nullcontext()
    )
    for key, target in written.items():
        if isinstance(target, DTensor) and key not in skipped:
            with outside:
                put_whole(target, values[key], drawn=draws(func))


def _log_gathering(name: str, refusal: str) -> None:
    """Warn once per function that it gathers full tensors."""
    if name in _told:
        return
    _told.add(name)
    if rank() == 0:
        reason = refusal.strip().split("\n")[0]
        log.warning(
            "torch's %s of parameters or gradients gathers the full tensors on every rank: %s",
            name,
            reason,
        )


def put_whole(target: DTensor, value: Tensor, *, drawn: bool = False) -> None:
    """Write a full tensor into a DTensor.

    Args:
        target: the DTensor; each rank writes its shard.
        value: the full tensor.
        drawn: whether the value contains random numbers. If True, all ranks use the value of the
            first rank of the mesh.
    """
    value = _replicate_value(value.to(target.dtype), target.device_mesh, drawn)
    if value.shape != target.shape:  # the function changed the shape in place (`t_`)
        value.__class__ = type(target)
        swap_tensors(target, value)
        return
    with DisableTorchFunctionSubclass():
        if any(p.is_partial() for p in target.placements):
            target._local_tensor, target._spec = value._local_tensor, value._spec
        else:
            DTensor.copy_(target, value.redistribute(target.device_mesh, target.placements))


def _on(x: Any, mesh: DeviceMesh) -> Any:
    if isinstance(x, DTensor):
        return x if x.device_mesh == mesh else _replicate_value(_gather_full(x), mesh)
    return _replicate_value(x, mesh) if isinstance(x, Tensor) else x


def _gather_full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _replicate_value(x: Any, mesh: DeviceMesh, drawn: bool = False) -> Any:
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        return x
    everywhere = [Replicate()] * mesh.ndim
    if drawn:
        return distribute_tensor(x.detach(), mesh, everywhere)
    # step counts of offloaded parameters stay on the host
    return wrap_local(x, mesh, everywhere, x.shape, x.stride())
