"""Training steps of a real model on one CUDA device: predicted and measured time and memory, and
the cost of budgets.

The methods are eager, eager with a checkpoint per layer, eager compiled by Inductor, autopar's
plans under shares of the memory of its plan without a budget, and the first of these compiled by
Inductor. A step is forward, backward and a fused AdamW. Times are those of the device with the host
ahead (`benchmarks.device_times`), and those of the host; a step takes the longer of the two. Peaks
are the largest number of live bytes of the allocator, from the start of forward to the end of
backward of a second step, so they include the state of the optimizer. Gradients are compared with
those of eager; the difference includes eager's rounding. With --offload, state and activations may
be stored on the host. --alone omits eager and the comparison with it, for models that are too large
for it. --no-inductor omits compiled variants. Without a device there is one row, which states this.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.api.planning import plan_model
from autopar.api.tracing import program_of, traced_for
from autopar.constraints import offload
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.errors import InfeasibleError
from autopar.plans import Plan
from autopar.request import Backend
from autopar.runtime.device_mesh import device_mesh
from autopar.runtime.module import ParallelModule
from benchmarks.common import Row, load_profile, parser, run_rows, specs_of
from benchmarks.device_times import in_turn, measure
from benchmarks.models import ModelSpec
from benchmarks.rivals.measuring import local

ONE = Mesh.parse("d=1")
SHARES = (1.0, 0.8, 0.65, 0.5, 0.4)
ROUNDS = 6
MAX_DIFFERENCE = 0.05  # relative difference of all gradients together, in bfloat16
Build = Callable[[], tuple[nn.Module, dict[str, Any]]]
COLUMNS = (
    "method",
    "share",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "peak_rel_err",
    "predicted_s",
    "measured_s",
    "host_s",
    "time_rel_err",
    "over_eager",
    "num_recomputed",
    "predicted_host_bytes",
    "gap",
    "difference",
    "skipped",
)
LLAMA = """llama:{"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "bos_token_id": 0, "eos_token_id": 0,
    "tie_word_embeddings": true, "use_cache": false}"""  # noqa: E501
MODEL = ModelSpec("llama-1.2b", LLAMA)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurements of a method: seconds of a step on the device and on the host, peak in bytes,
    and ‖its gradients − eager's‖ / ‖eager's‖, if known."""

    device_s: float
    host_s: float
    peak_bytes: int
    difference: float | None


