"""The command line, with a model that is planned in about a second."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar import cli
from autopar.core.terminal import parse_size
from autopar.errors import AutoparError
from autopar.plans import Plan

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.up, self.down = nn.Linear(128, width), nn.Linear(width, 128)
    def forward(self, x):
        return (x + self.down(torch.relu(self.up(x)))).pow(2).mean()

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.pow(2).mean()

def deep(): return Deep(), {"x": torch.randn(64, 128)}
def small(): return Net(), {"x": torch.randn(64, 128)}
def wide(): return Net(512), {"x": torch.randn(64, 128)}
def nothing(): return 3
def raises():
    raise ValueError("no such size")
"""
Command = Callable[..., tuple[int, str, str]]
PLAN = ("plan", "--mesh", "node=2,gpu=2", "--hardware", "cpu-gloo")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the file of the model as the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "broken.py").write_text("def small(: pass", encoding="utf-8")
    return tmp_path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """A function that runs the command line, as in ``command("plan", ...)``, and returns (exit
    code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["autopar", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        printed = capsys.readouterr()
        return int(exit_.value.code or 0), printed.out, printed.err

    return run


def test_explain_diff_check_verify_and_report_read_the_file_of_plan(
    here: Path, command: Command
) -> None:
    code, said, _ = command(*PLAN, "--module", "model.py:small", "--out", "plan.json")
    assert code == 0, said
    assert (
        "proven lower bound" in said and "`autopar check` proves it" in said and "plan.json" in said
    )
    assert Plan.load(here / "plan.json").mesh.shape == (2, 2)
    assert "Best alternatives" in command("explain", "plan.json")[1]
    for pattern in ("--only", "--module"):  # the second as it was spelled once
        said = command("explain", "plan.json", pattern, "up")[1]
        assert "Decisions of up" in said and "Decisions of down" not in said
    assert "0 ms" in command("diff", "plan.json", "plan.json")[1]
    code, said, _ = command("verify", "plan.json", "--module", "model.py:small")
    assert (code, said.startswith("equal to the plain model")) == (0, True)
    code, said, _ = command(
        "check", "plan.json", "--module", "model.py:small", "--json", "certificate.json"
    )
    assert (code, said.startswith("certified: Net on mesh node=2,gpu=2")) == (0, True)
    certificate = json.loads((here / "certificate.json").read_text())
    listed = [path for group in certificate["unverified"] for path in group["fields"]]
    assert certificate["ok"] and "proof.solver" in listed and all(path in said for path in listed)
    code, said, _ = command(
        "what-if", "plan.json", "--hardware", "h100-sxm", "--module", "model.py:small"
    )
    assert code == 0 and "planned for cpu-gloo, evaluated on h100-sxm" in said and "regret" in said
    code, said, _ = command(
        "what-if", "plan.json", "--mesh", "node=2,gpu=4", "--module", "model.py:small"
    )
    assert code == 0 and "evaluated on cpu-gloo and mesh node=2,gpu=4" in said
    code, said, _ = command(
        "what-if", "plan.json", "--memory", "1.5GiB", "--module", "model.py:small"
    )
    assert code == 0 and "and fits: " in said and " of 1.50 GiB per device" in said
    assert command("report", "plan.json", "--out", "plan.png")[0] == 0
    assert (here / "plan.png").stat().st_size > 10_000


def test_the_planner_shapes_a_mesh_of_nodes_and_devices(here: Path, command: Command) -> None:
    code, _, complaint = command(
        "plan",
        "--mesh",
        "1x4",
        "--hardware",
        "cpu-gloo",
        "--module",
        "model.py:small",
        "--out",
        "plan.json",
    )
    assert code == 0, complaint
    said = Plan.load(here / "plan.json").proof.covers[-1]
    assert "gpu=4" in said and "gpu0=2,gpu1=2" in said
    code, _, complaint = command(
        "plan", "--mesh", "4x", "--hardware", "cpu-gloo", "--module", "model.py:small"
    )
    assert code == 1 and "nodes × devices per node as 4x8" in complaint


def test_another_solver_can_plan_and_export_writes_the_integer_program(
    here: Path, command: Command
) -> None:
    asked = (*PLAN, "--module", "model.py:small", "--out", "plan.json")
    code, said, complaint = command(*asked, "--solver", "CBC", "--write-lp", "program.lp")
    assert code == 0, complaint
    assert Plan.load(here / "plan.json").proof.solver == "cbc"
    assert (
        "integer program written to program.lp" in said
        and "Minimize" in (here / "program.lp").read_text()
    )
    code, _, complaint = command(*asked, "--solver", "simplex")
    assert (
        code == 1
        and "unknown solver 'simplex'" in complaint
        and "the available solvers: highs" in complaint
    )


@pytest.mark.slow
def test_a_pipeline_is_planned_explained_compared_and_drawn(here: Path, command: Command) -> None:
    stages = ("--pipeline", "node", "--microbatches", "4")
    code, said, complaint = command(
        *PLAN, "--module", "model.py:deep", *stages, "--out", "plan.json"
    )
    assert code == 0, complaint
    assert "4 microbatches through 2 stages along node, schedule 1f1b" in said
    command(
        *PLAN, "--module", "model.py:deep", *stages, "--schedule", "gpipe", "--out", "other.json"
    )
    assert "Between stages" in command("explain", "plan.json")[1]
    assert command("diff", "plan.json", "other.json")[1].startswith("schedule: 1f1b → gpipe")
    assert command("report", "plan.json", "--out", "plan.png")[0] == 0
    code, said, complaint = command(
        "explain", "plan.json", "--flips", "40", "--module", "model.py:deep"
    )
    assert code == 0, complaint
    assert "Hardware changes that would change close choices" in said
    patterns = (
        (("--only", "layers.*"), True),
        (("--module", "layers.*"), True),
        (("--only", "(from the previous stage)"), False),
    )
    for pattern, turns in patterns:
        _, said, _ = command(
            "explain", "plan.json", "--flips", "40", "--function", "model.py:deep", *pattern
        )
        assert (
            "that would change close choices" in said,
            "choices that would change is in" in said,
        ) == (
            turns,
            not turns,
        ), said
    code, said, complaint = command(
        "report", "plan.json", "--flips", "40", "--module", "model.py:deep", "--out", "plan.html"
    )
    assert (
        code == 0
        and "Hardware changes that would change close choices" in (here / "plan.html").read_text()
    ), complaint
    code, _, complaint = command("explain", "plan.json", "--flips", "1")
    assert code == 1 and "--flips needs the model of the plan" in complaint
    code, said, complaint = command(
        *PLAN,
        "--module",
        "model.py:deep",
        *stages,
        "--schedule",
        "interleaved_1f1b",
        "--chunks",
        "2",
    )
    assert code == 0, complaint
    assert (
        "4 microbatches through 4 stages along node, 2 on each device, schedule interleaved_1f1b"
        in said
    )


@pytest.mark.slow
def test_a_pipeline_over_unequal_devices_is_planned_certified_explained_and_drawn(
    here: Path, command: Command
) -> None:
    asked = (
        "plan",
        "--mesh",
        "node=2,gpu=2",
        "--module",
        "model.py:deep",
        "--hardware",
        "node=h100-sxm,a100-sxm-80gb",
    )
    code, said, complaint = command(
        *asked, "--pipeline", "node", "--microbatches", "4", "--out", "plan.json"
    )
    assert code == 0, complaint
    assert "stage 0, h100-sxm: " in said and "stage 1, a100-sxm-80gb: " in said
    code, said, complaint = command("check", "plan.json", "--module", "model.py:deep")
    assert (
        code,
        said.startswith(
            "certified: Deep on mesh node=2,gpu=2 in 2 stages, node=h100-sxm,a100-sxm-80gb"
        ),
    ) == (0, True), complaint
    code, said, complaint = command(
        "what-if",
        "plan.json",
        "--hardware",
        "node=a100-sxm-80gb,h100-sxm",
        "--module",
        "model.py:deep",
    )
    assert code == 0 and "evaluated on node=a100-sxm-80gb,h100-sxm" in said, complaint
    assert command("report", "plan.json", "--out", "plan.png")[0] == 0
    code, said, complaint = command(*asked, "--microbatches", "1", "--out", "other.json")
    assert (
        code == 0
        and "node 1, a100-sxm-80gb, in lockstep with all other devices: these set the pace" in said
    ), complaint
    code, said, _ = command("check", "other.json", "--module", "model.py:deep")
    assert (
        code == 0 and "the planner's claim of how long unequal devices wait for the slowest" in said
    )


@pytest.mark.parametrize(
    ("mesh", "constraint", "why"),
    [
        ("1", (), "no op has another strategy on this mesh"),
        ("node=2,gpu=2", ("--constraint", "ddp"), "between 1/64 and 64 times its value"),
        (
            "node=2",
            ("--pipeline", "node", "--microbatches", "2"),
            "the constraints leave no choice",
        ),
    ],
)
def test_explain_gives_the_reason_if_no_change_turns_a_choice(
    here: Path, command: Command, mesh: str, constraint: tuple[str, ...], why: str
) -> None:
    model = ("--module", "model.py:small")
    command(
        "plan", "--mesh", mesh, "--hardware", "cpu-gloo", *constraint, *model, "--out", "plan.json"
    )
    for asked in (
        ("what-if", "plan.json", *model),
        ("explain", "plan.json", *model),
        ("report", "plan.json", *model, "--out", "plan.svg"),
    ):
        code, said, complaint = command(*asked, "--flips", "3")
        assert (
            code == 0
            and why in said
            and ("runner-ups changes if" in said or "no choice can change: " in said)
        ), complaint
        assert (
            "runner-ups changes" not in (quiet := command(*asked)[1]) and "can change" not in quiet
        )


def test_the_same_command_writes_the_same_file(here: Path, command: Command) -> None:
    for name in ("a.json", "b.json"):
        command(*PLAN, "--module", "model.py:small", "--out", name)
    assert (here / "a.json").read_bytes() == (here / "b.json").read_bytes()


def test_a_plan_for_another_model_is_refused_without_a_traceback(
    here: Path, command: Command
) -> None:
    command(*PLAN, "--module", "model.py:small", "--out", "plan.json")
    code, _, complaint = command("verify", "plan.json", "--module", "model.py:wide")
    assert code == 1
    assert complaint.startswith("the plan does not fit this call") and "what to do" in complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("explain", "missing.json"), "cannot read plan 'missing.json'"),
        (("explain", "model.py"), "plan is not JSON"),
        ((*PLAN, "--model", "nope"), "'nope' is not a model"),
        (PLAN, "no model is named"),
        ((*PLAN, "--model", "gpt2", "--module", "model.py:small"), "2 models are named"),
        ((*PLAN, "--module", "model.py:absent"), "has no function 'absent'"),
        ((*PLAN, "--module", "model.py:nothing"), "returned int"),
        ((*PLAN, "--module", "absent.py:small"), "file 'absent.py' does not exist"),
        (
            (*PLAN, "--module", "model.py:small", "--batch", "4", "--dtype", "float32"),
            "--batch and --dtype cannot be combined with --module",
        ),
        ((*PLAN, "--module", "model.py:small", "--memory", "much"), "'much' is not a size"),
        ((*PLAN, "--module", "model.py:small", "--memory", "100KiB"), "no plan fits"),
        ((*PLAN, "--module", "model.py:small", "--memory", "100KiB"), "or pass a larger --memory"),
        ((*PLAN, "--model", "gpt2", "--dtype", "int3"), "dtype 'int3'"),
        (
            (*PLAN, "--module", "model.py:deep", "--schedule", "gpipe"),
            "--schedule gpipe applies to pipelines only, and no pipeline is requested",
        ),
        (
            (*PLAN, "--module", "model.py:deep", "--chunks", "2", "--microbatches", "4"),
            "pass --pipeline AXIS or --pipeline auto too",
        ),
        (("plan", "--mesh", "node=x", "--model", "gpt2"), "cannot read mesh 'node=x'"),
        (
            ("plan", "--mesh", "2", "--model", "gpt2", "--hardware", "abacus"),
            "hardware profile 'abacus' does not exist",
        ),
        (
            ("plan", "--mesh", "2x2", "--model", "gpt2", "--hardware", "node=h100-sxm,h100-sxm"),
            "the planner chooses the axes",
        ),
        (
            ("plan", "--mesh", "a=2,b=2", "--model", "gpt2", "--hardware", "a=h100-sxm"),
            "has 1 profile along 'a'",
        ),
        (("profile", "--device", "abacus"), "device 'abacus' cannot be measured"),
        (("profile", "--device", "cuda", "--world-size", "2"), "omit world_size"),
        (("report", "missing.json"), "cannot read plan"),
        ((*PLAN, "--module", "model.py:raises"), "model.py:raises raised ValueError: no such size"),
        ((*PLAN, "--module", "broken.py:small"), "broken.py:small raised SyntaxError"),
        (
            (*PLAN, "--model", "gpt2", "--out", "absent/plan.json"),
            "cannot write to absent/plan.json: the folder does not exist",
        ),
        ((*PLAN, "--model", "gpt2", "--out", "."), "cannot write to .: it is a folder"),
        (("report", "missing.json", "--out", "absent/plan.png"), "cannot write to absent/plan.png"),
        (("run", "missing.py"), "script 'missing.py' does not exist"),
    ],
)
def test_errors_are_printed_and_exit_with_1(
    here: Path, command: Command, arguments: tuple[str, ...], complaint: str
) -> None:
    code, _, said = command(*arguments)
    assert code == 1
    assert complaint in said
    assert "Traceback" not in said


def test_an_exception_of_the_model_function_is_printed_with_its_line(
    here: Path, command: Command
) -> None:
    _, _, said = command(*PLAN, "--module", "model.py:raises")
    line = next(n for n, line in enumerate(MODEL.splitlines(), 1) if "no such size" in line)
    assert f"model.py:{line}: raise ValueError" in said


def test_mistyped_arguments_are_refused_before_a_model_is_built(
    here: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.cli.models.built", lambda *_, **__: pytest.fail("it was built"))
    mesh = ("plan", "--model", "gpt2", "--mesh")
    options = (
        ("--hardware", "abacus"),
        ("--dtype", "int3"),
        ("--precision", "fp4"),
        ("--out", "absent/p"),
    )
    for wrong in (("node=x",), *(("2", *option) for option in options)):
        code, _, said = command(*mesh, *wrong)
        assert code == 1 and "what to do" in said, wrong
    assert command("plan", "--mesh", "2", "--hf", "gpt2:{")[0] == 1


def test_a_model_file_can_import_neighbouring_files_and_define_dataclasses(
    here: Path, command: Command
) -> None:
    (here / "project").mkdir()
    (here / "project" / "net_beside.py").write_text(MODEL, encoding="utf-8")
    lines = [
        "from __future__ import annotations",
        "from dataclasses import dataclass",
        "import net_beside",
        "@dataclass",
        "class Config:",
    ]
    lines += [
        "    width: int = 256",
        "def made(): return net_beside.Net(Config().width), net_beside.small()[1]",
    ]
    (here / "project" / "config.py").write_text("\n".join(lines), encoding="utf-8")
    code, printed, complaint = command(*PLAN, "--module", "project/config.py:made")
    assert code == 0 and "Net on mesh node=2,gpu=2" in printed, complaint


def test_a_plan_that_is_not_certified_exits_with_1_and_the_reason(
    here: Path, command: Command
) -> None:
    command(*PLAN, "--module", "model.py:small", "--out", "plan.json")
    code, said, _ = command("check", "plan.json", "--module", "model.py:wide")
    assert code == 1 and said.startswith("NOT certified, 1 claim does not hold")
    assert "model: the plan is for another model: its fingerprint is" in said


def test_a_plan_that_cannot_be_written_is_refused(here: Path, command: Command) -> None:
    code, _, said = command(*PLAN, "--module", "model.py:small", "--out", "missing/plan.json")
    assert (code, "cannot write to missing/plan.json" in said) == (1, True)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (None, None),
        ("72GiB", 72 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("512k", 512_000),
        ("7", 7),
    ],
)
def test_sizes_are_parsed_with_their_unit(text: str | None, num_bytes: int | None) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "72 parsec", "-3GiB", "5i"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(AutoparError, match="is not a size"):
        parse_size(text)


@pytest.mark.slow
@pytest.mark.multiproc
def test_run_starts_the_script_in_several_processes_with_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    said = "' '.join([os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:]]) + '\\n'"
    script.write_text(
        f"import os, sys; os.write(1, ({said}).encode())", encoding="utf-8"
    )  # one write, which no other comes between
    arguments = [
        sys.executable,
        "-m",
        "autopar",
        "run",
        "-n",
        "2",
        str(script),
        "--steps",
        "3",
        "-n",
        "7",
        "--help",
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[1:] == [
        "0 2 --steps 3 -n 7 --help",
        "1 2 --steps 3 -n 7 --help",
    ]


def test_constraints_have_python_syntax(here: Path, command: Command) -> None:
    asked = ("--constraint", "ddp('node')", "--constraint", "fsdp('gpu')", "--out", "p.json")
    code, said, _ = command(*PLAN, "--module", "model.py:small", *asked)
    assert code == 0 and "Net on mesh" in said
    rests = {
        entry.nodes[0].strategy.outputs[0]
        for entry in Plan.load(here / "p.json").entries
        if entry.kind == "parameter"
    }
    assert {str(layout) for layout in rests} <= {"R S(0)", "R S(1)"}
    code, _, complaint = command(*PLAN, "--module", "model.py:small", "--constraint", "fsd()")
    assert code == 1 and "'fsd' is not a constraint" in complaint


@pytest.mark.slow
def test_an_inference_plan_without_labels_is_read_by_all_commands(
    here: Path, command: Command
) -> None:
    model = (
        "--hf",
        (
            't5:{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4,'
            ' "vocab_size": 64}'
        ),
    )
    sizes = (*model, "--batch", "4", "--seq", "8", "--dtype", "float32")
    code, printed, complaint = command(*PLAN, *sizes, "--inference", "--out", "plan.json")
    assert code == 0, complaint
    assert "cpu-gloo, inference" in printed and "optimizer" not in printed
    plan = Plan.load("plan.json")
    keys = {key for key in plan.node_choices() if key.endswith(("/input", "/output"))}
    assert {"decoder_input_ids/input", "logits/output"} <= keys and not keys & {
        "labels/input",
        "loss/output",
    }
    for name, says in (
        ("verify", "equal to the plain model"),
        ("check", "certified"),
        ("what-if", "regret"),
    ):
        code, printed, complaint = command(name, "plan.json", *sizes)
        assert code == 0 and says in printed, complaint
    code, printed, _ = command("explain", "plan.json", "--flips", "2", *sizes)
    assert code == 0 and "inference" in printed
