"""The list of architectures outside the zoo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from autopar import hf
from benchmarks import zoo

UNSEEN = json.loads((Path(zoo.__file__).parent / "unseen.json").read_text(encoding="utf-8"))


def test_every_model_of_the_list_is_a_spec_of_an_architecture_that_the_zoo_does_not_have() -> None:
    kinds = {name: hf.parse(spec)[0] for name, spec in UNSEEN["models"].items()}
    assert len(set(kinds.values())) >= 100
    assert not set(kinds.values()) & {
        published.kind.partition("/")[0] for published in zoo.PUBLISHED.values()
    }


def test_what_the_list_says_of_a_model_is_of_one_that_it_has() -> None:
    for about in ("seq", "seen", "refused"):
        assert set(UNSEEN[about]) <= set(UNSEEN["models"])
