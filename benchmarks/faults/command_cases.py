"""Commands on damaged files. Each must refuse the file, or give the answer for the undamaged file.

The commands run in this process. A file is refused if the command ends with status 1 and states a
remedy. For any file, no control character may be printed, no exception other than `AutoparError`
may leave a command, and memory must not exceed `MOST_BYTES`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

import autopar
from autopar.certificate import Certificate
from autopar.cli import main
from autopar.errors import AutoparError
from benchmarks.common import ROOT
from benchmarks.faults import checkpoint_cases, file_cases
from benchmarks.faults.damage import FURTHER_WAYS, Damaged, pattern_of
from benchmarks.faults.judging import Misbehaviour, Notes, WrongResult

MOST_BYTES = 2**30
MODEL = f"{file_cases.__file__}:model_and_batch"
FORMAT, VERSION = "autopar-plan", 4


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a command: its exit status and its terminal output."""

    status: int
    said: str


@dataclass(frozen=True, slots=True)
class Case:
    """A damaged file in a folder, and the undamaged text."""

    folder: Path
    path: Path
    whole: str
    damaged: Damaged
    notes: Notes

    def refused(self, *arguments: str | Path) -> bool:
        """Run a command that reads the file, and return whether it was refused. Raises the errors
        of `command`, and WrongResult as in `said`."""
        ended = command(*arguments)
        self.notes.entries["said"] = ended.said[:300]
        return ended.status != 0


