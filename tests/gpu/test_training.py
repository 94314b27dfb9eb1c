"""Training features on one GPU: losses outside the model, other shapes, evaluation, gradients of
inputs, saved state and trainers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import given_back
import lit
import no_loss
import pytest
import torch
import trained
import zoo_small
from hosts import quick_hosts
from native import needs_gpu
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.constraints import offload
from autopar.core.mesh import Mesh
from benchmarks import zoo

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
]
ONE = Mesh.parse("d=1")


def whole(x: Any) -> Tensor:
    tensor: Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return tensor


def tensors_of(outputs: Any) -> dict[str, Tensor]:
    """Return the tensors of the outputs of a model, by name."""
    by_name = (
        dict(outputs)
        if isinstance(outputs, dict)
        else dict(enumerate(outputs if isinstance(outputs, tuple) else (outputs,)))
    )
    return {str(name): x for name, x in by_name.items() if isinstance(x, Tensor)}


def to_cuda(batch: dict[str, Any]) -> dict[str, Any]:
    """Move a batch to the device, with new leaves for tensors that require gradients."""
    return {
        name: x.detach().cuda().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for name, x in batch.items()
    }


def close(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    scale = max(theirs.abs().max().item(), 1e-12)
    assert (
        whole(ours).device == theirs.device
        and (whole(ours) - theirs).abs().max().item() <= tolerance * scale
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_inductor_backend_trains_like_the_plain_model(kind: str) -> None:
    plain, batch = getattr(zoo_small, kind)()
    plain, batch = plain.cuda(), to_cuda(batch)
    ours = autopar.compile(
        copy.deepcopy(plain), ONE, example_inputs=batch, hardware="h100-sxm", backend="inductor"
    )
    theirs = plain(**batch).loss
    for _ in range(2):
        ours.zero_grad()
        loss = ours(**batch).loss
        loss.backward()
        close(loss.detach(), theirs.detach(), 1e-5)
    theirs.backward()
    for name, p in plain.named_parameters():
        close(ours.get_parameter(name).grad, p.grad, 1e-4)


@pytest.mark.parametrize("outputs", ["auto", "dtensor"])
@pytest.mark.parametrize("kind", ["several", "convolutions", "llama_layer"])
def test_loss_outside_the_model_trains_like_the_plain_model(kind: str, outputs: str) -> None:
    plain, batch = getattr(no_loss, kind)()
    plain, batch = (
        plain.double().cuda(),
        to_cuda({name: x.double() if x.is_floating_point() else x for name, x in batch.items()}),
    )
    ours = autopar.compile(
        copy.deepcopy(plain), ONE, example_inputs=batch, hardware="h100-sxm", outputs=outputs
    )
    for model in (plain, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            torch.stack(
                [
                    whole(x).pow(2).mean()
                    for x in tensors_of(model(**batch)).values()
                    if whole(x).requires_grad
                ]
            ).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        close(p.detach(), q.detach())
    with torch.no_grad():
        actual, expected = tensors_of(ours.eval()(**batch)), tensors_of(plain.eval()(**batch))
    for name, x in expected.items():
        close(actual[name], x)


@pytest.mark.parametrize("kind", ["shifted", "several", "convolutions", "llama"])
def test_gradients_of_inputs_match_the_plain_model(kind: str) -> None:
    plain, inputs = getattr(given_back, kind)()
    plain = plain.cuda()
    batches = [to_cuda(inputs) for _ in range(2)]
    ours = autopar.compile(
        copy.deepcopy(plain), ONE, example_inputs=batches[0], hardware="h100-sxm"
    )
    for model, batch in zip((ours, plain), batches, strict=True):
        out = tensors_of(model(**batch))
        losses = (
            [out["loss"]]
            if "loss" in out
            else [whole(x).pow(2).mean() for x in out.values() if whole(x).requires_grad]
        )
        torch.stack(losses).sum().backward()
    for name, x in batches[1].items():
        if isinstance(x, Tensor) and x.grad is not None:
            assert batches[0][name].grad is not None
            close(batches[0][name].grad, x.grad, 2e-5)


def test_other_shapes_evaluation_and_inference_match_the_plain_model() -> None:
    plain, batch = zoo.build("gpt2", dropout=0.0)
    plain, batch = plain.cuda(), to_cuda(batch)
    ours = autopar.compile(
        copy.deepcopy(plain), ONE, example_inputs=batch, hardware="h100-sxm", outputs="loss"
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (ours, plain)]
    for samples, tokens in ((4, 16), (4, 12), (3, 16), (4, 16)):
        _, other = zoo.build("gpt2", batch=samples, seq=tokens, seed=samples + tokens)
        other, losses = to_cuda(other), []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            loss = model.train()(**other).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses += [loss.detach(), model.eval()(**other).loss]
        torch.testing.assert_close(losses[:2], losses[2:], rtol=1e-4, atol=0)
    inference = autopar.compile(
        copy.deepcopy(plain).eval(), ONE, example_inputs=batch, hardware="h100-sxm", inference=True
    )
    with torch.no_grad():
        torch.testing.assert_close(
            inference(**batch).logits, plain.eval()(**batch).logits, rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offloaded_state_is_trained_in_microbatches_saved_and_loaded(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model, batch = zoo_small.gpt2(num_layers=4)
    model = model.to(dtype)
    plain, batch = copy.deepcopy(model).cuda(), to_cuda(batch)
    options: dict[str, Any] = {"hardware": quick_hosts(), "example_inputs": batch}
    free = autopar.plan(model, ONE, **options)
    within = int(0.5 * free.prediction.peak_bytes)
    ours = autopar.compile(
        model.cuda(),
        ONE,
        **options,
        constraints=(offload(),),
        memory_bytes=within,
        num_microbatches=2,
    )
    assert any(not p.to_local().is_cuda for p in ours.parameters())
    tolerance = (
        {"rtol": 1e-5, "atol": 0.0} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 0.0}
    )
    with torch.no_grad():
        torch.testing.assert_close(
            ours.eval()(**batch).loss, plain.eval()(**batch).loss, **tolerance
        )
    state = {name: whole(x).detach().cpu().clone() for name, x in ours.state_dict().items()}
    for model in (ours.train(), plain.train()):
        model(**batch).loss.backward()
    for (name, p), q in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        difference = (
            whole(p.grad).cuda().double() - q.grad.double()
        ).norm() / q.grad.double().norm().clamp_min(1e-9)
        assert difference < (1e-4 if dtype is torch.float32 else 5e-2), name
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(1.0)
    ours.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(
            ours.eval()(**batch).loss, plain.eval()(**batch).loss, **tolerance
        )
        assert all(
            torch.equal(whole(x).cpu(), state[name]) for name, x in ours.state_dict().items()
        )


class Rotated(nn.Module):
    """A model with complex tensors, one of which is saved as a conjugate, and two biases that are
    added."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.first, self.second = (nn.Parameter(torch.randn(64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        features = self.up(x) + (self.first + self.second)
        numbers = torch.view_as_complex(features.reshape(*features.shape[:-1], 32, 2))
        numbers = numbers * torch.polar(torch.ones_like(numbers.real), numbers.imag).conj()
        return self.down(torch.view_as_real(numbers).flatten(-2)).pow(2).mean()


