"""Plans of the field by name: what is forced on some mesh axes, on every op of the model. How, for any model, is in
`autopar.strategies.named`; what each moves is stated here.

Terms. P is the number of devices on the axes, Ψ the elements of all parameters. Volumes are what one device sends, by rings: an
all-gather or a reduce-scatter of a tensor of n elements sends n·(P−1)/P, an all-reduce twice that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autopar.constraints.grids import GRIDS, check_grid
from autopar.constraints.layouts import LayoutConstraint, check_layouts
from autopar.constraints.pipelines import Pipelined
from autopar.errors import ConstraintError
from autopar.mesh import Mesh

Axes = str | Sequence[str]
Recompute = Literal["none", "full", "selective"]
PlanName = Literal["ddp", "fsdp", "tensor_parallel_1d", "tensor_parallel_2d", "tensor_parallel_2.5d", "tensor_parallel_3d"]


@dataclass(frozen=True, slots=True)
class Parallelism:
    """One plan of the field on some mesh axes.

    Attributes:
        name: ``ddp``, ``fsdp`` or ``tensor_parallel_`` and its kind.
        axes: names of mesh axes, of a grid in its order; None for all of them.
        zero: ZeRO's stage of data parallelism: 3 of ``fsdp``, 0 of ``ddp``; `megatron` has 1 and 2 as well.
    """

    name: PlanName
    axes: tuple[str, ...] | None
    zero: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"plan": self.name, "axes": None if self.axes is None else list(self.axes)}

    def __str__(self) -> str:
        arguments = [] if self.kind is None else [self.kind]
        arguments += [] if self.axes is None else [f"axes={list(self.axes)}"]
        return f"{self.name.removesuffix('_' + arguments[0]) if self.kind else self.name}({', '.join(arguments)})"

    @property
    def kind(self) -> str | None:
        """Of tensor parallelism: ``1d``, ``2d``, ``2.5d`` or ``3d``."""
        return self.name.rpartition("_")[2] if self.name.startswith("tensor_parallel") else None


@dataclass(frozen=True, slots=True)
class Megatron:
    """`megatron`'s arguments: numbers of devices, or names of axes."""

    tp: int | tuple[str, ...]
    dp: int | tuple[str, ...] | None
    zero: int
    recompute: Recompute | None = None
    pp: int | str = 1
    microbatches: int | None = None

    def to_json(self) -> dict[str, Any]:
        words = {name: list(value) if isinstance(value, tuple) else value for name, value in (("tp", self.tp), ("dp", self.dp))}
        again = {} if self.recompute is None else {"recompute": self.recompute}
        stages = {} if self.pp == 1 and not self.microbatches else {"pp": self.pp, "microbatches": self.microbatches}
        return {"plan": "megatron", **words, "zero": self.zero, **again, **stages}

    def __str__(self) -> str:
        again = "" if self.recompute is None else f", recompute={self.recompute!r}"
        stages = "" if self.pp == 1 and not self.microbatches else f", pp={self.pp!r}, microbatches={self.microbatches}"
        return f"megatron(tp={_text(self.tp)}, dp={_text(self.dp)}, zero={self.zero}{again}{stages})"


Constraint = LayoutConstraint | Parallelism | Megatron | Pipelined


def ddp(axes: Axes | None = None) -> Parallelism:
    """Data parallelism: the batch is split over `axes` (by default all), and so is every activation; parameters rest whole.

    The batch is dim 0 of the inputs. Each parameter's gradient is summed over the axes once, by an all-reduce, a tied one's too:
    2Ψ(P−1)/P elements a step (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020; an
    all-reduce's volume as in Rajbhandari et al., "ZeRO", 2020, section 7.1). Over several axes it is reduced axis by axis, or
    scattered, reduced and gathered, as the planner likes. A gradient that is read through a lookup is summed before it: positions, a
    relative bias. Beside these the loss, and what the model itself sums over its batch.

    Raises (when a model is planned):
        ConstraintError: naming the first op that cannot be split over the batch, or not into so many parts.
    """
    return Parallelism("ddp", _names(axes))


