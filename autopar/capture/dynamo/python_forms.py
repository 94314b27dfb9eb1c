"""Adaptations of Python and torch code that Dynamo cannot trace unchanged.

- Before Python 3.12, `functools.cached_property` acquires a lock, which cannot be traced. A capture
  runs in one thread and needs no lock.
- Dynamo determines once per process how tensor operators are called within a `TorchFunctionMode`,
  by calling them. This fails with fake tensors, so it is done before the capture.
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
from torch import Tensor, fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.variables import UserFunctionVariable, builtin
from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch.distributions import Distribution, kl
from torch.nn import functional

from autopar.ops import ctc_loss


def know_operators() -> None:
    """Make Dynamo determine how tensor operators are called, before a mode is active."""
    find = getattr(builtin, "populate_builtin_to_tensor_fn_map", None)
    if find is not None:
        find()


def unlocked_properties() -> contextlib.AbstractContextManager[object]:
    """Return a context in which `functools.cached_property` does not acquire its lock."""
    if sys.version_info >= (3, 12):
        return contextlib.nullcontext()
    return mock.patch.object(functools.cached_property, "__get__", _get)


def _get(self: Any, instance: Any, owner: Any = None) -> Any:
    if instance is None:
        return self
    attributes = instance.__dict__
    if self.attrname not in attributes:
        attributes[self.attrname] = self.func(instance)
    return attributes[self.attrname]


# --------------------------------------------------------------------------------------------------
# Custom autograd functions that receive one tensor twice, as in ``Product.apply(x, x)``. Dynamo of
# torch 2.13 does not support this.


@contextlib.contextmanager
def tensors_given_twice() -> Iterator[None]:
    """Pass a view instead of a tensor that is passed again; the gradients of the views add up to
    the gradient of the tensor."""
    call = AutogradFunctionApplyVariable.call_function

    def call_with_views(variable: Any, translator: Any, args: Sequence[Any], kwargs: Any) -> Any:
        return call(variable, translator, _with_views_of_repeated(translator, args), kwargs)

    with mock.patch.object(AutogradFunctionApplyVariable, "call_function", call_with_views):
        yield


def _with_views_of_repeated(translator: Any, args: Sequence[Any]) -> list[Any]:
    previous: list[Any] = []
    new_args = []
    for arg in args:
        value = arg.as_proxy().node.meta.get("example_value") if arg.is_tensor() else None
        again = value is not None and any(value is other for other in previous)
        previous.append(value)
        new_args.append(arg.call_method(translator, "view_as", [arg], {}) if again else arg)
    return new_args


# --------------------------------------------------------------------------------------------------
# Functions of torch that are replaced under Dynamo.


@contextlib.contextmanager
def functions_replaced() -> Iterator[None]:
    """Replace the CTC loss with an op that has fixed shapes, and `torch.backends.cudnn.flags`,
    which does not affect results, with a context that does nothing."""
    # Dynamo looks torch functions up by name once per process. Do it now: after the replacement, it
    # would treat the replacements as torch functions.
    trace_rules.get_torch_obj_rule_map()

    def flags(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    with (
        mock.patch.object(functional, "ctc_loss", ctc_loss),
        mock.patch.object(torch.backends.cudnn, "flags", flags),
        comparisons_traced(),
    ):
        yield


# --------------------------------------------------------------------------------------------------
# Functions of torch that return a Python bool: `torch.equal`, `allclose` and `is_nonzero`. Dynamo
# does not know the values of its tensors, but `autopar.capture.dynamo.constants` does. Therefore
# Dynamo traces the tensor that decides the result.

_EQUAL, _CLOSE, _NONZERO = torch.equal, torch.allclose, torch.is_nonzero


def _equal(input: Tensor, other: Tensor) -> bool:
    if not torch.compiler.is_dynamo_compiling():
        return _EQUAL(input, other)
    return input.shape == other.shape and bool((input == other).all())


def _close(
    input: Tensor,
    other: Tensor,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> bool:
    if not torch.compiler.is_dynamo_compiling():
        return _CLOSE(input, other, rtol, atol, equal_nan)
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


def _nonzero(input: Tensor) -> bool:
    return bool(input) if torch.compiler.is_dynamo_compiling() else _NONZERO(input)


_COMPARISONS: Mapping[str, Callable[..., bool]] = {
    "equal": _equal,
    "allclose": _close,
    "is_nonzero": _nonzero,
}


@contextlib.contextmanager
def comparisons_traced() -> Iterator[None]:
    """Make Dynamo trace `torch.equal`, `allclose` and `is_nonzero`, and the methods of the same
    names, as a tensor whose value decides the result."""
    call = TensorVariable.call_method

    def call_traced(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Trace a method of a tensor; `tx` is Dynamo's translator."""
        if name not in _COMPARISONS:
            return call(self, tx, name, args, kwargs)
        return tx.inline_user_function_return(
            UserFunctionVariable(_COMPARISONS[name]), [self, *args], kwargs
        )

    with contextlib.ExitStack() as stack:
        for name, function in _COMPARISONS.items():
            stack.enter_context(mock.patch.object(torch, name, function))
        stack.enter_context(mock.patch.object(TensorVariable, "call_method", call_traced))
        yield