def test_complex_tensors_and_summed_biases_can_be_offloaded() -> None:
    torch.manual_seed(0)
    plain, x = Rotated().cuda(), torch.randn(64, 32, device="cuda")
    free = autopar.plan(plain, ONE, example_inputs={"x": x}, hardware=quick_hosts())
    within = int(0.6 * free.prediction.peak_bytes)
    ours = autopar.compile(
        copy.deepcopy(plain),
        ONE,
        example_inputs={"x": x},
        hardware=quick_hosts(),
        constraints=(offload(),),
        memory_bytes=within,
    )
    assert ours.plan.prediction.host_bytes
    for model in (ours, plain):
        model(x).backward()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(whole(p.grad).cuda(), q.grad, rtol=1e-4, atol=1e-6)


def test_lightning_on_the_device_matches_plain_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lit.QUIET, "accelerator", "gpu")
    expected = lit.train_and_test(tmp_path / "alone", "auto")
    result = lit.train_and_test(
        tmp_path / "ours", autopar.LightningStrategy(compile_options={"hardware": "h100-sxm"})
    )
    lit.same(result, expected)


def test_trainer_on_the_device_matches_the_transformers_trainer(tmp_path: Path) -> None:
    import transformers

    logs = []
    for kind, options in (
        (transformers.Trainer, {}),
        (autopar.Trainer, {"mesh": {"gpu": 1}, "compile_options": {"hardware": "h100-sxm"}}),
    ):
        args = trained.settings(tmp_path / kind.__module__, use_cpu=False)
        trainer = kind(model=trained.Tagger(), args=args, **trained.data(), **options)
        trainer.train()
        logs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert logs[0] and logs[1] == pytest.approx(logs[0], rel=1e-4)
