"""The groups into which a list of equal layers is cut, each of which decides for itself: cuts are
at the shares in which the relaxation mixes decisions.

A relaxation that keeps something in 45 of 100 layers wants two groups. With two such shares that
are far apart, three: more groups mean a larger program and a plan that is harder to read, for less
and less time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.core.solution import FractionalGroups, Solution
from autopar.cost.priced import Priced, Source
from autopar.sharding import Starts, layer_of

_CUTS = 2  # of a list
_NEAR = 16  # cuts that are nearer to each other than this part of the list are one


def starts_of(priced: Priced, choices: Solution | FractionalGroups) -> Starts:
    """Find the groups that would bring a plan nearer to the bound; none if all equal layers decide
    alike in the relaxation."""
    wanted: dict[str, Counter[int]] = {}
    for n, shares in choices.mixed.items():
        for layers, numbers in _layers(priced.sources[n]).items():
            for share in shares:
                num = round(min(share, 1.0 - share) * len(numbers))
                if 0 < num < len(numbers):
                    wanted.setdefault(layers, Counter())[numbers[num]] += 1
    return {
        layers: _cuts(found, max(_span(priced, layers) // _NEAR, 1))
        for layers, found in sorted(wanted.items())
    }


def _layers(source: Source) -> dict[str, list[int]]:
    """Map the lists of layers that an op's instances lie in to the indices of their layers."""
    found: dict[str, set[int]] = {}
    for layers, number in filter(None, map(layer_of, _keys(source))):
        found.setdefault(layers, set()).add(number)
    return {layers: sorted(numbers) for layers, numbers in found.items()}


def _keys(source: Source) -> Iterator[str]:
    yield from source.names
    yield from (
        cluster.members[0].key for cluster in (source.cluster.instances if source.cluster else ())
    )


def _span(priced: Priced, layers: str) -> int:
    return max(len(_layers(source).get(layers, ())) for source in priced.sources)


def _cuts(wanted: Counter[int], near: int) -> tuple[int, ...]:
    """Choose the layers at which most decisions change, none near another."""
    cuts: list[int] = []
    for layer, _ in sorted(wanted.items(), key=lambda item: (-item[1], item[0])):
        if len(cuts) < _CUTS and all(abs(layer - cut) >= near for cut in cuts):
            cuts.append(layer)
    return tuple(sorted(cuts))
