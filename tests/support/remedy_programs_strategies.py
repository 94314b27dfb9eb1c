"""Programs for the remedies of constraints that a model cannot satisfy, of prices, and of plans
with manual changes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar import HardwareProfile, hf
from autopar.constraints import (
    context_parallel,
    ddp,
    expert_parallel,
    fsdp,
    layout,
    megatron,
    offload,
    rests_as,
    tensor_parallel,
)
from tests.support.mlp import Mlp
from tests.support.remedy_programs import Called, Program, planned

_X, _IDS = torch.ones(8, 4), torch.ones(8, 4, dtype=torch.int64)
_LINE, _SQUARE = {"gpu": 2}, {"a": 2, "b": 2}
_SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 16,
}


class Words(nn.Module):
    """A chain of linear layers over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(16, 4), Mlp(4, 8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.embed(ids))


def _plan(
    *constraints: Any, model: Any = None, batch: Any = None, mesh: Any = None, **options: Any
) -> Callable[[], object]:
    """Plan a model with constraints, by default a small MLP."""
    batch = (_X,) if batch is None else batch
    return planned(
        Mlp(4, 8, 2) if model is None else model,
        batch,
        mesh or _LINE,
        constraints=constraints,
        **options,
    )


def _transformer(
    kind: str, *constraints: Any, mesh: Any = None, **settings: Any
) -> Callable[[], object]:
    """Plan a small model of transformers on the meta device."""

    def program() -> object:
        sizes = (
            {"n_embd": 8, "n_head": 4, "n_layer": 1, "vocab_size": 16} if kind == "gpt2" else _SIZES
        )
        model, batch = hf.build(f"{kind}:{json.dumps({**sizes, **settings})}", batch=4, seq=4)
        return _plan(*constraints, model=model, batch=batch, mesh=mesh)()

    return program


def _scaled(layer: nn.Module, x: Tensor) -> Tensor:
    return (layer.bias * x).square().mean()


def _sorted(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).mean(0).sort().values.square().mean()


def _with_half(add: bool) -> Callable[[], object]:
    """Plan in fp16 with a profile to which float16 may be added."""

    def program() -> object:
        data = json.loads(json.dumps(HardwareProfile.read("cpu-gloo")))
        data["name"] = "another"
        if add:
            data["peak_flops_per_s"]["float16"] = data["peak_flops_per_s"]["float32"]
            for kind in ("matmul", "attention", "attention_backward"):
                data["efficiency"][kind]["float16"] = data["efficiency"][kind]["float32"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "profile.json")
            path.write_text(json.dumps(data))
            return _plan(precision="fp16", hardware=str(path))()

    return program


def _with_host() -> object:
    data = json.loads(json.dumps(HardwareProfile.read("cpu-gloo")))
    data["name"], data["host"] = "another", HardwareProfile.read("h100-sxm")["host"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.json")
        path.write_text(json.dumps(data))
        return _plan(offload(), hardware=str(path))()


NAMED: dict[str, Program] = {
    "sharding/propagate.py nothing_to_split 0": Program(
        _plan(tensor_parallel("1d", axes="gpu"), model=Called(_scaled)),
        "remove the constraint",
        _plan(model=Called(_scaled)),
    ),
    "sharding/propagate.py nothing_to_split 0 | grid": Program(
        _plan(tensor_parallel("2d", axes=("a", "b")), model=Called(_scaled), mesh=_SQUARE),
        "remove the constraint",
        _plan(model=Called(_scaled), mesh=_SQUARE),
    ),
    "sharding/propagate.py nothing_to_split 0 | experts": Program(
        _plan(expert_parallel("gpu")), "remove the constraint", _plan()
    ),
    "sharding/propagate.py nothing_to_split 0 | sequence": Program(
        _plan(tensor_parallel("1d", axes="gpu", sequence=True), model=Words(), batch=(_IDS[:, 0],)),
        "remove sequence=True",
        _plan(tensor_parallel("1d", axes="gpu"), model=Words(), batch=(_IDS[:, 0],)),
    ),
    "sharding/resolve_presets.py _data_parallel 0": Program(
        _plan(ddp(), batch=(_X[:1],)), "with more than one sample in the batch", _plan(ddp())
    ),
    "sharding/resolve_presets.py _refuse 0": Program(
        _plan(tensor_parallel("2d", axes=("a", "b")), model=Called(_sorted), mesh=_SQUARE),
        "remove the constraint",
        _plan(model=Called(_sorted), mesh=_SQUARE),
    ),
    "sharding/resolve_presets.py _refuse 0 | sequence": Program(
        _plan(context_parallel("gpu"), model=nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))),
        "ddp(), fsdp() and tensor_parallel() shard other dims",
        _plan(fsdp(), model=nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))),
    ),
    "sharding/presets/batch_and_sequence.py check_batch 0": Program(
        _plan(ddp(), mesh={"gpu": 16}),
        "make the batch a multiple of 16",
        _plan(ddp(), mesh={"gpu": 16}, batch=(torch.ones(16, 4),)),
    ),
    "sharding/presets/batch_and_sequence.py check_batch 0 | axes": Program(
        _plan(ddp(), mesh={"node": 4, "gpu": 4}),
        "use fewer or smaller axes",
        _plan(ddp("gpu"), mesh={"node": 4, "gpu": 4}),
    ),
    "sharding/presets/batch_and_sequence.py by_experts 0": Program(
        _transformer(
            "mixtral",
            expert_parallel(("a", "b"), tokens="dispatched"),
            mesh=_SQUARE,
            num_local_experts=4,
        ),
        "use one axis",
        _transformer(
            "mixtral", expert_parallel("a", tokens="dispatched"), mesh=_SQUARE, num_local_experts=4
        ),
    ),
    "sharding/presets/batch_and_sequence.py by_experts 1": Program(
        _transformer("mixtral", expert_parallel("gpu"), num_local_experts=3),
        "axes whose sizes divide the number of experts",
        _transformer("mixtral", expert_parallel("gpu"), num_local_experts=4),
    ),
    "sharding/enumerate.py _refusal 0": Program(
        _transformer(
            "llama", tensor_parallel("1d", axes="gpu"), mesh={"gpu": 4}, num_key_value_heads=2
        ),
        "a multiple of 4, or use fewer or smaller axes",
        _transformer("llama", tensor_parallel("1d", axes="gpu"), mesh={"gpu": 4}),
    ),
    "sharding/enumerate.py _filter_allowed 0": Program(
        _plan(layout("layers.0.up", weight="S(0)"), layout("*.up", weight="S(1)")),
        "it can be one of: S(0)",
        _plan(layout("layers.0.up", weight="S(0)"), layout("*.up", weight="S(0)")),
    ),
}

