"""Renew the table of docs/cards.md: `python tools/cards_page.py [MODEL ...]`.

For each card and model: the plan that `inweave train --vram` makes for it, on the meta device. Time is predicted from
the card's compute capability and its number of multiprocessors; nothing is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inweave.bench.models import published_blueprint
from inweave.errors import MemoryBudgetError
from inweave.training.config.schema import TrainConfig
from inweave.training.memory.estimate import GIB, Measurements
from inweave.training.memory.plan import plan_memory
from inweave.training.memory.speed import speed_of_card

PAGE = Path(__file__).parents[1] / "docs" / "cards.md"
BEGIN, END = "<!-- generated: cards -->\n", "<!-- end -->\n"
#: what the system and the screen take
TAKEN = GIB // 2


class Card(NamedTuple):
    """A card of a size: compute capability and multiprocessors decide the predicted time."""

    memory: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int


CARDS = (
    Card(6, "RTX 3050 6 GB", (8, 6), 18),
    Card(8, "RTX 4060", (8, 9), 24),
    Card(12, "RTX 3060", (8, 6), 28),
    Card(16, "RTX 4060 Ti", (8, 9), 34),
    Card(24, "RTX 4090", (8, 9), 128),
    Card(48, "RTX 6000 Ada", (8, 9), 142),
)
MODELS = {
    "sd1.5": 512, "sdxl": 1024, "sd3.5-medium": 1024, "flux2-klein-base-4b": 1024, "z-image-turbo": 1024,
    "flux2-klein-base-9b": 1024, "flux1-dev": 1024, "qwen-image": 1024, "flux2-dev": 1024,
}  # fmt: skip


def rows_of(model: str, cards: Sequence[Card] = CARDS) -> list[str]:
    """Return the rows of one model, a card each."""
    blueprint = published_blueprint(model)
    settings: dict[str, Any] = {
        "dataset": "-", "precision": "bf16", "steps": 1000, "resolution": MODELS[model], "rank": 16, "quantize": "auto",
        "device": "cpu",
    }  # fmt: skip
    config = TrainConfig.of(**settings).with_preset(blueprint.family.preset_name(blueprint))
    measurements = Measurements(blueprint, config, device=torch.device("cuda"))
    rows = []
    for card in cards:
        try:
            speed = speed_of_card(card.capability, card.multiprocessors)
            plan = plan_memory(measurements, config, card.memory * GIB - TAKEN, speed)
        except MemoryBudgetError:
            rows.append(f"| {model} | {card.memory} GB | no plan fits | | | |")
            continue
        chosen, needs = plan.config, plan.estimate
        parts = [
            chosen.quantize if chosen.quantize != "off" else "bf16",
            "blocks streamed" if chosen.offload == "blocks" else "",
            f"{plan.resident} of them stay" if plan.resident else "",
            f"{chosen.gradient_checkpointing} checkpointing" if chosen.gradient_checkpointing != "off" else "",
            "8-bit AdamW" if chosen.optimizer != config.optimizer else "",
        ]
        text = ", ".join(filter(None, parts))
        device, host = (needs[name] / GIB for name in ("total_bytes", "host_bytes"))
        seconds = speed.seconds(needs)
        rows.append(f"| {model} | {card.memory} GB | {text} | {device:.1f} | {host:.0f} | {seconds:.2g} |")
    return rows


def table(models: dict[str, list[str]]) -> str:
    """Return the table with these rows of each model."""
    head = [
        "| model | card | plan | GPU memory, GiB | host memory, GiB | seconds per step, predicted |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(row for rows in models.values() for row in rows)]) + "\n"


def rows_on_page() -> dict[str, list[str]]:
    """Return the rows of each model on the page."""
    text = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return {model: [line for line in lines if line.split("|")[1].strip() == model] for model in MODELS}


if __name__ == "__main__":
    names = sys.argv[1:] or list(MODELS)
    rows = rows_on_page() | {name: rows_of(name) for name in names}
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(
        before + BEGIN + table({name: rows[name] for name in MODELS}) + END + rest.partition(END)[2], "utf-8"
    )
