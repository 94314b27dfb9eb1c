"""`megatron`: tensor, context, data, expert and pipeline parallelism combined, as in
Megatron-LM."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autopar.constraints.parallel import Axes, Parallelism, PlanName, names_of
from autopar.core.keywords import named
from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError

Recompute = Literal["none", "full", "selective"]


@dataclass(frozen=True, slots=True)
class Megatron:
    """The arguments of `megatron`: numbers of devices, or names of axes."""

    tp: int | tuple[str, ...]
    dp: int | tuple[str, ...] | None
    zero: int
    recompute: Recompute | None = None
    pp: int | str = 1
    microbatches: int | None = None
    cp: int | tuple[str, ...] = 1
    chunks: int = 1
    ep: int | tuple[str, ...] = 1
    free: tuple[str, ...] = ()
    sequence: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the record of a plan, which `autopar.constraints.read_constraint` reads."""
        degrees = [
            ("tp", self.tp),
            ("dp", self.dp),
            *(pair for pair in (("cp", self.cp), ("ep", self.ep)) if pair[1] != 1),
        ]
        words = {
            name: list(value) if isinstance(value, tuple) else value for name, value in degrees
        }
        again = {} if self.recompute is None else {"recompute": self.recompute}
        stages = (
            {}
            if self.pp == 1 and not self.microbatches
            else {"pp": self.pp, "microbatches": self.microbatches}
        )
        stages |= {"chunks": self.chunks} if self.chunks > 1 else {}
        stages |= {"sequence": True} if self.sequence else {}
        free = {"free": list(self.free)} if self.free else {}
        return {"plan": "megatron", **words, "zero": self.zero, **again, **stages, **free}

    def __str__(self) -> str:
        degrees = (
            ("tp", self.tp, 1),
            ("dp", self.dp, None),
            ("cp", self.cp, 1),
            ("ep", self.ep, 1),
        )
        arguments = [
            f"{word}={_text(degree)}" for word, degree, default in degrees if degree != default
        ]
        arguments += ["sequence=True"] if self.sequence else []
        arguments += [f"zero={self.zero}"] if self.zero else []
        arguments += [] if self.recompute is None else [f"recompute={self.recompute!r}"]
        arguments += [] if self.pp == 1 else [f"pp={self.pp!r}"]
        arguments += [] if self.microbatches is None else [f"microbatches={self.microbatches}"]
        arguments += [f"chunks={self.chunks}"] if self.chunks > 1 else []
        arguments += [f"free={list(self.free)}"] if self.free else []
        return f"megatron({', '.join(arguments)})"


