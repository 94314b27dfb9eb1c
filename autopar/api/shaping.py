"""A device count, or nodes × devices per node, and the mesh shapes that these may have.

Devices are numbered node by node, where only their count is given eight to a node (fewer are one node). Shapes have an axis over the
nodes and one over a node's devices, or one of these is cut in two: more axes let ops, parameters and stages lie in more ways, fewer let
one collective do what takes two along two axes. Which is best is found by planning for each; the first plan's time prunes the others
by their bounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.api.arguments import Unshaped
from autopar.errors import AutoparError, ConstraintError, InfeasibleError, MeshError
from autopar.mesh import Mesh
from autopar.planning import Planned, TooSlow
from autopar.units import seconds

log = logging.getLogger("autopar")
DEVICES_PER_NODE = 8


def shapes(devices: Unshaped) -> tuple[Mesh, ...]:
    """All shapes of at most three axes, the plainest first.

    Args:
        devices: their count, or the nodes and the devices of each.

    Raises:
        MeshError: where there are fewer than one device, or whole nodes do not make up the number.
    """
    nodes, here = _in_nodes(devices) if isinstance(devices, int) else devices
    if min(nodes, here) < 1:
        raise MeshError(f"a mesh of {nodes} nodes of {here} devices", remedy="pass numbers from 1, or autopar.Mesh({...})")
    whole = {name: size for name, size in (("node", nodes), ("gpu", here)) if size > 1} or {"gpu": 1}
    cut = [[(f"{name}0", size // inner), (f"{name}1", inner)] for name, size in whole.items() for inner in _inner(size)]
    found = [whole]
    for pair in cut:
        name = pair[0][0][:-1]
        axes = [axis for own, size in whole.items() for axis in (pair if own == name else [(own, size)])]
        found.append(dict(axes))
    return tuple(Mesh(axes, devices_per_node=here) for axes in found)


def _in_nodes(num_devices: int) -> tuple[int, int]:
    """Nodes, and devices of each, that a count stands for."""
    if num_devices < 1:
        raise MeshError(f"a mesh of {num_devices} devices", remedy="pass a number from 1, or autopar.Mesh({...})")
    here = min(num_devices, DEVICES_PER_NODE)
    if num_devices % here:
        what = f"{num_devices} devices are not nodes of {DEVICES_PER_NODE} each"
        raise MeshError(what, remedy="pass nodes and devices per node, as (3, 4), or autopar.Mesh with the axes that the machine has")
    return num_devices // here, here


def _inner(size: int) -> Iterator[int]:
    """Sizes of the inner one of two axes, the smallest last."""
    return (n for n in range(size // 2, 1, -1) if size % n == 0)


def best_shape(meshes: tuple[Mesh, ...], plan: Callable[[Mesh, float], Planned]) -> Planned:
    """The fastest plan over the shapes; it says which were tried.

    Args:
        plan: of one shape, or `TooSlow` where none is faster than so many seconds.

    Raises:
        ConstraintError, InfeasibleError, MeshError: of the first shape, where none has a plan.
    """
    best: Planned | None = None
    refusal: AutoparError | None = None
    told: list[str] = []
    for mesh in meshes:
        try:
            found = plan(mesh, float("inf") if best is None else best.plan.prediction.step_s)
        except TooSlow as error:
            told.append(f"{mesh} (at least {seconds(error.args[0])})")
            continue
        except (InfeasibleError, ConstraintError, MeshError) as error:
            log.info("no plan for mesh %s: %s", mesh, error.what)
            told.append(f"{mesh} (none)")
            refusal = refusal or error
            continue
        told.append(f"{mesh} ({seconds(found.plan.prediction.step_s)})")
        if best is None or found.plan.prediction.step_s < best.plan.prediction.step_s:
            best = found
    if best is None:
        assert refusal is not None, "there is a shape to try"
        raise refusal
    return best if len(meshes) == 1 else _told(best, told)


def _told(best: Planned, told: list[str]) -> Planned:
    """The plan with what its bound covers: its own shape, and which others were tried."""
    tried = f"this mesh shape alone; tried, with the step found for each: {'; '.join(told)}"
    proof = replace(best.plan.proof, covers=(*best.plan.proof.covers, tried))
    plan = replace(best.plan, proof=proof)
    return replace(best, plan=plan, program=replace(best.program, plan_hash=plan.hash))
