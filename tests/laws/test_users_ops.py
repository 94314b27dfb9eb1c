"""Models with ops without a row in the rule table: rules are discovered, plans are verified, and
plans name these ops."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import autopar
from autopar import AutoparError, Mesh
from autopar.cache.entries import Key
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.cost.op_times import call_time
from autopar.errors import PlanError
from autopar.plans import Entry, Fallback
from autopar.rules import Call, call_on, register, unregister, why_replicated
from autopar.rules.table import REGISTERED


@torch.library.custom_op("tests_users_ops::squash", mutates_args=())
def squash(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


@torch.library.custom_op("tests_users_ops::squash_backward", mutates_args=())
def squash_backward(grad: Tensor, x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    inner = grad * (1 - y * y)
    return inner @ w.mT, x.mT @ inner


@torch.library.custom_op("tests_users_ops::tangled", mutates_args=())
def tangled(x: Tensor) -> Tensor:
    """Every element of the result depends on every element of the operand."""
    return x * torch.tanh(x.flatten().cumsum(0).flip(0).view(x.shape))


@torch.library.custom_op("tests_users_ops::tangled_backward", mutates_args=())
def tangled_backward(grad: Tensor, x: Tensor) -> Tensor:
    factor = torch.tanh(x.flatten().cumsum(0).flip(0))
    through = (grad.flatten() * x.flatten() * (1 - factor * factor)).cumsum(0).flip(0)
    return (grad.flatten() * factor + through).view(x.shape)


def _set_up() -> None:
    squash.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
    squash_backward.register_fake(lambda grad, x, w, y: (torch.empty_like(x), torch.empty_like(w)))
    tangled.register_fake(torch.empty_like)
    tangled_backward.register_fake(lambda grad, x: torch.empty_like(x))
    squash.register_autograd(
        lambda ctx, grad: squash_backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
    )
    tangled.register_autograd(
        lambda ctx, grad: tangled_backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


_set_up()


class Made(nn.Module):
    def __init__(self, op: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.op = nn.Parameter(torch.randn(64, 48) / 8), op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, self.weight)


class Net(nn.Module):
    def __init__(self, op: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.made = nn.Linear(32, 64), Made(op)

    def forward(self, x: Tensor) -> Tensor:
        return self.made(self.up(x)).pow(2).sum()


def plain(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.tests_users_ops.squash(x, w)


def knotted(x: Tensor, w: Tensor) -> Tensor:
    return torch.ops.tests_users_ops.tangled(x @ w)


BATCH = {"x": torch.randn(16, 32, generator=torch.Generator().manual_seed(0))}


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    yield
    for op in list(REGISTERED):
        unregister(op)


def made(model: nn.Module, **options: object) -> autopar.Plan:
    return autopar.plan(
        model, Mesh({"a": 2, "b": 2}), example_inputs=BATCH, hardware="cpu-gloo", **options
    )


def ops_of(plan: autopar.Plan) -> tuple[set[str], set[str]]:
    """Return the names of ops with discovered rules, and of ops that run replicated because they
    have no rule."""
    return {op for e in plan.entries for op in e.discovered}, {
        fallback.op for e in plan.entries for fallback in e.fallbacks
    }


def tangled_call() -> Call:
    x = torch.ones(16, 48)
    return call_on(torch.ops.tests_users_ops.tangled.default, (x,), {}, tangled(x))[0]


def test_ops_without_a_rule_are_discovered_planned_and_verified() -> None:
    torch.manual_seed(0)
    model = Net(plain)
    plan = made(model, strict=True)
    discovered, replicated = ops_of(plan)
    assert (
        discovered == {"tests_users_ops.squash.default", "tests_users_ops.squash_backward.default"}
        and not replicated
    )
    assert autopar.verify(plan, model, BATCH).ok
    assert "discovered by experiment" in str(
        autopar.explain(plan)
    ) and "tests_users_ops.squash.default" in str(autopar.explain(plan))


def test_discovered_splits_are_used() -> None:
    """A constraint shards the columns of the weight over both axes, so that the op has to use a
    discovered strategy."""
    torch.manual_seed(0)
    model = Net(plain)
    plan = made(model, constraints=(autopar.constraints.layout("made", weight="S(1) S(1)"),))
    assert any(
        str(s.inputs[1]) == "S(1) S(1)"
        for node, s in plan.node_choices().items()
        if "/squash/" in node
    )
    assert autopar.verify(plan, model, BATCH).ok


def test_the_plan_file_stores_discovered_rules(tmp_path: Path) -> None:
    plan = made(Net(plain))
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan


def test_a_registered_op_is_not_reported() -> None:
    register(squash, "m _, _ n -> m n")
    register(squash_backward, "m _, m _, _ _, m _ -> m _, _ _")
    assert ops_of(made(Net(plain))) == (set(), set())


def test_a_registered_op_is_priced_by_its_flops_like_a_torch_product() -> None:
    factors = torch.ones(256, 256), torch.ones(256, 256)
    whole = Strategy((Layout.parse("R"),) * 2, (Layout.parse("R"),))
    profile = HardwareProfile.load("cpu-gloo")

    def seconds_of(target: Callable[..., Tensor]) -> float:
        call, _ = call_on(target, factors, {}, target(*factors))
        return call_time(call, whole, (1,), profile)

    product_s = seconds_of(torch.ops.aten.mm.default)
    register(squash, "m _, _ n -> m n")
    assert seconds_of(torch.ops.tests_users_ops.squash.default) < 0.9 * product_s, "its bytes"
    register(squash, "m _, _ n -> m n", flops=lambda x, w: 2 * x[0] * x[1] * w[1])
    assert seconds_of(torch.ops.tests_users_ops.squash.default) == product_s

    register(squash_backward, "m _, m _, _ _, m _ -> m _, _ _")
    model = Net(plain)
    assert autopar.check(made(model), model, BATCH).ok, "the certificate prices it alike"


def test_another_flops_function_gives_another_cache_key() -> None:
    """The cache does not return a plan with other prices."""
    register(squash_backward, "m _, m _, _ _, m _ -> m _, _ _")
    keys = set()
    for flops in (None, lambda x, w: 2 * x[0] * x[1] * w[1], lambda x, w: 4 * x[0] * x[1] * w[1]):
        register(squash, "m _, _ n -> m n", flops=flops)
        keys.add(Key.of("plan", Net(plain), (), {}, ()).text)
    assert len(keys) == 3


def test_an_op_that_cannot_be_sharded_runs_replicated_and_is_reported() -> None:
    torch.manual_seed(0)
    model = Net(knotted)
    plan = made(model)
    assert (
        ops_of(plan)
        == (set(), {"tests_users_ops.tangled.default", "tests_users_ops.tangled_backward.default"})
        and autopar.verify(plan, model, BATCH).ok
    )
    wide = Console(file=io.StringIO(), width=400)  # wide enough that no cell wraps
    with wide.capture() as printed:
        wide.print(autopar.explain(plan))
    text = printed.get()
    assert "run replicated" in text and "test_users_ops.py" in text and "%" in text
    assert "tests_users_ops.tangled.default" in text and why_replicated(tangled_call()) in text


def test_a_plan_that_names_another_op_without_a_rule_is_refused() -> None:
    model = Net(knotted)
    plan = made(model)

    def renamed(entry: Entry) -> Entry:
        fallbacks = tuple(Fallback("aten.mm.default", f.reason) for f in entry.fallbacks)
        return replace(entry, fallbacks=fallbacks)

    other = replace(plan, entries=tuple(map(renamed, plan.entries)))
    certificate = autopar.check(other, model, BATCH)
    assert not certificate.ok and "the ops without a rule are" in str(certificate)


def test_a_plan_of_an_earlier_version_has_no_list_of_ops_without_a_rule() -> None:
    model = Net(knotted)
    plan = made(model)
    data = json.loads(plan.dumps())
    assert sum("fallbacks" in e for e in data["entries"]) == sum(e.replicated for e in plan.entries)
    for entry in data["entries"]:
        entry.pop("fallbacks", None)
    earlier = autopar.Plan.loads(json.dumps(data))
    assert autopar.check(earlier, model, BATCH).ok
    assert "run replicated" in str(autopar.explain(earlier))


def test_strict_refuses_ops_that_run_replicated_with_their_line_and_cost() -> None:
    with pytest.raises(AutoparError, match="run replicated") as refused:
        made(Net(knotted), strict=True)
    assert f"tests_users_ops.tangled.default: {why_replicated(tangled_call())}" in str(
        refused.value
    )
    assert "autopar.rules.register" in str(refused.value)
    assert "made/tangled/forward" in str(refused.value) and "% of the step" in str(refused.value)
    assert "test_users_ops.py" in str(refused.value) and not isinstance(refused.value, PlanError)
