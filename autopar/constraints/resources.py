"""`pipeline`: stages along a mesh axis, and `offload`: use of the hosts' memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.core.keywords import named
from autopar.core.schedules import AUTO, INTERLEAVED, SCHEDULES
from autopar.errors import ConstraintError


@dataclass(frozen=True, slots=True)
class Pipelined:
    """Stages along an axis; see `pipeline`."""

    axis: str | None
    microbatches: int | None
    schedule: str
    cuts: tuple[str, ...] | None
    independent: bool
    chunks: int = 1

    def to_json(self) -> dict[str, Any]:
        """Return the record of a plan, which `autopar.constraints.read_constraint` reads."""
        cuts = None if self.cuts is None else list(self.cuts)
        words = {
            "axis": self.axis,
            "microbatches": self.microbatches,
            "schedule": self.schedule,
            "cuts": cuts,
        }
        words |= {"chunks": self.chunks} if self.chunks > 1 else {}
        return {"plan": "pipeline", **words, "independent": self.independent}

    def __str__(self) -> str:
        arguments = [] if self.axis is None else [repr(self.axis)]
        arguments += [] if self.microbatches is None else [f"microbatches={self.microbatches}"]
        arguments += (
            []
            if self.schedule == _schedule(self.axis, self.cuts)
            else [f"schedule={self.schedule!r}"]
        )
        arguments += [] if self.cuts is None else [f"cuts={list(self.cuts)}"]
        arguments += ["independent=True"] if self.independent else []
        arguments += [f"chunks={self.chunks}"] if self.chunks > 1 else []
        return f"pipeline({', '.join(arguments)})"


def _schedule(axis: str | None, cuts: Sequence[str] | None) -> str:
    """The default schedule."""
    return "1f1b" if axis is not None or cuts is not None else AUTO


@named("autopar.constraints.pipeline", "docs/constraints.md")
def pipeline(
    axis: str | None = None,
    *,
    microbatches: int | None = None,
    schedule: str | None = None,
    cuts: Sequence[str] | None = None,
    independent: bool = False,
    chunks: int | None = None,
) -> Pipelined:
    """Cut the model into as many stages as `axis` has devices. Stages work on different
    microbatches at the same time.

    Args:
        axis: name of a mesh axis. The other axes shard the computation of each stage. None lets the
            planner try every axis, and no pipeline; without one it also tries several microbatches
            one after another, if recomputation takes more than a twentieth of a step.
        microbatches: number of microbatches of the batch. None lets the planner choose: one if
            samples depend on each other, as in batch normalization or a contrastive loss; the plan
            then names the op.
        schedule: the order of the stages' work.

            - ``"1f1b"``: Narayanan et al., "PipeDream", 2019, as in Megatron-LM. A stage has as
              many microbatches in flight as there are stages from it to the last one.
            - ``"gpipe"``: Huang et al., 2019. All microbatches are in flight.
            - ``"interleaved_1f1b"``: Narayanan et al., "Efficient Large-Scale Language Model
              Training on GPU Clusters Using Megatron-LM", 2021, section 2.2. A device has several
              stages from distant parts of the model. It waits less, and it stores and sends more.
            - ``"auto"``: 1F1B, and if stages wait long enough for it to pay off, also interleaved
              with 2, 4, … stages per device, for as long as this is faster.

            The default is ``"1f1b"`` if `axis` is named, else ``"auto"``. A single microbatch has
            only one order, which plans call ``"gpipe"``. So does a model that returns no loss: its
            backward waits for a loss from outside, and all forwards run first.
        cuts: paths of the modules with which the later stages begin, such as
            ``["model.layers.8"]``. None lets the planner choose.
        independent: a promise that samples do not depend on each other, for models where the
            planner cannot see it, such as one that sorts tokens by expert.
        chunks: stages per device of the interleaved schedule, by default 2. Device r of P has the
            stages r, r + P, … of chunks·P. There must be at least P microbatches, in equal rounds,
            such as a multiple of P.

    Raises:
        ConstraintError: if an argument has an invalid value. When a model is planned: if the axis
            is not in the mesh, the batch is not divisible, samples depend on each other and several
            microbatches are asked for, or the model cannot be cut there. The error names the op.
    """
    schedule = schedule or _schedule(axis, cuts)
    if schedule not in (*SCHEDULES, AUTO):
        raise ConstraintError(
            f"schedule {schedule!r} is unknown",
            remedy=f"pass one of {', '.join((*SCHEDULES, AUTO))}",
        )
    if microbatches is not None and microbatches < 1:
        raise ConstraintError(
            f"microbatches must be a positive number, got {microbatches}",
            remedy="pass a positive number",
        )
    chunks = (2 if schedule == INTERLEAVED else 1) if chunks is None else chunks
    if (chunks < 2) if schedule == INTERLEAVED else (chunks != 1):
        message = f"schedule {schedule!r} does not support {chunks} stages per device"
        raise ConstraintError(
            message,
            remedy=f"pass chunks=2 or more with schedule={INTERLEAVED!r}, no chunks with other "
            "schedules",
        )
    if schedule == AUTO and cuts is not None:
        raise ConstraintError(
            "cuts determine the number of stages per device, which the planner was asked to choose",
            remedy='pass schedule="1f1b"',
        )
    return Pipelined(
        axis, microbatches, schedule, None if cuts is None else tuple(cuts), independent, chunks
    )


# --------------------------------------------------------------------------------------------------
# `offload`: tensors that may be stored in the memory of the devices' hosts.


@dataclass(frozen=True, slots=True)
class Offloaded:
    """The tensors that may be offloaded; see `offload`."""

    parameters: bool
    activations: bool
    host_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the record of a plan, which `autopar.constraints.read_constraint` reads."""
        return {
            "plan": "offload",
            "parameters": self.parameters,
            "activations": self.activations,
            "host_bytes": self.host_bytes,
        }

    def __str__(self) -> str:
        arguments = [
            f"{name}=False" for name in ("parameters", "activations") if not getattr(self, name)
        ]
        arguments += [] if self.host_bytes is None else [f"host_bytes={self.host_bytes}"]
        return f"offload({', '.join(arguments)})"


