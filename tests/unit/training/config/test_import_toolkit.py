"""ai-toolkit's jobs become ours, in YAML and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from inweave.training.config.importers.detect import import_config
from inweave.training.config.importers.files import leaves_of
from tests.unit.training.config.other_trainers import AI_TOOLKIT, accounted, write_text


def test_ai_toolkit(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    result = import_config(write_text(tmp_path, AI_TOOLKIT))
    c = result.config
    assert result.kind == "ai-toolkit"
    assert (c.name, c.output, c.device, c.trigger, c.model) == (
        "harbour_v2", "output", "cuda:0", "h4rbour", "black-forest-labs/FLUX.1-dev",
    )  # fmt: skip
    assert (c.network, c.rank, c.alpha, c.rules[0].skip) == ("lora", 32, 16, True)
    assert re.search(c.rules[0].pattern, "single_transformer_blocks.0.attn.to_q")
    assert (c.steps, c.learning_rate, c.weight_decay, c.optimizer, c.ema_decay) == (1500, 1e-4, 1e-4, "adamw8bit", 0.99)
    assert (c.objective, c.timestep_sampling, c.precision, c.gradient_checkpointing) == (
        "flow",
        "sigmoid",
        "bf16",
        "full",
    )
    assert isinstance(c.dataset, dict)
    sets = [
        (each["resolution"], each["subsets"][0]["image_dir"], each["subsets"][0]["num_repeats"])
        for each in c.dataset["datasets"]
    ]
    assert sets == [*((side, "/data/harbour", 3) for side in (512, 768, 1024)), (512, "/data/boats", 1)]
    assert (c.caption_extensions, c.caption_dropout) == ((".txt",), 0.05)
    assert (c.save_every, c.keep_last, c.sample_every, c.sample_steps, c.sample_guidance) == (250, 4, 250, 20, 4)
    assert c.sample_prompts == ("h4rbour at dawn", "a lighthouse, h4rbour")
    assert [each.split(":")[0] for each in result.no_equivalent] == ["model.quantize"]
    for name in leaves_of(yaml.safe_load(AI_TOOLKIT)):
        assert accounted(result, name.removeprefix("config.process.0.")), name


def test_ai_toolkit_in_json_and_with_little_in_it(tmp_path: Path) -> None:
    process = {
        "network": {"type": "lora"},
        "datasets": [{"folder_path": "x"}],
        "model": {"name_or_path": "m"},
        "sample": {"samples": [{"prompt": "p"}]},
    }
    result = import_config(
        write_text(tmp_path, json.dumps({"job": "extension", "config": {"name": "n", "process": [process]}}))
    )
    c = result.config
    assert (c.rank, c.alpha, c.steps, c.learning_rate, c.precision) == (4, 1.0, 1000, 1e-6, "fp32")
    assert c.sample_prompts == ("p",)


def test_merge_keys_mean_what_yaml_says() -> None:
    yaml = pytest.importorskip("yaml")
    from inweave.training.config.importers.yaml_loader import BoundedLoader

    text = "x: &x {a: 1, b: 2}\ny: &y {b: 3, c: 4}\nz: &z {<<: [*x, *y], c: 5}\nw: {d: 1, <<: *z, a: 7}\n=: 1\n"
    assert yaml.load(text, BoundedLoader) == yaml.safe_load(text)