def fsdp(axes: Axes | None = None) -> Parallelism:
    """Fully sharded data parallelism, ZeRO's stage 3: as `ddp`, but every parameter rests sharded over `axes`, with its gradient
    and optimizer state, on a dim of the planner's choice. One too small to be cut rests whole.

    Each parameter is gathered for forward and its gradient reduce-scattered. Whether the gathered copy is kept until backward
    or gathered again is the planner's, by memory: 2Ψ(P−1)/P elements a step, or 3Ψ(P−1)/P (Rajbhandari et al., "ZeRO: Memory
    Optimizations Toward Training Trillion Parameter Models", 2020, section 7.2). A device rests with 1/P of the states.

    Raises (when a model is planned):
        ConstraintError: as `ddp`.
    """
    return Parallelism("fsdp", _names(axes), 3)


def tensor_parallel(kind: str = "1d", *, axes: Axes) -> Parallelism:
    """Tensor parallelism of linears over `axes`. Of ``"2d"``, ``"2.5d"`` and ``"3d"`` says `autopar.constraints.grids` what lies
    where and what moves: there axes are named in the grid's order. In ``"1d"`` the residual stream, and all else, is whole.

    ``"1d"`` is Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019,
    section 3. In each chain from one linear to the next that every op between can compute in parts (attention by heads, an MLP,
    a gated one), the first linears' weights are split by columns (what they make), the last's by rows (what they contract). A
    table of more rows than columns that is looked up by ids of the batch is split by rows, and so is a head of more classes than
    features whose cross entropy is the loss. Other linears stay whole, such as those before a norm, and so do keys and values of
    a single head; where an op is the reason, the log names both. Weights rest as they are used. With b samples of s tokens of h
    features, elements a step:

        attention, MLP    one all-reduce of b·s·h in forward and one in backward, each: 2·2·b·s·h(P−1)/P for either
        embedding         one all-reduce of b·s·h in forward, none in backward
        head and loss     one all-reduce of b·s·h in backward; in forward three of b·s (maximum, sum and the label's logit)

    The one in backward sums what queries, keys and values add to the gradient of their input. Where the model's backward adds
    these to the residual's one by one (BERT), they are three. Cross-attention adds one in forward and one in backward, and one
    more for the encoder's output, all layers together. Scales that all heads share (a norm of queries) have gradients of their
    size to sum.

    Raises:
        ConstraintError: on a kind that is not there, or a grid with another number of axes. When a model is planned: where the
            sides of a grid differ in size, where nothing can be split, or naming the op that cannot be split, or not into so many
            parts, such as the view of a projection as heads.
    """
    names = _names(axes) or ()
    if kind not in ("1d", *GRIDS):
        raise ConstraintError(f"tensor_parallel({kind!r}) is not there", remedy='pass "1d", "2d", "2.5d" or "3d"')
    if kind in GRIDS and len(set(names)) != GRIDS[kind]:
        what = f"tensor_parallel({kind!r}) is for {GRIDS[kind]} mesh axes, axes={list(names)} names {len(set(names))}"
        raise ConstraintError(what, remedy="name each side of the grid once, as in tensor_parallel('2d', axes=('a', 'b'))")
    return Parallelism(f"tensor_parallel_{kind}", names)  # type: ignore[arg-type]


