"""Replace activations and root-mean-square norms that a model computes by elementwise formulas with
single ops, in the forward graph of torch functions.

An op may appear in this graph as a function, an operator or a method. `name_of` returns the same
name for all three.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar import ops

_ALIASES = {
    "special_erf": "erf",
    "special_expit": "sigmoid",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "truediv": "div",
}
_NAMES = (
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "square",
    "neg",
    "divide",
    "multiply",
    "subtract",
    "tanh",
    "erf",
    "sigmoid",
    "sqrt",
    "rsqrt",
    "mean",
    "rms_norm",
)
_FUNCTIONS = {
    *(getattr(torch, name) for name in _NAMES),
    *(getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "pow", "neg")),
    torch.nn.functional.tanh,
    torch.nn.functional.sigmoid,
    torch.nn.functional.rms_norm,
    torch.special.erf,
    torch.special.expit,
}


def name_of(node: fx.Node) -> str:
    """Return the name of an op that is called as a function, an operator or a method; empty for
    other nodes."""
    if node.op == "call_method":
        return _ALIASES.get(str(node.target), str(node.target))
    name = (
        getattr(node.target, "__name__", "")
        if node.op == "call_function" and node.target in _FUNCTIONS
        else ""
    )
    return _ALIASES.get(name, name)


def float_dtype(node: Any) -> torch.dtype | None:
    """Return the dtype of a floating tensor; None for anything else."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None


