"""Rules about the modules that importing a package may load, directly or through other modules.

Importing a module loads the ``__init__`` of its packages and their imports. Two closures are
checked. The first follows imports at module level: the modules that ``import`` loads. The second
also follows *late* imports, which are inside functions: the modules that calling the package can
load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from source_modules import (
    Module,
    executed_nodes,
    imports_of,
    internal_targets,
    is_under,
    uses_of,
)


@dataclass(frozen=True, slots=True)
class Rule:
    """The modules that some packages must not load, directly or through other modules.

    Attributes:
        units: the packages and modules below ``autopar`` that the rule applies to.
        forbidden: dotted names of modules that must not be loaded, including everything below them.
        permitted: dotted names below `forbidden` that may be loaded.
        late_uses: by exact name, the modules that may use forbidden modules inside functions, with
            the reason.
        uses: by exact name, the modules that may also use them at module level, with the reason.
    """

    units: tuple[str, ...]
    forbidden: tuple[str, ...]
    permitted: tuple[str, ...] = ()
    late_uses: Mapping[str, str] = field(default_factory=dict)
    uses: Mapping[str, str] = field(default_factory=dict)

    def forbids(self, target: str) -> bool:
        """Return whether the rule forbids loading the module `target`."""
        return is_under(target, self.forbidden) and not is_under(target, self.permitted)

    def has_exception(self, module: str, *, late: bool) -> bool:
        """Return whether the module is a known exception, at module level or (`late`) inside
        functions."""
        return module in self.uses or (late and module in self.late_uses)


@dataclass(frozen=True, slots=True)
class _Graph:
    """The modules of autopar that each module loads, and all names that it uses, with lines."""

    loads: dict[str, list[str]]
    uses: dict[str, list[tuple[str, int]]]

    @staticmethod
    def of(modules: Mapping[str, Module], *, late: bool) -> _Graph:
        loads, uses = {}, {}
        for module in modules.values():
            nodes = executed_nodes(module, late=late)
            targets = [
                target
                for imported in imports_of(module, nodes)
                for target in internal_targets(modules, imported)
            ]
            parts = module.name.split(".")
            packages = [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]
            loads[module.name] = [*targets, *(name for name in packages if name in modules)]
            uses[module.name] = list(uses_of(module, nodes))
        return _Graph(loads, uses)


def check_rules(modules: Mapping[str, Module], rules: Mapping[str, Rule]) -> list[str]:
    """Return a sentence for each use that a rule forbids, with the path of imports that leads to
    it."""
    sentences: dict[tuple[str, str, str], str] = {}
    for late in (False, True):
        graph = _Graph.of(modules, late=late)
        for name, rule in rules.items():
            uses = _forbidden_uses(graph, rule, late=late)
            for unit in rule.units:
                for path, target, line in _violations(modules, graph, rule, unit, uses):
                    how = "can load, by a late import," if late else "loads"
                    text = f"{unit} {how} {target} ({' → '.join(path)}:{line}): {name}"
                    sentences.setdefault((unit, path[-1], target), text)
    return list(sentences.values())


def unused_exceptions(modules: Mapping[str, Module], rules: Mapping[str, Rule]) -> list[str]:
    """Return a sentence for each exception of a rule whose module does not use a forbidden
    module."""
    problems = []
    for name, rule in rules.items():
        for late, exceptions in ((False, rule.uses), (True, rule.late_uses)):
            for module in exceptions:
                nodes = executed_nodes(modules[module], late=late) if module in modules else ()
                uses = uses_of(modules[module], nodes) if module in modules else ()
                if not any(rule.forbids(target) for target, _ in uses):
                    problems.append(f"{name}: {module} needs no exception, remove it")
    return problems


def _forbidden_uses(graph: _Graph, rule: Rule, *, late: bool) -> dict[str, dict[str, int]]:
    """Return the forbidden uses of each module without an exception, with the first line."""
    return {
        name: {target: line for target, line in reversed(uses) if rule.forbids(target)}
        for name, uses in graph.uses.items()
        if not rule.has_exception(name, late=late)
    }


def _violations(
    modules: Mapping[str, Module],
    graph: _Graph,
    rule: Rule,
    unit: str,
    uses: Mapping[str, Mapping[str, int]],
) -> Iterator[tuple[list[str], str, int]]:
    """Iterate over forbidden uses: the modules from the unit to the using module, the target, and
    the line.

    Imports of forbidden modules are not followed.
    """
    parents: dict[str, str] = {m.name: "" for m in modules.values() if m.unit == unit}
    todo = deque(parents)
    while todo:
        name = todo.popleft()
        for target, line in uses.get(name, {}).items():
            yield _path(parents, name), target, line
        for target in graph.loads[name]:
            if target in modules and target not in parents and not rule.forbids(target):
                parents[target] = name
                todo.append(target)


def _path(parents: Mapping[str, str], name: str) -> list[str]:
    path = [name]
    while parents[path[0]]:
        path.insert(0, parents[path[0]])
    return path