FORCED: dict[str, Program] = {
    "sharding/resolve_constraints.py _match 0": Program(
        _plan(layout("layer.*", weight="S(0)")),
        "did you mean 'layers.*'",
        _plan(layout("layers.*", weight="R")),
    ),
    "sharding/resolve_constraints.py _resolve_layouts 0": Program(
        _plan(layout("layers.0.up", storage="R"), layout("*.up", storage="S(0)")),
        "force one storage layout for it",
        _plan(layout("*.up", storage="S(0)")),
    ),
    "sharding/resolve_constraints.py _softmax_to_recompute 0": Program(
        _plan(megatron(tp=2, recompute="selective")),
        "recompute='full', or remove the option",
        _plan(megatron(tp=2, recompute="full")),
    ),
    "sharding/resolve_constraints.py _find_offload 0": Program(
        _plan(offload(), offload(activations=False), hardware="h100-sxm"),
        "pass one of them",
        _plan(offload(), hardware="h100-sxm"),
    ),
    "sharding/resolve_constraints.py view_layout 0": Program(
        _plan(layout("*.up", storage="S(2)")),
        "use one of its dims",
        _plan(layout("*.up", storage="S(1)")),
    ),
    "sharding/resolve_constraints.py _resting_layouts 0": Program(
        _plan(rests_as({"layers.0.up.weight": "S(3)"})),
        "from a plan of the same model",
        _plan(rests_as({"layers.0.up.weight": "S(0)"})),
    ),
    "cost/zero_stages.py cannot_rest 0": Program(
        _plan(layout("layers.*.up", storage="P")),
        "force one of these",
        _plan(layout("layers.*.up", storage="S(0)")),
    ),
    "cost/zero_stages.py cannot_rest 1": Program(
        _transformer("gpt2", layout("*.c_attn", storage="S(1)#1 S(1)#0"), mesh=_SQUARE),
        "over axes in mesh order",
        _transformer("gpt2", layout("*.c_attn", storage="S(1) S(1)"), mesh=_SQUARE),
    ),
    "cost/op_times.py _rates 0": Program(
        _plan(precision="fp16"), "use one of float32, bfloat16", _plan(precision="bf16")
    ),
    "cost/op_times.py _rates 0 | added": Program(
        _with_half(False),
        "add float16 to peak_flops_per_s and to efficiency in a copy of the profile",
        _with_half(True),
    ),
    "cost/offload.py host_budget 0": Program(
        _plan(offload()),
        'add the field "host" to a copy of the profile and pass its path',
        _with_host,
    ),
    "cost/offload.py host_budget 0 | without": Program(
        _plan(offload()), "or plan without offload", _plan()
    ),
}

PROGRAMS: dict[str, Program] = {**NAMED, **FORCED}
