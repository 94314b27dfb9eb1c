"""Microbatches with weights inferred from the graphs give the loss, outputs and gradients of the
batch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.analysis.microbatches import Microbatching, find_microbatching, ready
from autopar.api.planning import plan_model
from autopar.api.tracing import microbatch_of, trace_part
from autopar.capture import Trace, capture
from autopar.capture.execute import execute
from autopar.capture.trees import flatten_call
from autopar.core.mesh import Mesh
from autopar.emit.program_builder import microbatches_of
from autopar.errors import AutoparError, ConstraintError, CoupledError, VerificationError
from autopar.kernels.collectives import fake_groups
from autopar.ops import random
from autopar.program.executor import Executor
from autopar.program.stage_work import StageWork
from benchmarks import zoo

NUM = 4


def traced(
    model: nn.Module, batch: dict[str, Any], **how: Any
) -> tuple[Trace, Trace, Microbatching]:
    whole = capture(model, (), batch)
    part = capture(model, *microbatch_of((), batch, NUM))
    return whole, *ready(part, find_microbatching(whole, part, NUM, **how))


def error(model: nn.Module, batch: dict[str, Any], **how: Any) -> float:
    """Return the largest error of outputs and gradients of microbatches in float64, compared with
    the full batch."""
    whole, part, inferred = traced(model, batch, **how)
    tensors = {
        n: x.detach()
        for n, x in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    }
    tensors = {n: x.double() if x.is_floating_point() else x for n, x in tensors.items()} | {
        random.STATE: random.initial_state(0)
    }
    leaves = dict(flatten_call((), batch)[0])
    inputs = {
        i.path: leaves[i.path].double() if leaves[i.path].is_floating_point() else leaves[i.path]
        for i in whole.inputs
    }
    expected, gradients, _ = execute(
        whole, tensors, tensors, list(inputs.values()), dtype=torch.float64
    )
    batches = microbatches_of(part, inferred)
    parts = batches.parts(inputs, tensors)
    made: dict[str, list[Tensor]] = {}
    sums: dict[str, Tensor] = {}
    tangent = torch.tensor(batches.weight, dtype=torch.float64)
    for one in parts:
        got, grads, _ = execute(
            part, tensors, tensors, [one[i.path] for i in part.inputs], tangent, dtype=torch.float64
        )
        for o, x in zip(part.outputs, got, strict=True):
            made.setdefault(o.path, []).append(x)
        sums = {n: sums[n] + g if n in sums else g for n, g in grads.items()}
    scale = max(float(g.abs().max()) for g in gradients.values())
    worst = max(float((sums[n] - g).abs().max()) for n, g in gradients.items()) / scale
    for o, x in zip(whole.outputs, expected, strict=True):
        worst = max(
            worst,
            float((batches.join(o.path, made[o.path]) - x).abs().max()) / float(x.abs().max()),
        )
    return worst


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "bert",
        "unet2d",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("t5", "vit", "dlrm")),
    ],
)
def test_microbatches_give_the_results_of_the_batch(name: str) -> None:
    model, batch = zoo.build(name)
    assert error(model, batch) < 1e-12


def test_ignored_labels_have_no_weight_in_any_distribution_over_microbatches() -> None:
    model, batch = zoo.build("gpt2")
    labels = torch.full_like(batch["labels"], -100)
    labels[0, :5], labels[3, 2:] = 7, 3  # the third and fourth microbatch have no valid label
    assert error(model, {**batch, "labels": labels}) < 1e-12


class Head(nn.Module):
    """A linear layer and a loss of its result."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(3, 5), loss

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.linear(x), y)}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(8, 3, generator=generator),
        "y": torch.randn(8, 5, generator=generator),
    }


