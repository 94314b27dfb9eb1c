"""Mesh shapes for a device count, or for nodes × devices per node.

Devices are numbered node by node. A device count stands for nodes of eight devices (one node if
there are fewer). A shape has an axis over the nodes and one over the devices of a node, or one of
these is split into two axes. More axes allow more layouts of ops, parameters and stages. Fewer axes
allow one collective instead of two. The best shape is found by planning for each; the step time of
the first plan prunes the others by their bounds.

For devices of a single node, or with one device per node, these shapes have at most two axes.
Shapes with three axes are tried only if constraints hold on none of these: a third axis speeds up
no collective, and planning takes longer.
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
    """Return the shapes in which at most one axis is split into two, the simplest first.

    Args:
        devices: the device count, or (nodes, devices per node).

    Raises:
        MeshError: if there is less than one device, or the count is not a multiple of the node
            size.
    """
    here, full_axes = _full_axes_of(devices)
    cut = [
        [(f"{name}0", size // inner), (f"{name}1", inner)]
        for name, size in full_axes.items()
        for inner in _inner(size)
    ]
    axis_choices = [full_axes]
    for pair in cut:
        name = pair[0][0][:-1]
        axes = [
            axis
            for own, size in full_axes.items()
            for axis in (pair if own == name else [(own, size)])
        ]
        axis_choices.append(dict(axes))
    return tuple(Mesh(axes, devices_per_node=here) for axes in axis_choices)


def shapes_in_three(devices: Unshaped) -> tuple[Mesh, ...]:
    """Return the shapes with three axes, for devices that otherwise have a single axis; else none.

    Arguments and errors are as in `shapes`.
    """
    here, full_axes = _full_axes_of(devices)
    if len(full_axes) > 1:
        return ()
    ((name, size),) = full_axes.items()
    sizes = [
        (size // inner // middle, middle, inner)
        for inner in _inner(size)
        for middle in _inner(size // inner)
    ]
    return tuple(
        Mesh({f"{name}{i}": part for i, part in enumerate(parts)}, devices_per_node=here)
        for parts in sizes
    )


def _full_axes_of(devices: Unshaped) -> tuple[int, dict[str, int]]:
    """Return the devices per node, and the axes without a split."""
    nodes, here = _in_nodes(devices) if isinstance(devices, int) else devices
    if min(nodes, here) < 1:
        raise MeshError(
            f"a mesh with {nodes} nodes of {here} devices",
            remedy="pass positive numbers, or autopar.Mesh({...})",
        )
    return here, {name: size for name, size in (("node", nodes), ("gpu", here)) if size > 1} or {
        "gpu": 1
    }


def _in_nodes(num_devices: int) -> tuple[int, int]:
    """Return the number of nodes and of devices per node for a device count."""
    if num_devices < 1:
        raise MeshError(
            f"a mesh with {num_devices} devices",
            remedy="pass a positive number, or autopar.Mesh({...})",
        )
    here = min(num_devices, DEVICES_PER_NODE)
    if num_devices % here:
        message = f"{num_devices} devices is not a multiple of {DEVICES_PER_NODE} devices per node"
        raise MeshError(
            message,
            remedy=(
                "pass (nodes, devices per node), as (3, 4), or an autopar.Mesh with the axes of "
                "the machine"
            ),
        )
    return num_devices // here, here


def _inner(size: int) -> Iterator[int]:
    """Yield the possible sizes of the inner one of two axes, in descending order."""
    return (n for n in range(size // 2, 1, -1) if size % n == 0)


@dataclass
class ShapeSearch:
    """Plans for the mesh shapes in turn, each faster than the best before it.

    For each mesh of `shapes_to_try`, the caller makes a plan that beats `best_s`, within `attempt`,
    and passes it to `add`.

    Attributes:
        budget: work for further shapes once there is a plan.
        status: receives progress reports.
        holds: whether a shape has the axes that the constraints name.
        best: the fastest plan.
        untried: shapes that were not tried because the budget was spent.
    """

    budget: WorkBudget
    holds: Callable[[Mesh], bool] = lambda _: True
    status: SearchStatus = field(default_factory=SearchStatus)
    best: Planned | None = None
    untried: list[Mesh] = field(default_factory=list)
    _refusals: list[tuple[Mesh, AutoparError]] = field(default_factory=list)
    _summaries: list[str] = field(default_factory=list)

    @property
    def best_s(self) -> float:
        """Seconds of a step of the fastest plan; infinite without a plan."""
        return math.inf if self.best is None else self.best.plan.prediction.step_s

    def shapes_to_try(self, meshes: Sequence[Mesh], further: Sequence[Mesh] = ()) -> Iterator[Mesh]:
        """Yield the shapes for which there is work left.

        Args:
            meshes: the shapes to try.
            further: shapes to try if these have no plan, and not for lack of memory alone.
        """
        for place, mesh in enumerate(meshes, 1):
            if self.best is not None and not self.budget.take(search_work(len(mesh.axes))):
                why = (
                    "the search had ended" if self.budget.is_over else 'effort="thorough" tries it'
                )
                self._leave_out(mesh, f"not tried: {why}")
                continue
            self.status.begin(f"mesh {mesh}" if len(meshes) > 1 else "", len(meshes) - place)
            yield mesh
        lack_memory = all(isinstance(error, InfeasibleError) for _, error in self._refusals)
        if further and self.best is None and not lack_memory:
            yield from self.shapes_to_try(further)

    def _leave_out(self, mesh: Mesh, why: str) -> None:
        self._summaries.append(f"{mesh} ({why})")
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
            self._summaries.append(f"{mesh} (at least {seconds(error.args[0])})")
        except (InfeasibleError, ConstraintError, MeshError) as error:
            log.info("no plan for mesh %s: %s", mesh, error.what)
            self._summaries.append(f"{mesh} (no plan)")
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
        self._summaries.append(f"{mesh} ({seconds(step_s)})")
        if step_s < self.best_s:
            self.best = found
            self.status.add(found)

    @property
    def refusal(self) -> AutoparError:
        """Return the most informative error if no shape has a plan.

        If all shapes only lack memory, it is the error of the shape that lacks least. Otherwise it
        is that of the simplest shape with the axes that the constraints name, or else of a shape
        with the most axes.
        """

        def rank(refusal: tuple[Mesh, AutoparError]) -> tuple[int, float]:
            mesh, error = refusal
            if isinstance(error, InfeasibleError):
                return 0, error.needed_bytes or math.inf
            return (1, 0) if self.holds(mesh) else (2, -len(mesh.axes))

        assert self._refusals, "a shape without a plan was refused"
        return min(self._refusals, key=rank)[1]

    def note(self, best: Planned) -> Planned:
        """Return a plan with a note that its bound covers its own shape only. The note lists the
        other shapes that were tried.
        """
        if len(self._summaries) < 2:
            return best
        summaries = "; ".join(self._summaries)
        tried = f"only this mesh shape; shapes tried, with the step time of each: {summaries}"
        proof = replace(best.plan.proof, covers=(*best.plan.proof.covers, tried))
        plan = replace(best.plan, proof=proof)
        return replace(best, plan=plan, program=replace(best.program, plan_hash=plan.hash))