def megatron(
    *,
    tp: int | Axes = 1,
    dp: int | Axes | None = None,
    zero: int = 0,
    recompute: Recompute | None = None,
    pp: int | str = 1,
    microbatches: int | None = None,
) -> Megatron:
    """Megatron's plan: `tensor_parallel` of degree `tp`, data parallelism of degree `dp`, `pipeline` of `pp` stages; together the whole
    mesh.

    Args:
        tp, dp: numbers of devices, or names of axes. By number, `tp` takes the last axes whose sizes give it as their product
            (in a mesh written from the slowest links to the fastest these have the fastest). `dp` takes what is left, of which it
            must be the size.
        zero: 0 as `ddp`, 3 as `fsdp` over the data axes. 1 and 2 rest as 3 between steps, and hold parameters gathered through a
            step, of several microbatches; with 1 gradients add up as partial sums, which are reduced once at its end, with 2 each
            microbatch's is scattered (`autopar.cost.held` has the volumes).
        recompute: what backward runs again: ``none``, ``full``: all that it reads of a layer but what crosses between layers, or
            ``selective``: in attention what lies around the softmax (Korthikanti et al., "Reducing Activation Recomputation in Large
            Transformer Models", 2022, section 5), no more in either; by default what the planner likes. With ``full`` a layer keeps
            its input, b·s·h elements, and what it gathers or reduces for what is run again it does again: one all-reduce of b·s·h
            more in backward over the tensor axes, attention's. ``selective`` keeps no tensor of [heads, s, s].
        pp: number of stages, or the name of their axis; by number the first axis of that size. microbatches: as in `pipeline`, also
            without stages.

    Volumes are those of the two plans, with the batch and the parameters that are left on a device: each rank of a tensor group
    has b/dp samples, and all-reduces gradients of the part of the parameters that it holds.

    Raises:
        ConstraintError: on a stage or a recomputation that is not there. When a model is planned: where the axes are not in the mesh,
            or there is no attention to run again.
    """
    if zero not in (0, 1, 2, 3):
        raise ConstraintError(f"megatron(zero={zero}) is not there", remedy="pass 0, or one of ZeRO's stages 1, 2 and 3")
    if recompute not in (None, "none", "full", "selective"):
        raise ConstraintError(f"megatron(recompute={recompute!r}) is not there", remedy='pass "none", "full" or "selective"')
    if not isinstance(pp, str) and pp < 1:
        raise ConstraintError(f"megatron(pp={pp}) is no number of stages", remedy="pass a number from 1, or the name of an axis")
    return Megatron(_degree(tp), None if dp is None else _degree(dp), zero, recompute, pp, microbatches)


def pipeline_in(constraints: Iterable[Constraint], mesh: Mesh) -> Pipelined | None:
    """The pipeline that is asked for, by `pipeline` or `megatron`.

    Raises:
        ConstraintError: where two are, or no axis has the size that is asked for.
    """
    found: list[Pipelined] = []
    for constraint in constraints:
        if isinstance(constraint, Pipelined):
            found.append(constraint)
        elif isinstance(constraint, Megatron) and (constraint.pp != 1 or constraint.zero in (1, 2) or constraint.microbatches):
            found.append(Pipelined(_stage_axis(constraint, mesh), constraint.microbatches, "1f1b", None, independent=False))
    if len(found) > 1:
        raise ConstraintError(f"{found[0]} and {found[1]} both cut the model", remedy="pass one of them")
    return found[0] if found else None


def _stage_axis(constraint: Megatron, mesh: Mesh) -> str:
    if isinstance(constraint.pp, str) or constraint.pp == 1:
        return constraint.pp if isinstance(constraint.pp, str) else ""
    for axis in mesh.axes:
        if axis.size == constraint.pp:
            return axis.name
    what = f"{constraint}: no axis of mesh {mesh} has {constraint.pp} devices"
    raise ConstraintError(what, remedy="plan for a mesh with an axis of that size, or name the axis: pp='node'")


def check(constraint: Constraint, mesh: Mesh) -> None:
    """That a constraint speaks of this mesh.

    Raises:
        ConstraintError: naming the constraint and the mesh.
    """
    if isinstance(constraint, LayoutConstraint):
        check_layouts(constraint, mesh)
    elif isinstance(constraint, Pipelined):
        if constraint.axis is not None:
            mesh.without(constraint.axis)
    else:
        list(parallelisms([constraint], mesh))


