"""Options of a call on one mesh axis and its strategies on a mesh, from its rule or from
discovery."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from autopar.core.layout import Strategy
from autopar.rules.call import Call, KeyedCall
from autopar.rules.discovery import discover
from autopar.rules.expansion import expand, is_expansion
from autopar.rules.notation import AxisOption, options
from autopar.rules.table import rule_of


def is_fallback(call: Call) -> bool:
    """Return whether the op has no rule, and none was discovered, so that it runs replicated."""
    return rule_of(call.target) is None and not is_discovered(call)


def is_discovered(call: Call) -> bool:
    """Return whether options of the call were discovered by experiments."""
    return rule_of(call.target) is None and not discover(call).reason


def why_replicated(call: Call) -> str:
    """Return the reason why a call for which `is_fallback` is true runs replicated."""
    return discover(call).reason


def axis_options(call: Call) -> tuple[AxisOption, ...]:
    """Return all options of a call on one mesh axis; the first replicates everything. They do not
    depend on sizes, except that dims of size 1 are never sharded. The options of an op without a
    rule are discovered.

    Raises:
        RuleError: the rule of the op does not fit the call.
    """
    return _cached_options(call.keyed)


@lru_cache(maxsize=16384)
def _cached_options(keyed: KeyedCall) -> tuple[AxisOption, ...]:
    rule = rule_of(keyed.call.target)
    return options(rule(keyed.call), keyed.call) if rule else discover(keyed.call).options


def forget() -> None:
    """Clear the caches after a rule was added or removed."""
    _cached_options.cache_clear()
    _strategies.cache_clear()
    _is_strategy.cache_clear()


def strategies(call: Call, mesh_shape: Sequence[int]) -> tuple[Strategy, ...]:
    """Return all strategies of a call on a mesh in a deterministic order (see `expansion`); the
    first replicates everything."""
    return _strategies(call.keyed, tuple(mesh_shape))


@lru_cache(maxsize=16384)
def _strategies(keyed: KeyedCall, mesh_shape: tuple[int, ...]) -> tuple[Strategy, ...]:
    return expand(keyed.call, axis_options(keyed.call), mesh_shape)


def is_strategy(call: Call, strategy: Strategy, mesh_shape: Sequence[int]) -> bool:
    """Return whether `strategies` returns a strategy, without listing all of them.

    Args:
        call: the call.
        strategy: the strategy.
        mesh_shape: number of devices on each axis of the mesh.
    """
    return _is_strategy(call.keyed, strategy, tuple(mesh_shape))


@lru_cache(maxsize=65536)  # equal layers make equal calls
def _is_strategy(keyed: KeyedCall, strategy: Strategy, mesh_shape: tuple[int, ...]) -> bool:
    return is_expansion(keyed.call, _cached_options(keyed), strategy, mesh_shape)
