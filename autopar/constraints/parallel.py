"""Named plans of parallelism: data, context, expert and tensor parallelism. This docstring states
layouts and communication of the grids of tensor parallelism. The docstrings of the other plans
state theirs.

Terms. A grid has sides of q devices, and P devices in all. A linear is ``Y[n, m] = X[n, k] W[k,
m]``, where n is the number of samples times the number of tokens. Layouts are per axis, in the
order of the grid. Volumes are elements that one device sends in ring collectives: a collective over
one axis, of a tensor with x elements on the devices of the axis together, sends x·(q−1)/q. They are
per linear and step, for each tensor.

Each parameter is stored split over all axes of size q, with its gradient and optimizer state. Each
activation is computed and kept split over all axes, so that a device has 1/P of it. Gathered
operands of a product are not kept; backward gathers them again. There are three exceptions.
Parameters that cannot be split over all axes, such as the bias of a fused projection, are split
over fewer axes, and their gradients are all-reduced over the others. Sums per token are replicated
over the axis whose features they sum. Tensors that do not depend on the batch are replicated.

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

from autopar.core.keywords import named
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
        message = (
            f"{plan}: the sides of the grid must have equal sizes, but in mesh {mesh} they are "
            f"{words}"
        )
        remedy = "name axes of equal size" + (
            ", and the depth as the third axis" if kind == "2.5d" else ""
        )
        raise ConstraintError(message, remedy=remedy)


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


@named("autopar.constraints.ddp", "docs/constraints.md")
def ddp(axes: Axes | None = None) -> Parallelism:
    """Data parallelism: the batch and every activation are split over `axes` (all axes by default),
    and parameters are replicated.

    The batch is dim 0 of the inputs. The gradient of each parameter, tied or not, is summed over
    the axes once, by an all-reduce of 2Ψ(P−1)/P elements per step (Li et al., "PyTorch Distributed:
    Experiences on Accelerating Data Parallel Training", 2020; for the volume see Rajbhandari et
    al., "ZeRO", 2020, section 7.1). Over several axes the planner chooses between one all-reduce
    per axis, and a reduce-scatter, an all-reduce and an all-gather. A gradient that passes through
    a lookup, such as that of position embeddings or of a relative bias, is summed before the
    lookup. The loss, and every sum over the batch in the model itself, are also reduced.

    An op that couples samples, such as a contrastive loss, reads gathered operands: only those that
    it needs to compute its own part, or else all of them. The log and `Plan.proof.covers` name such
    ops.

    Args:
        axes: names of mesh axes; None for all axes.

    Raises (when a model is planned):
        ConstraintError: if an op cannot be split over the batch into P parts. The error names the
            first such op.
    """
    return Parallelism("ddp", names_of(axes))


@named("autopar.constraints.fsdp", "docs/constraints.md")
def fsdp(axes: Axes | None = None) -> Parallelism:
    """Fully sharded data parallelism, stage 3 of ZeRO: as `ddp`, but each parameter is stored
    sharded over `axes`, together with its gradient and optimizer state.

    The planner chooses the dim that is sharded. A parameter that is too small to shard is
    replicated. A device stores 1/P of the states.

    Each parameter is gathered for forward, and its gradient is reduce-scattered. The planner
    decides by the memory budget whether the gathered copy is kept until backward, which takes
    2Ψ(P−1)/P elements per step, or gathered again, which takes 3Ψ(P−1)/P (Rajbhandari et al.,
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 7.2).

    Args:
        axes: names of mesh axes; None for all axes.

    Raises (when a model is planned):
        ConstraintError: as `ddp`.
    """
    return Parallelism("fsdp", names_of(axes), 3)


@named("autopar.constraints.context_parallel", "docs/constraints.md")
def context_parallel(axes: Axes) -> Parallelism:
    """Context parallelism: the sequence, dim 1 of the inputs, and every activation are split over
    `axes`, and parameters are replicated.

    Each device computes attention of its own queries with all keys and values, which are gathered
    (Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2). With b samples of s
    tokens, and keys of g heads of d features, a layer sends 2·b·s·g·d(P−1)/P elements in forward,
    the same number in backward for their gradients, and the same again if gathered keys and values
    are not kept. The gradient of each parameter is summed over the axes once, as in `ddp`.

    With causal attention, queries at the end of the sequence see the most keys, and all devices
    wait for the last part. If one axis splits the sequence into parts of even length, attention may
    use mirrored parts instead (`autopar.core.placements`). Each device then computes 1/P of the
    attention. In forward this sends half a part of the queries, b·s·h/2P elements, and half a part
    of the result; in backward it sends the same number for their gradients. The planner chooses for
    each layer: mirrored parts are faster for long sequences, plain parts for short ones.

    Args:
        axes: names of mesh axes.

    Raises (when a model is planned):
        ConstraintError: if an op cannot compute on a part of the sequence, or not on P parts. The
            error names the first such op.
    """
    return Parallelism("context_parallel", names_of(axes))


@named("autopar.constraints.expert_parallel", "docs/constraints.md")
def expert_parallel(axes: Axes, tokens: Literal["", "dispatched", "gathered"] = "") -> Parallelism:
    """Expert parallelism: the batch is split over `axes` as in `ddp`, and each device has 1/P of
    the experts of every expert layer, with their gradients and optimizer state. All other
    parameters are replicated.

    The number of tokens that pick an expert is not known in advance. Lepikhin et al., "GShard:
    Scaling Giant Models with Conditional Computation and Automatic Sharding", 2020, section 3, and
    Fedus et al., "Switch Transformers", 2021, section 2.2, limit it by a capacity and drop the
    remaining tokens. Here no token is dropped, and results equal those of the plain model. There
    are two ways to bring tokens and experts together. The planner chooses the cheaper one for each
    layer, unless `tokens` names one. T is the number of tokens on the P devices together, h the
    number of features, and k the number of experts that a token picks. A device sends, per layer:

    ``"dispatched"`` (GShard; Switch; Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5): each
    token's row is sent to the device of each expert that the token picked, and the result is sent
    back. These are all-to-alls of as many rows as there are. The price assumes balanced picks:

        forward     rows of tokens T·h·k(P−1)/P², of results T·h·k(P−1)/P²
        backward    rows of results' gradients and, again, of tokens, T·2h·k(P−1)/P², gates
                    T·k(P−1)/P²; gradients of tokens T·h·k(P−1)/P²,
                    of gates T·k(P−1)/P²

    Forward and backward each also exchange the counts of rows, one number per expert.

    ``"gathered"`` (the all-gather dispatcher of Megatron Core's MoE): a device gathers the tokens
    of all P devices, with their picks and gates, and computes the rows that picked its own experts.
    The results, with zeros for other tokens, are reduce-scattered:

        forward     gathered: tokens T·h(P−1)/P, picks T·k(P−1)/P, gates T·k(P−1)/P; scattered:
                    results T·h(P−1)/P
        backward    gathered: the results' gradients T·h(P−1)/P; scattered: those of tokens
                    T·h(P−1)/P, of gates T·k(P−1)/P

    Backward gathers again what forward gathered, unless it is kept. Dispatch sends k/P times as
    many elements per row, which is less if P > k. If `axes` are several, at most one axis of an op
    dispatches.

    Gradients of experts are not summed over `axes`. The price assumes that all experts are picked
    equally often, so that each device computes T·k/P rows. Otherwise all devices wait for the one
    whose experts are picked most; with dispatch, this device also receives and stores more rows.

    Combine the plan with `ddp` or `fsdp` on other axes, or use ``megatron(ep=...)``, which leaves
    the choice between the two ways to the planner.

    Args:
        axes: names of mesh axes.
        tokens: ``"dispatched"``, ``"gathered"``, or ``""`` for the planner's choice.

    Raises:
        ConstraintError: if `tokens` has another value. When a model is planned: as `ddp`, and if
            the model has no experts, the number of experts of an op is not a multiple of P, or
            tokens are to be dispatched over several axes.
    """
    if tokens not in (*_EXPERTS,):
        remedy = 'pass "dispatched" or "gathered", or omit tokens to let the planner choose'
        raise ConstraintError(
            f'tokens must be "dispatched" or "gathered" in expert_parallel, got {tokens!r}',
            remedy=remedy,
        )
    return Parallelism(_EXPERTS[tokens], names_of(axes))


@named("autopar.constraints.tensor_parallel", "docs/constraints.md")
def tensor_parallel(kind: str = "1d", *, axes: Axes, sequence: bool = False) -> Parallelism:
    """Tensor parallelism: the weights of linears are split over `axes`.

    For ``"2d"``, ``"2.5d"`` and ``"3d"``, the docstring of `autopar.constraints.parallel` states
    layouts and communication; their axes are named in the order of the grid. With ``"1d"``, the
    residual stream and everything outside of the linears is replicated.

    ``"1d"`` is Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using
    Model Parallelism", 2019, section 3. It applies to each chain of linears between which every op
    can compute parts: attention by heads, an MLP, a gated MLP, each expert. Weights of the first
    linears are split by columns (output features), those of the last by rows (input features). An
    embedding with more rows than columns that is indexed by ids of the batch is split by rows, and
    so is a head with more classes than features whose cross entropy is the loss. Other linears are
    replicated, such as those before a norm, and so are keys and values of a single head. If an op
    is the reason, the log names the linear and the op. Weights are stored in the layout in which
    they are used. With b samples of s tokens of h features, elements per step:

        attention, MLP    one all-reduce of b·s·h in forward and one in backward, each:
                          2·2·b·s·h(P−1)/P for either
        experts           one all-reduce of b·s·h in forward; in backward one of b·s·h, and, for
                          each token's k gates, one of b·s·k for
                          each op that reads their gradient
        embedding         one all-reduce of b·s·h in forward, none in backward
        head and loss     one all-reduce of b·s·h in backward; in forward three of b·s (maximum, sum
                          and the label's logit)

    The all-reduce in backward sums the gradients of the input by way of queries, keys and values.
    If the model's backward adds these to the residual's gradient one by one, as BERT's does, there
    are three. Cross-attention adds one all-reduce in forward and one in backward, and one for the
    encoder's output in all layers together. The gradient of a scale that all heads share, such as
    that of a norm of queries, is also all-reduced.

    With `sequence`, activations outside of these chains, such as norms, dropout and the residual
    stream, are split along the sequence, dim 1 of the inputs. This is Megatron's sequence
    parallelism (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models", 2022, section 4.2.2). One all-gather and one reduce-scatter of b·s·h replace each
    all-reduce above and send as many elements. Backward gathers the input of the first linears
    again, unless it is kept gathered. Gradients of parameters that all tokens share, such as
    weights of norms and biases that are added outside of the chains, are summed over the axes.
    Tensors with one number per token, which the loss sums, are replicated.

    Args:
        kind: ``"1d"``, ``"2d"``, ``"2.5d"`` or ``"3d"``.
        axes: names of mesh axes, for a grid in its order.
        sequence: whether other activations are split along the sequence; only for ``"1d"``.

    Raises:
        ConstraintError: if `kind` has another value, `sequence` is passed for a grid, or a grid has
            another number of axes. When a model is planned: if no input has the sequence, the sides
            of a grid differ in size, nothing can be split, or an op cannot be split into P parts,
            such as the view of a projection as heads. The error names the op.
    """
    names = names_of(axes) or ()
    if kind not in (*_TENSORS,):
        raise ConstraintError(
            f'kind must be "1d", "2d", "2.5d" or "3d" in tensor_parallel, got {kind!r}',
            remedy='pass "1d", "2d", "2.5d" or "3d"',
        )
    if sequence and kind != "1d":
        message = (
            f"tensor_parallel({kind!r}, sequence=True) is not supported: grids already shard the "
            "tensors between linear layers"
        )
        raise ConstraintError(message, remedy='pass "1d", or omit sequence')
    if kind in GRIDS and len(set(names)) != GRIDS[kind]:
        message = (
            f"tensor_parallel({kind!r}) needs {GRIDS[kind]} mesh axes, but axes={list(names)} "
            f"names {len(set(names))}"
        )
        raise ConstraintError(
            message,
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
            f"axes must be names of mesh axes, got {axes!r}",
            remedy='pass names, as in axes=("gpu",)',
        )
    return names
