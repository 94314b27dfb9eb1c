"""Prepare further programs of a compiled module: keep the structure of its model, the request of
its plan, and the layouts in which its parameters are stored.
"""

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
from autopar.request import PlanOptions
from autopar.runtime.module import ParallelModule

# Maximum number of elements of a buffer that keeps its values, such as a mask for 256 positions.
_KEPT = 1 << 16


@dataclass(frozen=True, slots=True)
class Structure:
    """A copy of a model without values, which can be set to training or eval mode.

    Attributes:
        modes: module path → whether the module was in training mode when the model was compiled.
        refusal: why there is no copy, if the model cannot be copied.
    """

    model: nn.Module | None
    modes: Mapping[str, bool]
    refusal: str = ""

    @staticmethod
    def of(model: nn.Module) -> Structure:
        """Copy a model, with parameters and large buffers on meta. Small buffers keep their values,
        which a capture may have to read.
        """
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
        except Exception as error:  # modules may raise anything; reported when a copy is needed
            return Structure(None, modes, f"{type(error).__name__}: {error}")

    def as_called(self, training: bool, trained: Mapping[str, bool]) -> nn.Module:
        """Return the model in a mode. In the mode in which it was compiled, every module has its
        original mode.

        Args:
            training: the mode.
            trained: name → whether a parameter is now trained; other parameters are unchanged.

        Raises:
            RuntimeStateError: if there is no copy.
        """
        if self.model is None:
            what = (
                "cannot plan for another mode or other batch shapes, because the model cannot be "
                f"copied: {self.refusal}"
            )
            raise RuntimeStateError(
                what,
                remedy=(
                    "compile the model for that call and load its state with load_state_dict, or "
                    "pad the batch"
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
    """Return the options of a further plan.

    The first options are those of the first plan. The second ones omit the constraints that name
    layouts, for calls in which one of them cannot hold.

    Args:
        plan: the first plan.
        storage: the layout in which each parameter is stored.
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


def storage_of(module: ParallelModule) -> dict[str, Layout]:
    """Return the layout in which each parameter of all stages is stored; replicated if no program
    reads it.
    """
    stages = module.program.stages
    held = {name: module.resting(name) for name, _ in module.named_parameters()}
    return held | {t.name: t.layout for stage in stages for t in stage.parameters}


def _stages(plan: Plan) -> tuple[Pipelined, ...]:
    """Return the pipeline of a plan as a constraint, with the same cuts."""
    made = plan.as_pipeline
    if not made.axis:
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
    """Return the options of a plan for forward only, with the memory that the optimizer state
    leaves.
    """
    assert options.memory_bytes is not None, "a plan records its budget"
    state = plan.as_pipeline.num_chunks * max(
        stage.prediction.memory_bytes.get("optimizer", 0) for stage in plan.stages
    )  # the maximum over the stages of all ranks
    return replace(
        options,
        inference=True,
        memory_bytes=max(options.memory_bytes - state, 1),
        num_microbatches="auto",
    )


def shapes_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Describe a call in a text on which all ranks have to agree."""
    leaves, spec = tree_flatten(tree_map(_shape, (args, dict(kwargs))))
    return f"{leaves} {spec}"


def told_trained(trained: Mapping[str, bool]) -> str:
    """Describe in a short text which parameters are trained; all ranks have to agree on it."""
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
    )  # the repr of other objects contains an address
