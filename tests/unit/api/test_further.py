"""Calls that the first program does not cover (the other mode, other shapes, other values). Each
kind of call is planned once and shares the parameters."""

from __future__ import annotations

import copy
import gc
import io
import logging
import threading
import weakref
from fractions import Fraction
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import autopar
from autopar.core import terminal
from autopar.core.hardware import HardwareProfile
from autopar.errors import RuntimeStateError
from autopar.runtime import guards


class Net(nn.Module):
    """A model that depends on the mode and draws random numbers in training."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        found = self.last(self.dropout(torch.relu(self.norm(self.first(x))))) * scale
        return nn.functional.cross_entropy(found, y), found


class Flipping(nn.Module):
    """A model whose computation depends on plain arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, flip: bool = False, kind: str | None = "sum") -> Tensor:
        found = self.weight * (-x if flip else x)
        return found.mean() if kind is None else found.sum() if kind == "sum" else found.max()


def batch(samples: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, 8, generator=generator),
        "y": torch.randint(0, 4, (samples,), generator=generator),
    }


def pair(dropout: float = 0.0, **options: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    plain = Net(dropout)
    return plain, autopar.compile(
        copy.deepcopy(plain),
        example_inputs=batch(8),
        hardware="cpu-gloo",
        **{"outputs": "full"} | options,
    )


def test_an_epoch_with_a_smaller_last_batch_and_evaluation_matches_the_plain_model() -> None:
    plain, module = pair()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, module)]
    seen: list[list[float]] = [[], []]
    for epoch in range(2):
        for each, optimizer, losses in zip((plain, module), optimizers, seen, strict=True):
            each.train()
            for number, samples in enumerate((8, 8, 3)):
                loss, _ = each(**batch(samples, 10 * epoch + number))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            each.eval()
            with torch.no_grad():
                loss, found = each(**batch(5, 99))
            losses += [loss.item(), found.sum().item()]
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)
    assert len(module.variants.known) == 2, "each kind of call is planned once"
    assert module.state_dict().keys() == plain.state_dict().keys()
    for name, wanted in plain.state_dict().items():
        if name != "first.bias":  # its gradient is only rounding error
            torch.testing.assert_close(_full(module.state_dict()[name]), wanted)
    assert {id(p) for p in module.parameters()} == {
        id(p) for m in module.variants.known for p in m.parameters()
    }


def test_gradients_of_calls_with_different_shapes_accumulate() -> None:
    plain, module = pair()
    for each in (plain, module):
        for samples in (8, 5):
            each(**batch(samples))[0].backward()
    torch.testing.assert_close(_full(module.last.weight.grad), plain.last.weight.grad)


def test_all_programs_share_one_random_state() -> None:
    _, module = pair(0.5)
    module.manual_seed(3)
    first = [module(**batch(n))[0].item() for n in (8, 5, 8, 5)]
    after = module.random_state
    module.manual_seed(3)
    assert [
        module(**batch(n))[0].item() for n in (8, 5, 8, 5)
    ] == first and module.random_state == after
    assert len(set(first)) == 4
    _, quiet = pair(0.5)
    quiet.eval()
    quiet(**batch(8))
    assert quiet.random_state is not None and "autopar_random_state" not in quiet.state_dict()


def test_a_module_compiled_in_eval_mode_can_be_trained() -> None:
    torch.manual_seed(0)
    plain = Net()
    module: Any = autopar.compile(
        copy.deepcopy(plain).eval(), example_inputs=batch(8), hardware="cpu-gloo", outputs="full"
    )
    with torch.no_grad():
        assert module(**batch(8))[0].item() == pytest.approx(
            copy.deepcopy(plain).eval()(**batch(8))[0].item(), rel=1e-6
        )
        module.train()
    loss, wanted = module(**batch(8))[0], plain(**batch(8))[0]
    loss.backward()
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    torch.testing.assert_close(_full(module.last.weight.grad), plain.last.weight.grad)


