"""A random model on real processes: its loss and every gradient are compared with the plain
model's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import autopar
from benchmarks.faults.judging import WrongResult
from benchmarks.faults.programs import Recipe
from benchmarks.ranks import run_ranks

TOLERANCE, LIMIT_S = 1e-3, 200.0  # relative to the largest gradient, in float32; seconds
MAX_RANKS = 4
ROUNDED = ("dropout", "autocast", "casts")  # steps whose plain results differ


def may_run(recipe: Recipe) -> bool:
    """Return whether real processes compute the same as the plain model, and are few."""
    num_ranks = torch.tensor(recipe.mesh).prod().item()
    plain = not any(word in name for name, _ in recipe.steps for word in ROUNDED)
    return (
        plain and 1 < num_ranks <= MAX_RANKS and not recipe.inference and "bf16" not in recipe.plan
    )


def run_processes(text: str, plan: autopar.Plan) -> None:
    """Train one step on as many processes as the plan has devices.

    Raises:
        WrongResult: if a loss or a gradient differs.
        AutoparError: if a rank fails, with its traceback.
    """
    num_ranks = plan.mesh.num_devices
    for rank, (error, name) in enumerate(
        run_ranks(num_ranks, step, text, plan.dumps(), limit_s=LIMIT_S)
    ):
        if not error <= TOLERANCE:
            raise WrongResult(f"on process {rank} the relative error of {name} is {error:.2e}")


def step(rank: int, tell: Callable[[Any], None], text: str, plan: str) -> tuple[float, str]:
    """Run one step on this rank.

    Returns:
        The largest error relative to the plain model's largest gradient, and the name of its
        tensor.
    """
    from benchmarks.faults.model_cases import load

    with tempfile.TemporaryDirectory() as folder:
        module = load(text, Path(folder))
        plain, loaded = module.build(), autopar.Plan.loads(plan)
        loss_of(plain(**module.batch())).backward()
        compiled = autopar.compile(
            module.build(), loaded.mesh, example_inputs=module.batch(), plan=loaded
        )
        loss_of(compiled(**module.batch())).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    scale = max((float(g.abs().max()) for g in wanted.values()), default=0.0) or 1.0
    found = gradients_of(compiled)
    errors = [(difference(found[name], wanted.get(name)) / scale, name) for name in found]
    return max(errors, default=(0.0, "nothing"))


def loss_of(result: Any) -> Tensor:
    """Return the loss, or a sum over the outputs if there is none."""
    if isinstance(result, dict) and "loss" in result:
        result = result["loss"]
    leaves = [whole(t) for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([leaf.square().mean() if leaf.dim() else leaf for leaf in leaves]).sum()


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the full gradient of each parameter that this rank holds."""
    named = module.named_parameters()
    return {name: None if p.grad is None else whole(p.grad) for name, p in named}


def difference(found: Tensor | None, wanted: Tensor | None) -> float:
    """Return the largest difference. A missing gradient counts as zeros."""
    if found is None or wanted is None:
        given = found if wanted is None else wanted
        return 0.0 if given is None else float(given.abs().max())
    return float((found - wanted).abs().max())
