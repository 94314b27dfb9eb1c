"""Adaptations of Python and torch code that Dynamo cannot trace as it is.

- `functools.cached_property` takes a lock before Python 3.12, which cannot be traced. A capture has
  one thread, and needs no lock.
- Dynamo determines once how operators of tensors are called within a `TorchFunctionMode`, by trying
  them. This fails with fake tensors, so it is done before.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.variables import builtin
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.distributions import Distribution, kl
from torch.nn import functional

from autopar.ops import ctc_loss


def know_operators() -> None:
    """Let Dynamo determine how operators are called, before a mode is active."""
    find = getattr(builtin, "populate_builtin_to_tensor_fn_map", None)
    if find is not None:
        find()


def unlocked_properties() -> contextlib.AbstractContextManager[object]:
    """Use `functools.cached_property` without its lock."""
    if sys.version_info >= (3, 12):
        return contextlib.nullcontext()
    return mock.patch.object(functools.cached_property, "__get__", _get)


def _get(self: Any, instance: Any, owner: Any = None) -> Any:
    if instance is None:
        return self
    held = instance.__dict__
    if self.attrname not in held:
        held[self.attrname] = self.func(instance)
    return held[self.attrname]


# --------------------------------------------------------------------------------------------------
# Autograd functions of the user that get one tensor twice, as ``Product.apply(x, x)``, which Dynamo
# (2.13) refuses.


@contextlib.contextmanager
def tensors_given_twice() -> Iterator[None]:
    """Pass a view of a tensor wherever it is passed again; gradients of views add up as the
    tensor's own do."""
    call = AutogradFunctionApplyVariable.call_function

    def call_with_views(variable: Any, translator: Any, args: Sequence[Any], kwargs: Any) -> Any:
        return call(variable, translator, _views_of_the_second(translator, args), kwargs)

    with mock.patch.object(AutogradFunctionApplyVariable, "call_function", call_with_views):
        yield


def _views_of_the_second(translator: Any, args: Sequence[Any]) -> list[Any]:
    seen: list[Any] = []
    given = []
    for arg in args:
        value = arg.as_proxy().node.meta.get("example_value") if arg.is_tensor() else None
        again = value is not None and any(value is other for other in seen)
        seen.append(value)
        given.append(arg.call_method(translator, "view_as", [arg], {}) if again else arg)
    return given


# --------------------------------------------------------------------------------------------------
# Functions of torch that Dynamo traces in another form.


@contextlib.contextmanager
def functions_replaced() -> Iterator[None]:
    """Replace the CTC loss with an op that has fixed shapes, and cuDNN's flags, which do not affect
    results, with nothing."""
    # found by name once for the process: later, Dynamo would take what stands there now for torch's
    trace_rules.get_torch_obj_rule_map()

    def flags(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    with (
        mock.patch.object(functional, "ctc_loss", ctc_loss),
        mock.patch.object(torch.backends.cudnn, "flags", flags),
    ):
        yield


# --------------------------------------------------------------------------------------------------
# Models that are fx.GraphModules: from torch.fx.symbolic_trace, torch.export or torchvision's
# feature extractors.
#
# The module that Dynamo captures is copied with all that it holds, also with its graph. So Dynamo
# gets a module with the same forward that is not a GraphModule and holds all but the graph.

_OF_GRAPH_MODULES = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph()))) - frozenset(
    vars(nn.Module())
)


def without_graph(model: nn.Module) -> nn.Module:
    """Return `model`; for a GraphModule, a plain module that shares its parameters, buffers,
    modules and hooks."""
    if not isinstance(model, fx.GraphModule):
        return model
    kind = type(type(model).__name__, (nn.Module,), {"forward": type(model).forward})
    plain: nn.Module = kind()
    vars(plain).update(
        {name: value for name, value in vars(model).items() if name not in _OF_GRAPH_MODULES}
    )
    return plain


# --------------------------------------------------------------------------------------------------
# Attributes of tensors that are tensors (`x.T`, `mT`, `H`, `mH`, `real`, `imag`, `data`), as calls
# of the graph.
#
# For such an attribute of an argument, a parameter or a buffer, Dynamo records its source, as it
# does for attributes of modules. If it is returned unchanged, Dynamo reads it from the source again
# after the graph, and nothing states what the graph must compute. Without a source it is a value
# like any other.

_GETS = (
    "tp_getattro_impl",
    "var_getattr",
)  # its method that gets an attribute, as of torch 2.14, and before


def computed_attributes() -> contextlib.AbstractContextManager[object]:
    """Let Dynamo compute tensor attributes of tensors (`x.T`, `x.real`) in its graph, also if they
    are returned."""
    name = next((name for name in _GETS if name in vars(TensorVariable)), None)
    if name is None:  # such attributes are refused where they are returned
        return contextlib.nullcontext()
    return mock.patch.object(TensorVariable, name, _without_place(getattr(TensorVariable, name)))


def _without_place(get: Callable[..., Any]) -> Callable[..., Any]:
    def get_attribute(self: Any, tx: Any, name: str) -> Any:
        """Return an attribute of a tensor, without a place unless the tensor is an input.

        Args:
            self: Dynamo's variable of the tensor.
            tx: Dynamo's translator.
            name: the attribute.
        """
        value = get(self, tx, name)
        if isinstance(value, TensorVariable) and value.proxy.node.op != "placeholder":
            value.source = None
        return value

    return get_attribute


# --------------------------------------------------------------------------------------------------
# Divergences of torch's distributions: the formula of each pair of classes is looked up before the
# capture.
#
# `torch.distributions.kl_divergence` searches the registered formulas in a way that Dynamo cannot
# trace, and caches the result. A capture must not depend on what the process computed before.

_Pair = tuple[type, type]


def known_divergences() -> contextlib.AbstractContextManager[object]:
    """Let every pair of distribution classes have its formula, as if `kl_divergence` had been
    called with each."""
    return mock.patch.dict(
        kl._KL_MEMOIZE,
        _formulas(frozenset(_kinds(Distribution)), frozenset(kl._KL_REGISTRY.items())),
    )


def _kinds(kind: type) -> Iterator[type]:
    below: list[type] = kind.__subclasses__()
    for each in below:
        yield each
        yield from _kinds(each)


@functools.lru_cache(maxsize=1)
def _formulas(
    kinds: frozenset[type], registered: frozenset[tuple[_Pair, Any]]
) -> Mapping[_Pair, Callable[..., Any]]:
    """Return pair of classes → formula for all pairs that have one; `registered` is torch's
    registry."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pairs that no model may have
        found = {(p, q): kl._dispatch_kl(p, q) for p in kinds for q in kinds}
    return {pair: formula for pair, formula in found.items() if formula is not NotImplemented}
