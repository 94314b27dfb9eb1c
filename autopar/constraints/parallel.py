"""Named plans of parallelism: data, context, expert and tensor parallelism. This docstring states
layouts and communication of the grids of tensor parallelism; those of the other plans are in their
docstrings.

Terms. A grid has sides of q devices, and P devices in all. A linear is ``Y[n, m] = X[n, k] W[k,
m]``, where n is all samples times all tokens; an X of which a device holds 1/P is *split P times*.
Layouts are per axis, in the grid's order. Volumes are elements that one device sends, by rings: a
collective over one axis of what is a whole of x elements within the axis sends x·(q−1)/q. They are
per linear and step, tensor by tensor.

Every parameter rests split over both or all three axes of the q's, with its gradient and
optimizer's state; every activation is made and kept until backward split over all axes, P times.
What a product reads gathered is not kept: backward gathers it again. Split less are parameters that
cannot be stored split so often, such as a fused projection's bias (their gradients are all-reduced
on the axes left); sums per token, whole on the axis whose features they sum; and what does not
depend on the batch.

**2d**, axes (a, b): SUMMA (van de Geijn and Watts, 1997) as in Xu and You, "An Efficient 2D Method
for Training Super-Large Deep Learning Models", 2021 (Optimus). X rests [n on a, k on b], n by
samples, and W [k on a, m on b]; Y is made [n on a, m on b].

              forward               backward
    X         all-gather on b       all-gather on b (for W's gradient), reduce-scatter on b (its
                                    gradient): 3·(nk/q)(q−1)/q
    W         all-gather on a       all-gather on a (for X's gradient), reduce-scatter on a (its
                                    gradient): 3·(km/q)(q−1)/q

Together 3(nk + km)(q−1)/q², as in the paper; its broadcasts in a row of devices, of q parts in
turn, are here one all-gather. The papers count each linear's X; here one that several read (q, k
and v; gate and up) is gathered once in each phase, and what they add to its gradient is scattered
once where the model's backward adds that up first (BERT's does not). So it is in all three.

**2.5d**, axes (a, b, d), d of any size: Solomonik and Demmel, "Communication-Optimal Parallel 2.5D
Matrix Multiplication", 2011, as in Wang et al., "Tesseract: Parallelize the Tensor Parallelism
Efficiently", 2021. As 2d on (a, b) with the samples split over d as well: n becomes n/d, and
parameters rest alike on all of d, 1/q² of each. Beside what 2d moves, each gradient is all-reduced
on d as it rests: 2·(km/q²)(d−1)/d. Together 3(nk/d + km)(q−1)/q² + 2km(d−1)/(dq²).

**3d**, axes (i, j, l): Agarwal et al., "A three-dimensional approach to parallel matrix
multiplication", 1995, as in Bian et al., "Maximizing Parallelism in Distributed Training for Huge
Neural Networks", 2021. Samples are split over i always. The residual stream rests [n on i and l,
features on j]. A linear that reads it gathers X on l and W on i, multiplies [n on i, k on j] by [k
on j, m on l], and scatters the sums over j: Y is made [n on i and j, m on l]. The next one reads
that with j and l in each other's place, and gives back what the first one read.

              forward                 backward
    X         all-gather on l         all-gather on l (for W's gradient), reduce-scatter on l (its
                                      gradient): 3·(nk/q²)(q−1)/q
    W         all-gather on i         all-gather on i, reduce-scatter on i: 3·(km/q²)(q−1)/q
    Y         reduce-scatter on j     all-gather on j (of its gradient): 2·(nm/q²)(q−1)/q

Together (3nk + 3km + 2nm)(q−1)/q³; the paper gathers Y's gradient for either product, 3nm. Of a
chain of an odd number of linears beside the residual stream, the result is moved to where the
stream is.

A parameter that is gathered on one axis can rest with others on its dim where that axis splits it
innermost; of a fused projection only the mesh's last can. So of a model with such in 3d, name the
mesh's last axis as i.

Beside the linears, with h features of the stream (n stands for n/d in 2.5d):

    bias of m             2d: gathered on a, its gradient scattered, (m/q)(q−1)/q either; 3d: on i
                          and j, (m/q)(1 − 1/q²)
    norm in parts         its sum all-reduced on b, n/q, in 3d on j, n/q²: one in forward and one in
                          backward (RMS norms as models spell
                          them); its scale is gathered as a bias is, in backward again, and the
                          gradient scattered
    norm as one op        cannot sum over split features: tokens are split instead, which the log
                          says. In 2d its x comes, and the
                          gradient of x goes, by an all-to-all on b, (nh/q²)(q−1)/q each; in 3d what
                          it makes goes to features again and back in backward, in all five on j of
                          (nh/q³)(q−1)/q. Its scale and bias are gathered on all axes
    table of v rows       rests by features on b (j); gathered on a, and its gradient scattered
                          there, (vh/q)(q−1)/q each; in 3d on
                          i and l, (vh/q)(1 − 1/q²) each. One that is the head's weight too lies as
                          the head asks, split by rows on b (l): its sums are scattered,
                          (nh/q)(q−1)/q, in 3d (nh/q²)(q−1)/q, and their gradient gathered
    loss                  a head is a linear; its cross entropy all-reduces three of n/q on b, in 3d
                          of n/q² on l
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autopar.core.mesh import Mesh
from autopar.errors import ConstraintError

GRIDS: Mapping[str, int] = {"2d": 2, "2.5d": 3, "3d": 3}
"""Kind of grid → its number of axes."""


def check_grid(plan: str, kind: str, axes: Sequence[str], mesh: Mesh) -> None:
    """Check that the sides of a grid are equal; for ``2.5d`` the first two.

    Args:
        plan: the plan as text, for the error.
        kind: kind of the grid, of `GRIDS`.
        axes: names of its axes.
        mesh: the mesh.

    Raises:
        ConstraintError: if they differ; the plan, the mesh and the sizes are named.
    """
    sizes = [mesh.shape[mesh.names.index(name)] for name in axes]
    sides = sizes[:2] if kind == "2.5d" else sizes
    if len(set(sides)) > 1:
        words = ", ".join(f"{name}={size}" for name, size in zip(axes, sides, strict=False))
        what = f"{plan}: the sides of its grid are to be equal, in mesh {mesh} they are {words}"
        remedy = "name axes of one size" + (
            ", and the depth as the third" if kind == "2.5d" else ""
        )
        raise ConstraintError(what, remedy=remedy)


# --------------------------------------------------------------------------------------------------
# Named plans. Each forces layouts of every op of the model on some mesh axes; their resolution for
# any model is in `autopar.sharding.resolve_presets`. The docstrings state the communication.
#
# Terms. P is the number of devices on the axes, Ψ the number of elements of all parameters. Volumes
# are the elements that one device sends, by rings: an all-gather or a reduce-scatter of a tensor of
# n elements sends n·(P−1)/P, an all-reduce twice as much.

Axes = str | Sequence[str]
Recompute = Literal["none", "full", "selective"]
PlanName = Literal[
    "ddp",
    "fsdp",
    "context_parallel",
    "expert_parallel",
    "expert_parallel_dispatched",
    "expert_parallel_gathered",
    "tensor_parallel_1d",
    "tensor_parallel_2d",
    "tensor_parallel_2.5d",
    "tensor_parallel_3d",
]

# Names of the plans by the arguments of `expert_parallel` and `tensor_parallel`.
_EXPERTS: Mapping[str, PlanName] = {
    "": "expert_parallel",
    "dispatched": "expert_parallel_dispatched",
    "gathered": "expert_parallel_gathered",
}
_TENSORS: Mapping[str, PlanName] = {
    "1d": "tensor_parallel_1d",
    "2d": "tensor_parallel_2d",
    "2.5d": "tensor_parallel_2.5d",
    "3d": "tensor_parallel_3d",
}


@dataclass(frozen=True, slots=True)
class Parallelism:
    """One named plan on some mesh axes.

    Attributes:
        name: ``ddp``, ``fsdp``, ``context_parallel``, ``expert_parallel``, optionally followed by
            ``_`` and the way in which experts get tokens, or ``tensor_parallel_`` and its kind.
        axes: names of mesh axes, for a grid in its order; None for all axes.
        zero: ZeRO stage of data parallelism: 3 for ``fsdp``, 0 for ``ddp``; `megatron` also uses 1
            and 2.
        sequence: for 1D tensor parallelism, whether the tensors that it leaves whole are split
            along the sequence.
    """

    name: PlanName
    axes: tuple[str, ...] | None
    zero: int = 0
    sequence: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the record of a plan, which `autopar.constraints.read_constraint` reads."""
        words = {"plan": self.name, "axes": None if self.axes is None else list(self.axes)}
        return {**words, "sequence": True} if self.sequence else words

    def __str__(self) -> str:
        arguments = [] if self.kind is None else [repr(self.kind)]
        arguments += [] if self.axes is None else [f"axes={list(self.axes)}"]
        arguments += [f"tokens={self.tokens!r}"] if self.tokens else []
        arguments += ["sequence=True"] if self.sequence else []
        return f"{self.name.removesuffix(f'_{self.kind or self.tokens}')}({', '.join(arguments)})"

    @property
    def kind(self) -> str | None:
        """Kind of tensor parallelism: ``1d``, ``2d``, ``2.5d`` or ``3d``; None for other plans."""
        return self.name.rpartition("_")[2] if self.name.startswith("tensor_parallel") else None

    @property
    def tokens(self) -> str:
        """For expert parallelism, whether tokens are ``dispatched`` or ``gathered``; ``""`` if the
        planner chooses, and for other plans."""
        return (
            self.name.removeprefix("expert_parallel").lstrip("_")
            if self.name.startswith("expert_parallel")
            else ""
        )