LOSSES = {
    "sum": (lambda z, y: ((z - y) ** 2).sum(), "sum"),
    "mean": (lambda z, y: ((z - y) ** 2).mean(), "mean"),
    "mse": (F.mse_loss, "mean"),
    "per sample": (lambda z, y: ((z - y) ** 2).sum() / z.shape[0], "mean"),
    "a tensor filled with a constant": (
        lambda z, y: (z.sum(1) * torch.full((z.shape[0],), 0.5)).sum(),
        "sum",
    ),
    "a constant divisor": (lambda z, y: ((z - y) ** 2).sum() / 3.0, "sum"),
    "two means": (lambda z, y: F.mse_loss(z, y) + 0.1 * z.abs().mean(), "mean"),
    "one less a mean": (lambda z, y: 1 - (z * y).mean() * 2.0, "mean"),
    "sum of means": (lambda z, y: ((z - y) ** 2).mean(1).sum(), "sum"),
    "one sample's weight": (lambda z, y: (z * y).mean(0).sum() * 2.0, "mean"),
    "a linear of an average": (
        lambda z, y: F.linear((z * y).mean(0, keepdim=True), torch.ones(2, 5), torch.ones(2)).sum(),
        "mean",
    ),
    "a sum and a mean": (lambda z, y: ((z - y) ** 2).sum() + z.abs().mean(), "mean"),
    "a linear of a sum": (
        lambda z, y: F.linear((z * y).sum(0, keepdim=True), torch.ones(2, 5), torch.ones(2)).sum(),
        "mean",
    ),
    "one less a sum": (lambda z, y: 1 - z.sum(), "mean"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_every_kind_are_weighted_correctly(name: str) -> None:
    loss, kind = LOSSES[name]
    assert traced(Head(loss), batch())[2].outputs["loss"].combination == kind
    assert error(Head(loss), batch()) < 1e-12


COUPLED = {
    "a maximum over the batch": lambda z, y: (z - z.amax(0)).sum(),
    "a product of samples": lambda z, y: (z @ z.t()).sum(),
    "a bias beside a sum over samples": lambda z, y: torch.addmm(torch.ones(5), z.t(), y).sum(),
    "a mean that is subtracted": lambda z, y: ((z - z.mean(0)) ** 2).sum(),
    "a product of means": lambda z, y: z.mean() * F.mse_loss(z, y),
    "a square of a mean": lambda z, y: z.mean().square(),
    "a constant for each pair": lambda z, y: (z.sum(1) * torch.ones(z.shape[0], z.shape[0])).sum(),
    "a tensor filled with a share of the batch": (
        lambda z, y: (z.sum(1) * torch.full((z.shape[0],), 1 / z.shape[0])).sum()
    ),
    "a number made of the number of samples": (
        lambda z, y: (z.sum(1) * torch.tensor(1 / z.shape[0])).sum()
    ),
    "a new tensor filled with it": (
        lambda z, y: (z.sum(1) * z.new_full((z.shape[0],), 1 / z.shape[0])).sum()
    ),
    "a position in the batch": lambda z, y: (z.sum(1) * torch.arange(z.shape[0])).sum(),
    "a sum and a regulariser": lambda z, y: (
        (z * y).sum() + (torch.ones(5) * 2).sum() * z.sum().square()
    ),
}


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_couple_samples_are_refused(name: str) -> None:
    with pytest.raises(ConstraintError, match="cannot be split into 4 microbatches: at "):
        traced(Head(COUPLED[name]), batch())


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("cnn", "features.1"),
        ("clip", "/dot/forward"),
        pytest.param("mixtral", "/forward/", marks=pytest.mark.slow),
    ],
)
def test_models_that_couple_samples_are_refused_with_the_op(name: str, op: str) -> None:
    model, data = zoo.build(name)
    with pytest.raises(AutoparError, match=op):
        traced(model, data)


def test_a_promise_of_independent_samples_is_recorded_if_needed() -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return (z.sort(0).values * 0 + z * y).sum()  # the sort couples samples and adds zero

    _, _, inferred = traced(Head(loss), batch(), independent=True)
    assert any("sort" in key for key in inferred.promised)
    assert error(Head(loss), batch(), independent=True) < 1e-12


def test_a_batch_not_divisible_by_the_microbatches_is_refused() -> None:
    with pytest.raises(
        ConstraintError, match="8 samples cannot be split into 3 equal microbatches"
    ):
        microbatch_of((), batch(), 3)