def shape_given(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor."""
    return tuple(node.meta["example_value"].shape)


class FormulaPlaces:
    """Positions of nodes in a graph, and the nodes with side effects: in-place writes and changes
    of the gradient or autocast mode. Formulas are not joined across these nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        self._changes = [
            self._places[node]
            for node in graph.nodes
            if _changes_an_operand(node) or node.is_impure()
        ]

    def any_change(self, first: fx.Node, last: fx.Node) -> bool:
        """Return whether a node with side effects is between two nodes."""
        return any(self._places[first] < place < self._places[last] for place in self._changes)

    def put(self, node: fx.Node, instead_of: fx.Node) -> None:
        """Give a new node the position, metadata and users of another."""
        node.meta, self._places[node] = dict(instead_of.meta), self._places[instead_of]
        instead_of.replace_all_uses_with(node)


def erase(graph: fx.Graph, node: fx.Node, names: Container[str]) -> None:
    """Erase a node without users, and the operands that then have no users.

    Args:
        graph: the graph.
        node: the node to erase.
        names: names of the ops whose nodes may be erased as operands.
    """
    waiting = [node]
    while waiting:
        here = waiting.pop()
        operands = here.all_input_nodes
        graph.erase_node(here)
        waiting += [
            operand for operand in operands if not operand.users and name_of(operand) in names
        ]


def _changes_an_operand(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    written = (
        node.op in ("call_method", "call_function")
        and name.endswith("_")
        and not name.endswith("__")
    )
    return (
        written
        or "out" in node.kwargs
        or node.target is operator.setitem
        or _is_augmented(node.target)
    )


def _is_augmented(target: Any) -> bool:
    """Return whether a function is an in-place operator, as called by ``x += y``."""
    name = getattr(target, "__name__", "")
    return (
        getattr(target, "__module__", "") == "_operator"
        and name.startswith("i")
        and hasattr(operator, f"__{name}__")
    )


# --------------------------------------------------------------------------------------------------
# Activations that a model computes by formulas.
#
#     gelu(x) = x/2 (1 + erf(x/√2)) ≈ x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))
#     silu(x) = x σ(x)
#
# (Hendrycks and Gimpel 2016, arXiv:1606.08415, sections 2 and 4.) As a formula, the second form of
# gelu needs eight passes over memory and its gradient eleven; as one op, they need one each. The
# formulas are matched in the forward graph of torch functions, before the backward is created. For
# any order of products, powers and constants, the tensors of a formula are polynomials of x and t,
# where t is the erf, tanh or σ of a polynomial of x.

Polynomial = Mapping[tuple[int, int], float]  # powers of x and of t → coefficient

_TOLERANCE = 1e-9  # relative tolerance of coefficients: √(2/π) is often written with ten digits
_MOST_TERMS, _MOST_POWER, _MOST_SOURCES = 8, 4, 32


@dataclass(frozen=True, slots=True)
class _Activation:
    """An activation: the argument of t as a polynomial of x, the result as a polynomial of x and t,
    and the op that computes it."""

    inner: Polynomial
    whole: Polynomial
    function: Callable[..., torch.Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)


_GELU_FACTOR = math.sqrt(2 / math.pi)
_ACTIVATIONS: Mapping[str, _Activation] = {
    "tanh": _Activation(
        {(1, 0): _GELU_FACTOR, (3, 0): _GELU_FACTOR * 0.044715},
        {(1, 0): 0.5, (1, 1): 0.5},
        torch.nn.functional.gelu,
        {"approximate": "tanh"},
    ),
    "erf": _Activation(
        {(1, 0): math.sqrt(0.5)}, {(1, 0): 0.5, (1, 1): 0.5}, torch.nn.functional.gelu
    ),
    "sigmoid": _Activation({(1, 0): 1.0}, {(1, 1): 1.0}, torch.nn.functional.silu),
}


def join_activations(graph: fx.Graph) -> None:
    """Replace each activation that is computed by a formula in a graph of torch functions.

    An activation is not replaced if a node with side effects (`FormulaPlaces`) is between its
    operand and its result.
    """
    places = FormulaPlaces(graph)
    for t in [node for node in graph.nodes if name_of(node) in _ACTIVATIONS]:
        activation = _ACTIVATIONS[name_of(t)]
        ends = _match_activation(t, activation)
        if ends is None or places.any_change(*ends):
            continue
        x, result = ends
        with graph.inserting_before(result):
            joined = graph.call_function(activation.function, (x,), dict(activation.settings))
        places.put(joined, result)
        erase(graph, result, _ACTIVATION_OPS)


@dataclass
class _Terms:
    """Nodes as polynomials of `x` and, unless it is None, `t`."""

    x: fx.Node
    t: fx.Node | None = None
    _known: dict[fx.Node, Polynomial | None] = field(default_factory=dict)

    def of(self, node: fx.Node) -> Polynomial | None:
        """Return the polynomial of a node; None if it is not a polynomial of x and t."""
        if node not in self._known:
            self._known[node] = self._compute(node)
        return self._known[node]

    def _compute(self, node: fx.Node) -> Polynomial | None:
        if node is self.t:
            return {(0, 1): 1.0}
        if node is self.x:
            return {(1, 0): 1.0}
        rule = _RULES.get(name_of(node))
        if rule is None or node.kwargs:
            return None
        operands = [self.of(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        if len(operands) != _NUM_OPERANDS.get(name_of(node), 2) or not all(
            isinstance(each, int | float | dict) for each in operands
        ):
            return None
        terms = rule(*operands)
        fits = (
            terms is not None
            and len(terms) <= _MOST_TERMS
            and max((sum(powers) for powers in terms), default=0) <= _MOST_POWER
        )
        return terms if fits else None


def _match_activation(t: fx.Node, activation: _Activation) -> tuple[fx.Node, fx.Node] | None:
    """Return the operand and the result of the activation that `t` belongs to."""
    argument = t.args[0] if len(t.args) == 1 and not t.kwargs else None
    if not isinstance(argument, fx.Node):
        return None
    for x in _sources(argument):
        if _equals(_Terms(x).of(argument), activation.inner):
            outer = _Terms(x, t)
            for node in _users_of_users(t):
                if _equals(outer.of(node), activation.whole) and float_dtype(node) == float_dtype(
                    x
                ):
                    return x, node
    return None


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node and the nodes that it may be a polynomial of, the nearest first."""
    visited, waiting = {node}, [node]
    while waiting and len(visited) <= _MOST_SOURCES:
        here = waiting.pop(0)
        if float_dtype(here) is not None:
            yield here
        for operand in here.all_input_nodes if name_of(here) in _RULES else ():
            if operand not in visited:
                visited.add(operand)
                waiting.append(operand)


def _users_of_users(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the polynomial ops that use a node directly or through other polynomial ops."""
    visited, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop(0).users:
            if user not in visited and name_of(user) in _RULES:
                visited.add(user)
                waiting.append(user)
                yield user


def _equals(found: Polynomial | None, wanted: Polynomial) -> bool:
    if found is None or found.keys() != wanted.keys():
        return False
    return all(
        math.isclose(found[powers], coefficient, rel_tol=_TOLERANCE)
        for powers, coefficient in wanted.items()
    )


def _as_polynomial(x: Polynomial | float) -> Polynomial:
    return {(0, 0): float(x)} if isinstance(x, int | float) else x


def _sum(a: Polynomial | float, b: Polynomial | float, sign: float = 1.0) -> Polynomial:
    left_terms, right = _as_polynomial(a), _as_polynomial(b)
    total = {
        powers: left_terms.get(powers, 0.0) + sign * right.get(powers, 0.0)
        for powers in (*left_terms, *right)
    }
    return {powers: coefficient for powers, coefficient in total.items() if coefficient}


def _product(a: Polynomial | float, b: Polynomial | float) -> Polynomial:
    total: dict[tuple[int, int], float] = {}
    for (x, t), left_factor in _as_polynomial(a).items():
        for (more_x, more_t), right in _as_polynomial(b).items():
            powers = x + more_x, t + more_t
            total[powers] = total.get(powers, 0.0) + left_factor * right
    return total


def _power(a: Polynomial | float, exponent: Polynomial | float) -> Polynomial | None:
    if not isinstance(exponent, int | float) or exponent not in range(1, _MOST_POWER + 1):
        return None
    power = _as_polynomial(a)
    for _ in range(int(exponent) - 1):
        power = _product(power, a)
    return power


def _quotient(a: Polynomial | float, b: Polynomial | float) -> Polynomial | None:
    return _product(a, 1.0 / b) if isinstance(b, int | float) and b else None


_RULES: Mapping[str, Callable[..., Polynomial | None]] = {
    "add": _sum,
    "sub": lambda a, b: _sum(a, b, -1.0),
    "mul": _product,
    "div": _quotient,
    "pow": _power,
    "square": lambda a: _product(a, a),
    "neg": lambda a: _product(a, -1.0),
}
_NUM_OPERANDS = {"square": 1, "neg": 1}  # else 2
_ACTIVATION_OPS = frozenset({*_RULES, *_ACTIVATIONS})


# --------------------------------------------------------------------------------------------------
# Root-mean-square norms that a model computes by formulas become `autopar.ops.normed`.
#
#     u = x.to(W);  r = 1/√(mean(u², −1, keepdim) + ε);  n = (u · r).to(D);  y = (n · weight).to(O)
#
# The casts and the weight are optional. The norms are matched from r on, before the backward is
# created. They are not replaced if a node with side effects is between x and the result. If another
# node reads an intermediate value, the norm ends before that value.
# ``torch.nn.functional.rms_norm`` over the last dim is the same formula with all casts.

_CASTS = frozenset(("to", "type", "type_as", "float", "double", "half", "bfloat16"))
_NORM_OPS = frozenset(("add", "mul", "div", "pow", "square", "sqrt", "rsqrt", "mean", *_CASTS))
_RMS_NORM = ("input", "normalized_shape", "weight", "eps")


@dataclass(frozen=True, slots=True)
class _Norm:
    """A matched norm: its operands, its settings (`autopar.ops.norms`), the nodes that read x, and
    the node of the result."""

    x: fx.Node
    readers: tuple[fx.Node, ...]
    result: fx.Node
    eps: float
    dtype: torch.dtype
    rounded: torch.dtype
    out: torch.dtype
    weight: fx.Node | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        """Arguments of `autopar.ops.normed`."""
        return self.x, self.weight, self.eps, self.dtype, self.rounded, self.out


def join_norms(graph: fx.Graph) -> None:
    """Replace each root-mean-square norm in a graph of torch functions."""
    places = FormulaPlaces(graph)
    for node in list(graph.nodes):
        norm = _match_call(node) if name_of(node) == "rms_norm" else _match_formula(node)
        if norm is None or any(places.any_change(reader, norm.result) for reader in norm.readers):
            continue
        with graph.inserting_before(norm.result):
            both = graph.call_function(ops.normed, norm.args)
            joined = graph.call_function(operator.getitem, (both, 0))
        both.meta = {
            name: value for name, value in norm.result.meta.items() if name != "example_value"
        }
        places.put(joined, norm.result)
        erase(graph, norm.result, _NORM_OPS)


def _match_call(node: fx.Node) -> _Norm | None:
    arguments = dict(zip(_RMS_NORM, node.args, strict=False)) | dict(node.kwargs)
    x, eps, weight, dtype = (
        arguments.get("input"),
        arguments.get("eps"),
        arguments.get("weight"),
        float_dtype(arguments.get("input")),
    )
    if (
        dtype is None
        or len(tuple(arguments["normalized_shape"])) != 1
        or not isinstance(eps, float)
        or float_dtype(node) != dtype
    ):
        return None
    wide = torch.promote_types(dtype, torch.float32)
    return _Norm(x, (node,), node, eps, wide, wide, dtype, weight)


def _match_formula(root: fx.Node) -> _Norm | None:
    """Return the norm whose 1/√(…) or √(…) is `root`; None if there is none."""
    mean_square = _match_mean_square(root)
    dtype = float_dtype(root)
    if mean_square is None or dtype is None:
        return None
    squared, squares, eps = mean_square
    x = _before_cast(squared) if float_dtype(squared) == dtype else squared
    if x is squared and torch.promote_types(_dtype(x), dtype) != dtype:
        return None
    for user in root.users:
        other = _match_scaled(user, root)
        if other is None or float_dtype(user) != dtype:
            continue
        if other is squared or _is_cast_of(other, x, dtype):
            readers = tuple(node for node in (squared, squares, other, user) if x in node.args)
            return _extend(_Norm(x, readers, user, eps, dtype, dtype, dtype))
    return None


def _match_mean_square(root: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """Match mean(x²) + ε under a root, all in the dtype of the root.

    Returns:
        x, x² and ε; None if the operand of the root differs.
    """
    summed = _under_root(root)
    mean, eps = _split(summed, "add") if summed is not None else (None, None)
    if mean is None or not isinstance(eps, int | float):
        return None
    squares = _mean_of(mean)
    squared = _match_square(squares) if squares is not None else None
    if squares is None or squared is None or float_dtype(squared) is None:
        return None
    dtype = float_dtype(root)
    same_dtypes = all(float_dtype(each) == dtype for each in (summed, mean, squares))
    return (squared, squares, float(eps)) if same_dtypes else None


def _extend(norm: _Norm) -> _Norm:
    """Extend the norm by the casts and the weight that follow it.

    The norm ends at a node with several users, and before a second rounding: one cast can replace
    several only if all but the last are exact.
    """
    exact = norm.dtype.itemsize > 2  # whether the current result is not rounded yet
    while (user := _only_user(norm.result)) is not None:
        if _is_cast(user, norm.result) and exact:
            dtype = _dtype(user)
            exact = torch.promote_types(_dtype(norm.result), dtype) == dtype
            norm = replace(
                norm, result=user, out=dtype, rounded=norm.rounded if norm.weight else dtype
            )
        elif norm.weight is None and (weight := _weight(user, norm)) is not None:
            norm, exact = replace(norm, result=user, weight=weight, out=_dtype(user)), True
        else:
            break
    return norm


def _under_root(node: fx.Node) -> fx.Node | None:
    """Return the operand of a square root; None for other nodes."""
    exponent = node.args[1] if len(node.args) == 2 else None
    is_root = name_of(node) in ("rsqrt", "sqrt") or (
        name_of(node) == "pow" and exponent in (-0.5, 0.5)
    )
    under = node.args[0] if is_root and node.args and not node.kwargs else None
    return under if isinstance(under, fx.Node) else None


def _match_scaled(node: fx.Node, root: fx.Node) -> fx.Node | None:
    """Return the operand that a node multiplies by the inverse root, or divides by the root."""
    inverse = name_of(root) == "rsqrt" or (name_of(root) == "pow" and root.args[1] == -0.5)
    if not inverse:
        top, bottom = (
            node.args
            if name_of(node) == "div" and len(node.args) == 2 and not node.kwargs
            else (None, None)
        )
        return top if bottom is root and isinstance(top, fx.Node) and top is not root else None
    others = [each for each in _operands(node, "mul") if each is not root]
    return others[0] if len(others) == 1 else None


def _split(node: fx.Node, name: str) -> tuple[fx.Node | None, Any]:
    """Return the tensor and the number that a node adds or multiplies."""
    if name_of(node) != name or len(node.args) != 2 or node.kwargs:
        return None, None
    a, b = node.args
    if isinstance(a, fx.Node):
        return a, b
    return (b, a) if isinstance(b, fx.Node) else (None, None)


def _operands(node: fx.Node, name: str) -> Iterator[fx.Node]:
    """Yield the two tensors that a node adds or multiplies; nothing for other nodes."""
    if (
        name_of(node) == name
        and len(node.args) == 2
        and not node.kwargs
        and all(isinstance(each, fx.Node) for each in node.args)
    ):
        yield from node.args


def _mean_of(node: fx.Node) -> fx.Node | None:
    """Return the operand of a mean over the last dim that keeps the dim; None for other nodes."""
    arguments = dict(zip(("input", "dim", "keepdim"), node.args, strict=False)) | dict(node.kwargs)
    x, dim = arguments.get("input"), arguments.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, list | tuple) else []
    if (
        name_of(node) != "mean"
        or not isinstance(x, fx.Node)
        or not arguments.get("keepdim")
        or len(dims) != 1
        or arguments.keys() - _MEAN
    ):
        return None
    return x if dims[0] in (-1, len(shape_given(x)) - 1) else None


_MEAN = {"input", "dim", "keepdim"}


def _match_square(node: fx.Node) -> fx.Node | None:
    if (name_of(node) == "pow" and len(node.args) == 2 and node.args[1] == 2) or name_of(
        node
    ) == "square":
        return node.args[0] if isinstance(node.args[0], fx.Node) and not node.kwargs else None
    factors = set(_operands(node, "mul"))
    return factors.pop() if len(factors) == 1 else None


def _weight(node: fx.Node, norm: _Norm) -> fx.Node | None:
    """Return the operand that a node multiplies by the norm, if its shape is that of the last dim
    of x."""
    weights = [
        each
        for each in _operands(node, "mul")
        if each is not norm.result and float_dtype(each) is not None
    ]
    return (
        weights[0]
        if len(weights) == 1
        and shape_given(weights[0]) == shape_given(norm.x)[-1:]
        and len(shape_given(norm.x)) > 1
        else None
    )


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_cast(node: fx.Node, of: fx.Node) -> bool:
    return (
        node.op == "call_method"
        and node.target in _CASTS
        and node.args[0] is of
        and float_dtype(node) is not None
    )


def _is_cast_of(node: fx.Node, x: fx.Node, dtype: torch.dtype) -> bool:
    """Return whether `node` is x or a cast of x, with the values of x cast to `dtype`."""
    exact = torch.promote_types(_dtype(x), dtype) == dtype
    return (node is x and exact) or (_is_cast(node, x) and _dtype(node) == dtype)


def _before_cast(node: fx.Node) -> fx.Node:
    """Return the operand of a cast, or the node itself."""
    source = node.args[0] if node.op == "call_method" and node.target in _CASTS else None
    return source if isinstance(source, fx.Node) and float_dtype(source) is not None else node


def _dtype(node: fx.Node) -> torch.dtype:
    dtype = float_dtype(node)
    assert dtype is not None, "the node is a floating tensor"
    return dtype
