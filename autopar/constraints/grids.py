"""Grids of tensor parallelism: what lies where, and what moves.

Terms. A grid has sides of q devices, and P devices in all. A linear is ``Y[n, m] = X[n, k] W[k, m]``, where n is all samples times
all tokens; an X of which a device holds 1/P is *split P times*. Layouts are per axis, in the grid's order. Volumes are elements that
one device sends, by rings: a collective over one axis of what is a whole of x elements within the axis sends x·(q−1)/q. They are per
linear and step, tensor by tensor.

Every parameter rests split over both or all three axes of the q's, with its gradient and optimizer's state; every activation is made
and kept until backward split over all axes, P times. What a product reads gathered is not kept: backward gathers it again. Split
less are parameters that cannot be stored split so often, such as a fused projection's bias (their gradients are all-reduced on the
axes left); sums per token, whole on the axis whose features they sum; and what does not depend on the batch.

**2d**, axes (a, b): SUMMA (van de Geijn and Watts, 1997) as in Xu and You, "An Efficient 2D Method for Training Super-Large Deep
Learning Models", 2021 (Optimus). X rests [n on a, k on b], n by samples, and W [k on a, m on b]; Y is made [n on a, m on b].

              forward               backward
    X         all-gather on b       all-gather on b (for W's gradient), reduce-scatter on b (its gradient): 3·(nk/q)(q−1)/q
    W         all-gather on a       all-gather on a (for X's gradient), reduce-scatter on a (its gradient): 3·(km/q)(q−1)/q

Together 3(nk + km)(q−1)/q², as in the paper; its broadcasts in a row of devices, of q parts in turn, are here one all-gather. The
papers count each linear's X; here one that several read (q, k and v; gate and up) is gathered once in each phase, and what they add to
its gradient is scattered once where the model's backward adds that up first (BERT's does not). So it is in all three.

**2.5d**, axes (a, b, d), d of any size: Solomonik and Demmel, "Communication-Optimal Parallel 2.5D Matrix Multiplication", 2011, as in
Wang et al., "Tesseract: Parallelize the Tensor Parallelism Efficiently", 2021. As 2d on (a, b) with the samples split over d as well:
n becomes n/d, and parameters rest alike on all of d, 1/q² of each. Beside what 2d moves, each gradient is all-reduced on d as it
rests: 2·(km/q²)(d−1)/d. Together 3(nk/d + km)(q−1)/q² + 2km(d−1)/(dq²).

**3d**, axes (i, j, l): Agarwal et al., "A three-dimensional approach to parallel matrix multiplication", 1995, as in Bian et al.,
"Maximizing Parallelism in Distributed Training for Huge Neural Networks", 2021. Samples are split over i always. The residual stream
rests [n on i and l, features on j]. A linear that reads it gathers X on l and W on i, multiplies [n on i, k on j] by [k on j, m on l],
and scatters the sums over j: Y is made [n on i and j, m on l]. The next one reads that with j and l in each other's place, and gives
back what the first one read.

              forward                 backward
    X         all-gather on l         all-gather on l (for W's gradient), reduce-scatter on l (its gradient): 3·(nk/q²)(q−1)/q
    W         all-gather on i         all-gather on i, reduce-scatter on i: 3·(km/q²)(q−1)/q
    Y         reduce-scatter on j     all-gather on j (of its gradient): 2·(nm/q²)(q−1)/q

Together (3nk + 3km + 2nm)(q−1)/q³; the paper gathers Y's gradient for either product, 3nm. Of a chain of an odd number of linears
beside the residual stream, the result is moved to where the stream is.

A parameter that is gathered on one axis can rest with others on its dim where that axis splits it innermost; of a fused projection
only the mesh's last can. So of a model with such in 3d, name the mesh's last axis as i.

Beside the linears, with h features of the stream (n stands for n/d in 2.5d):

    bias of m             2d: gathered on a, its gradient scattered, (m/q)(q−1)/q either; 3d: on i and j, (m/q)(1 − 1/q²)
    norm in parts         its sum all-reduced on b, n/q, in 3d on j, n/q²: one in forward and one in backward (RMS norms as models spell
                          them); its scale is gathered as a bias is, in backward again, and the gradient scattered
    norm as one op        cannot sum over split features: tokens are split instead, which the log says. In 2d its x comes, and the
                          gradient of x goes, by an all-to-all on b, (nh/q²)(q−1)/q each; in 3d what it makes goes to features again
                          and back in backward, in all five on j of (nh/q³)(q−1)/q. Its scale and bias are gathered on all axes
    table of v rows       rests by features on b (j); gathered on a, and its gradient scattered there, (vh/q)(q−1)/q each; in 3d on
                          i and l, (vh/q)(1 − 1/q²) each. One that is the head's weight too lies as the head asks, split by rows on b
                          (l): its sums are scattered, (nh/q)(q−1)/q, in 3d (nh/q²)(q−1)/q, and their gradient gathered
    loss                  a head is a linear; its cross entropy all-reduces three of n/q on b, in 3d of n/q² on l
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import ConstraintError
from autopar.mesh import Mesh

GRIDS: Mapping[str, int] = {"2d": 2, "2.5d": 3, "3d": 3}
"""Kinds of grids, and how many axes each has."""


def check_grid(plan: str, kind: str, axes: Sequence[str], mesh: Mesh) -> None:
    """That the sides of a grid are equal; of ``2.5d`` the first two.

    Raises:
        ConstraintError: naming the plan, the mesh and the sizes.
    """
    sizes = [mesh.shape[mesh.names.index(name)] for name in axes]
    sides = sizes[:2] if kind == "2.5d" else sizes
    if len(set(sides)) > 1:
        words = ", ".join(f"{name}={size}" for name, size in zip(axes, sides, strict=False))
        what = f"{plan}: the sides of its grid are to be equal, in mesh {mesh} they are {words}"
        remedy = "name axes of one size" + (", and the depth as the third" if kind == "2.5d" else "")
        raise ConstraintError(what, remedy=remedy)