class Weighted(nn.Module):
    """A cross entropy with class weights in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 5)
        self.register_buffer("weights", torch.rand(5) + 0.1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(x), y, weight=self.weights)


class Scaled(Weighted):
    """A cross entropy with class weights in parameters."""

    def __init__(self) -> None:
        super().__init__()
        del self.weights
        self.weights = nn.Parameter(torch.rand(5) + 0.1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = self.weights[y]
        return (
            nn.functional.cross_entropy(self.net(x), y, reduction="none") * weights
        ).sum() / weights.sum()


def test_losses_use_the_current_class_weights_in_buffers() -> None:
    torch.manual_seed(0)
    model, labels = Weighted(), torch.randint(0, 5, (8,))
    labels[2:4], labels[4] = -100, -100  # the second microbatch has no valid label
    data = {"x": torch.randn(8, 6), "y": labels}
    assert error(model, data) < 1e-12
    pm = autopar.compile(copy.deepcopy(model), Mesh(1), example_inputs=data, num_microbatches=NUM)
    for scale in (1.0, 3.0):
        for each in (pm, model):
            each.zero_grad()
            with torch.no_grad():
                each.get_buffer("weights")[0] *= scale
            each(**data).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(pm.get_parameter(name).grad.full_tensor(), parameter.grad)


def test_losses_with_class_weights_in_parameters_are_refused() -> None:
    torch.manual_seed(0)
    model, data = Scaled(), {"x": torch.randn(8, 6), "y": torch.randint(0, 5, (8,))}
    with pytest.raises(
        ConstraintError,
        match="the value of the batch depends on parameter 'weights', which is known only after",
    ):
        traced(model, data)


class Whole(nn.Module):
    """A model with labels for exactly eight samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 8)
        self.register_buffer("labels", torch.arange(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(x), self.labels)


class Averages(nn.Module):
    """A loss and another average, over the same labels or over others."""

    def __init__(self, *, same: bool) -> None:
        super().__init__()
        self.loss, self.other, self.same = nn.Linear(8, 4), nn.Linear(8, 4), same

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> dict[str, Tensor]:
        return {
            "loss": F.cross_entropy(self.loss(x), y),
            "other": F.cross_entropy(self.other(x), y if self.same else z),
        }


@pytest.mark.parametrize("same", [True, False])
def test_an_average_returned_with_the_loss_is_that_of_the_batch(same: bool) -> None:
    torch.manual_seed(0)
    y, z = (torch.randint(0, 4, (8,)).masked_fill(torch.arange(8) < num, -100) for num in (3, 5))
    model, batch = Averages(same=same), {"x": torch.randn(8, 8), "y": y, "z": z}
    options: dict[str, Any] = {
        "example_inputs": batch,
        "hardware": "cpu-gloo",
        "num_microbatches": 2,
        "outputs": "full",
    }
    expected = model(**batch)
    found = autopar.verify(autopar.plan(model, 1, **options), model, batch)
    assert found.ok and "other" in found.outputs
    module: Any = autopar.compile(model, 1, **options)
    torch.testing.assert_close(module(**batch)["other"], expected["other"].detach())


class Masked(nn.Module):
    """Two entropies with separate labels after dropout, and a random mask whose elements are
    counted."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = nn.Linear(8, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        scores = self.net(self.drop(x))
        seen = (torch.rand_like(x[:, 0]) > 0.4).to(x.dtype)
        return (
            F.cross_entropy(scores, y)
            + F.cross_entropy(scores.sin(), z)
            + (scores.sum(1) * seen).sum() / seen.sum()
        )


def test_random_numbers_are_per_microbatch_and_their_counts_per_batch() -> None:
    torch.manual_seed(0)
    y, z = (torch.randint(0, 4, (8,)).masked_fill(torch.arange(8) < num, -100) for num in (3, 5))
    batch = {"x": torch.randn(8, 8), "y": y, "z": z}
    plan = autopar.plan(
        Masked(), 1, example_inputs=batch, hardware="cpu-gloo", num_microbatches=NUM
    )
    found = autopar.verify(plan, Masked(), batch)
    assert found.ok and found.max_error < 1e-12, str(found)


class Connections(nn.Module):
    """Dropout of weights, with separate draws for each microbatch."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.weight, self.loss = nn.Parameter(torch.ones(5, 3)), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(F.linear(x, F.dropout(self.weight, 0.5)), y)


def test_random_numbers_without_a_sample_dim_are_verified_per_microbatch() -> None:
    options: dict[str, Any] = {
        "example_inputs": batch(),
        "hardware": "cpu-gloo",
        "num_microbatches": NUM,
    }
    model = Connections(F.mse_loss)
    assert autopar.verify(autopar.plan(model, 1, **options), model, batch()).ok
    counted = Connections(lambda z, y: (z * (y > 0)).sum() / (y > 0).sum())
    with pytest.raises(
        VerificationError, match="draws its own random numbers, which match no sample"
    ):
        autopar.verify(autopar.plan(counted, 1, **options), counted, batch())


class Positions(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.pow(2).mean(), "at": torch.arange(len(x))}


def test_positions_in_the_batch_are_not_assembled_from_microbatches() -> None:
    options: dict[str, Any] = {
        "example_inputs": {"x": torch.randn(8, 8)},
        "hardware": "cpu-gloo",
        "num_microbatches": 2,
        "outputs": "full",
    }
    with pytest.raises(CoupledError, match="'at' has positions in the batch"):
        autopar.plan(Positions(), 1, inference=True, **options)


def test_a_model_with_a_fixed_batch_size_is_refused_in_microbatches() -> None:
    model, data = Whole(), {"x": torch.randn(8, 6)}
    with pytest.raises(
        CoupledError, match="the model accepts the whole batch, but not a part with 2 samples"
    ):
        trace_part(model, capture(model, (), data), (), data, NUM)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: F.cross_entropy(z, y, reduction="sum") / (y != -100).sum(),
        lambda z, y: (
            (F.cross_entropy(z, y.clamp(min=0), reduction="none") * (y != -100)).sum()
            / (y != -100).sum()
        ),
        lambda z, y: F.cross_entropy(z, y, reduction="sum") / (y != -100).sum().clamp(min=1),
    ],
    ids=["sum over count", "masked", "sum over clamped count"],
)
def test_a_microbatch_without_counted_labels_adds_nothing(loss: Any) -> None:
    torch.manual_seed(0)
    model, labels = Head(loss), torch.randint(0, 5, (8,))
    labels[4:6] = -100
    whole = {"x": torch.randn(8, 3), "y": labels}
    pm = autopar.compile(copy.deepcopy(model), Mesh(1), example_inputs=whole, num_microbatches=4)
    pm(**whole)["loss"].backward()
    model(**whole)["loss"].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(pm.get_parameter(name).grad.full_tensor(), parameter.grad)
    assert autopar.verify(pm.plan, model, whole).ok