def test_a_submodule_in_eval_mode_stays_in_eval_mode_for_other_batch_shapes() -> None:
    torch.manual_seed(0)
    plain = Net()
    plain.norm.eval()
    module: Any = autopar.compile(
        copy.deepcopy(plain), example_inputs=batch(8), hardware="cpu-gloo", outputs="full"
    )
    assert module(**batch(5))[0].item() == pytest.approx(plain(**batch(5))[0].item(), rel=1e-6)


@pytest.mark.slow
def test_evaluation_accepts_batches_that_do_not_fit_in_training() -> None:
    torch.manual_seed(0)
    plain = Net()
    step = autopar.plan(
        copy.deepcopy(plain), 1, example_inputs=batch(8), hardware="cpu-gloo"
    ).prediction.peak_bytes
    within = step + 2000
    module: Any = autopar.compile(
        copy.deepcopy(plain),
        1,
        example_inputs=batch(8),
        hardware="cpu-gloo",
        outputs="full",
        memory_bytes=within,
        num_microbatches=1,
    )
    module.eval()
    plain.eval()
    with torch.no_grad():
        found, wanted = module(**batch(24)), plain(**batch(24))
    torch.testing.assert_close(found[1], wanted[1])
    (alone,) = module.variants.known
    assert (
        alone.only_forward
        and alone.plan.options["inference"]
        and alone.plan.prediction.peak_bytes < within
    )
    with pytest.raises(autopar.AutoparError, match="fits"):
        # a training program runs these batches, in microbatches as long as they fit
        for samples in (24, 202):
            module(**batch(samples))
    assert not any(each.only_forward for each in module.variants.known[1:])


def test_batch_local_accepts_the_other_mode_and_refuses_other_shapes() -> None:
    plain, module = pair(batch="local", outputs="local")
    module.eval()
    assert module(**batch(8))[0].item() == pytest.approx(
        plain.eval()(**batch(8))[0].item(), rel=1e-6
    )
    with pytest.raises(
        RuntimeStateError,
        match=(
            r"\(5, 8\), but the program expects torch.float32 \(8, 8\),"
            r" this rank's shard of \(8, 8\)"
        ),
    ):
        module(**batch(5))


def test_each_value_of_a_plain_argument_is_planned_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, module = pair()
    plain.eval(), module.eval()
    for scale in (2.0, 3.0, 1.0, 2.0, 3.0):
        assert module(**batch(8), scale=scale)[0].item() == pytest.approx(
            plain(**batch(8), scale=scale)[0].item(), rel=1e-6
        )
    assert module(**batch(8))[0].item() == pytest.approx(plain(**batch(8))[0].item(), rel=1e-6)
    assert len(module.variants.known) == 3, "eval, whose scale is 1.0 by default, and two values"
    assert "argument 'scale' is 3.0, but the program was compiled for" not in caplog.text, (
        "at INFO, since the mode differs, too"
    )


def test_programs_are_distinguished_by_plain_arguments_of_all_types() -> None:
    plain = Flipping()
    module: Any = autopar.compile(
        copy.deepcopy(plain), 1, example_inputs=(torch.ones(4, 2),), hardware="cpu-gloo"
    )
    x = torch.arange(8.0).reshape(4, 2)
    for flip, kind in (
        (True, "sum"),
        (False, "sum"),
        (False, None),
        (True, "max"),
        (1, "max"),
        (False, "sum"),
    ):
        assert module(x, flip, kind=kind).item() == plain(x, flip, kind=kind).item(), (flip, kind)
    assert len(module.variants.known) == 4, "the default values use the first program"


def test_batch_local_accepts_other_values_of_plain_arguments() -> None:
    plain = pair()[0]
    call: dict[str, Any] = batch(8) | {"scale": 1.0}
    module: Any = autopar.compile(
        copy.deepcopy(plain),
        1,
        example_inputs=call,
        hardware="cpu-gloo",
        batch="local",
        outputs="local",
    )
    assert module(**batch(8), scale=2.0)[0].item() == pytest.approx(
        plain(**batch(8), scale=2.0)[0].item(), rel=1e-6
    )


