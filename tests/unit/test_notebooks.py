"""The notebooks run from top to bottom and show their documented outputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PUBLISHED = 'hf.build("llama3-8b", '
AS_IT_IS: dict[str, str] = {}
FEW_LAYERS = {
    PUBLISHED: (
        """hf.build('llama:{"num_hidden_layers": 1, "hidden_size": 4096, "intermediate_size": 14336}', """  # noqa: E501
    ),
    "heads=4, layers=2": "heads=4, layers=1",
    "heads=64, layers=2": "heads=64, layers=1",
    "heads=16, layers=4": "heads=16, layers=1",
}


def _outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def _text(notebook: Any) -> str:
    return "\n".join(
        output["text"] for output in _outputs(notebook) if output["output_type"] == "stream"
    )


# The kernel's own libraries warn in this process about how it is reached; that is not for these
# tests to judge.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "models",
    [FEW_LAYERS, pytest.param(AS_IT_IS, marks=pytest.mark.slow)],
    ids=["few layers", "as it is"],
)
def test_the_one_liner_runs_shows_the_plan_and_draws_layouts_memory_and_time_line(
    models: dict[str, str],
) -> None:
    notebook = nbformat.read(NOTEBOOKS / "01_one_liner.ipynb", as_version=4)
    for written, run in models.items():
        (cell,) = (cell for cell in notebook.cells if written in cell.source)
        cell.source = cell.source.replace(written, run)
    for each in notebook.cells:
        if each.cell_type == "code":
            each.outputs = []  # the outputs checked below were created by this run
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOKS)}},
    ).execute()
    assert sum("image/png" in output.get("data", {}) for output in _outputs(notebook)) == 3
    (shown,) = (
        cell.outputs[0]["data"]["text/html"] for cell in notebook.cells if cell.source == "plan"
    )
    assert "Modules" in shown
    said = _text(notebook)
    assert "equal to the plain model" in said
    assert re.search(r"far is a link of kind intra[\s\S]*far is a link of kind inter", said)
    over_far = [int(value) for value in re.findall(r"'far': (\d+)", said)]
    assert over_far[1] < over_far[0]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_is_small_and_stored_with_outputs_and_without_machine_paths(
    path: Path,
) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert all(
        cell.get("outputs") or not cell.source.strip()
        for cell in notebook.cells
        if cell.cell_type == "code" and _shows(cell.source)
    )
    assert not re.search(r"(/home|/work|/root|/Users)/", path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 1_000_000


def _shows(source: str) -> bool:
    """Return whether a cell ends with a displayed value: a call at the left margin, or a plan."""
    return bool(
        re.match(r"^(print|plan$|report\.|autopar\.(explain|diff))", source.splitlines()[-1])
    )
