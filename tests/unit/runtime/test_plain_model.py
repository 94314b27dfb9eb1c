"""A change of the plain model after compilation that the compiled module does not follow is
refused, or it gives a warning."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RuntimeStateError
from autopar.runtime.tensor_guards import sample_checksum

X = torch.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x))).pow(2).mean()


def pair() -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Net()
    return plain, autopar.compile(plain, example_inputs=(X,), hardware="cpu-gloo")


def other() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return Net().state_dict()


def test_another_mode_is_refused_until_the_compiled_module_is_set_to_it() -> None:
    plain, module = pair()
    plain.eval()
    with pytest.raises(
        RuntimeStateError, match=r"the plain model was set to another mode[\s\S]*call pm\.eval\(\)"
    ):
        module(X)
    module.eval()
    with torch.no_grad():
        assert module(X).item() == pytest.approx(plain(X).item())
    module.train()
    with pytest.raises(RuntimeStateError, match=r"call pm\.train\(\)|set the plain model back"):
        module(X)
    plain.train()
    module(X)


def test_another_mode_of_a_submodule_is_refused() -> None:
    plain, module = pair()
    plain.norm.eval()
    with pytest.raises(
        RuntimeStateError,
        match=r"plain model's 'norm' was set to another mode[\s\S]*before compiling",
    ):
        module(X)
    plain.norm.train()
    module(X)


def test_frozen_parameters_are_refused_until_the_compiled_parameters_are_frozen() -> None:
    plain, module = pair()
    module(X).backward()
    plain.layer.requires_grad_(False)
    with pytest.raises(
        RuntimeStateError,
        match=(
            r"'layer\.weight' was frozen after it was"
            r" compiled[\s\S]*get_parameter\('layer\.weight'\)"
        ),
    ):
        module(X)
    module.layer.requires_grad_(False)
    module.zero_grad()
    module(X).backward()
    assert module.layer.weight.grad is None and module.norm.weight.grad is not None


def test_unfrozen_parameters_are_refused() -> None:
    torch.manual_seed(0)
    plain: Any = Net()
    plain.layer.requires_grad_(False)
    module: Any = autopar.compile(plain, example_inputs=(X,), hardware="cpu-gloo")
    plain.layer.bias.requires_grad_(True)
    with pytest.raises(RuntimeStateError, match=r"'layer\.bias' was unfrozen"):
        module(X)


def _in_place(plain: Any) -> None:
    with torch.no_grad():
        plain.layer.weight.mul_(2.0)


def _replace(plain: Any) -> None:
    plain.layer.weight = nn.Parameter(torch.ones(4, 4))


def _data(plain: Any) -> None:
    plain.layer.weight.data = torch.ones(4, 4)


def _past_what_counts(plain: Any) -> None:
    plain.layer.weight.data.copy_(torch.ones(4, 4))


WAYS: list[Callable[[Any], Any]] = [
    lambda plain: plain.load_state_dict(other()),
    _in_place,
    _replace,
    _data,
    _past_what_counts,
    lambda plain: nn.init.ones_(plain.layer.weight.data),
    lambda plain: plain.layer.weight.detach().numpy().fill(1.0),
]


@pytest.mark.parametrize(
    "write", WAYS, ids=["load", "in place", "replace", "data", "in data", "init of data", "numpy"]
)
def test_parameters_written_before_the_first_call_are_refused(
    write: Callable[[Any], Any],
) -> None:
    plain, module = pair()
    write(plain)
    for _ in range(3):
        with pytest.raises(
            RuntimeStateError,
            match=(
                r"'layer\.weight' was written after it was compiled"
                r"[\s\S]*call load_state_dict of the compiled module"
            ),
        ):
            module(X)
    module.load_state_dict(plain.state_dict())
    module(X)


def test_equal_writes_to_both_models_before_the_first_call_are_allowed() -> None:
    plain, module = pair()
    for each in (plain, module):
        for parameter in each.parameters():
            parameter.data.copy_(torch.ones_like(parameter))
    torch.testing.assert_close(module.layer.weight.full_tensor(), plain.layer.weight)
    module(X)


def test_values_are_checked_in_calls_2_4_and_8_and_one_changed_value_is_detected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, module = pair()
    for call in range(1, 9):
        with caplog.at_level(logging.WARNING, "autopar"):
            module(X)
        assert bool(caplog.records) == (call == 8), call
        if call == 4:
            plain.layer.weight.data[1, 2] += 1.0
    assert "'layer.weight' of the plain model was written" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(300, 300),
        lambda: torch.zeros(3, 4).T,
        lambda: torch.zeros(1000, 30, dtype=torch.bfloat16).T,
        lambda: torch.zeros(3, dtype=torch.complex128).conj(),
        lambda: torch.zeros(2, dtype=torch.bool),
        lambda: torch.tensor(0.0),
        lambda: torch.full((2,), float("nan")),
    ],
)
def test_the_sample_checksum_changes_exactly_if_values_change(
    make: Callable[[], Tensor],
) -> None:
    x = make()
    before = sample_checksum(x)
    assert before == sample_checksum(make()) is not None
    x.data.fill_(1)
    assert sample_checksum(x) != before
    assert sample_checksum(x.to("meta")) is None and sample_checksum(x.new_empty(0)) is None


def test_the_sample_checksum_of_a_large_tensor_covers_every_column() -> None:
    found = set()
    for column in range(256):
        x = torch.zeros(2048, 256)
        x[:, column] = 1.0
        found.add(sample_checksum(x))
    assert sample_checksum(torch.zeros(2048, 256)) not in found


@pytest.mark.parametrize("what", ["later", "later by data", "trained", "buffer"])
def test_writes_that_may_be_intended_give_one_warning(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, module = pair()
    if what == "later":
        module(X)
        plain.load_state_dict(other())
    elif what == "later by data":
        module(X)
        _data(plain)
    elif what == "trained":
        plain(X).backward()
        torch.optim.SGD(plain.parameters(), 0.1).step()
    else:
        plain.norm.running_mean.add_(1.0)
    with caplog.at_level(logging.WARNING, "autopar"):
        module(X)
        assert len(caplog.records) == 1
        _in_place(plain)
        module(X)
    assert len(caplog.records) == 1
    assert "of the plain model was written after it was compiled" in caplog.text


def test_a_plain_model_on_meta_or_deleted_is_not_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, module = pair()
    plain.to("meta")
    module(X).backward()
    del plain
    gc.collect()
    module(X).backward()
    assert not caplog.records


def test_a_model_on_meta_that_gets_values_is_refused() -> None:
    with torch.device("meta"):
        plain: Any = Net()
    module: Any = autopar.compile(plain, example_inputs=(X,), hardware="cpu-gloo")
    plain.load_state_dict(other(), assign=True)
    with pytest.raises(
        RuntimeStateError, match="was on the meta device"
    ):  # the parameters of the compiled module have no values
        module(X)
    module.load_state_dict(other())
    module(X)


def test_a_copy_of_a_compiled_module_checks_the_same_plain_model() -> None:
    plain, module = pair()
    copied = copy.deepcopy(module)
    plain.eval()
    with pytest.raises(RuntimeStateError, match="another mode"):
        copied(X)


def test_the_checks_keep_no_reference_to_the_plain_model_or_its_weights() -> None:
    plain, module = pair()
    held = [weakref.ref(plain), weakref.ref(plain.layer.weight)]
    del plain
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    module(X)


@pytest.mark.parametrize("mode", ["of the model", "of what waits"])
def test_a_deferred_module_is_planned_in_the_mode_at_its_first_call(
    mode: str,
) -> None:
    torch.manual_seed(0)
    plain = Net()
    module: Any = autopar.compile(plain, hardware="cpu-gloo")
    (plain if mode == "of the model" else module).eval()
    with torch.no_grad():
        found = module(X).item()
        assert (
            not module.training and not plain.training and found == pytest.approx(plain(X).item())
        )


@pytest.mark.parametrize(
    "kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
@pytest.mark.parametrize("path", ["", "layer"])
def test_hooks_registered_after_compilation_are_refused_until_they_are_removed(
    path: str, kind: str
) -> None:
    torch.manual_seed(0)
    plain: Any = Net()
    plain.drop.register_forward_hook(lambda *_: None)
    module: Any = autopar.compile(plain, example_inputs=(X,), hardware="cpu-gloo")
    module(X)
    where = f"'s '{path}'" if path else ""
    handle = getattr(plain.get_submodule(path), f"register_{kind}")(lambda *_: None)
    with pytest.raises(
        RuntimeStateError, match=f"hook was registered on the plain model{where} after"
    ):
        module(X)
    handle.remove()
    module(X)


def test_parameter_hooks_registered_after_compilation_are_refused() -> None:
    plain, module = pair()
    handle = plain.layer.weight.register_hook(lambda grad: grad)
    with pytest.raises(
        RuntimeStateError,
        match=r"plain model's parameter 'layer\.weight'[\s\S]*pm\.get_parameter\('layer\.weight'\)",
    ):
        module(X)
    handle.remove()
    module(X)