# --------------------------------------------------------------------------------------------------
# Models that are fx.GraphModules, from torch.fx.symbolic_trace, torch.export or the feature
# extractors of torchvision.
#
# Dynamo copies the module with all its attributes, including the graph. Therefore it receives a
# plain module with the same forward and all attributes except the graph.

_OF_GRAPH_MODULES = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph()))) - frozenset(
    vars(nn.Module())
)


def without_graph(model: nn.Module) -> nn.Module:
    """Return `model`, or for a GraphModule a plain module that shares its parameters, buffers,
    submodules and hooks."""
    if not isinstance(model, fx.GraphModule):
        return model
    kind = type(type(model).__name__, (nn.Module,), {"forward": type(model).forward})
    plain: nn.Module = kind()
    vars(plain).update(
        {name: value for name, value in vars(model).items() if name not in _OF_GRAPH_MODULES}
    )
    return plain


# --------------------------------------------------------------------------------------------------
# The root of a captured model.
#
# Dynamo's bytecode reads tensors in class attributes, and in closures and defaults of methods,
# through the class of the root (`type(self).__dict__[name]`). In the place of the root, Dynamo
# passes its graph module, whose class does not have these attributes.


def keep_class(captured: Any, model: nn.Module) -> None:
    """Make Dynamo's bytecode receive a shallow copy of the model, which has its class. Attributes
    that the bytecode sets are set on the copy.

    Args:
        captured: Dynamo's graph module.
        model: the module that Dynamo traced.
    """
    root = object.__new__(type(model))
    vars(root).update(vars(model))
    for part in (captured._dynamo_bytecode_flatten, captured._dynamo_bytecode_unflatten):
        part.input_processor.root = root


# --------------------------------------------------------------------------------------------------
# Attributes of tensors that are tensors (`x.T`, `mT`, `H`, `mH`, `real`, `imag`, `data`) become
# calls in the graph.
#
# For such an attribute of an argument, a parameter or a buffer, Dynamo records a source, as for an
# attribute of a module. If forward returns the attribute, Dynamo reads it from the source after the
# graph, and the graph does not compute it. Without a source, it is computed like any other value.

_GETS = (
    "tp_getattro_impl",
    "var_getattr",
)  # method of Dynamo that gets an attribute, since torch 2.14 and before


def computed_attributes() -> contextlib.AbstractContextManager[object]:
    """Make Dynamo compute tensor attributes of tensors (`x.T`, `x.real`) in its graph, even if they
    are returned."""
    name = next((name for name in _GETS if name in vars(TensorVariable)), None)
    if name is None:  # models that return such attributes are then refused
        return contextlib.nullcontext()
    return mock.patch.object(TensorVariable, name, _without_source(getattr(TensorVariable, name)))


def _without_source(get: Callable[..., Any]) -> Callable[..., Any]:
    def get_attribute(self: Any, tx: Any, name: str) -> Any:
        """Return an attribute of a tensor, without a source unless it is a placeholder.

        Args:
            self: Dynamo's variable of the tensor.
            tx: Dynamo's translator.
            name: name of the attribute.
        """
        value = get(self, tx, name)
        if isinstance(value, TensorVariable) and value.proxy.node.op != "placeholder":
            value.source = None
        return value

    return get_attribute


# --------------------------------------------------------------------------------------------------
# KL divergences of torch's distributions: the formulas of all pairs of classes are looked up before
# the capture.
#
# `torch.distributions.kl_divergence` searches the registered formulas in a way that Dynamo cannot
# trace, and caches the result. A capture must not depend on earlier calls in the process.

_Pair = tuple[type, type]


def known_divergences() -> contextlib.AbstractContextManager[object]:
    """Return a context in which `kl_divergence` has the formula of every pair of distribution
    classes in its cache."""
    return mock.patch.dict(
        kl._KL_MEMOIZE,
        _formulas(frozenset(_kinds(Distribution)), frozenset(kl._KL_REGISTRY.items())),
    )


def _kinds(kind: type) -> Iterator[type]:
    below: list[type] = kind.__subclasses__()
    for subclass in below:
        yield subclass
        yield from _kinds(subclass)


@functools.lru_cache(maxsize=1)
def _formulas(
    kinds: frozenset[type], registered: frozenset[tuple[_Pair, Any]]
) -> Mapping[_Pair, Callable[..., Any]]:
    """Return pair of classes → formula for all pairs that have one; `registered` is the registry of
    torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about pairs that the model may not use
        formulas = {(p, q): kl._dispatch_kl(p, q) for p in kinds for q in kinds}
    return {pair: formula for pair, formula in formulas.items() if formula is not NotImplemented}
