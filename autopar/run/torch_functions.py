"""What functions of torch's do with a DTensor, by name: what they write, whether they draw, and of which DTensor alone is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ACCESS = _names("__get__ __set__ __delete__")
ASIDE = _names(  # they compute nothing of elements, or leave that to autograd
    """untyped_storage storage data_ptr size dim ndimension numel nelement stride storage_offset is_contiguous is_floating_point is_complex
    is_conj is_neg is_inference element_size get_device is_shared is_pinned __len__ register_hook register_post_accumulate_grad_hook
    retain_grad backward grad requires_grad_ has_names dim_order"""
)
VIEWS = _names(
    """__getitem__ select narrow chunk split tensor_split hsplit vsplit dsplit unbind view reshape flatten unflatten t transpose swapaxes
    swapdims permute movedim moveaxis squeeze unsqueeze expand expand_as view_as reshape_as diagonal detach unfold ravel adjoint"""
)
VIEW_ATTRIBUTES = _names("data T mT H mH real imag")
OF_SEVERAL = _names("_foreach_norm stack cat concat hstack vstack")  # by which tensors become one
_DRAWS = _names(
    """normal_ uniform_ bernoulli_ random_ exponential_ cauchy_ geometric_ log_normal_ trunc_normal_ rand_like randn_like randint_like
    bernoulli dropout alpha_dropout feature_dropout multinomial poisson normal kaiming_uniform_ kaiming_normal_ xavier_uniform_
    xavier_normal_ orthogonal_ sparse_ rrelu gumbel_softmax"""
)
# DTensor computes each element of these where it lies, whatever the placements; of other writes some go into copies (`index_add_`).
_ELEMENTWISE = _names(
    """add sub subtract rsub mul multiply div divide true_divide truediv floor_divide remainder fmod lerp addcmul addcdiv zero fill copy
    clone detach clamp clamp_min clamp_max clip abs neg negative sqrt rsqrt sign sgn square reciprocal pow exp exp2 expm1 log log2 log10
    log1p sigmoid tanh relu erf sin cos floor ceil round trunc frac nan_to_num masked_fill where eq ne gt ge lt le isnan isinf isfinite
    logical_and logical_or logical_not logical_xor maximum minimum zeros_like ones_like full_like empty_like to type double float half
    bfloat16 cpu contiguous bool and or xor invert"""
)
_TURNS = _names("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_")  # what a tensor is seen as, not its elements
_REDUCTIONS = _names("sum norm vector_norm mean max min amax amin")
_OPERATORS = _names("__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__")
_NO_WRITE = _names("requires_grad_ share_memory_")
_ALONE = _ELEMENTWISE | {f"{name}_" for name in _ELEMENTWISE} | _OPERATORS | {f"__{name}__" for name in _ELEMENTWISE}


def is_of_elements(name: str) -> bool:
    """Whether DTensor alone is right wherever all tensors are DTensors of one mesh."""
    return name in _ALONE or name.startswith(("_foreach_", "_fused_"))


def draws(func: Any) -> bool:
    """Whether it draws random numbers."""
    return func.__name__ in _DRAWS


def computes_in_place(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether DTensor computes it where elements lie, so that writes reach their target, and parts may be in any order."""
    name = func.__name__
    if name.startswith(("_foreach_", "_fused_")) or name in _TURNS:
        return True
    if name in _REDUCTIONS:  # of all elements
        return len(args) == 1 and "dim" not in kwargs and "axis" not in kwargs
    bare = name.strip("_")
    is_operator = name.startswith("__") and name.endswith("__")
    return bare in _ELEMENTWISE or (is_operator and bare[0] in "ir" and bare[1:] in _ELEMENTWISE)


def written_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that it writes into."""
    name = func.__name__
    if isinstance(kwargs.get("out"), Tensor):
        return [kwargs["out"]]
    if not (name in _OPERATORS or name == "__setitem__" or (name.endswith("_") and not name.endswith("__") and name not in _NO_WRITE)):
        return []
    first = args[0] if args else kwargs.get("tensor", kwargs.get("self"))
    return [first] if isinstance(first, Tensor) else [x for x in first if isinstance(x, Tensor)] if isinstance(first, tuple | list) else []


def tensors_in(value: Any) -> list[Tensor]:
    """Those in arguments or results of such a function."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [x for each in value for x in tensors_in(each)]
    return [x for each in value.values() for x in tensors_in(each)] if isinstance(value, dict) else []