def row(
    spec: dict[str, Any],
    mesh: str,
    batch: int,
    seq: int,
    hardware: str,
    shares: list[float],
    plans: str | None,
    dtype: str,
    precision: str | None,
    offloads: bool,
    alone: bool,
    inductor: bool,
    rounds: int,
) -> list[Row]:
    """Return the rows of all methods of one model."""
    if not torch.cuda.is_available() and plans is None:
        return [{"method": "", "ok": True, "error": None, "skipped": "there is no CUDA device"}]
    built, profile = ModelSpec(**spec), load_profile(hardware)
    size: dict[str, Any] = {"batch": batch, "seq": seq, "dtype": getattr(torch, dtype)}
    meta, example = built.build(**size, meta=True)
    asked = {
        "outputs": "loss",
        "precision": precision,
        "constraints": (offload(),) if offloads else (),
    }
    with tempfile.TemporaryDirectory() as folder:
        kind = f"{profile.name}-{batch}x{seq}-{dtype}{f'-{precision}' * bool(precision)}{'-offload' * offloads}"  # noqa: E501
        made = [
            *_plans(
                meta,
                example,
                profile,
                shares,
                Path(plans or folder) / built.name.replace("/", "-"),
                kind,
                asked,
            )
        ]
    if not torch.cuda.is_available():
        cases = [
            {"share": share, "skipped": reason or "planned, but not run: there is no CUDA device"}
            for share, _, reason in made
        ]
        return [
            {"method": "autopar", "hardware": profile.name, "ok": True, "error": None, **case}
            for case in cases
        ]
    base: Row = {
        "batch": batch,
        "seq": seq,
        "dtype": dtype,
        "precision": precision,
        "offload": offloads,
        "hardware": profile.name,
    }
    base |= {"error": None, "skipped": None, "device": torch.cuda.get_device_name()}

    def build() -> tuple[nn.Module, dict[str, Any]]:
        return built.build(**size, device="cuda")

    eager: Measurement | None = None
    rows, theirs = list[Row](), None if alone else dict[str, Tensor]()
    if theirs is not None:
        eager = _measure(build, theirs, rounds)
        rows = [_row(base, "eager", eager, eager)]
        rows.append(
            _row(
                base,
                "eager, a checkpoint per layer",
                _measure(lambda: _checkpointed(*build()), theirs, rounds),
                eager,
            )
        )
        if inductor:
            rows.append(
                _row(
                    base,
                    "eager, torch.compile",
                    _measure(lambda: _by_inductor(*build()), theirs, rounds),
                    eager,
                )
            )
    devices = device_mesh(ONE, "cuda")
    for share, plan, reason in made:
        shown = {**base, "share": share, "method": "autopar"}
        if plan is None:
            rows.append({**shown, "ok": True, "skipped": reason})
        else:
            program = program_of(plan, meta, traced_for(plan, meta, (), example), (), example)
            rows.append(
                _row(
                    shown,
                    "autopar",
                    _measure(partial(_compiled, program, devices, build), theirs, rounds),
                    eager,
                    plan,
                )
            )
            if inductor and theirs is not None and share == made[0][0] and not offloads:
                seen = _measure(
                    partial(_compiled, program, devices, build, "inductor"), theirs, rounds
                )
                rows.append(_row(shown, "autopar, inductor", seen, eager))
    return rows


def _plans(
    model: nn.Module,
    example: dict[str, Any],
    profile: HardwareProfile,
    shares: list[float],
    folder: Path,
    kind: str,
    asked: Mapping[str, Any],
) -> Iterator[tuple[float, Plan | None, str]]:
    """Yield for each share its plan, or the reason why there is none. The shares are of the memory
    that a plan needs within the device's whole memory, which is made first. Plans of this kind in
    the folder are reused, so they can be made on another machine."""
    ample = None
    folder.mkdir(parents=True, exist_ok=True)
    for share in (1.0, *(each for each in shares if each != 1.0)):
        path = folder / f"{kind}-{share}.json"
        budget = None if ample is None else int(share * ample)
        try:
            if not path.exists():
                plan_model(
                    model,
                    ONE,
                    example_inputs=example,
                    hardware=profile,
                    memory_bytes=budget,
                    **asked,
                )[1].plan.save(path)
            plan = Plan.load(path)
            ample = ample or plan.prediction.peak_bytes
            if share in shares:
                yield share, plan, ""
        except InfeasibleError as error:
            yield share, None, str(error).splitlines()[0]
            if ample is None:
                return