def test_the_loss_of_microbatches_can_be_scaled_in_place() -> None:
    torch.manual_seed(0)
    model = Head(lambda z, y: F.cross_entropy(z, y))
    whole = {"x": torch.randn(8, 3), "y": torch.randint(0, 5, (8,))}
    pm = autopar.compile(copy.deepcopy(model), Mesh(1), example_inputs=whole, num_microbatches=4)
    for module in (pm, model):
        loss = module(**whole)["loss"]
        loss *= 0.25
        loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(pm.get_parameter(name).grad.full_tensor(), parameter.grad)


def nan_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Initialize sums of gradients with NaN."""
    plain = Executor.new_sums
    monkeypatch.setattr(
        Executor, "new_sums", lambda self: [total.fill_(math.nan) for total in plain(self)]
    )


@pytest.mark.parametrize("ignored", [(), (0,), (0, 1), (1, 3), (0, 1, 2, 3)], ids=str)
def test_the_first_counted_microbatch_overwrites_the_gradient_sums(
    ignored: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    nan_sums(monkeypatch)
    torch.manual_seed(0)
    model = Head(lambda z, y: F.cross_entropy(z, y))
    data = {"x": torch.randn(8, 3), "y": torch.randint(0, 5, (8,))}
    pm = autopar.compile(copy.deepcopy(model), Mesh(1), example_inputs=data, num_microbatches=NUM)
    for scale in (1.0, -2.0):
        labels = data["y"].clone()
        for number in ignored:
            labels[2 * number : 2 * number + 2] = -100
        given = {"x": data["x"] * scale, "y": labels}
        for each in (pm, model):
            each.zero_grad()
            each(**given)["loss"].backward()
        for name, parameter in model.named_parameters():
            ours = pm.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(
                ours, torch.zeros_like(parameter) if len(ignored) == NUM else parameter.grad
            )


def test_gradients_are_zero_if_no_microbatch_has_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nan_sums(monkeypatch)
    made = plan_model(
        Head(F.mse_loss), Mesh(1), example_inputs=batch(), hardware="cpu-gloo", num_microbatches=NUM
    )[1]
    (stage,) = made.program.stages
    work = StageWork(
        stage, Executor(stage, fake_groups(stage.mesh), outputs="local"), torch.device("cpu")
    )
    parts = [{name: x[2 * n : 2 * n + 2] for name, x in batch().items()} for n in range(NUM)]
    work.begin([], [torch.randn(t.shape) for t in stage.parameters], [], parts, 0.0, keep=True)
    for number in range(NUM):
        work.forward(number)
        work.backward(number)
    gradients = work.finish()
    assert len(gradients) == 2 and not any(g.any() for g in gradients)
