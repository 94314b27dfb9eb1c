"""Layout constraints can express expert plans. These plans emit exactly the collectives of a
handwritten version.

The batch of 4 runs on 2 × 4 devices. Each rank has two samples, so that linear layers flatten batch
and sequence, and the batch is too small to be sharded over the tensor axis as well.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import expert
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autopar.capture import capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.planner import Planned, PlanOptions, make_plan

# open choices are made without overlap, as in a handwritten plan
ALONE = replace(HardwareProfile.load("h100-sxm"), overlap_slowdown=1.0, hash="alone")
MESH = Mesh({"data": 2, "tensor": 4}, devices_per_node=8)
DATA, TENSOR = 0, 1
NUM_LAYERS = 2
CONFIGS = {
    "llama": {
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "use_cache": False,
    },
    "gpt2": {
        "n_layer": NUM_LAYERS,
        "n_embd": 2048,
        "n_head": 16,
        "vocab_size": 32000,
        "n_positions": 4096,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
    },
}


def forced(kind: str, *, fsdp: bool) -> Planned:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIGS[kind]))
    ids = torch.empty(4, 4096, dtype=torch.int64, device="meta")
    trace = capture(model, (), {"input_ids": ids, "labels": ids})
    constraints = getattr(expert, kind)(fsdp=fsdp)
    return make_plan(trace, MESH, ALONE, PlanOptions(constraints=constraints))


def counted(planned: Planned) -> dict[str, Counter[tuple[str, str, int]]]:
    """Return, for each module kind (layer indices dropped), the number of each (phase, collective,
    axis) of its tensors, for all layers together."""
    found: dict[str, Counter[tuple[str, str, int]]] = {}
    for phase, key, collective in (
        (c.phase, node, c.collective) for node, c in planned.plan.steps()
    ):
        if collective.kind != "slice":
            module = re.sub(r"\.\d+(?=\.|$)", "", key.partition("/")[0])
            found.setdefault(module, Counter())[phase, collective.kind, collective.axis] += 1
    return found


def total(planned: Planned) -> Counter[tuple[str, str, int]]:
    return sum(counted(planned).values(), Counter())


# Megatron-LM's sequence parallelism (Korthikanti et al., 2022, figure 5): per layer, forward
# gathers the sequence before attention and MLP and scatters after them, and backward does the
# reverse. In addition, there are the scatter of the vocabulary-parallel embedding, the gather of
# the head (and their reverses), three small reductions of the vocabulary-parallel loss, the sum of
# the loss over data, and one gradient all-reduce per tensor.
FORWARD = {
    ("forward", "all_gather", TENSOR): 2 * NUM_LAYERS + 1,
    ("forward", "reduce_scatter", TENSOR): 2 * NUM_LAYERS + 1,
    ("forward", "all_reduce", TENSOR): 3,
    ("forward", "all_reduce", DATA): 1,
}
BACKWARD = {
    ("backward", "all_gather", TENSOR): 2 * NUM_LAYERS + 1,
    ("backward", "reduce_scatter", TENSOR): 2 * NUM_LAYERS + 1,
}


@pytest.mark.slow
def test_megatron_on_llama_emits_exactly_the_collectives_of_a_handwritten_version() -> None:
    gradients = {
        ("backward", "all_reduce", DATA): (
            9 * NUM_LAYERS + 3
        ),  # 7 matrices and 2 norms a layer; embedding, head, last norm
        ("backward", "all_reduce", TENSOR): 2 * NUM_LAYERS
        + 1,  # norms run on a shard of the sequence
    }
    assert total(forced("llama", fsdp=False)) == Counter({**FORWARD, **BACKWARD, **gradients})


@pytest.mark.slow
def test_megatron_on_gpt2_emits_exactly_the_collectives_of_a_handwritten_version() -> None:
    planned = forced("gpt2", fsdp=False)
    storage = {p.name: (p.view, str(p.layout)) for p in planned.program.stages[0].parameters}
    assert storage["transformer.h.0.attn.c_attn.weight"] == ((2048, 3, 2048), "R S(2)")
    found = counted(planned)
    block = {m: c for m, c in found.items() if m.startswith("transformer.h")}
    forward = sum(
        (Counter({k: n for k, n in c.items() if k[0] == "forward"}) for c in found.values()),
        Counter(),
    )
    assert forward == Counter(FORWARD)
    moved = sum(
        (Counter({k: n for k, n in c.items() if k[1] != "all_reduce"}) for c in block.values()),
        Counter(),
    )
    assert (
        moved[("backward", "all_gather", TENSOR)]
        == moved[("backward", "reduce_scatter", TENSOR)]
        == 2 * NUM_LAYERS
    )
    reduced = sum(
        (Counter({k: n for k, n in c.items() if k[1] == "all_reduce"}) for c in block.values()),
        Counter(),
    )
    # per layer over data: 4 matrices, 4 biases, 2 norms with weight and bias; over tensor:
    # parameters of ops on a shard of the sequence
    assert reduced == {
        ("backward", "all_reduce", DATA): 12 * NUM_LAYERS,
        ("backward", "all_reduce", TENSOR): 6 * NUM_LAYERS,
    }


@pytest.mark.slow
def test_fsdp_times_tensor_on_llama_gathers_weights_over_data_and_scatters_their_gradients() -> (
    None
):
    found = total(forced("llama", fsdp=True))
    matrices = 7 * NUM_LAYERS + 2
    assert found["forward", "all_gather", DATA] == matrices
    assert found["backward", "all_gather", DATA] == 0, "with ample memory gathered weights are kept"
    assert found["backward", "reduce_scatter", DATA] == matrices
    assert found["backward", "all_reduce", DATA] == 2 * NUM_LAYERS + 1, (
        "only the norms rest replicated"
    )
    assert {k: n for k, n in found.items() if k[2] == TENSOR and k[0] == "forward"} == {
        k: n for k, n in FORWARD.items() if k[2] == TENSOR
    }


def test_fsdp_times_tensor_on_gpt2_gathers_weights_over_data_and_scatters_their_gradients() -> None:
    found = total(forced("gpt2", fsdp=True))
    matrices = 4 * NUM_LAYERS + 1
    assert found["forward", "all_gather", DATA] == matrices
    assert found["backward", "reduce_scatter", DATA] == matrices


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_priced_collectives_equal_emitted_collectives(kind: str) -> None:
    planned = forced(kind, fsdp=True)
    priced = Counter(planned.plan.issued())
    emitted = Counter(
        (phase, collective) for phase, _, collective in planned.program.stages[0].collectives
    )
    assert emitted == priced
