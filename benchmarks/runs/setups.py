"""The inputs of planning for a published run: a model of its sizes, its mesh, and its plan as
constraints; or the reason why it is left out.

Facts that sources do not state are assumed, equally for all their runs:

- parameters are stored in fp32 and read in bf16 (`precision`), also if a run used fp16, which has
  the same communication and compute; the optimizer is AdamW;
- Megatron's data parallelism uses its distributed optimizer, ZeRO stage 1; tensor parallelism
  includes sequence parallelism since Megatron Core, and in nanotron, whose mode is documented as a
  reduce-scatter;
- "selective" recomputation is the framework's choice of ops: the planner chooses recomputed ops
  within the memory of the device, as it does if nothing is stated; BigScience's runs checkpoint
  whole layers, which their formula of flops counts;
- attention has the speed of its kernel at the time of the run (`ATTENTION`), or else that of the
  profile, which is of FlashAttention-2 and later;
- MPT is a GPT-2 of its sizes (its linears have no biases, and its positions no table), InternLM a
  Llama;
- ranks are in Megatron's order: tensor axis innermost, then context, data, stages; the part of data
  parallelism within a node is a separate axis, as NCCL's rings visit all devices of a node before
  they leave it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.constraints import Constraint, Recompute, ddp, megatron
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from benchmarks.runs.reading import Run

PROFILES: Mapping[str, str] = {
    "H100 80GB": "h100-sxm",
    "H100": "h100-sxm",
    "H200": "h200-sxm",
    "A100 80GB": "a100-sxm-80gb",
    "A100 40GB": "a100-sxm-40gb",
}
NODE_GBITS: Mapping[str, float] = {
    "4x100Gb RoCE per node": 400.0,
    "Jean Zay": 400.0,
    "400Gbps per node": 400.0,
    "800Gbps per node": 800.0,
}
"""Gb/s between nodes, if it differs from that of the profile's eight NICs. Jean Zay's nodes of
A100s have four Omni-Path 100 NICs."""
ATTENTION: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "llm-foundry": {"a100": (0.40, 0.30), "h100": (0.40 * 0.35 / 0.73, 0.30 * 0.35 / 0.73)},
}
"""Framework → chip → share of the peak that its attention reached in forward and backward, if it
differs from the profile's.

