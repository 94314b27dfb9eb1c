"""What a comparison found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verification:
    """Errors of a program against the plain model (see `autopar.verification.check`).

    Attributes:
        ok: whether every error is within its tolerance.
        tolerance: largest relative error allowed against the plain model. dtype: what was computed in.
        loss: error of the loss, None where the model returns none.
        outputs, buffers, gradients: error by output path, buffer name, parameter name.
        lower_parts: ops that the plain model computes in a smaller dtype; where there are any, the tolerance is wider.
        traced: largest error against the traced graph where there are lower parts, else None.
        traced_tolerance: the limit of `traced`.
        num_collectives: communication steps that ran on each rank, local slices not counted.
        apart: its largest error as it is, where the model magnifies what these ops round, and was compared with them in `dtype`.
        instead_of: the dtype that was asked for and why the plain model cannot be compared in it, or ``""``.
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
        """(kind, name, error) of everything that was compared, the worst first."""
        found = [("loss", "loss", self.loss)] if self.loss is not None else []
        found += [("output", n, e) for n, e in self.outputs.items()]
        found += [("buffer", n, e) for n, e in self.buffers.items()] + [("gradient", n, e) for n, e in self.gradients.items()]
        return tuple(sorted(found, key=lambda row: -row[2]))

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
            f"{'equal' if self.ok else 'NOT equal'} to the plain model in {self.dtype}: largest relative error {self.max_error:.2e}"
            f" ({self.worst}), tolerance {self.tolerance:.0e}; {self.num_collectives} collectives",
            *([f"  loss       {self.loss:.2e}"] if self.loss is not None else []),
        ]
        for kind, errors in (("outputs", self.outputs), ("buffers", self.buffers), ("gradients", self.gradients)):
            if errors:
                name = max(errors, key=lambda n: errors[n])
                lines.append(f"  {kind:<10} {errors[name]:.2e}  worst of {len(errors)}: {name}")
        if self.instead_of:
            lines.append(f"  the model cannot be compared in {self.instead_of}")
        if self.lower_parts:
            lines.append(f"  the model itself computes in a smaller dtype: {', '.join(self.lower_parts[:4])}")
        if self.apart is not None:
            lines.append(f"  which was compared with these ops in {self.dtype}, too; as it is, what they round makes {self.apart:.2e}")
        if self.traced is not None:
            lines.append(f"  against the traced graph, all in {self.dtype}: {self.traced:.2e}, tolerance {self.traced_tolerance:.0e}")
        return "\n".join(lines)
