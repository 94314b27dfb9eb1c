"""Relative errors of results, and their tolerances.

The error of a tensor a against its reference b is max|a − b| / max(max|b|, floor). Some gradients
are exactly zero in theory and contain only rounding noise, such as that of a key projection's bias,
which cancels in the softmax. So the floor of a gradient is a share of the largest magnitude among
all gradients. With tolerance t and share f, an error below t · f of that magnitude passes: in
float64 1e-13 of the largest gradient. `autopar.verification.rounding` covers steps in which all
gradients are zero, and the floors of outputs and buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
TOLERANCE_16_BIT = 5e-2
TOLERANCE_WITH_LOWER_PARTS = 2e-6  # a few roundings of float32 with its 24-bit mantissa
_FLOOR_SHARES = {torch.float64: 1e-4, torch.float32: 1e-2}
_FLOOR_SHARE_16_BIT = 1e-1
_FLOOR_SHARE_WITH_LOWER_PARTS = (
    0.5  # times this tolerance, 1e-6 of the largest gradient, as in float32 throughout
)


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the largest relative error allowed if everything is computed in `dtype`."""
    return TOLERANCES.get(dtype, TOLERANCE_16_BIT)


def tolerance_with(lower: Iterable[torch.dtype]) -> float:
    """Return the largest relative error allowed if the reference computes parts in these smaller
    dtypes."""
    return max(
        (TOLERANCE_WITH_LOWER_PARTS if d.itemsize >= 4 else TOLERANCE_16_BIT for d in lower),
        default=0.0,
    )


def floor_share_of(dtype: torch.dtype) -> float:
    """Return the floor as a share of the largest magnitude, if everything is computed in
    `dtype`."""
    return _FLOOR_SHARES.get(dtype, _FLOOR_SHARE_16_BIT)


def floor_share_with(lower: Iterable[torch.dtype]) -> float:
    """Return the floor as a share of the largest magnitude, if the reference computes parts in
    these smaller dtypes."""
    smallest = min((d.itemsize for d in lower), default=None)
    return (
        0.0
        if smallest is None
        else _FLOOR_SHARE_WITH_LOWER_PARTS
        if smallest >= 4
        else _FLOOR_SHARE_16_BIT
    )


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one step: full tensors by name. `gradients` omits tensors without a
    gradient."""

    outputs: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors by name."""

    outputs: Mapping[str, float]
    buffers: Mapping[str, float]
    gradients: Mapping[str, float]

    @property
    def worst(self) -> float:
        """The largest error."""
        return max((*self.outputs.values(), *self.buffers.values(), *self.gradients.values()))


def compare(
    ours: Results,
    reference: Results,
    share: float,
    scale: float = 0.0,
    summed: Mapping[str, float] = MappingProxyType({}),
    noise: Mapping[str, float] = MappingProxyType({}),
) -> Errors:
    """Return the error of every tensor of `reference`. A gradient that is missing in `ours` counts
    as zeros.

    Args:
        ours: results of the program.
        reference: results to compare with.
        share: floor of gradients, as a share of the largest magnitude among them, or of `scale` if
            that is larger.
        scale: a magnitude of gradients.
        summed: name of an output or buffer → scale of the terms that were summed for it; its floor
            is the same share of this scale.
        noise: name of a gradient → its own floor
            (`autopar.verification.rounding.noise_of_rounding`).
    """
    floor = share * max((scale, *(magnitude(x) for x in reference.gradients.values())))
    floors = {name: share * size for name, size in summed.items()}
    return Errors(
        _relative(ours.outputs, reference.outputs, floors),
        _relative(ours.buffers, reference.buffers, floors),
        _relative(
            ours.gradients,
            reference.gradients,
            {name: max(floor, noise.get(name, 0.0)) for name in reference.gradients},
        ),
    )


def _relative(
    ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], floors: Mapping[str, float]
) -> dict[str, float]:
    return {
        name: relative_error(ours.get(name), wanted, floors.get(name, 0.0))
        for name, wanted in reference.items()
    }


