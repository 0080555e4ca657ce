"""An image with a LoRA costs at most a fifth more than one without."""

from __future__ import annotations

from inweave.bench.cost import LIMIT, measure_cost
from inweave.generate.pipeline import pipeline
from tests.support import sized


def test_a_lora_costs_at_most_a_fifth_of_an_image() -> None:
    figures = measure_cost(pipeline("inweave/emoji"), rounds=sized(2, 5), steps=sized(6, 20))
    assert figures["base"] > 0 and figures["ratio"] <= LIMIT == 1.2, figures