def ddp(axes: Axes | None = None) -> Parallelism:
    """Data parallelism: the batch is split over `axes` (by default all), and so is every
    activation; parameters rest whole.

    The batch is dim 0 of the inputs. Each parameter's gradient is summed over the axes once, by an
    all-reduce, a tied one's too: 2Ψ(P−1)/P elements a step (Li et al., "PyTorch Distributed:
    Experiences on Accelerating Data Parallel Training", 2020; an all-reduce's volume as in
    Rajbhandari et al., "ZeRO", 2020, section 7.1). Over several axes it is reduced axis by axis, or
    scattered, reduced and gathered, as the planner likes. A gradient that is read through a lookup
    is summed before it: positions, a relative bias. Beside these the loss, and what the model
    itself sums over its batch.

    An op that couples samples, as a contrastive loss, has gathered as little of what it reads as
    lets it make its own part, or else all of it. The log and what the plan says of its bound
    (`Plan.proof.covers`) name such ops.

    Raises (when a model is planned):
        ConstraintError: naming the first op that cannot be split over the batch into so many parts.
    """
    return Parallelism("ddp", names_of(axes))


def fsdp(axes: Axes | None = None) -> Parallelism:
    """Fully sharded data parallelism, ZeRO's stage 3: as `ddp`, but every parameter rests sharded
    over `axes`, with its gradient and optimizer state, on a dim of the planner's choice. One too
    small to be cut rests whole.

    Each parameter is gathered for forward and its gradient reduce-scattered. Whether the gathered
    copy is kept until backward or gathered again is the planner's, by memory: 2Ψ(P−1)/P elements a
    step, or 3Ψ(P−1)/P (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models", 2020, section 7.2). A device rests with 1/P of the states.

    Raises (when a model is planned):
        ConstraintError: as `ddp`.
    """
    return Parallelism("fsdp", names_of(axes), 3)


