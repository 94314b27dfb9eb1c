"""The README and the documentation match the program.

Commands print the output in the README. The Python code of every page runs. Links, anchors, make
targets, modules and names exist. The reference of the command line is the help of the commands.
"""

from __future__ import annotations

import html
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.cli
import typer.main

import autopar
from autopar import cli, constraints

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
READMES = [
    ROOT / "README.md",
    *sorted(p for p in ROOT.glob("*/README.md") if not p.parent.name.startswith(".")),
]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a language. "python" blocks are run, and "py" blocks are
    excerpts."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def session() -> Iterator[tuple[str, list[str]]]:
    """Return each command of the console blocks of the README with its expected lines."""
    for block in blocks(TEXT, "console"):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = step.splitlines()
            yield command, [line for line in lines if line.strip()]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_the_commands_print_the_output_in_the_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, lines in session():
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
def test_the_one_line_example_trains_equally_with_one_and_two_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks(TEXT, "python")[0], encoding="utf-8")
    alone = run([sys.executable, "train.py"], tmp_path)
    together = run([sys.executable, "-m", "autopar", "run", "-n", "2", "train.py"], tmp_path)
    assert "not parallelized" not in together.stderr, "what the first example shows is distributed"
    said = re.findall(r"step \d+: loss [\d.]+", alone.stdout)
    assert len(said) == 3
    # Two processes share one terminal: their texts are complete, but line ends may be mixed.
    assert sorted(re.findall(r"step \d+: loss [\d.]+", together.stdout)) == sorted(said * 2)


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command, and show its output if it fails."""
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert not found.returncode, found.stderr[-3000:]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    code = blocks(page.read_text(encoding="utf-8"), "python")
    if code:
        (tmp_path / "page.py").write_text("\n".join(code), encoding="utf-8")
        run([sys.executable, "-W", "ignore", "page.py"], tmp_path)


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_training_loop_resumes_on_two_processes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    text = blocks(page, "python")[0].replace("range(start, 10)", "range(start, int(sys.argv[1]))")
    (tmp_path / "train.py").write_text("import sys\n" + text, encoding="utf-8")
    run([sys.executable, "train.py", "5"], tmp_path)
    resumed = run([sys.executable, "-m", "autopar", "run", "-n", "2", "train.py", "10"], tmp_path)
    assert re.findall(r"^step (\d): loss", resumed.stdout, re.MULTILINE) == list("56789")


def test_every_named_make_target_and_module_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", TEXT, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    measured = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    texts = [TEXT, measured, *(page.read_text(encoding="utf-8") for page in PAGES)]
    for module in re.findall(r"python -m (benchmarks\.[a-z_]+)", "\n".join(texts)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_link_has_a_target(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 200


def test_the_site_lists_every_page_once() -> None:
    listed = re.findall(
        r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == [page.name for page in PAGES]


def test_the_command_line_reference_is_the_help_of_the_commands() -> None:
    command = typer.main.get_command(cli.app)
    written = typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command), name="autopar")
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert html.unescape(page).strip() == written.strip(), "run `make docs` to write it again"


def test_the_python_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    for path in listed:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path
    names = {path.rpartition(".")[2] for path in listed}
    assert {"register", "unregister"} <= names
    public = {name for name in (*dir(autopar), *dir(constraints)) if not name.startswith("_")}
    assert public - names <= {"AutoparError", "Layout", "constraints", "read_constraint", "rules"}