def test_an_argument_of_an_unsupported_type_is_refused() -> None:
    module: Any = autopar.compile(
        Flipping(), 1, example_inputs=(torch.ones(4, 2), True), hardware="cpu-gloo"
    )
    with pytest.raises(
        RuntimeStateError, match="argument '1' is Fraction, but the program was compiled for True"
    ):
        module(torch.ones(4, 2), Fraction(1))
    assert not module.variants.known


def test_the_number_of_programs_is_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, module = pair()
    monkeypatch.setattr(guards, "MOST", 1)
    with caplog.at_level(logging.WARNING):
        module(**batch(5))
    assert (
        "argument 'x' is torch.float32 (5, 8), but the program expects torch.float32 (8, 8):"
        " planning again for this call" in caplog.text
    )
    module(**batch(5, 1))
    with pytest.raises(
        RuntimeStateError,
        match=r"\(6, 8\)[\s\S]* 1 other modes, shapes and values already[\s\S]*drop_last",
    ):
        module(**batch(6))


def test_a_model_that_cannot_be_copied_is_refused_at_the_first_call_that_needs_a_copy() -> None:
    torch.manual_seed(0)
    plain = Net()
    plain.lock = threading.Lock()  # type: ignore[assignment]
    module: Any = autopar.compile(plain, example_inputs=batch(8), hardware="cpu-gloo")
    module(**batch(8))
    with pytest.raises(
        RuntimeStateError,
        match=r"cannot be copied: TypeError: cannot pickle '_thread.lock' object",
    ):
        module(**batch(5))


def test_the_loss_scale_applies_to_all_programs() -> None:
    plain, module = pair(
        num_microbatches=1, constraints=[autopar.constraints.pipeline("gpu", microbatches=1)]
    )
    module.loss_scale = 64.0
    for samples in (8, 5):
        (module(**batch(samples))[0] * module.loss_scale).backward()
        plain(**batch(samples))[0].backward()
    torch.testing.assert_close(_full(module.last.weight.grad) / 64.0, plain.last.weight.grad)
    assert all(each.loss_scale == 64.0 for each in module.variants.known)


def _full(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def test_further_programs_keep_no_reference_to_the_plain_or_the_compiled_model() -> None:
    torch.manual_seed(0)
    plain = Net()
    module: Any = autopar.compile(plain, example_inputs=batch(8), hardware="cpu-gloo")
    module(**batch(5))
    gc.collect()
    gc.disable()
    try:
        held = [weakref.ref(each) for each in (plain, module, next(module.parameters()))]
        del plain, module
        assert [each() for each in held] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["buffer", "assign"])
def test_replaced_parameters_and_buffers_are_replaced_in_all_programs(how: str) -> None:
    plain, module = pair()
    other = copy.deepcopy(plain)
    with torch.no_grad():
        module.eval()(**batch(8))
        other.norm.running_mean += 1.0
        other.last.weight.mul_(2.0)
        if how == "buffer":
            other.last.weight.div_(2.0)
            module.norm.running_mean = other.norm.running_mean.clone()
        else:
            state = {
                name: _like(module.state_dict()[name], x) for name, x in other.state_dict().items()
            }
            module.load_state_dict(state, assign=True)
        assert module(**batch(8))[0].item() == pytest.approx(
            other.eval()(**batch(8))[0].item(), rel=1e-6
        )


def test_a_seed_set_before_any_draw_applies_to_the_first_program_that_draws() -> None:
    def losses(begin: bool) -> list[float]:
        torch.manual_seed(0)
        made: Any = autopar.compile(
            Net(0.5).train(begin), example_inputs=batch(8), hardware="cpu-gloo", outputs="full"
        )
        made.manual_seed(7)
        kept = made.random_state
        made.train()
        return [kept, *(made(**batch(8))[0].item() for _ in range(2))]

    assert losses(begin=False) == losses(begin=True)