@named("autopar.constraints.megatron", "docs/constraints.md")
def megatron(
    *,
    tp: int | Axes = 1,
    dp: int | Axes | None = None,
    cp: int | Axes = 1,
    ep: int | Axes = 1,
    zero: int = 0,
    recompute: Recompute | None = None,
    pp: int | str = 1,
    microbatches: int | None = None,
    chunks: int = 1,
    free: Axes = (),
    sequence: bool = False,
) -> Megatron:
    """Megatron's combination of parallelisms: `tensor_parallel` of degree `tp`, `context_parallel`
    of degree `cp`, data parallelism of degree `dp` and `pipeline` of `pp` stages. Together they use
    the whole mesh, except for the axes in `free`. Over `ep` of the `dp` devices, experts are split
    by `expert_parallel`.

    Args:
        tp, cp: degrees, or names of axes. A degree of `tp` takes the last axes of the mesh whose
            sizes have it as their product, which are those with the fastest links if axes are named
            from the slowest to the fastest. A degree of `cp` takes the last such axes before these.
        dp: a degree, or names of axes. It gets all axes that are left, and the degree must be their
            size; None takes any size.
        ep: a degree, or names of axes of `dp`. A degree takes the last of these, as in Megatron
            Core, where expert parallelism divides data parallelism. Experts are stored split over
            these axes for every `zero`, and over the rest of `dp` like other parameters.
        zero: 0 is `ddp`, and 3 is `fsdp` over the axes of `dp` and `cp`. 1 and 2 store parameters
            sharded between steps, as 3 does, but keep them gathered during a step of several
            microbatches. With 1, gradients accumulate as partial sums, which are reduced once at
            the end of the step. With 2, the gradient of each microbatch is reduce-scattered. This
            also holds with 1 for gradients that are summed where they are computed, such as one
            that passes through a lookup. `autopar.cost.zero_stages` states the volumes.
        recompute: what backward computes again. ``"none"``: nothing. ``"full"``: everything that it
            reads of a layer, except for tensors that cross between layers. A layer then keeps its
            input, b·s·h elements, and repeats the collectives of the ops that run again: one more
            all-reduce of b·s·h in backward over the tensor axes, that of attention.
            ``"selective"``: the ops around the softmax of attention, so that no tensor of [heads,
            s, s] is kept (Korthikanti et al., "Reducing Activation Recomputation in Large
            Transformer Models", 2022, section 5). None leaves it to the planner.
        pp: number of stages, or the name of their axis. A number takes the first axis of that size.
        microbatches: as for `pipeline`; also possible without stages.
        chunks: stages per device (Megatron's virtual pipeline). With 2 or more the schedule is
            interleaved.
        free: names of axes that the constraint leaves to the planner.
        sequence: as for `tensor_parallel`.

    The volumes are those of the combined plans, with the batch and the parameters of one device:
    each rank of a tensor group has b/dp samples, and all-reduces gradients of its own part of the
    parameters.

    Raises:
        ConstraintError: if `zero`, `recompute`, `pp` or `chunks` has an invalid value. When a model
            is planned: if axes are not in the mesh, or `recompute` asks for attention and there is
            none.
    """
    if zero not in (0, 1, 2, 3):
        raise ConstraintError(
            f"zero must be 0, 1, 2 or 3 in megatron, got {zero}",
            remedy="pass 0, or one of the ZeRO stages 1, 2 and 3",
        )
    if recompute not in (None, "none", "full", "selective"):
        raise ConstraintError(
            f'recompute must be "none", "full" or "selective" in megatron, got {recompute!r}',
            remedy='pass "none", "full" or "selective"',
        )
    if not isinstance(pp, str) and pp < 1:
        raise ConstraintError(
            f"pp must be a positive number of stages in megatron, got {pp}",
            remedy="pass a positive number, or the name of an axis",
        )
    if chunks < 1 or (chunks > 1 and pp == 1):
        message = (
            f"megatron(pp={pp!r}, chunks={chunks}) does not define a pipeline with that many stages"
        )
        raise ConstraintError(message, remedy="pass pp too, and a positive number of chunks")
    degrees = _degree(tp), None if dp is None else _degree(dp)
    return Megatron(
        *degrees,
        zero,
        recompute,
        pp,
        microbatches,
        _degree(cp),
        chunks,
        _degree(ep),
        names_of(free or None) or (),
        sequence,
    )


def stage_axis(constraint: Megatron, mesh: Mesh) -> str:
    """Return the name of the mesh axis of a constraint's stages; ``""`` if there is one stage.

    Raises:
        ConstraintError: if no axis has as many devices as there are stages.
    """
    if isinstance(constraint.pp, str) or constraint.pp == 1:
        return constraint.pp if isinstance(constraint.pp, str) else ""
    for axis in mesh.axes:
        if axis.size == constraint.pp:
            return axis.name
    message = f"{constraint}: mesh {mesh} has no axis with {constraint.pp} devices"
    raise ConstraintError(
        message, remedy="use a mesh with an axis of that size, or name the axis: pp='node'"
    )