@named("autopar.constraints.offload", "docs/constraints.md")
def offload(
    *, parameters: bool = True, activations: bool = True, host_bytes: int | None = None
) -> Offloaded:
    """Allow the planner to store tensors in the memory of the devices' hosts.

    A parameter on the host has its optimizer state and its gradient there too, and the host's
    processors compute the optimizer step (Ren et al., "ZeRO-Offload: Democratizing Billion-Scale
    Model Training", 2021, section 4). It is copied to the device once per step, or once for forward
    and once for backward (Rajbhandari et al., "ZeRO-Infinity", 2021, section 5). Each device copies
    its own part, and the parts are gathered on the devices. Tensors that forward keeps for backward
    may wait on the host: they are stored when they are made and fetched before they are read.

    The constraint forces nothing: the planner chooses the place of each parameter, and of each kept
    tensor in each layout. `layout(pattern, storage="S(0) host")` forces a parameter to the host.

    Args:
        parameters: whether parameters may be on the host.
        activations: whether tensors that are kept for backward may be.
        host_bytes: bytes of its host that a device may use; by default four fifths of its share in
            the hardware profile.

    Raises:
        ConstraintError: if neither may be offloaded, or `host_bytes` is no number of bytes. When a
            model is planned: if the hardware profile has no host.
    """
    if not (parameters or activations):
        raise ConstraintError(
            "offload(parameters=False, activations=False) offloads nothing",
            remedy="omit the constraint",
        )
    if host_bytes is not None and (not isinstance(host_bytes, int) or host_bytes <= 0):
        raise ConstraintError(
            f"host_bytes must be a positive number of bytes, got {host_bytes!r}",
            remedy="pass bytes per device, for example 128 * 2**30",
        )
    return Offloaded(bool(parameters), bool(activations), host_bytes)
