"""Renew the table of docs/cards.md: `python tools/cards_page.py [MODEL ...]`.

For each card and model: the plan that `inweave train --vram` makes for it, on the meta device. Time is predicted from
the card's compute capability and its number of multiprocessors; nothing is measured.

The rows of a large model take minutes of a CPU. So the page also has, for each model, a digest of the figures that the
planner computes with: a change of one of them shows at once which rows are of before, without planning anything.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from inweave.bench.models import published_blueprint
from inweave.errors import MemoryBudgetError
from inweave.ops.quantized import FORMATS
from inweave.training.config.schema import TrainConfig
from inweave.training.memory import candidates, estimate, speed
from inweave.training.memory.estimate import GIB, Measurements
from inweave.training.memory.plan import SAME_TIME, plan_memory
from inweave.training.memory.speed import speed_of_card
from inweave.weights.streaming import activations
from inweave.weights.streaming.stream import SLOTS

PAGE = Path(__file__).parents[1] / "docs" / "cards.md"
BEGIN, END = "<!-- generated: cards -->\n", "<!-- end -->\n"
PLANNER = re.compile(r"<!-- planner: (.*) -->\n")
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
    "flux2-klein-base-9b": 1024, "flux1-dev": 1024, "chroma1-hd": 1024, "qwen-image": 1024,
    "qwen-image-edit-2511": 1024, "flux2-dev": 1024,
}  # fmt: skip


def rows_of(model: str, cards: Sequence[Card] = CARDS) -> list[str]:
    """Return the rows of one model, a card each."""
    blueprint = published_blueprint(model)
    settings: dict[str, Any] = {
        "dataset": "-", "precision": "bf16", "steps": 1000, "resolution": MODELS[model], "rank": 16, "quantize": "auto",
        "device": "cpu",
    }  # fmt: skip
    config = TrainConfig.of(**settings).with_preset(blueprint.family.preset_name(blueprint))
    references = ((MODELS[model],) * 2,) if blueprint.family.needs_reference else ()
    measurements = Measurements(blueprint, config, references=references, device=torch.device("cuda"))
    rows = []
    for card in cards:
        try:
            pace = speed_of_card(card.capability, card.multiprocessors)
            plan = plan_memory(measurements, config, card.memory * GIB - TAKEN, pace)
        except MemoryBudgetError:
            rows.append(f"| {model} | {card.memory} GB | no plan fits | | | |")
            continue
        chosen, needs = plan.config, plan.estimate
        parts = [
            chosen.quantize if chosen.quantize != "off" else "bf16",
            "blocks streamed" if chosen.offload == "blocks" else "",
            f"all but {plan.resident}" if plan.resident else "",
            f"{chosen.gradient_checkpointing} checkpointing" if chosen.gradient_checkpointing != "off" else "",
            "their inputs in host memory" if chosen.offload_activations == "on" else "",
            "8-bit AdamW" if chosen.optimizer != config.optimizer else "",
        ]
        text = ", ".join(filter(None, parts))
        device, host = (needs[name] / GIB for name in ("total_bytes", "host_bytes"))
        seconds = float(f"{pace.seconds(needs):.2g}")
        rows.append(f"| {model} | {card.memory} GB | {text} | {device:.1f} | {host:.0f} | {seconds:g} |")
    return rows


def choices() -> list[list[list[str]]]:
    """Return what each candidate of each group changes, for any image model in float32; nothing is measured."""
    config = TrainConfig.of(dataset="-", precision="fp32", device="cpu", batch_size=2)
    streamable = SimpleNamespace(blocks={"unet": (1, 1)})
    anything: Any = SimpleNamespace(blueprint=True, own=torch.float32, trained="unet", at=lambda config: streamable)

    def changes(candidate: candidates.Candidate) -> list[str]:
        own = candidate.config.model_dump()
        rest = [f"{name}={own[name]}" for name, value in config.model_dump().items() if own[name] != value]
        return [f"size={candidate.size}", f"staged={candidate.staged}", *rest]

    return [[changes(each) for each in group] for group in candidates.candidates(anything, config, None)]


def planner_digest(model: str) -> str:
    """Return a digest of what decides the rows of a model: figures and choices of the planner, and the cards."""
    figures = [
        CARDS, TAKEN, MODELS[model], speed.PASSES, speed.KERNELS, speed.GPU_UTILIZATION, speed.RECORDED_LAUNCH,
        speed.PRODUCTS, speed.CONVERSION, speed.OTHER_CONVERSION, speed._BANDWIDTHS, speed._MULTIPROCESSOR,
        estimate.RESERVE, estimate.HOST, estimate._STATE_BYTES, candidates.MODES, SLOTS, SAME_TIME,
        [(name, kind.bytes_per_parameter, kind.scratch_per_parameter) for name, kind in FORMATS.items()],
        activations.SMALLEST, choices(),
    ]  # fmt: skip
    return hashlib.sha256(repr(figures).encode()).hexdigest()[:12]


def digests_on_page() -> dict[str, str]:
    """Return {model: the digest when its rows were made}."""
    listed = PLANNER.search(PAGE.read_text("utf-8"))
    return dict(pair.split("=") for pair in listed[1].split()) if listed is not None else {}


def table(models: dict[str, list[str]], digests: dict[str, str]) -> str:
    """Return the table with these rows of each model."""
    head = [
        "| model | card | plan | GPU memory, GiB | host memory, GiB | seconds per step, predicted |",
        "|---|---|---|---|---|---|",
    ]
    listed = " ".join(f"{name}={digest}" for name, digest in digests.items())
    lines = [*head, *(row for rows in models.values() for row in rows), f"<!-- planner: {listed} -->"]
    return "\n".join(lines) + "\n"


def rows_on_page() -> dict[str, list[str]]:
    """Return the rows of each model on the page."""
    text = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return {model: [line for line in lines if line.split("|")[1].strip() == model] for model in MODELS}


if __name__ == "__main__":
    names = sys.argv[1:] or list(MODELS)
    rows = rows_on_page() | {name: rows_of(name) for name in names}
    digests = digests_on_page() | {name: planner_digest(name) for name in names}
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    made = [name for name in MODELS if rows[name]]
    text = table({name: rows[name] for name in made}, {name: digests.get(name, "") for name in made})
    PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2], "utf-8")