def parts_of(constraint: Megatron, mesh: Mesh) -> tuple[Parallelism, ...]:
    """Return the tensor, context, expert and data parallelism of a constraint on a mesh, each with
    the names of its axes.

    Raises:
        ConstraintError: if their axes do not fill the mesh.
    """
    wide = [a.name for a in mesh.axes if a.size > 1 and a.name not in constraint.free]
    tensor = _last_axes(constraint, "tp", constraint.tp, wide, mesh)
    others = [name for name in wide if name not in tensor]
    context = _last_axes(constraint, "cp", constraint.cp, others, mesh)
    free_axes = tuple(
        name for name in mesh.names if name not in (*tensor, *context, *constraint.free)
    )
    experts = _expert_axes(constraint, free_axes, mesh)
    data = tuple(
        name for name in _data_axes(constraint, free_axes, experts, mesh) if name not in experts
    )
    pairs: tuple[tuple[PlanName, tuple[str, ...]], ...] = (
        ("context_parallel", context),
        ("expert_parallel", experts),
    )
    along = tuple(Parallelism(name, axes, constraint.zero) for name, axes in pairs if axes)
    chains = Parallelism("tensor_parallel_1d", tensor, sequence=constraint.sequence)
    return chains, *along, Parallelism("fsdp" if constraint.zero else "ddp", data, constraint.zero)


def _expert_axes(constraint: Megatron, left: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which experts are split, which are axes of data parallelism.

    Args:
        constraint: the constraint.
        left: names of the axes that neither tensor nor context parallelism has.
        mesh: the mesh.

    Raises:
        ConstraintError: if the constraint names another axis.
    """
    wide = [axis.name for axis in mesh.axes if axis.size > 1 and axis.name in left]
    experts = _last_axes(constraint, "ep", constraint.ep, wide, mesh)
    if set(experts) <= {*left, *_trivial_axes(mesh)}:
        return experts
    message = (
        f"{constraint}: experts are split over axes of data parallelism, which "
        f"{', '.join(experts)} are not"
    )
    names = f": {', '.join(left)}" if left else ""
    raise ConstraintError(message, remedy=f"name axes that are not used by tp, cp or pp{names}")


def _data_axes(
    constraint: Megatron, left: tuple[str, ...], experts: tuple[str, ...], mesh: Mesh
) -> tuple[str, ...]:
    """Return the axes of data parallelism, with those of the experts.

    Args:
        constraint: the constraint.
        left: names of the axes that neither tensor nor context parallelism has.
        experts: names of the axes over which experts are split.
        mesh: the mesh.

    Raises:
        ConstraintError: if the axes do not fill the mesh, or have not as many devices as `dp` says.
    """
    dp = constraint.dp
    data = tuple(dict.fromkeys((*dp, *experts))) if isinstance(dp, tuple) else left
    has_devices = not isinstance(dp, int) or _num_devices(data, mesh) == dp
    if has_devices and set(left) <= {*data, *_trivial_axes(mesh)}:
        return data
    size = _num_devices(left, mesh)
    message = (
        f"{constraint} does not fill mesh {mesh}: {size} devices remain besides the tensor axes"
    )
    raise ConstraintError(message, remedy=f"pass dp={size}, or omit it")


def _num_devices(names: Collection[str], mesh: Mesh) -> int:
    """Return the product of the sizes of the axes."""
    return math.prod(axis.size for axis in mesh.axes if axis.name in names)


def _trivial_axes(mesh: Mesh) -> set[str]:
    """Return the names of the axes of size 1."""
    return {axis.name for axis in mesh.axes if axis.size == 1}


def _last_axes(
    constraint: Megatron, word: str, degree: int | tuple[str, ...], names: Sequence[str], mesh: Mesh
) -> tuple[str, ...]:
    """The axes that are named, or those of `names` whose sizes multiply to the degree: the last
    ones if possible, and as few as possible."""
    if not isinstance(degree, int):
        return degree
    wide = [axis for axis in reversed(mesh.axes) if axis.name in names]
    for count in range(len(wide) + 1):
        for axes in itertools.combinations(wide, count):
            if math.prod(axis.size for axis in axes) == degree:
                return tuple(axis.name for axis in axes)
    message = f"{constraint}: no combination of axes of mesh {mesh} has {degree} devices"
    raise ConstraintError(
        message, remedy=f"use a mesh with an axis of that size, or name the axes: {word}='gpu'"
    )


def _degree(value: int | Axes) -> int | tuple[str, ...]:
    if isinstance(value, int):
        if value < 1:
            raise ConstraintError(
                f"the number of devices must be positive, got {value}",
                remedy="pass a positive number, or names of axes",
            )
        return value
    return names_of(value) or ()


def _text(value: int | tuple[str, ...] | None) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