def parallelisms(constraints: Iterable[Constraint], mesh: Mesh) -> Iterator[Parallelism]:
    """The named plans among the constraints, each with its axes named; `megatron` is two.

    Raises:
        ConstraintError: where an axis is not in the mesh, or two plans claim one.
    """
    claimed: dict[str, Parallelism] = {}
    for constraint in constraints:
        if isinstance(constraint, LayoutConstraint | Pipelined):
            continue
        for plan in _parts(constraint, mesh) if isinstance(constraint, Megatron) else (constraint,):
            names = tuple(mesh.names[axis] for axis in axes_of(plan, mesh))
            if plan.kind is not None and plan.kind in GRIDS:
                check_grid(str(plan), plan.kind, plan.axes or (), mesh)
                names = plan.axes or ()
            for name in names:
                if name in claimed:
                    what = f"{constraint} and {claimed[name]} both speak of axis {name!r}"
                    raise ConstraintError(what, remedy="name the axes of each, for example ddp(axes='node')")
                claimed[name] = plan
            if names:
                yield Parallelism(plan.name, names, plan.zero)


def axes_of(plan: Parallelism, mesh: Mesh) -> tuple[int, ...]:
    """Indices of the plan's axes.

    Raises:
        ConstraintError: where one is not in the mesh.
    """
    for name in plan.axes or ():
        if name not in mesh.names:
            raise ConstraintError(f"{plan}: mesh {mesh} has no axis {name!r}", remedy=f"its axes are {', '.join(mesh.names)}")
    return tuple(axis for axis, name in enumerate(mesh.names) if plan.axes is None or name in plan.axes)


def _parts(constraint: Megatron, mesh: Mesh) -> tuple[Parallelism, Parallelism]:
    tensor = _last_axes(constraint, mesh) if isinstance(constraint.tp, int) else constraint.tp
    left = tuple(name for name in mesh.names if name not in tensor)
    data = left if constraint.dp is None or isinstance(constraint.dp, int) else constraint.dp
    size = math.prod(axis.size for axis in mesh.axes if axis.name in data)
    if (isinstance(constraint.dp, int) and size != constraint.dp) or not set(left) <= {*data, *(a.name for a in mesh.axes if a.size == 1)}:
        sizes = math.prod(axis.size for axis in mesh.axes if axis.name in left)
        what = f"{constraint} does not fill mesh {mesh}: beside the tensor axes it has {sizes} devices"
        raise ConstraintError(what, remedy=f"pass dp={sizes}, or leave it out")
    return Parallelism("tensor_parallel_1d", tensor), Parallelism("fsdp" if constraint.zero else "ddp", data, constraint.zero)


def _last_axes(constraint: Megatron, mesh: Mesh) -> tuple[str, ...]:
    """The axes whose sizes give `tp`: the last ones where possible, as few as possible."""
    wide = [axis for axis in reversed(mesh.axes) if axis.size > 1]
    for count in range(len(wide) + 1):
        for axes in itertools.combinations(wide, count):
            if math.prod(axis.size for axis in axes) == constraint.tp:
                return tuple(axis.name for axis in axes)
    what = f"{constraint}: no axes of mesh {mesh} make {constraint.tp} devices together"
    raise ConstraintError(what, remedy="plan for a mesh with an axis of that size, or name the axes: tp='gpu'")


def _names(axes: Axes | None) -> tuple[str, ...] | None:
    names = (axes,) if isinstance(axes, str) else None if axes is None else tuple(axes)
    if names is not None and (not names or not all(isinstance(name, str) for name in names)):
        raise ConstraintError(f"axes={axes!r} are no names of mesh axes", remedy='pass names, as in axes=("gpu",)')
    return names


def _degree(value: int | Axes) -> int | tuple[str, ...]:
    if isinstance(value, int):
        if value < 1:
            raise ConstraintError(f"{value} is no number of devices", remedy="pass a number from 1, or names of axes")
        return value
    return _names(value) or ()


def _text(value: int | tuple[str, ...] | None) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