def command(*arguments: str | Path) -> Ended:
    """Run a command of autopar.

    Raises:
        WrongResult: if it prints control characters, or ends with status 1 without a remedy.
    """
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("autopar").addHandler(handler)
    try:
        with (
            mock.patch.object(sys, "argv", ["autopar", *map(str, arguments)]),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        logging.getLogger("autopar").removeHandler(handler)
    text = said.getvalue()
    file_cases.refuse_escapes(text)
    if status and "what to do: " not in text and "NOT certified" not in text:
        raise WrongResult(f"{arguments[0]} ends with status {status} and states no remedy:\n{text}")
    return Ended(status, text)


def show(case: Case) -> None:
    """Run `explain`, `diff` and `report` on a plan."""
    name, file, whole = case.path, case.folder / "shown", case.folder / "whole.json"
    whole.write_text(case.whole, encoding="utf-8")
    refused = [case.refused("explain", name), case.refused("explain", name, "--only", "layers.*")]
    refused += [case.refused("diff", whole, name), case.refused("diff", name, whole)]
    for suffix in (".svg", ".html"):
        picture = file.with_suffix(suffix)
        refused.append(case.refused("report", name, "--out", picture))
        if not refused[-1]:
            text = picture.read_text(encoding="utf-8")
            if "<script>alert" in text:
                raise WrongResult(f"the {suffix} figure contains a script from the file")
    if len(set(refused)) > 1:
        raise WrongResult(f"some commands read the file, others refuse it: {refused}")
    case.notes.entries["note"] = "refused" if refused[0] else "shown"
    if not refused[0]:
        refuse_version(case)


def check(case: Case) -> None:
    """Run `check` on a plan. The fields that it verifies must be unchanged."""
    found = case.folder / "certificate.json"
    if case.refused("check", case.path, "--module", MODEL, "--json", found):
        case.notes.entries["note"] = "refused"
        return
    refuse_version(case)
    text = autopar.Plan.load(case.path).dumps()
    data = json.loads(found.read_text(encoding="utf-8"))
    listed = [Unlisted(tuple(each["fields"])) for each in data["unverified"]]
    certificate = Certificate("", (), unverified=tuple(listed))  # type: ignore[arg-type]
    note = file_cases.refuse_changes(certificate, case.whole, text, case.damaged.how)
    case.notes.entries["note"] = note


@dataclass(frozen=True, slots=True)
class Unlisted:
    """Fields that the JSON of a certificate lists as not verified."""

    paths: tuple[str, ...]


def ask_what_if(case: Case) -> None:
    """Run `what-if` on a plan for another mesh."""
    refused = case.refused("what-if", case.path, "--module", MODEL, "--hardware", "cpu-gloo")
    case.notes.entries["note"] = "refused" if refused else "answered"


def run_plan(case: Case) -> None:
    """Run `compile(plan=...)`. The loss and the gradients must equal those of the plain model."""
    plain = file_cases.build()
    expected = plain(**file_cases.batch())
    expected.backward()
    module = autopar.compile(
        file_cases.build(), example_inputs=file_cases.batch(), plan=str(case.path)
    )
    refuse_version(case)
    loss = module(**file_cases.batch())
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    loss.backward()
    torch.testing.assert_close(loss, expected, msg=differs("loss"))
    for name, parameter in plain.named_parameters():
        got = module.get_parameter(name).grad
        assert got is not None and parameter.grad is not None
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        torch.testing.assert_close(got, parameter.grad, msg=differs(name))
    case.notes.entries["note"] = "computed"


def differs(name: str) -> Callable[[str], str]:
    """Return a function that formats the message of a failed comparison."""
    return lambda why: f"the damaged plan runs, but {name} differs: {why}"


def refuse_version(case: Case) -> None:
    """Raise WrongResult if a file of another format or version was read."""
    data = json.loads(case.path.read_bytes())
    if (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise WrongResult(f"a plan of {data.get('format')!r} {data.get('version')!r} is read")


def plan_on(case: Case) -> None:
    """Run `plan --hardware` with a profile."""
    file = case.folder / "plan.json"
    arguments = ("plan", "--module", MODEL, "--mesh", "gpu=2", "--hardware", case.path)
    if case.refused(*arguments, "--out", file):
        case.notes.entries["note"] = "refused"
        return
    plan = autopar.Plan.load(file)
    step_s, bound_s = plan.prediction.step_s, plan.proof.bound_s
    if not (math.isfinite(step_s) and 0 <= bound_s <= step_s * (1 + 1e-9) and step_s > 0):
        raise WrongResult(f"a step of {step_s} s and a bound of {bound_s} s")
    if case.refused("check", file, "--module", MODEL, "--hardware", case.path):
        raise WrongResult(f"the plan is refused on its own profile: {case.notes.entries['said']}")
    case.notes.entries["note"] = "planned and certified"


def check_on(case: Case) -> None:
    """Run `check --hardware` on a plan for the undamaged profile."""
    file = case.folder / "plan.json"
    file.write_text(file_cases.plan_text("fsdp"), encoding="utf-8")
    refused = case.refused("check", file, "--module", MODEL, "--hardware", case.path)
    same = False
    with contextlib.suppress(ValueError, RecursionError):
        same = json.loads(case.path.read_bytes()) == json.loads(case.whole)
    if not refused and not same:
        raise WrongResult("a plan is certified on a profile that differs from its own")
    case.notes.entries["note"] = "refused" if refused else "the profile is unchanged"


PLAN_ACTIONS = (show, show, check, ask_what_if, run_plan)
PROFILE_ACTIONS = (plan_on, plan_on, check_on)


@cache
def whole_weights() -> dict[str, torch.Tensor]:
    """Return the weights that `export` writes for the undamaged checkpoint."""
    with tempfile.TemporaryDirectory() as scratch:
        autopar.Checkpoints(checkpoint_cases.saved()[0]).export(scratch)
        return weights_in(Path(scratch))


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the safetensors files in a folder."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def export(rng: random.Random, notes: Notes, folder: Path) -> None:
    """Run `export` on a damaged folder of checkpoints."""
    saved, mark, out = folder / "run", folder / "mark", folder / "out"
    shutil.copytree(checkpoint_cases.saved()[0], saved)
    expected = whole_weights()
    if rng.random() < 0.5:
        notes.entries["damage"] = damage_metadata(saved, rng)
    else:
        notes.entries["damage"] = rng.choice(checkpoint_cases.DAMAGES)(saved, mark, rng)
    notes.phase = "export"
    ended = command("export", saved, out)
    notes.entries["said"] = ended.said[:300]
    if mark.exists():
        raise WrongResult("code from a file ran")
    if ended.status:
        if out.exists() and weights_in(out):
            raise WrongResult("the checkpoint was refused, but weights were written")
        notes.entries["note"] = "refused"
        return
    states = checkpoint_cases.saved()[1]
    steps = [weights_of(state, expected) for state in states.values()]
    if not any(checkpoint_cases.same(weights_in(out), each) for each in (expected, *steps)):
        raise WrongResult("the written weights belong to no step")
    notes.entries["note"] = "exported"


def weights_of(
    state: checkpoint_cases.State, like: dict[str, torch.Tensor]
) -> checkpoint_cases.State:
    """Return the weights in the state that a checkpoint restores."""
    return {name: state[name] for name in like}


def damage_metadata(saved: Path, rng: random.Random) -> str:
    """Damage a JSON file of the newest checkpoint in any way, possibly with a matching checksum."""
    place = checkpoint_cases.newest(saved)
    path = rng.choice([p for p in checkpoint_cases.files_of(place) if p.suffix == ".json"])
    damaged = FURTHER_WAYS[rng.choice(tuple(FURTHER_WAYS))](path.read_text(encoding="utf-8"), rng)
    path.write_bytes(damaged.data)
    forged = rng.random() < 0.5
    if forged:
        checkpoint_cases.forge(place)
    return f"{path.name}: {damaged.how}{', with its checksum' if forged else ''}"


def run(seed: int, notes: Notes) -> None:
    """Run the case of a seed.

    Raises:
        WrongResult: if damage has an effect and is not refused.
        Misbehaviour: if a command uses too much memory.
        AutoparError: if autopar refuses.
    """
    rng = random.Random(seed)
    kind = rng.choice(("plan", "plan", "plan", "profile", "profile", "export"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as scratch:
        if kind == "export":
            notes.entries["plan"] = kind
            export(rng, notes, Path(scratch))
        else:
            run_file(kind, rng, notes, Path(scratch))
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if taken > MOST_BYTES:
        raise Misbehaviour("memory", f"it uses {taken} bytes")
    if notes.entries.get("note") == "refused":
        raise AutoparError(str(notes.entries["said"]), remedy="as the command says")


def run_file(kind: str, rng: random.Random, notes: Notes, folder: Path) -> None:
    """Run a command on a damaged plan or profile."""
    way = rng.choice(tuple(FURTHER_WAYS))
    if kind == "plan":
        action = rng.choice(PLAN_ACTIONS)
        alone = ("one device", "microbatches")
        name = rng.choice(alone if action is run_plan else tuple(file_cases.PLANS))
        notes.phase = "whole plan"
        whole = file_cases.plan_text(name)
    else:
        action, name = rng.choice(PROFILE_ACTIONS), rng.choice(file_cases.PROFILES)
        name = "h100-sxm" if action is check_on else name
        whole = (ROOT / "cost_models" / f"{name}.json").read_text(encoding="utf-8")
    damaged = FURTHER_WAYS[way](whole, rng)
    path = folder / f"{kind}.json"
    path.write_bytes(damaged.data)
    notes.entries |= {"plan": f"{action.__name__} {kind} {name}", "damage": damaged.how}
    notes.entries["field"] = pattern_of(damaged.path)
    notes.phase = action.__name__
    action(Case(folder, path, whole, damaged, notes))