def context_parallel(axes: Axes) -> Parallelism:
    """Context parallelism: the sequence, dim 1 of the inputs, is split over `axes`, and so is every
    activation; parameters rest whole.

    Attention reads its own part of the queries and all keys and values, which are gathered
    (Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2). With b samples of s
    tokens and keys of g heads of d features, elements a layer: 2·b·s·g·d(P−1)/P in forward, as much
    in backward for their gradients, and again where they are not kept whole. Each parameter's
    gradient is summed over the axes once, as in `ddp`.

    Of causal attention the last part of the sequence sees most keys, so that all wait for it. Where
    one axis splits the sequence into parts of an even length, attention may have them mirrored
    instead (`autopar.core.placements`): then each device computes 1/P of the whole, at the price of
    half a part of queries (b·s·h/2P elements) sent in forward, half a part of what is made of them,
    and as much in backward for these gradients. The planner has what is faster, layer by layer: of
    long sequences the mirrored parts, of short ones the plain.

    Raises (when a model is planned):
        ConstraintError: naming the first op that cannot compute on a part of the sequence, or not
        into so many parts.
    """
    return Parallelism("context_parallel", names_of(axes))


def expert_parallel(axes: Axes, tokens: Literal["", "dispatched", "gathered"] = "") -> Parallelism:
    """Expert parallelism: the batch is split over `axes` as in `ddp`, and of every layer of experts
    each device has 1/P of the experts, with their gradients and optimizer's states. All other
    parameters rest whole.

    How many tokens pick an expert is known to no one before. Lepikhin et al., "GShard: Scaling
    Giant Models with Conditional Computation and Automatic Sharding", 2020, section 3, and Fedus et
    al., "Switch Transformers", 2021, section 2.2, cut them at a capacity, and drop what is above;
    here none is dropped, so that numbers are the plain model's. There are two ways for tokens to
    meet their experts, and the planner takes the cheaper one for each layer, if `tokens` does not
    say which. Elements that a device sends per layer, with T tokens on the P devices together, h
    features and k picks of each:

    ``"dispatched"`` (GShard; Switch; Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5): a
    token's row goes to the device of each expert that it picked, and what that makes comes back, by
    all-to-alls of the rows that there are. With picks that are balanced, for which they are priced,

        forward     rows of tokens T·h·k(P−1)/P², of results T·h·k(P−1)/P²
        backward    rows of results' gradients and, again, of tokens, T·2h·k(P−1)/P², gates
                    T·k(P−1)/P²; gradients of tokens T·h·k(P−1)/P²,
                    of gates T·k(P−1)/P²

    and, once in forward and once in backward, how many rows go where, a number for each expert.

    ``"gathered"`` (the all-gather dispatcher of Megatron Core's MoE): a device gathers the tokens
    of all P, with their picks and gates, computes with its own experts the rows that picked them
    and no others, and what it makes, zeros for other tokens, is summed and scattered:

        forward     gathered: tokens T·h(P−1)/P, picks T·k(P−1)/P, gates T·k(P−1)/P; scattered:
                    results T·h(P−1)/P
        backward    gathered: the results' gradients T·h(P−1)/P; scattered: those of tokens
                    T·h(P−1)/P, of gates T·k(P−1)/P

    and in backward again what forward gathered, where it is not kept whole. So dispatch sends k/P
    of that per row, and less where P > k. Over several axes at most one of an op dispatches.

    Gradients of experts are summed over none of `axes`. A device computes T·k/P rows where all
    experts are picked alike, which is what is priced; where not, all wait for the one whose experts
    are picked most, and with dispatch it also gets, and holds, that many rows.

    The axes are beside those of `ddp` or `fsdp`, as `megatron(ep=...)` composes them, which leaves
    the two ways to the planner.

    Raises:
        ConstraintError: on other `tokens`. When a model is planned: where it has no experts, or the
            number of experts is no multiple of P, naming the op; where tokens are to be dispatched
            over several axes; and as `ddp`.
    """
    if tokens not in (*_EXPERTS,):
        remedy = 'pass "dispatched" or "gathered", or leave it to the planner'
        raise ConstraintError(f"expert_parallel(tokens={tokens!r}) is not there", remedy=remedy)
    return Parallelism(_EXPERTS[tokens], names_of(axes))


