"""Models whose forward reads values, uses plain tensors or changes parameters: what is captured and
what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import hf
from autopar.capture import capture
from autopar.errors import CaptureError, RuntimeStateError


class Inner(nn.Module):
    """A linear layer followed by `does`."""

    def __init__(self, does: Any) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4), does
        self.table = torch.linspace(-1.0, 1.0, 4).unsqueeze(0)  # a view that is not a buffer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.does(self, self.linear(x))
        return result


class Outer(nn.Module):
    def __init__(self, does: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Inner(does)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _guarded(module: Inner, x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = torch.clamp(x, -1.0, 1.0)
    return x


def _guarded_twice(module: Inner, x: Tensor) -> Tensor:
    if torch.isnan(x).any() or torch.isinf(x).any():
        x = torch.zeros_like(x)
    return x.clamp(min=-9.0)  # torch computes clamp with isnan, too


def _guarded_at_once(module: Inner, x: Tensor) -> Tensor:
    if (torch.isnan(x).any() | torch.isinf(x).any()).item():
        x = torch.zeros_like(x)
    return x


def _weighed(module: Inner, x: Tensor) -> Tensor:
    x = _guarded(module, x)
    return x * torch.isfinite(x).all()


def _masked(module: Inner, x: Tensor) -> Tensor:
    x = _guarded(module, x)
    return torch.where(torch.isinf(x), torch.zeros_like(x), x)


def _positive(module: Inner, x: Tensor) -> Tensor:
    if (x > 0).all():
        x = x * 2
    return x


def _clamped(module: Inner, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.linear.bias.clamp_(-0.5, 0.5)
    return x


def _verified(does: Any) -> None:
    torch.manual_seed(0)
    model, batch = Outer(does).double(), (torch.randn(4, 4, dtype=torch.float64),)
    plan = autopar.plan(model, autopar.Mesh({"a": 2}), example_inputs=batch)
    assert autopar.verify(plan, model, batch).ok


@pytest.mark.parametrize(
    "does",
    [_guarded, _guarded_twice, _guarded_at_once],
    ids=["isfinite", "isnan, isinf", "at once"],
)
def test_a_branch_on_finite_values_is_captured_for_finite_values_with_a_warning(
    does: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="autopar"):
        _verified(does)
    assert any("test_values.py" in text and "finite" in text for text in caplog.messages)


def test_patches_for_branches_on_finite_values_are_removed_after_the_capture() -> None:
    capture(Outer(_guarded), (torch.ones(2, 4),))
    assert torch.isfinite(torch.tensor(1.0)).all().item() is True
    assert (
        torch.isnan(torch.tensor(float("nan"))).item()
        and torch.isinf(torch.tensor(float("inf"))).item()
    )


@pytest.mark.parametrize("does", [_weighed, _masked])
def test_a_finite_check_that_is_also_used_in_computation_is_refused(
    does: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CaptureError):
        capture(Outer(does), (torch.ones(2, 4),))
    assert not any("the branch for finite values" in text for text in caplog.messages)


def test_other_data_dependent_control_flow_is_refused_with_module_line_and_remedy() -> None:
    with pytest.raises(CaptureError, match="Data-dependent") as caught:
        capture(Outer(_positive), (torch.ones(2, 4),))
    assert caught.value.where is not None and not isinstance(caught.value.where, str)
    assert (
        caught.value.where.module == "layers.1" and "if (x > 0).all():" in caught.value.where.source
    )
    assert "torch.where" in caught.value.remedy


def test_a_plain_tensor_that_is_a_view_is_captured() -> None:
    _verified(lambda module, x: x + module.table.type_as(x))


def test_distributions_in_forward_are_captured_without_argument_validation() -> None:
    torch.distributions.Distribution.set_default_validate_args(
        True
    )  # torch.compile in another test switches it off permanently
    _verified(
        lambda module, x: (
            x * torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.75, dtype=x.dtype))
        )
    )
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(0.0, -1.0)


def test_an_in_place_change_of_a_parameter_is_refused_with_name_and_line() -> None:
    with pytest.raises(
        CaptureError, match=r"changes the parameter 'layers\.1\.linear\.bias'"
    ) as caught:
        capture(Outer(_clamped), (torch.ones(2, 4),))
    assert "clamp_(-0.5, 0.5)" in str(caught.value) and "optimizer.step()" in caught.value.remedy


def _small(kind: str, **settings: Any) -> Any:
    text = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "vocab_size": 96,
    }
    vision = {
        **text,
        "num_hidden_layers": 2,
        "image_size": 16,
        "patch_size": 8,
        "model_type": "clip_vision_model",
    }
    del vision["vocab_size"]
    towers = {"text_config": {**text, "model_type": "llama"}, "vision_config": vision}
    spec = f"{kind}/AutoModelForImageTextToText:{json.dumps({**towers, 'image_token_index': 95, **settings})}"  # noqa: E501
    return hf.build(spec, device="cpu", batch=4, seq=20)


@pytest.mark.slow
def test_a_model_that_uses_numpy_on_image_sizes_and_binds_signatures_is_captured() -> None:
    model, batch = _small("llava_next", image_grid_pinpoints=[[16, 16]])
    assert capture(model, (), batch).loss is not None


@pytest.mark.slow
def test_a_submodule_that_was_called_alone_records_its_outputs_once() -> None:
    model, batch = _small("llava")
    model.model.vision_tower(
        batch["pixel_values"], output_hidden_states=True
    )  # this call makes it record its outputs
    assert capture(model, (), batch).loss is not None


class Applies(nn.Module):
    """A model that passes the result of a layer and an integer input to a function."""

    def __init__(self, does: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(8, 8), does

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.does(self.layer(x), i).square().sum()


def _counts(h: Tensor, i: Tensor) -> Tensor:
    return h * torch.zeros(8, dtype=torch.long).scatter_add(0, i, torch.ones_like(i))


def _sums(h: Tensor, i: Tensor) -> Tensor:
    weights = h.sum(1)
    return weights.new_zeros(8).scatter_add(0, i, weights)


def _covariance(h: Tensor, i: Tensor) -> Tensor:
    x, w = h.T, i.to(h)
    n = w.sum()
    c = x - (x * w).sum(1, keepdim=True) / n
    return (c * w) @ c.T / (n - 1)


@pytest.mark.parametrize(
    ("refused", "remedy", "instead"),
    [
        (lambda h, i: h * torch.bincount(i, minlength=8), r"scatter_add\(0, i, torch", _counts),
        (lambda h, i: torch.bincount(i, h.sum(1), 8), r"scatter_add\(0, i, weights", _sums),
        (lambda h, i: torch.cov(h.T, fweights=i), r"\(c \* w\) @ c\.T", _covariance),
    ],
)
def test_remedies_of_ops_that_read_values_work(
    refused: Callable[[Tensor, Tensor], Tensor],
    remedy: str,
    instead: Callable[[Tensor, Tensor], Tensor],
) -> None:
    x, i = torch.linspace(-1.0, 1.0, 64).reshape(8, 8), torch.tensor([1, 2, 3, 1, 7, 4, 4, 4])
    with pytest.raises(CaptureError, match=remedy):
        capture(Applies(refused), (x, i))
    torch.testing.assert_close(instead(x, i), refused(x, i))
    capture(Applies(instead), (x, i))


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # which the setting itself causes
def test_a_setting_that_capture_changes_has_the_users_value(is_enabled: bool) -> None:
    def scaled(_: nn.Module, x: Tensor) -> Tensor:
        return x * (3.0 if torch.backends.mkldnn.enabled else 2.0)

    x = torch.randn(8, 4)
    with torch.backends.mkldnn.flags(enabled=is_enabled):
        model = Outer(scaled)
        expected = model(x)
        pm = autopar.compile(model, 1, example_inputs=(x,), hardware="cpu-gloo")
        assert torch.equal(pm(x), expected)
        assert torch.backends.mkldnn.enabled is is_enabled
        with (
            torch.backends.mkldnn.flags(enabled=not is_enabled),
            pytest.raises(RuntimeStateError, match=r"enabled of torch\.backends\.mkldnn"),
        ):
            pm(x)
