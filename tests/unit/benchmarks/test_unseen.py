"""The list of architectures outside the zoo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from autopar import hf
from benchmarks import zoo

UNSEEN = json.loads((Path(zoo.__file__).parent / "unseen.json").read_text(encoding="utf-8"))


def test_listed_models_have_architectures_outside_the_zoo() -> None:
    kinds = {name: hf.parse(spec)[0] for name, spec in UNSEEN["models"].items()}
    assert len(set(kinds.values())) >= 100
    assert not set(kinds.values()) & {
        published.kind.partition("/")[0] for published in zoo.PUBLISHED.values()
    }


def test_entries_of_the_list_refer_to_listed_models() -> None:
    for about in ("seq", "seen", "refused"):
        assert set(UNSEEN[about]) <= set(UNSEEN["models"])
