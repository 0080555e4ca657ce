"""docs/cards.md has what the planner says today: one row by default, all of a model with `pytest --full`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

from tools.cards_page import CARDS, MODELS, PAGE, rows_of, rows_on_page

from tests.support import sized


def test_the_page_is_up_to_date() -> None:
    """`python tools/cards_page.py` renews it."""
    rows = rows_on_page()["sd1.5"]
    count = sized(1, len(CARDS))
    assert rows[-count:] == rows_of("sd1.5", CARDS[-count:])


def test_every_model_of_the_page_has_a_row_for_each_card() -> None:
    for model, rows in rows_on_page().items():
        assert model in MODELS and len(rows) in (0, len(CARDS))
        assert [row.split("|")[2].strip() for row in rows] == [f"{card.memory} GB" for card in CARDS][: len(rows)]
    text = PAGE.read_text("utf-8")
    assert "predicted, not measured" in text and all(card.name in text for card in CARDS)