def _checkpointed(model: nn.Module, data: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    model.gradient_checkpointing_enable()
    return model, data


def _by_inductor(model: nn.Module, data: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    model.compile()
    return model, data


def _compiled(
    program: Any, devices: DeviceMesh, build: Build, backend: Backend = "eager"
) -> tuple[nn.Module, dict[str, Any]]:
    model, data = build()
    return ParallelModule(program, devices, model, outputs="loss", backend=backend), data


def _measure(build: Build, theirs: dict[str, Tensor] | None, rounds: int) -> Measurement:
    """Measure what `build` returns, and leave nothing of it on the device. `theirs` holds eager's
    gradients on the host, once they are known."""
    seen = _measured(*build(), theirs, rounds)
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return seen


def _measured(
    model: nn.Module, data: dict[str, Any], theirs: dict[str, Tensor] | None, rounds: int
) -> Measurement:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def gradients() -> None:
        model(**data)["loss"].backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    gradients()
    difference = None if theirs is None else _compared(model, theirs)
    update()
    torch.cuda.reset_peak_memory_stats()
    gradients()
    peak_bytes = torch.cuda.max_memory_allocated()
    update()
    times = measure({"step": in_turn(gradients, update)}, rounds)["step"]
    return Measurement(times.device_s, times.host_s, peak_bytes, difference)


def _compared(model: nn.Module, theirs: dict[str, Tensor]) -> float:
    ours = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    if not theirs:
        theirs |= {name: grad.cpu() for name, grad in ours.items()}
    return _difference(ours, theirs)


def _row(
    base: Row, method: str, seen: Measurement, eager: Measurement | None, plan: Plan | None = None
) -> Row:
    step_s = max(seen.device_s, seen.host_s)
    found = {
        **base,
        "method": method,
        "measured_peak_bytes": seen.peak_bytes,
        "measured_s": seen.device_s,
        "host_s": seen.host_s,
        "over_eager": None if eager is None else step_s / max(eager.device_s, eager.host_s),
        "difference": seen.difference,
        "ok": seen.difference is None or seen.difference <= MAX_DIFFERENCE,
    }
    if plan is not None:
        predicted = plan.prediction
        found |= {
            "predicted_peak_bytes": predicted.peak_bytes,
            "predicted_host_bytes": sum(predicted.host_bytes.values()),
            "peak_rel_err": predicted.peak_bytes / seen.peak_bytes - 1,
            "predicted_s": predicted.step_s,
            "time_rel_err": predicted.step_s / step_s - 1,
            "num_recomputed": sum(
                len(entry.instances) for entry in plan.entries if entry.recompute
            ),
            "gap": plan.proof.gap,
        }
    return found


def _difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return ‖ours − theirs‖ / ‖theirs‖ of all gradients together."""
    apart, whole = 0.0, 0.0
    for name, grad in theirs.items():
        wide = grad.to(ours[name].device).float()
        apart += (ours[name].float() - wide).square().sum().item()
        whole += wide.square().sum().item()
    return (apart / whole) ** 0.5


def main(arguments: list[str]) -> int:
    flags = parser("device_training", __doc__ or "", batch=8, seq=2048)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("--hardware", default="h100-sxm")
    flags.add_argument(
        "--plans",
        metavar="FOLDER",
        help="folder of plans: read them from it, or plan (without a device) and write them to it",
    )
    flags.add_argument(
        "--share",
        type=float,
        action="append",
        help=f"share of the memory of the plan without a budget; by default {SHARES}",
    )
    flags.add_argument("--dtype", default="bfloat16", help="dtype of the model's parameters")
    flags.add_argument("--precision", choices=("bf16",), help="precision of autopar.compile")
    flags.add_argument(
        "--offload",
        action="store_true",
        dest="offloads",
        help="allow state and activations on the host",
    )
    flags.add_argument(
        "--alone", action="store_true", help="omit eager, and the comparisons with it"
    )
    flags.add_argument(
        "--no-inductor",
        action="store_false",
        dest="inductor",
        help="omit variants compiled by Inductor",
    )
    flags.add_argument("--rounds", type=int, default=ROUNDS, help="number of timed steps")
    options = flags.parse_args(arguments)
    asked = (
        "batch",
        "seq",
        "hardware",
        "plans",
        "dtype",
        "precision",
        "offloads",
        "alone",
        "inductor",
        "rounds",
    )
    shared = {name: getattr(options, name) for name in asked}
    shared["shares"] = options.share or SHARES
    specs = (
        specs_of(options, ())
        if (options.model or options.hf or options.zoo is not None)
        else [MODEL]
    )
    return run_rows(
        "device_training",
        [{"spec": s.to_json(), "mesh": "d=1", **shared} for s in specs],
        COLUMNS,
        options.json,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
