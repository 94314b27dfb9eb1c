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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

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


def best_shape(
    meshes: tuple[Mesh, ...],
    plan: Callable[[Mesh, float], Planned],
    *,
    further: tuple[Mesh, ...] = (),
    holds: Callable[[Mesh], bool] = lambda _: True,
    late: Callable[[], bool] = lambda: False,
) -> Planned:
    """The fastest plan over the shapes; it says which were tried.

    Args:
        plan: of one shape, or `TooSlow` where none is faster than so many seconds.
        further: shapes that are tried where none of `meshes` has a plan, and not for want of memory
            alone.
        holds: whether a shape has the axes that constraints speak of. late: whether what was found
            is to do.

    Raises:
        ConstraintError, InfeasibleError, MeshError: where none has a plan, of the shape that says
            most: of those that want memory alone the one that wants least, else the plainest that
            has the axes, else one of the most axes.
    """
    tried = _Tried(plan, late)
    tried.add(meshes)
    if tried.best is None and not all(
        isinstance(error, InfeasibleError) for _, error in tried.refusals
    ):
        tried.add(further)
    if tried.best is None:
        raise _most_informative(tried.refusals, holds)
    return tried.best if len(tried.told) == 1 else _note_tried_shapes(tried.best, tried.told)


@dataclass
class _Tried:
    """The shapes that were planned for.

    Attributes:
        told: per shape, how fast its plan is, or that there is none.
    """

    plan: Callable[[Mesh, float], Planned]
    late: Callable[[], bool]
    best: Planned | None = None
    refusals: list[tuple[Mesh, AutoparError]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def add(self, meshes: tuple[Mesh, ...]) -> None:
        """Plan for these shapes, each for less time than the best before it."""
        for mesh in meshes:
            if self.best is not None and self.late():
                self.told.append(f"{mesh} (not tried: the time was over)")
                continue
            try:
                found = self.plan(
                    mesh, math.inf if self.best is None else self.best.plan.prediction.step_s
                )
            except TooSlow as error:
                self.told.append(f"{mesh} (at least {seconds(error.args[0])})")
                continue
            except (InfeasibleError, ConstraintError, MeshError) as error:
                log.info("no plan for mesh %s: %s", mesh, error.what)
                self.told.append(f"{mesh} (none)")
                self.refusals.append((mesh, error))
                continue
            self.told.append(f"{mesh} ({seconds(found.plan.prediction.step_s)})")
            if self.best is None or found.plan.prediction.step_s < self.best.plan.prediction.step_s:
                self.best = found


def _most_informative(
    refusals: list[tuple[Mesh, AutoparError]], holds: Callable[[Mesh], bool]
) -> AutoparError:
    """Return the refusal that says most; `best_shape` states the order."""

    def rank(refusal: tuple[Mesh, AutoparError]) -> tuple[int, float]:
        mesh, error = refusal
        if isinstance(error, InfeasibleError):
            return 0, error.needed_bytes or math.inf
        return (1, 0) if holds(mesh) else (2, -len(mesh.axes))

    return min(refusals, key=rank)[1]


def _note_tried_shapes(best: Planned, told: list[str]) -> Planned:
    """Return the plan with a note on what its bound covers: its own shape. The note lists the other
    shapes that were tried."""
    tried = f"this mesh shape alone; tried, with the step found for each: {'; '.join(told)}"
    proof = replace(best.plan.proof, covers=(*best.plan.proof.covers, tried))
    plan = replace(best.plan, proof=proof)
    return replace(best, plan=plan, program=replace(best.program, plan_hash=plan.hash))
