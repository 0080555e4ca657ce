"""N processes are one with N times the accumulation, bit for bit: every loss counts alike, in an order that is fixed.

Rows of a text have different lengths and images different sizes and masks, so a mean of means would be another number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.e2e.test_train_shard import bits, llama
from tests.forked import run_forked
from tests.peers import tiny_models
from tests.unit.training.image_sets import color_image

#: what each process runs, in worlds of one to three: `delay` seconds at random before every sum
WORKER = """
import json, random, sys, time
from pathlib import Path
from tests.e2e.ranks import run_ranks
from inweave.training.config.schema import TrainConfig
from inweave.training.session import prepare
from inweave.training.distributed import world as worlds

for size, runs in json.loads(sys.argv[1]):
    def work():
        world, add_up = worlds.join("cpu"), worlds.World.add_up
        for settings in runs:
            delay = settings.pop("delay", 0)

            def late(self, *arguments, **options):
                time.sleep(random.random() * delay)
                add_up(self, *arguments, **options)

            worlds.World.add_up = late
            config = TrainConfig.of(**settings)
            run, _ = prepare(config, world)
            summary = run.train()
            if world.first:
                report = [summary.losses, summary.validation]
                Path(config.output, "report.json").write_text(json.dumps(report))
        world.leave()

    run_ranks(work, size)
"""


def trained(folder: Path, worlds: dict[int, dict[str, dict[str, Any]]]) -> None:
    """Run each world's runs in folders of their names."""
    common = {"name": "t", "device": "cpu", "save_dtype": "fp32", "log_every": 1, "cache_dir": str(folder / "cache")}
    runs = []
    for size, group in worlds.items():
        runs.append((size, [{"output": str(folder / name), **common, **each} for name, each in group.items()]))
        for name in group:
            (folder / name).mkdir()
    result = run_forked(WORKER, json.dumps(runs), folder=folder)
    assert result.returncode == 0, result.stderr[-3000:]


def report(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


def text_settings(folder: Path) -> dict[str, Any]:
    """Rows of 3 to 60 tokens, of which only completions count, and one that `max_length` cuts."""
    rows = [{"prompt": "say it", "completion": "a cat" * (1 + number % 5)} for number in range(9)]
    rows += [{"prompt": "go on " * 9, "completion": "a dog on a log"}, {"prompt": "no", "completion": "o"}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "model": str(llama(folder / "llama")), "dataset": str(folder / "rows.jsonl"), "steps": 2, "rank": 2,
        "batch_size": 2, "learning_rate": 1e-2, "targets": "attention-mlp", "max_length": 40, "dropout": 0.1,
    }  # fmt: skip


def image_settings(folder: Path) -> dict[str, Any]:
    """Images of three sizes, masked by rectangles of different areas, and one without a mask."""
    dataset = folder / "set"
    dataset.mkdir()
    for number, size in enumerate([(64, 64), (96, 64), (64, 96), (64, 64), (96, 64), (64, 64), (64, 64)]):
        color_image(number, *size).save(dataset / f"{number}.png")
        if number:
            mask = Image.new("L", size)
            mask.paste(255, (0, 0, size[0] // 8 * (1 + number), size[1] // 2))
            mask.save(dataset / f"{number}-masklabel.png")
        (dataset / f"{number}.txt").write_text(f"an image of {number}")
    return {
        "model": str(tiny_models.folder("sd1.5")), "dataset": str(dataset), "steps": 2, "rank": 2, "batch_size": 2,
        "resolution": 64, "masked_loss": True, "learning_rate": 1e-2, "targets": "attention", "ema_decay": 0.5,
        "validation_split": 0.2, "max_grad_norm": 0.01,
    }  # fmt: skip


def test_any_number_of_processes_is_one_that_accumulates(tmp_path: Path) -> None:
    """Three processes in whatever order they get ready; a mean of their means would be off by percents."""
    text, image = text_settings(tmp_path), image_settings(tmp_path)
    worlds: dict[int, dict[str, dict[str, Any]]] = {
        1: {
            "text-one": {**text, "gradient_accumulation": 3},
            "image-one": {**image, "gradient_accumulation": 3},
            "text-four": {**text, "gradient_accumulation": 4},
        },
        2: {"text-both": {**text, "gradient_accumulation": 2}},
        3: {"text": {**text, "delay": 0.05}, "image": image},
    }
    trained(tmp_path, worlds)
    file = Path("t", "adapter_model.safetensors")
    assert bits(tmp_path / "text" / file) == bits(tmp_path / "text-one" / file)
    assert bits(tmp_path / "image" / "t.safetensors") == bits(tmp_path / "image-one" / "t.safetensors")
    for name in ("text", "image"):
        assert report(tmp_path / name) == report(tmp_path / f"{name}-one")
    four, both = (load_file(tmp_path / name / file) for name in ("text-four", "text-both"))
    assert all((four[name] - both[name]).abs().max() < 1e-5 for name in four), "two sums of two: up to rounding"
    assert report(tmp_path / "text-both")[0] == pytest.approx(report(tmp_path / "text-four")[0], rel=1e-6)