def tensor_parallel(kind: str = "1d", *, axes: Axes, sequence: bool = False) -> Parallelism:
    """Tensor parallelism of linears over `axes`. Of ``"2d"``, ``"2.5d"`` and ``"3d"`` says
    `autopar.constraints.parallel` what lies where and what moves: there axes are named in the
    grid's order. In ``"1d"`` the residual stream, and all else, is whole.

    ``"1d"`` is Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using
    Model Parallelism", 2019, section 3. In each chain from one linear to the next that every op
    between can compute in parts (attention by heads, an MLP, a gated one, each expert), the first
    linears' weights are split by columns (what they make), the last's by rows (what they contract).
    A table of more rows than columns that is looked up by ids of the batch is split by rows, and so
    is a head of more classes than features whose cross entropy is the loss. Other linears stay
    whole, such as those before a norm, and so do keys and values of a single head; where an op is
    the reason, the log names both. Weights rest as they are used. With b samples of s tokens of h
    features, elements a step:

        attention, MLP    one all-reduce of b·s·h in forward and one in backward, each:
                          2·2·b·s·h(P−1)/P for either
        experts           one all-reduce of b·s·h in forward; in backward one of b·s·h, and, for
                          each token's k gates, one of b·s·k for
                          each op that reads their gradient
        embedding         one all-reduce of b·s·h in forward, none in backward
        head and loss     one all-reduce of b·s·h in backward; in forward three of b·s (maximum, sum
                          and the label's logit)

    The one in backward sums what queries, keys and values add to the gradient of their input. Where
    the model's backward adds these to the residual's one by one (BERT), they are three.
    Cross-attention adds one in forward and one in backward, and one more for the encoder's output,
    all layers together. Scales that all heads share (a norm of queries) have gradients of their
    size to sum.

    With `sequence`, Megatron's sequence parallelism (Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models", 2022, section 4.2.2), what lies outside of these
    chains is split along the sequence, dim 1 of the inputs: norms, dropout, the residual stream. In
    place of each all-reduce above one all-gather and one reduce-scatter of b·s·h move as much;
    backward gathers what the first linears read once more, where it is not kept whole; and
    gradients of what all tokens share (norms' weights, biases that are added outside) are summed
    over the axes. Numbers of one per token, which the loss sums, stay as they are.

    Raises:
        ConstraintError: on a kind that is not there, `sequence` of a grid, or a grid with another
            number of axes. When a model is planned: where no input has the sequence that is to be
            split, where the sides of a grid differ in size, where nothing can be split, or naming
            the op that cannot be split, or not into so many parts, such as the view of a projection
            as heads.
    """
    names = names_of(axes) or ()
    if kind not in (*_TENSORS,):
        raise ConstraintError(
            f"tensor_parallel({kind!r}) is not there", remedy='pass "1d", "2d", "2.5d" or "3d"'
        )
    if sequence and kind != "1d":
        what = (
            f"tensor_parallel({kind!r}, sequence=True) is not there: grids split what lies between"
            " linears already"
        )
        raise ConstraintError(what, remedy='pass "1d", or leave sequence out')
    if kind in GRIDS and len(set(names)) != GRIDS[kind]:
        what = (
            f"tensor_parallel({kind!r}) is for {GRIDS[kind]} mesh axes, axes={list(names)} names"
            f" {len(set(names))}"
        )
        raise ConstraintError(
            what,
            remedy="name each side of the grid once, as in tensor_parallel('2d', axes=('a', 'b'))",
        )
    return Parallelism(_TENSORS[kind], names, sequence=sequence)


def axes_of(plan: Parallelism, mesh: Mesh) -> tuple[int, ...]:
    """Return the indices of the axes of a plan.

    Raises:
        ConstraintError: if one is not in the mesh.
    """
    for name in plan.axes or ():
        if name not in mesh.names:
            raise ConstraintError(
                f"{plan}: mesh {mesh} has no axis {name!r}",
                remedy=f"its axes are {', '.join(mesh.names)}",
            )
    return tuple(
        axis for axis, name in enumerate(mesh.names) if plan.axes is None or name in plan.axes
    )


def names_of(axes: Axes | None) -> tuple[str, ...] | None:
    """Return the names of axes that a user passes, one or several, as a tuple; None for all axes.

    Raises:
        ConstraintError: if they are no names.
    """
    names = (axes,) if isinstance(axes, str) else None if axes is None else tuple(axes)
    if names is not None and (not names or not all(isinstance(name, str) for name in names)):
        raise ConstraintError(
            f"axes={axes!r} are no names of mesh axes", remedy='pass names, as in axes=("gpu",)'
        )
    return names
