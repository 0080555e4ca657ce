"""The settings of an image are in the image: for us as JSON, for other front ends as they write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from inweave.errors import RequestError
from inweave.generate.config import GenerateConfig
from inweave.generate.record import from_infotext, infotext, png_text, read_record

RECORD = {
    "config": {
        "prompt": "a cat, sitting", "negative_prompt": "dog: large", "steps": 20, "guidance": 7.5, "seed": 5,
        "width": 512,
        "height": 640, "sampler": "dpm_solver_multistep", "schedule": "karras", "clip_skip": 2,
        "loras": [{"name": "ink", "te": 0.5, "unet": 0.8}],
    },
    "model": {"name": "my, model"},
    "loras": [
        {"name": "ink", "te": 0.5, "unet": 0.8, "in_prompt": False, "autov3": "0123456789ab"},
        {"name": "pixel", "te": 1.0, "unet": 1.0, "in_prompt": True, "autov3": "ba9876543210"},
    ],
    "inputs": {},
}  # fmt: skip


def test_the_text_other_front_ends_read() -> None:
    assert infotext(RECORD).splitlines()[:2] == ["a cat, sitting <lora:ink:0.5:0.8>", "Negative prompt: dog: large"]
    last = infotext(RECORD).splitlines()[2]
    assert last.startswith(
        "Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7.5, Seed: 5, Size: 512x640, "
    )
    assert 'Model: "my, model"' in last
    assert 'Lora hashes: "ink: 0123456789ab, pixel: ba9876543210"' in last


def test_written_text_reads_back() -> None:
    config = GenerateConfig(**from_infotext(infotext(RECORD)))
    assert (config.steps, config.guidance, config.seed, config.width, config.height) == (20, 7.5, 5, 512, 640)
    assert (config.sampler, config.schedule, config.clip_skip) == ("dpm_solver_multistep", "karras", 2)
    assert config.prompt == "a cat, sitting <lora:ink:0.5:0.8>" and config.negative_prompt == "dog: large"


def test_an_image_of_another_front_end(tmp_path: Path) -> None:
    text = (
        "masterpiece, (cat:1.2)\nsecond line\nNegative prompt: bad, worse\n"
        "Steps: 28, Sampler: Euler a, CFG scale: 7, Seed: 1234567890, Size: 512x768, Model hash: abc, Model: x, "
        'Lora hashes: "a: 0123456789ab", Version: v1.10.1'
    )
    info = PngInfo()
    info.add_text("parameters", text)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=info)
    config = read_record(tmp_path / "a.png")["config"]
    assert config["prompt"] == "masterpiece, (cat:1.2)\nsecond line" and config["negative_prompt"] == "bad, worse"
    assert GenerateConfig(**config).sampler == "euler_ancestral"


def test_both_texts_are_in_the_file(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=png_text(RECORD))
    with Image.open(tmp_path / "a.png") as image:
        image.load()
        assert {"inweave", "parameters"} <= image.info.keys()
    assert read_record(tmp_path / "a.png")["config"] == RECORD["config"]


def test_missing_or_damaged_settings_of_an_image_are_reported(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "bare.png")
    with pytest.raises(RequestError, match="no generation settings"):
        read_record(tmp_path / "bare.png")
    info = PngInfo()
    info.add_text("inweave", "{broken")
    Image.new("RGB", (8, 8)).save(tmp_path / "bad.png", pnginfo=info)
    with pytest.raises(RequestError, match="damaged"):
        read_record(tmp_path / "bad.png")
    with pytest.raises(RequestError, match="not an image"):
        read_record(Path(__file__))
