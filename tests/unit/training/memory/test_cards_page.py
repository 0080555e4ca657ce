"""docs/cards.md has what the planner says today: one row and all figures; all rows of a model with `--full`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from tools.cards_page import CARDS, MODELS, PAGE, choices, digests_on_page, planner_digest, rows_of, rows_on_page

from inweave.models import bundled
from inweave.models.variants import find_variant
from inweave.training.memory import candidates, speed
from tests.support import sized


def test_the_page_is_up_to_date() -> None:
    """`python tools/cards_page.py` renews it."""
    rows = rows_on_page()["sd1.5"]
    count = sized(1, len(CARDS))
    assert rows[-count:] == rows_of("sd1.5", CARDS[-count:])


def test_every_model_of_the_page_has_a_row_for_each_card() -> None:
    rows = rows_on_page()
    assert rows.keys() == MODELS.keys()
    for lines in rows.values():
        assert [row.split("|")[2].strip() for row in lines] == [f"{card.memory} GB" for card in CARDS]
    text = PAGE.read_text("utf-8")
    assert "predicted, not measured" in text and all(card.name in text for card in CARDS)


def test_no_rows_are_of_other_figures_than_the_planners() -> None:
    """`python tools/cards_page.py MODEL` makes the rows of a model again, in minutes."""
    digests = digests_on_page()
    outdated = [model for model in MODELS if digests.get(model) != planner_digest(model)]
    assert not outdated, f"run python tools/cards_page.py {' '.join(outdated)}"


def test_a_figure_that_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {model: planner_digest(model) for model in MODELS}
    monkeypatch.setitem(speed.CONVERSION, "nf4", 41)
    assert all(planner_digest(model) != digest for model, digest in before.items())
    monkeypatch.undo()
    monkeypatch.setitem(MODELS, "sdxl", 1152)
    assert [model for model, digest in before.items() if planner_digest(model) != digest] == ["sdxl"]
    monkeypatch.undo()
    listed = [change for group in choices() for each in group for change in each]
    assert {"offload_activations=on", "offload=blocks", "gradient_checkpointing=selective"} <= {*listed}
    monkeypatch.setattr(candidates, "MODES", ("off", "full"))
    assert "gradient_checkpointing=selective" not in [
        change for group in choices() for each in group for change in each
    ]


def test_every_family_has_a_model_on_the_page() -> None:
    assert _families(MODELS) == _families(bundled.variants())


def _families(models: Iterable[str]) -> set[str]:
    return {variant.family for variant in map(find_variant, models) if variant is not None}
