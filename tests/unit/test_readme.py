"""What the README shows is what happens: its commands run, its output is theirs, its links and targets exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar import cli

ROOT = Path(__file__).parents[2]
READMES = [ROOT / "README.md", *sorted(path for path in ROOT.glob("*/README.md") if not path.parent.name.startswith("."))]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def _session() -> Iterator[tuple[str, list[str]]]:
    """(command, lines that it is said to print) of the console blocks."""
    for block in _blocks("console"):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = step.splitlines()
            yield command, [line for line in lines if line.strip()]


def test_the_commands_print_what_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, lines in _session():
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        printed = capsys.readouterr()
        assert not exit_.value.code, printed.err
        squeezed = [" ".join(line.split()) for line in printed.out.splitlines()]
        for line in lines:
            assert " ".join(line.split()) in squeezed, f"{command} printed\n{printed.out}"
    assert (tmp_path / "plan.png").is_file()


@pytest.mark.multiproc
def test_the_one_liner_trains_alike_on_one_process_and_on_two(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_blocks("python")[0], encoding="utf-8")
    alone = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    command = [sys.executable, "-m", "autopar", "run", "-n", "2", "train.py"]
    together = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert "not parallelized" not in together.stderr, "what the first example shows is distributed"
    said = re.findall(r"step \d+: loss [\d.]+", alone.stdout)
    assert len(said) == 3
    # two processes share one terminal: what each says is whole, the ends of lines may meet
    assert sorted(re.findall(r"step \d+: loss [\d.]+", together.stdout)) == sorted(said * 2)


def test_every_make_target_and_module_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", TEXT, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    measured = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for module in re.findall(r"python -m (benchmarks\.[a-z_]+)", TEXT + measured):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_every_link_leads_somewhere(readme: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", readme.read_text(encoding="utf-8")):
        assert link.startswith("https://") or (readme.parent / link).exists(), link


def test_every_command_of_the_command_line_is_named() -> None:
    commands = {command.name for command in cli.app.registered_commands}
    named = re.search(r"`autopar --help` lists the commands: (.*?)\.", TEXT, re.DOTALL)
    assert named is not None
    assert set(re.findall(r"`([\w-]+)`", named[1])) == commands