def relative_error(ours: Tensor | None, reference: Tensor, floor: float = 0.0) -> float:
    """Return max|a − b| / max(max|b|, floor).

    Equal elements have no difference, including equal infinities and pairs of NaN. The error is
    infinite if shapes or kinds of dtypes differ, or if only one side has a NaN or an infinity.

    Args:
        ours: a; None for zeros.
        reference: b.
        floor: the smallest magnitude by which a difference is divided.
    """
    if ours is None:
        ours = torch.zeros_like(reference)
    kinds = {(x.shape, x.is_floating_point(), x.is_complex()) for x in (ours, reference)}
    if len(kinds) > 1:
        return float("inf")
    a, b = _wide(ours), _wide(reference)
    differ = ~((a == b) | (a.isnan() & b.isnan()))
    if not bool(differ.any()):
        return 0.0
    error = (a - b).abs()[differ].max().item()
    scale = max(magnitude(reference), floor)
    return error / scale if error == error and scale > 0 else float("inf")


def magnitude(x: Tensor) -> float:
    """Return the largest finite magnitude; 0 if there is none."""
    values = _wide(x)
    finite = values[values.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)


# --------------------------------------------------------------------------------------------------
# The result of a comparison.


@dataclass(frozen=True, slots=True)
class Verification:
    """Errors of a program compared with the plain model (see `autopar.verification.check`).

    Attributes:
        ok: whether every error is within its tolerance.
        tolerance: largest relative error allowed against the plain model.
        dtype: dtype of the computation.
        loss: error of the loss; None if the model returns no loss.
        outputs: error by output path.
        buffers: error by buffer name.
        gradients: error by parameter name.
        lower_parts: ops that the plain model computes in a smaller dtype. If there are any, the
            tolerance is wider.
        traced: largest error against the traced graph if there are lower parts, else None.
        traced_tolerance: largest error allowed against the traced graph.
        num_collectives: number of communication steps on each rank, without local slices.
        instead_of: the requested dtype, and why the plain model cannot be compared in it; ``""`` if
            it can.
        apart: the largest error without widening, if the lower parts were computed in `dtype` for
            the comparison; else None.
    """

    ok: bool
    tolerance: float
    dtype: str
    loss: float | None
    outputs: Mapping[str, float]
    buffers: Mapping[str, float]
    gradients: Mapping[str, float]
    lower_parts: tuple[str, ...]
    traced: float | None
    traced_tolerance: float
    num_collectives: int
    instead_of: str = ""
    apart: float | None = None

    @property
    def rows(self) -> tuple[tuple[str, str, float], ...]:
        """(kind, name, error) of all compared tensors, the largest error first."""
        errors = [("loss", "loss", self.loss)] if self.loss is not None else []
        errors += [("output", n, e) for n, e in self.outputs.items()]
        errors += [("buffer", n, e) for n, e in self.buffers.items()] + [
            ("gradient", n, e) for n, e in self.gradients.items()
        ]
        return tuple(sorted(errors, key=lambda row: -row[2]))

    @property
    def worst(self) -> str:
        """Kind and name of the tensor with the largest error."""
        return f"{self.rows[0][0]} {self.rows[0][1]}"

    @property
    def max_error(self) -> float:
        """The largest error against the plain model."""
        return self.rows[0][2]

    def __str__(self) -> str:
        lines = [
            (
                f"{'equal' if self.ok else 'NOT equal'} to the plain model in {self.dtype}: largest"
                f" relative error {self.max_error:.2e} ({self.worst}), tolerance"
                f" {self.tolerance:.0e}; {self.num_collectives} collectives"
            ),
            *([f"  loss       {self.loss:.2e}"] if self.loss is not None else []),
        ]
        for kind, errors in (
            ("outputs", self.outputs),
            ("buffers", self.buffers),
            ("gradients", self.gradients),
        ):
            if errors:
                name = max(errors, key=lambda n: errors[n])
                lines.append(f"  {kind:<10} {errors[name]:.2e}  worst of {len(errors)}: {name}")
        if self.instead_of:
            lines.append(f"  the model cannot be compared in {self.instead_of}")
        if self.lower_parts:
            lines.append(
                f"  the model uses a lower-precision dtype: {', '.join(self.lower_parts[:4])}"
            )
        if self.apart is not None:
            lines.append(
                f"  the comparison also ran these ops in {self.dtype}; without that, their rounding"
                f" accounts for {self.apart:.2e}"
            )
        if self.traced is not None:
            lines.append(
                f"  against the traced graph, all in {self.dtype}: {self.traced:.2e}, tolerance"
                f" {self.traced_tolerance:.0e}"
            )
        return "\n".join(lines)
