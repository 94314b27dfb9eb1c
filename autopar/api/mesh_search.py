"""A device count, or nodes × devices per node, and the mesh shapes that these may have.

Devices are numbered node by node, where only their count is given eight to a node (fewer are one
node). Shapes have an axis over the nodes and one over a node's devices, or one of these is cut in
two: more axes let ops, parameters and stages lie in more ways, fewer let one collective do what
takes two along two axes. Which is best is found by planning for each; the first plan's time prunes
the others by their bounds.

Where there are devices of one node alone, or one of each node, they have two axes at most so. Cut
in three they are tried only where constraints hold on none of those: three axes let nothing move
faster, and take longer to plan for than all that are plainer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from autopar.api.alternatives import SearchStatus, WorkBudget, search_work
from autopar.core.mesh import Mesh, Unshaped
from autopar.core.units import seconds
from autopar.errors import AutoparError, ConstraintError, InfeasibleError, MeshError
from autopar.planner import Planned, TooSlow

log = logging.getLogger("autopar")
DEVICES_PER_NODE = 8


def shapes(devices: Unshaped) -> tuple[Mesh, ...]:
    """Shapes of which at most one axis is cut in two, the plainest first.

    Args:
        devices: their count, or the nodes and the devices of each.

    Raises:
        MeshError: where there are fewer than one device, or whole nodes do not make up the number.
    """
    here, whole = _whole(devices)
    cut = [
        [(f"{name}0", size // inner), (f"{name}1", inner)]
        for name, size in whole.items()
        for inner in _inner(size)
    ]
    found = [whole]
    for pair in cut:
        name = pair[0][0][:-1]
        axes = [
            axis for own, size in whole.items() for axis in (pair if own == name else [(own, size)])
        ]
        found.append(dict(axes))
    return tuple(Mesh(axes, devices_per_node=here) for axes in found)


def shapes_in_three(devices: Unshaped) -> tuple[Mesh, ...]:
    """Return the shapes with three axes, for devices that have a single axis if none is cut; else
    none.

    Arguments and errors are those of `shapes`.
    """
    here, whole = _whole(devices)
    if len(whole) > 1:
        return ()
    ((name, size),) = whole.items()
    sizes = [
        (size // inner // middle, middle, inner)
        for inner in _inner(size)
        for middle in _inner(size // inner)
    ]
    return tuple(
        Mesh({f"{name}{i}": part for i, part in enumerate(parts)}, devices_per_node=here)
        for parts in sizes
    )


def _whole(devices: Unshaped) -> tuple[int, dict[str, int]]:
    """Return the devices per node, and the axes if none is cut."""
    nodes, here = _in_nodes(devices) if isinstance(devices, int) else devices
    if min(nodes, here) < 1:
        raise MeshError(
            f"a mesh of {nodes} nodes of {here} devices",
            remedy="pass numbers from 1, or autopar.Mesh({...})",
        )
    return here, {name: size for name, size in (("node", nodes), ("gpu", here)) if size > 1} or {
        "gpu": 1
    }


def _in_nodes(num_devices: int) -> tuple[int, int]:
    """Return the number of nodes, and of devices per node, that a device count stands for."""
    if num_devices < 1:
        raise MeshError(
            f"a mesh of {num_devices} devices",
            remedy="pass a number from 1, or autopar.Mesh({...})",
        )
    here = min(num_devices, DEVICES_PER_NODE)
    if num_devices % here:
        what = f"{num_devices} devices are not nodes of {DEVICES_PER_NODE} each"
        raise MeshError(
            what,
            remedy=(
                "pass nodes and devices per node, as (3, 4), or autopar.Mesh with the axes that the"
                " machine has"
            ),
        )
    return num_devices // here, here


def _inner(size: int) -> Iterator[int]:
    """Yield the sizes that the inner one of two axes may have, the smallest last."""
    return (n for n in range(size // 2, 1, -1) if size % n == 0)


@dataclass
class ShapeSearch:
    """The plans of one mesh shape after another, each faster than the best before it.

    For each mesh of `pending`, the caller makes a plan that beats `best_s`, within `attempt`, and
    passes it to `add`.

    Attributes:
        budget: work that may be spent once there is a plan.
        status: is told what is searched.
        holds: whether a shape has the axes that constraints speak of.
        best: the fastest plan.
        untried: shapes for which no work was left.
    """

    budget: WorkBudget
    holds: Callable[[Mesh], bool] = lambda _: True
    status: SearchStatus = field(default_factory=SearchStatus)
    best: Planned | None = None
    untried: list[Mesh] = field(default_factory=list)
    _refusals: list[tuple[Mesh, AutoparError]] = field(default_factory=list)
    _told: list[str] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        """Seconds of a step of the fastest plan; infinite without a plan."""
        return math.inf if self.best is None else self.best.plan.prediction.step_s

    def pending(self, meshes: Sequence[Mesh], further: Sequence[Mesh] = ()) -> Iterator[Mesh]:
        """Yield the shapes for which there is work left.

        Args:
            meshes: the shapes to try.
            further: shapes to try if these have no plan, and not for lack of memory alone.
        """
        for place, mesh in enumerate(meshes, 1):
            if self.best is not None and not self.budget.take(search_work(len(mesh.axes))):
                why = "the search was over" if self.budget.is_over else 'effort="thorough" tries it'
                self._leave_out(mesh, f"not tried: {why}")
                continue
            self.status.begin(f"mesh {mesh}" if len(meshes) > 1 else "", len(meshes) - place)
            yield mesh
        lack_memory = all(isinstance(error, InfeasibleError) for _, error in self._refusals)
        if further and self.best is None and not lack_memory:
            yield from self.pending(further)

    def _leave_out(self, mesh: Mesh, why: str) -> None:
        self._told.append(f"{mesh} ({why})")
        self.untried.append(mesh)

    @contextmanager
    def attempt(self, mesh: Mesh) -> Iterator[None]:
        """Record why a shape has no plan, if planning for it raises.

        Raises:
            KeyboardInterrupt: if there is no plan yet.
        """
        try:
            yield
        except TooSlow as error:
            self._told.append(f"{mesh} (at least {seconds(error.args[0])})")
        except (InfeasibleError, ConstraintError, MeshError) as error:
            log.info("no plan for mesh %s: %s", mesh, error.what)
            self._told.append(f"{mesh} (none)")
            self._refusals.append((mesh, error))
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self.budget.interrupt()
            self._leave_out(mesh, "interrupted")

    def add(self, mesh: Mesh, found: Planned) -> None:
        """Record the plan of a shape."""
        step_s = found.plan.prediction.step_s
        if self.best is None:
            self.budget.measure(len(mesh.axes), found.plan.proof.num_variables)
        self._told.append(f"{mesh} ({seconds(step_s)})")
        if step_s < self.best_s:
            self.best = found
            self.status.add(found)

    @property
    def refusal(self) -> AutoparError:
        """Why no shape has a plan: the refusal of the shape that says most.

        Of the shapes that lack memory alone, it is the one that lacks least; else the plainest
        that has the axes that constraints speak of; else one of the most axes.
        """

        def rank(refusal: tuple[Mesh, AutoparError]) -> tuple[int, float]:
            mesh, error = refusal
            if isinstance(error, InfeasibleError):
                return 0, error.needed_bytes or math.inf
            return (1, 0) if self.holds(mesh) else (2, -len(mesh.axes))

        assert self._refusals, "a shape without a plan was refused"
        return min(self._refusals, key=rank)[1]

    def note(self, best: Planned) -> Planned:
        """Return a plan with a note on what its bound covers: its own shape. The note lists the
        other shapes that were tried."""
        if len(self._told) < 2:
            return best
        tried = (
            f"this mesh shape alone; tried, with the step found for each: {'; '.join(self._told)}"
        )
        proof = replace(best.plan.proof, covers=(*best.plan.proof.covers, tried))
        plan = replace(best.plan, proof=proof)
        return replace(best, plan=plan, program=replace(best.program, plan_hash=plan.hash))