def test_a_plain_argument_fixed_in_one_program_may_differ_in_another() -> None:
    torch.manual_seed(0)

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            found = self.layer(x)
            return found.pow(2).mean() if y is None else nn.functional.cross_entropy(found, y)

    plain = Optional()
    module: Any = autopar.compile(
        copy.deepcopy(plain), example_inputs=batch(8), hardware="cpu-gloo"
    )
    for args in (
        (batch(8)["x"], None),
        (batch(5)["x"], None),
        (batch(5)["x"], batch(5)["y"]),
        (batch(8)["x"], batch(8)["y"]),
    ):
        assert module(*args).item() == pytest.approx(plain(*args).item(), rel=1e-6)


def test_further_calls_of_a_plan_with_an_unregistered_profile_need_the_profile() -> None:
    mine = HardwareProfile.from_json({**HardwareProfile.read("cpu-gloo"), "name": "mine"})
    plain, _ = pair()
    plan = autopar.plan(plain, 1, example_inputs=batch(8), hardware=mine)
    module: Any = autopar.compile(
        copy.deepcopy(plain), 1, example_inputs=batch(8), plan=plan, hardware=mine
    )
    assert module(**batch(5))[0].item() == pytest.approx(plain(**batch(5))[0].item(), rel=1e-6)
    without: Any = autopar.compile(copy.deepcopy(plain), 1, example_inputs=batch(8), plan=plan)
    with pytest.raises(autopar.AutoparError, match="hardware profile 'mine' does not exist"):
        without(**batch(5))


def test_a_deferred_module_keeps_the_modes_of_submodules_and_shows_their_attributes() -> None:
    torch.manual_seed(0)
    plain = Net(0.5)
    plain.dropout.eval()
    module: Any = autopar.compile(plain, hardware="cpu-gloo")
    losses = [module(**batch(8))[0].item() for _ in range(2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and not plain.dropout.training
    assert module.dropout.p == 0.5 and module.variants is not None


def _like(held: Any, full: Tensor) -> Any:
    return (
        distribute_tensor(full, held.device_mesh, held.placements)
        if isinstance(held, DTensor)
        else full.clone()
    )


@pytest.mark.parametrize("samples", [8, 3])
def test_planning_a_further_program_logs_the_reason_once(
    samples: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, module = pair()
    monkeypatch.setattr(terminal, "_AFTER_S", 0.0)
    monkeypatch.setattr(terminal, "err", Console(file=io.StringIO(), force_terminal=False))
    caplog.clear()
    if samples == 8:
        module.eval()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "autopar"):
        module(**batch(samples))
        module(**batch(samples))
    why = (
        "the program was compiled in train mode, and the model computes differently in the other"
        " mode"
        if samples == 8
        else "argument 'x' is torch.float32 (3, 8), but the program expects torch.float32 (8, 8)"
    )
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1, "one line, for the first of equal calls"
    assert told[0].startswith(
        f"{why}: planning again for this call; the new program is kept for later calls"
    )


def test_a_further_program_is_explained_by_the_parameters_that_no_program_trains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    plain[0].requires_grad_(False)
    plain[1].requires_grad_(False)
    x = torch.ones(8, 4)
    module: Any = autopar.compile(plain, 1, example_inputs=(x,), hardware="cpu-gloo")
    reasons = []
    for part in (1, 0):
        caplog.clear()
        module.get_submodule(str(part)).requires_grad_(True)
        with caplog.at_level(logging.WARNING, "autopar"):
            module(x).sum().backward()
        (reason,) = (record.getMessage() for record in caplog.records)
        reasons.append(reason.partition(":")[0])
    assert reasons == [
        f"parameters '{part}.weight', '{part}.bias' were frozen when the model was compiled, but"
        " now require gradients"
        for part in (1, 0)
    ]
    assert all(p.grad is not None for p in module.parameters())
