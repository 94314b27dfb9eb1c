"""What further programs of a compiled module are planned from: its structure, what was asked of
its plan, and how its parameters rest."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from autopar.api.plan_options import recorded_options
from autopar.constraints import (
    Constraint,
    Megatron,
    Offloaded,
    Pipelined,
    Resting,
    pipeline,
    rests_as,
)
from autopar.core.layout import Layout
from autopar.errors import RuntimeStateError
from autopar.plans import Plan
from autopar.program.program import StagedProgram
from autopar.request import PlanOptions
from autopar.runtime.module import ParallelModule
from autopar.runtime.staged_module import StagedModule

_KEPT = (
    1 << 16
)  # elements of a buffer whose values are kept for further programs: a mask for 256 positions


@dataclass(frozen=True, slots=True)
class Structure:
    """A model without values, in either mode.

    Attributes:
        modes: module path → whether it was in training mode when the model was compiled.
        refusal: why there is none, where the model cannot be copied.
    """

    model: nn.Module | None
    modes: Mapping[str, bool]
    refusal: str = ""

    @staticmethod
    def of(model: nn.Module) -> Structure:
        """A copy whose parameters and large buffers are on meta; small buffers hold what they
        held, which a capture may have to read."""
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(
                parameter.detach().to("meta"), requires_grad=parameter.requires_grad
            )
        for buffer in model.buffers():
            kept = (
                buffer.detach().clone() if buffer.numel() <= _KEPT else buffer.detach().to("meta")
            )
            memo.setdefault(id(buffer), kept)
        modes = {path: module.training for path, module in model.named_modules()}
        try:
            return Structure(copy.deepcopy(model, memo), modes)
        except (
            Exception
        ) as error:  # whatever a module's attributes raise: it is said where a copy would be needed
            return Structure(None, modes, f"{type(error).__name__}: {error}")

    def as_called(self, training: bool, trained: Mapping[str, bool]) -> nn.Module:
        """The model in a mode; in that in which it was compiled every module as it was then.

        Args:
            trained: name → whether a parameter is now to be trained; of others that is as it was.

        Raises:
            RuntimeStateError: where there is no copy.
        """
        if self.model is None:
            what = (
                f"the model cannot be copied ({self.refusal}), so that another mode, or a batch of"
                " other shapes, is not planned for"
            )
            raise RuntimeStateError(
                what,
                remedy=(
                    "compile the model for that call, and load_state_dict into it; or pad the batch"
                ),
            )
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(trained.get(name, parameter.requires_grad))
        self.model.train(training)
        if training == self.modes[""]:
            for path, module in self.model.named_modules():
                module.training = self.modes[path]
        return self.model


def asked_of(plan: Plan, storage: Mapping[str, Layout]) -> tuple[PlanOptions, PlanOptions]:
    """The options of a further plan: as the first plan's, and, where a constraint cannot hold for
    that call, without what names layouts.

    Args:
        storage: how every parameter rests.
    """
    options = recorded_options(plan)
    kept = [c for c in options.constraints if not isinstance(c, Pipelined | Resting)]
    stages = _stages(plan)
    kept = [replace(c, microbatches=None) if isinstance(c, Megatron) else c for c in kept]
    few: tuple[Constraint, ...] = (
        rests_as(storage),
        *(c for c in kept if isinstance(c, Offloaded)),
        *stages,
    )
    all_of_them = (
        rests_as(storage),
        *kept,
        *(() if any(isinstance(c, Megatron) and c.pp != 1 for c in kept) else stages),
    )
    free = replace(options, num_microbatches="auto", loss_rows="auto", constraints=())
    return replace(free, constraints=all_of_them), replace(free, constraints=few)


def storage_of(module: ParallelModule | StagedModule) -> dict[str, Layout]:
    """How each parameter rests, of all stages; those that no program reads are whole."""
    program = module.program
    stages = program.stages if isinstance(program, StagedProgram) else (program,)
    held = {name: module.resting(name) for name, _ in module.named_parameters()}
    return held | {t.name: t.layout for stage in stages for t in stage.parameters}


def _stages(plan: Plan) -> tuple[Pipelined, ...]:
    """The same cuts."""
    made = plan.pipeline
    if made is None or not made.axis:
        return ()
    chunks = made.num_chunks
    schedule = made.schedule if chunks > 1 or made.num_microbatches > 1 else "1f1b"
    cuts = made.modules
    return (
        pipeline(
            made.axis,
            schedule=schedule,
            cuts=cuts,
            independent=made.independent,
            chunks=chunks if chunks > 1 else None,
        ),
    )


def beside_the_optimizer(plan: Plan, options: PlanOptions) -> PlanOptions:
    """The options where no backward follows: forward alone, beside the optimizer's state."""
    assert options.memory_bytes is not None, "a plan records its budget"
    in_stages = plan.pipeline is not None and bool(plan.pipeline.axis)
    plans = plan.pipeline.stages if plan.pipeline is not None and in_stages else (plan,)
    num_chunks = plan.pipeline.num_chunks if plan.pipeline is not None else 1
    state = num_chunks * max(
        each.prediction.memory_bytes.get("optimizer", 0) for each in plans
    )  # of any rank's stages
    return replace(
        options,
        inference=True,
        memory_bytes=max(options.memory_bytes - state, 1),
        num_microbatches="auto",
    )


def shapes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """A call in words: what all ranks are to agree on."""
    leaves, spec = tree_flatten(tree_map(_shape, (args, dict(kwargs))))
    return f"{leaves} {spec}"


def told_trained(trained: Mapping[str, bool]) -> str:
    """Which parameters are trained, in a few words: what all ranks are to agree on."""
    names = sorted(name for name, trains in trained.items() if trains)
    digest = hashlib.blake2b("\n".join(names).encode(), digest_size=4).hexdigest()
    return f", {len(names)} parameters trained ({digest})" if trained else ""


def _shape(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)}{' with a gradient' if leaf.requires_grad else ''}"
    return (
        repr(leaf)
        if isinstance(leaf, int | float | complex | str | bytes | None)
        else type(leaf).__name__
    )  # others differ by address
