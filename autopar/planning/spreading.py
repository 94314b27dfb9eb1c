"""Which instances of a folded problem's ops have neighbours that are alike: groups for `autopar.solve.relaxed`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autopar.planning.instances import Instance, Instances
from autopar.solve.relaxed import Spread


def spread(instances: Instances) -> Spread:
    """The groups: instances of an op whose tensors are of the same variants."""
    problem = instances.priced.problem
    groups: list[dict[object, int]] = [{} for _ in problem.ops]
    times: list[list[float]] = [[] for _ in problem.ops]
    made: list[Counter[int]] = [Counter() for _ in problem.variants]
    read: list[list[Counter[int]]] = [[Counter() for _ in v.uses] for v in problem.variants]
    for instance in instances.found:
        mine = groups[instance.op]
        group = mine.setdefault(_key(instances, instance), len(mine))
        times[instance.op] += [0.0] * (group + 1 - len(times[instance.op]))
        times[instance.op][group] += instance.share
        for ref in instance.results:
            if ref in instances.variant:
                made[instances.variant[ref]][group] += 1
        for operand, ref in instance.operands:
            read[instances.variant[ref]][instances.use(instance.op, operand, ref)][group] += 1
    found = tuple(tuple(each) or (0.0,) for each in times)
    apart = {instances.variant[ref] for ref in instances.hidden | instances.shared() if ref in instances.variant}
    return Spread(found, tuple(map(_shares, made)), tuple(tuple(map(_shares, each)) for each in read), frozenset(apart))


def _key(instances: Instances, instance: Instance) -> object:
    operands = tuple((operand, instances.variant[ref]) for operand, ref in instance.operands)
    return operands, tuple(instances.variant.get(ref, -1) for ref in instance.results), instance.unit if instance.alone else -1


def _shares(counts: Counter[int]) -> Mapping[int, float]:
    total = sum(counts.values())
    return {group: num / total for group, num in sorted(counts.items())}