llm-foundry's benchmarks used `attn_impl: triton`, the default of
scripts/train/benchmarking/submit_benchmarks.py (mosaicml/llm-foundry), which sweep.sh does not
change, on H100s at v0.0.4 with torch 2.0.1 and CUDA 11.8. This is the first FlashAttention: 30 to
50 % of an A100's peak in forward, 25 to 35 % in backward (Dao, "FlashAttention-2", 2023, section 1;
here the middle). On an H100 the share is assumed to decrease as that of FlashAttention-2 does, from
73 % to 35 % (Shah et al., "FlashAttention-3", 2024, abstract).
"""
_GPT, _LLAMA, _NEMOTRON = "gpt2", "llama", "nemotron"
_FAMILIES: tuple[tuple[str, str], ...] = (
    ("nemotron4", _NEMOTRON),
    ("nemo megatron", _GPT),
    ("llama", _LLAMA),
    ("internlm", _LLAMA),
    ("mpt-", _GPT),
    ("gpt ", _GPT),
)
_CHECKPOINTS = "BigScience tr11"
_SEQUENCE = (
    "NeMo",
    "Megatron-Core",
    "Megatron-Bridge",
    "nanotron",
)  # frameworks whose tensor parallelism also splits the sequence
_UNBOUND = 1 << 50  # bytes; unlimited if the recomputed ops are known and forced


@dataclass(frozen=True, slots=True)
class Setup:
    """The inputs of planning.

    Attributes:
        spec: the model, in the form of `autopar.hf`.
        batch: number of samples of a step.
        seq: number of tokens per sample.
        mesh: the mesh.
        constraints: the plan of the run.
        microbatches: number of microbatches into which a replica cuts its part.
        profile: the hardware.
        memory_bytes: budget of the plan; None for the planner's default.
    """

    spec: str
    batch: int
    seq: int
    mesh: Mesh
    constraints: tuple[Constraint, ...]
    microbatches: int
    profile: HardwareProfile
    memory_bytes: int | None


def why_skipped(run: Run) -> str | None:
    """Return the reason why a run is not planned; None if it is."""
    missing = [
        name
        for name in ("layers", "hidden", "heads", "seq", "num_devices", "batch")
        if getattr(run, name) is None
    ]
    reasons = (
        (run.step_s is None and run.peak_bytes is None, "neither a time nor a peak was published"),
        (run.gpu not in PROFILES, f"no profile of {run.gpu}"),
        (
            "fp8" in run.precision.lower() or "fp4" in run.precision.lower(),
            f"precision {run.precision}: plans do not support 8-bit precision",
        ),
        (
            run.framework.startswith(("MaxText", "PaxML")),
            "compiled by XLA, shardings not published",
        ),
        (
            any(word in run.model.lower() for word in ("lora", "sft", "finetuning")),
            "fine-tuning of packed samples or adapters",
        ),
        (_family(run) is None or run.ep > 1, "no dense decoder of published sizes"),
        (run.source.startswith("Megatron-LM CI"), "a toy, bound by its launches"),
        (bool(missing), f"not stated: {', '.join(missing)}"),
    )
    return next((reason for holds, reason in reasons if holds), None) or _find_inconsistency(run)


def _find_inconsistency(run: Run) -> str | None:
    assert run.batch and run.num_devices and run.dp
    if run.num_devices != run.tp * run.pp * run.cp * run.dp:
        return (
            f"tp {run.tp}, pp {run.pp}, cp {run.cp} and dp {run.dp} do not make {run.num_devices}"
            " devices"
        )
    if run.batch % (run.dp * (run.micro_batch or 1)):
        return (
            f"{run.batch} samples do not divide into microbatches of {run.micro_batch} on {run.dp}"
            " replicas"
        )
    return None


def setup_of(run: Run) -> Setup:
    """Return the inputs of planning for a run that is not skipped."""
    assert run.batch and run.seq and run.dp
    microbatches = run.batch // (run.dp * run.micro_batch) if run.micro_batch else 1
    mesh, within = _mesh(run)
    recompute = _recompute(run)
    apart = "across" in run.sharding or "within" in run.sharding
    nodes = ("dp_node",) if apart and "dp_node" in mesh.names else ()
    plan = megatron(
        tp="tp" if run.tp > 1 else 1,
        cp="cp" if run.cp > 1 else 1,
        dp=within if apart else None,
        pp="pp" if run.pp > 1 else 1,
        zero=_zero(run),
        recompute=recompute,
        chunks=run.chunks if run.pp > 1 else 1,
        microbatches=microbatches if microbatches > 1 or run.pp > 1 else None,
        free=nodes,
        sequence=run.tp > 1 and run.framework.startswith(_SEQUENCE),
    )
    constraints: tuple[Constraint, ...] = (plan, *(ddp(name) for name in nodes))
    memory = None if recompute is None else _UNBOUND
    return Setup(
        _spec(run), run.batch, run.seq, mesh, constraints, microbatches, _profile(run), memory
    )


def _mesh(run: Run) -> tuple[Mesh, tuple[str, ...]]:
    """Return the axes in Megatron's order, and those of data parallelism within a node."""
    assert run.dp
    inner = math.gcd(run.dp, max(1, run.devices_per_node // (run.tp * run.cp)))
    sizes = {"pp": run.pp, "dp_node": run.dp // inner, "dp": inner, "cp": run.cp, "tp": run.tp}
    axes = {name: size for name, size in sizes.items() if size > 1} or {"dp": 1}
    return Mesh(axes, devices_per_node=run.devices_per_node), ("dp",) if "dp" in axes else ()


def _recompute(run: Run) -> Recompute | None:
    """Return the forced recomputation; None if the planner chooses."""
    if run.recompute == "full" or run.source.startswith(_CHECKPOINTS):
        return "full"
    return "none" if run.recompute == "none" else None


def _zero(run: Run) -> int:
    said = run.sharding.lower()
    if "zero-3" in said or "fsdp" in said:
        return 2 if "zero-2" in said else 3
    if "zero-2" in said:
        return 2
    return (
        0
        if said in ("zero-0 (ddp)", "ddp") and run.framework.startswith(("nanotron", "LitGPT"))
        else 1
        if run.dp and run.dp > 1
        else 0
    )


def _profile(run: Run) -> HardwareProfile:
    profile = _with_attention(run, HardwareProfile.load(PROFILES[run.gpu]))
    gbits = NODE_GBITS.get(run.interconnect)
    if gbits is None:
        return profile
    inter = profile.links["inter"]
    full_gbits = {"h100-sxm": 3200.0, "h200-sxm": 3200.0}.get(profile.name, 1600.0)
    slower = replace(
        inter, bandwidth_bytes_per_s=inter.bandwidth_bytes_per_s * gbits / full_gbits, curves={}
    )
    return replace(
        profile, links={**profile.links, "inter": slower}, hash=f"{profile.hash}-{gbits:g}"
    )


def _with_attention(run: Run, profile: HardwareProfile) -> HardwareProfile:
    framework = next((name for name in ATTENTION if run.framework.startswith(name)), None)
    if framework is None:
        return profile
    reached = dict(
        zip(
            ("attention", "attention_backward"),
            ATTENTION[framework][profile.name.partition("-")[0]],
            strict=True,
        )
    )
    changed = {
        kind: dict.fromkeys(profile.efficiency[kind], share) for kind, share in reached.items()
    }
    return replace(
        profile, efficiency={**profile.efficiency, **changed}, hash=f"{profile.hash}-{framework}"
    )


def _family(run: Run) -> str | None:
    name = run.model.lower()
    return next((family for start, family in _FAMILIES if name.startswith(start)), None)


def _spec(run: Run) -> str:
    assert run.hidden and run.heads and run.layers and run.seq
    vocab = run.vocab or 51200
    if _family(run) == _GPT:
        sizes = {
            "n_layer": run.layers,
            "n_embd": run.hidden,
            "n_head": run.heads,
            "n_inner": run.ffn or 4 * run.hidden,
        }
        return f"gpt2:{json.dumps({**sizes, 'n_positions': run.seq, 'vocab_size': vocab, 'bos_token_id': 0, 'eos_token_id': 0})}"  # noqa: E501
    ffn = run.ffn or 256 * math.ceil(8 * run.hidden / 3 / 256)  # Llama's, and InternLM's
    sizes = {
        "num_hidden_layers": run.layers,
        "hidden_size": run.hidden,
        "intermediate_size": ffn,
        "num_attention_heads": run.heads,
    }
    more = {
        "num_key_value_heads": run.kv_heads or run.heads,
        "vocab_size": vocab,
        "max_position_embeddings": run.seq,
    }
    return f"{_family(run)}:{json.dumps({**sizes, **more, 'bos_token_id': 0, 'eos_token_id': 0})}"
