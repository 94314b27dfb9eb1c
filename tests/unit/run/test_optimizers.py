"""Optimizers are checked at the first step in which they hold a distributed parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import RuntimeStateError
from autopar.run.optimizers import watch_optimizers


def test_an_optimizer_that_is_given_parameters_later_is_checked_then() -> None:
    early, late = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([early], lr=0.1, fused=True)
    early.grad = torch.ones(2)
    optimizer.step()
    watch_optimizers([late])
    late.grad = torch.ones(2)
    optimizer.add_param_group({"params": [late]})
    with pytest.raises(RuntimeStateError, match=r"torch\.optim\.SGD\(fused=True\) does not work on distributed parameters"):
        optimizer.step()


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_fused_steps_that_dtensor_has_no_rule_for_are_refused_and_others_taken(name: str) -> None:
    held = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    watch_optimizers(held)
    for p in held:
        p.grad = torch.ones(2)
    with pytest.raises(RuntimeStateError, match=rf"torch\.optim\.{name}\(fused=True\) does not work on distributed parameters"):
        getattr(torch.optim, name)(held[:1], lr=0.1, fused=True).step()
    getattr(torch.optim, name)(held[:1], lr=0.1).step()
    torch.optim.AdamW(held[1:], lr=0.1, fused=True).step()
    assert all((p < 1.0).all() for p in held)
