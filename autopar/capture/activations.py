"""Activations that a model writes out as formulas become the ops that they are.

    gelu(x) = x/2 (1 + erf(x/√2)) ≈ x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))   (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2)
    silu(x) = x σ(x)                                                           (the same, section 4)

Written out, the second form takes eight passes over memory and its gradient eleven; as one op they take one each. They are looked for
before there is a backward, in the graph of torch functions as the model calls them. However a formula is written, with products, powers
and constants in this order or that one, its tensors are polynomials of x and of t, which is the erf, tanh or σ of a polynomial of x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.functions import Places, erase, float_dtype, name_of

Polynomial = Mapping[tuple[int, int], float]  # powers of x and of t → coefficient

_NEAR = 1e-9  # of coefficients, relative: people write √(2/π) with ten digits
_MOST_TERMS, _MOST_POWER, _MOST_SOURCES = 8, 4, 32


@dataclass(frozen=True, slots=True)
class _Activation:
    """What t is a function of, what the result is of x and t, and the op that gives the same."""

    inner: Polynomial
    whole: Polynomial
    function: Callable[..., torch.Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)


_FLAT = math.sqrt(2 / math.pi)
_ACTIVATIONS: Mapping[str, _Activation] = {
    "tanh": _Activation(
        {(1, 0): _FLAT, (3, 0): _FLAT * 0.044715}, {(1, 0): 0.5, (1, 1): 0.5}, torch.nn.functional.gelu, {"approximate": "tanh"}
    ),
    "erf": _Activation({(1, 0): math.sqrt(0.5)}, {(1, 0): 0.5, (1, 1): 0.5}, torch.nn.functional.gelu),
    "sigmoid": _Activation({(1, 0): 1.0}, {(1, 1): 1.0}, torch.nn.functional.silu),
}


def join_activations(graph: fx.Graph) -> None:
    """Replace each activation that is written out in a graph of torch functions.

    One stays as it is where anything between its operand and its result writes into a tensor, or switches gradients or autocast.
    """
    places = Places(graph)
    for t in [node for node in graph.nodes if name_of(node) in _ACTIVATIONS]:
        activation = _ACTIVATIONS[name_of(t)]
        ends = _ends(t, activation)
        if ends is None or places.any_change(*ends):
            continue
        x, result = ends
        with graph.inserting_before(result):
            joined = graph.call_function(activation.function, (x,), dict(activation.settings))
        places.put(joined, result)
        erase(graph, result, _WRITTEN_WITH)


@dataclass
class _Terms:
    """Nodes as polynomials of two of them, `x` and, where it is given, `t`."""

    x: fx.Node
    t: fx.Node | None = None
    _known: dict[fx.Node, Polynomial | None] = field(default_factory=dict)

    def of(self, node: fx.Node) -> Polynomial | None:
        """None for what is none, as where another tensor is read beside x."""
        if node not in self._known:
            self._known[node] = self._computed(node)
        return self._known[node]

    def _computed(self, node: fx.Node) -> Polynomial | None:
        if node is self.t:
            return {(0, 1): 1.0}
        if node is self.x:
            return {(1, 0): 1.0}
        rule = _RULES.get(name_of(node))
        if rule is None or node.kwargs:
            return None
        operands = [self.of(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        if len(operands) != _NUM_OPERANDS.get(name_of(node), 2) or not all(isinstance(each, int | float | dict) for each in operands):
            return None
        found = rule(*operands)
        fits = found is not None and len(found) <= _MOST_TERMS and max((sum(powers) for powers in found), default=0) <= _MOST_POWER
        return found if fits else None


def _ends(t: fx.Node, activation: _Activation) -> tuple[fx.Node, fx.Node] | None:
    """What the activation that `t` stands in reads, and its result."""
    argument = t.args[0] if len(t.args) == 1 and not t.kwargs else None
    if not isinstance(argument, fx.Node):
        return None
    for x in _sources(argument):
        if _equals(_Terms(x).of(argument), activation.inner):
            outer = _Terms(x, t)
            for node in _users_of_users(t):
                if _equals(outer.of(node), activation.whole) and float_dtype(node) == float_dtype(x):
                    return x, node
    return None


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """A node and what it may be a polynomial of, the nearest first."""
    seen, waiting = {node}, [node]
    while waiting and len(seen) <= _MOST_SOURCES:
        here = waiting.pop(0)
        if float_dtype(here) is not None:
            yield here
        for operand in here.all_input_nodes if name_of(here) in _RULES else ():
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)


def _users_of_users(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a node, or what polynomials of it read."""
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop(0).users:
            if user not in seen and name_of(user) in _RULES:
                seen.add(user)
                waiting.append(user)
                yield user


def _equals(found: Polynomial | None, wanted: Polynomial) -> bool:
    if found is None or found.keys() != wanted.keys():
        return False
    return all(math.isclose(found[powers], coefficient, rel_tol=_NEAR) for powers, coefficient in wanted.items())


def _as_polynomial(x: Polynomial | float) -> Polynomial:
    return {(0, 0): float(x)} if isinstance(x, int | float) else x


def _sum(a: Polynomial | float, b: Polynomial | float, sign: float = 1.0) -> Polynomial:
    left, right = _as_polynomial(a), _as_polynomial(b)
    total = {powers: left.get(powers, 0.0) + sign * right.get(powers, 0.0) for powers in (*left, *right)}
    return {powers: coefficient for powers, coefficient in total.items() if coefficient}


def _product(a: Polynomial | float, b: Polynomial | float) -> Polynomial:
    total: dict[tuple[int, int], float] = {}
    for (x, t), left in _as_polynomial(a).items():
        for (more_x, more_t), right in _as_polynomial(b).items():
            powers = x + more_x, t + more_t
            total[powers] = total.get(powers, 0.0) + left * right
    return total


def _power(a: Polynomial | float, exponent: Polynomial | float) -> Polynomial | None:
    if not isinstance(exponent, int | float) or exponent not in range(1, _MOST_POWER + 1):
        return None
    found = _as_polynomial(a)
    for _ in range(int(exponent) - 1):
        found = _product(found, a)
    return found


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
_WRITTEN_WITH = frozenset({*_RULES, *_ACTIVATIONS})
