"""Hires fix, upscalers and outpainting: what they equal, what they keep, what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from inweave.errors import ConfigError, FormatError
from inweave.generate.config import GenerateConfig
from inweave.generate.denoise import Progress
from inweave.generate.enlarge import UpscalePass, made_steps, steps_for
from inweave.generate.infotext import infotext, parse_infotext
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.generate.upscale import Tiles
from inweave.generate.upscaler_files import UpscalerFinder
from inweave.models.upscalers import CONTEXT, open_upscaler
from tests.unit.generate.upscaler_files import compact, esrgan

QUICK: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "seed": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("upscalers")
    save_file(compact(scale=2), path / "twice.safetensors")
    return path


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Iterator[Pipeline]:
    yield pipeline("inweave/emoji", device="cpu", upscalers=[folder])


def test_the_second_pass_is_image_to_image_of_the_enlarged_first(pipe: Pipeline) -> None:
    made = pipe("a cat face", loras=["pixel:0.5"], upscale={"strength": 0.5, "steps": 4}, **QUICK)
    first = pipe("a cat face", loras=["pixel:0.5"], **QUICK).images[0]
    large = first.resize((128, 128), Image.Resampling.LANCZOS)
    second = pipe("a cat face", loras=["pixel:0.5"], init=large, strength=0.5, steps=4, seed=7, batch=1).images[0]
    assert made.images[0].size == (128, 128)
    assert made.images[0].tobytes() == second.tobytes()


def test_latents_are_enlarged_and_painted_again(pipe: Pipeline) -> None:
    nothing = pipe("a cat face", upscale={"strength": 0, "upscaler": "Latent (nearest-exact)"}, **QUICK).images[0]
    some = pipe("a cat face", upscale={"strength": 0.5, "steps": 4, "upscaler": "latent"}, **QUICK).images[0]
    assert nothing.size == some.size == (128, 128) and nothing.tobytes() != some.tobytes()
    first = pipe("a cat face", **QUICK).images[0]
    near = np.asarray(nothing.resize((64, 64), Image.Resampling.BOX), np.int16) - np.asarray(first, np.int16)
    assert np.abs(near).mean() < 30, "the same image, decoded from larger latents"


def test_images_of_a_batch_and_of_one_request_are_those_of_their_seeds(pipe: Pipeline) -> None:
    seen: list[tuple[int, int]] = []
    progress: list[Progress] = []
    many = pipe(
        "a {cat|dog|cow} face", count=3, batch=1, upscale={"strength": 0.5}, **QUICK,
        on_image=lambda number, image, record: seen.append((number, record["config"]["seed"])),
        progress=progress.append,
    )  # fmt: skip
    assert seen == [(0, 7), (1, 8), (2, 9)] and [image.size for image in many.images] == [(128, 128)] * 3
    assert len({record["config"]["prompt"] for record in many.records}) > 1
    single = pipe(GenerateConfig(**many.records[2]["config"]), batch=1)
    assert single.images[0].tobytes() == many.images[2].tobytes(), "a record repeats its image"
    assert single.records[0] == many.records[2]
    done = [at.done for at in progress]
    assert done == sorted(done) and progress[-1].done == progress[-1].work == 3 * (2 + 1)


def test_only_enlarging_leaves_the_model_out(pipe: Pipeline, folder: Path) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (48, 40, 3), np.uint8))
    made = pipe("", init=image, strength=0, upscale={"scale": 3, "strength": 0, "upscaler": "nearest"})
    assert made.images[0].tobytes() == image.resize((120, 144), Image.Resampling.NEAREST).tobytes()
    cropped = pipe("", init=image, strength=0, upscale={"width": 80, "height": 80, "strength": 0}).images[0]
    assert cropped.size == (80, 80)
    network = pipe("", init=image, strength=0, upscale={"scale": 2, "strength": 0, "upscaler": "twice"}).images[0]
    values = torch.from_numpy(np.asarray(image)).permute(2, 0, 1)[None].float() / 255
    expected = open_upscaler(folder / "twice.safetensors").network(values).clamp(0, 1)[0].permute(1, 2, 0)
    assert np.abs(np.asarray(network, np.int16) - (expected.detach().numpy() * 255).round()).max() <= 1


@pytest.mark.parametrize(("length", "side"), [(64, 64), (65 * 8, 64), (256, 128), (1000, 256), (4096, 512), (72, 64)])
def test_tiles_cover_an_image_and_overlap(length: int, side: int) -> None:
    starts = Tiles.starts(length, side, 8)
    assert starts[0] == 0 and starts[-1] + side == max(length, side)
    assert all(second - first <= side - side // 4 + 8 for first, second in pairwise(starts))
    assert all(start % 8 == 0 for start in starts)


def test_joined_tiles_of_one_image_are_that_image() -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (200, 328, 3), np.uint8))
    tiles = Tiles(image.size, 96, 8)
    assert len(tiles.boxes) > 6
    assert tiles.join([image.crop(box) for box in tiles.boxes]).tobytes() == image.tobytes()


def test_memory_follows_a_tile(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []
    monkeypatch.setattr(type(pipe.model), "predict", _recording(type(pipe.model).predict, shapes))
    image = Image.new("RGB", (64, 64), "orange")
    made = pipe("grass", init=image, strength=0, steps=2, seed=1, batch=1,
                upscale={"scale": 3, "strength": 0.5, "tile": 64})  # fmt: skip
    assert made.images[0].size == (192, 192)
    assert len(shapes) == 16 and {shape[-2:] for shape in shapes} == {
        (16, 16) if pipe.model.latent_scale == 4 else (8, 8)
    }
    assert (
        made.images[0].tobytes()
        == pipe(GenerateConfig(**made.records[0]["config"]), init=image, batch=1).images[0].tobytes()
    )


def _recording(predict: Any, shapes: list[Any]) -> Any:
    def recorded(self: Any, rows: torch.Tensor, *rest: Any) -> Any:
        shapes.append(tuple(rows.shape))
        return predict(self, rows, *rest)

    return recorded


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"upscaler": "nosuch"}, "no such upscaler"),
        ({"upscaler": "twic"}, "did you mean 'twice'"),
        ({"scale": 1}, "greater than 1"),
        ({"scale": 2, "width": 128}, "not both"),
        ({"width": 5000}, "4096"),
        ({"scale": 8, "tile": 65}, "multiple of"),
        ({"strength": 1.5}, "1"),
        ({"sampler": "nosuch"}, "nosuch"),
        ({"nosuch": 1}, "nosuch"),
    ],
)
def test_what_cannot_be_enlarged_is_refused_before_any_work(
    pipe: Pipeline, settings: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        pipe("a cat", upscale=settings, progress=lambda at: pytest.fail("work began"), **QUICK)
    assert word in str(caught.value)


def test_steps_are_counted_as_a1111_does_and_back() -> None:
    for made in range(1, 60):
        for strength in (0.3, 0.4, 0.5, 0.7, 0.75, 1.0):
            assert made_steps(steps_for(made, strength), strength) == made or steps_for(made, strength) == 150


def test_the_settings_of_a_second_pass_survive_as_text(pipe: Pipeline) -> None:
    made = pipe("a {cat|dog}", upscale={"strength": 0.5, "upscaler": "latent-bicubic", "sampler": "euler"}, **QUICK)
    text = infotext(made.records[0])
    assert "Hires upscale: 2, Hires steps: 1, Hires sampler: Euler, Hires upscaler: Latent (bicubic)" in text
    read = parse_infotext(text)
    assert read.warnings == [] and read.config["template"]["prompt"] == "a {cat|dog}"
    assert GenerateConfig(**read.config).upscale == UpscalePass(
        scale=2, strength=0.5, steps=2, upscaler="latent-bicubic", sampler="euler"
    )


def test_an_image_is_extended_and_keeps_its_pixels(pipe: Pipeline) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8))
    sides = {"left": 24, "bottom": 16, "blend": 8}
    made = pipe("grass", init=image, outpaint=sides, strength=1.0, steps=2, seed=1)
    result = made.images[0]
    assert result.size == (88, 80)
    assert np.array_equal(np.asarray(result)[:56, 32:], np.asarray(image)[:56, 8:]), (
        "what is not blended keeps its bits"
    )
    assert len(np.unique(np.asarray(result)[:, :24].reshape(-1, 3), axis=0)) > 50, "something was painted"
    assert made.records[0]["config"]["outpaint"] == {"left": 24, "top": 0, "right": 0, "bottom": 16, "blend": 8}
    for wrong, word in (({"left": 0}, "name a side"), ({"left": 4090}, "at most 4096"), ({"up": 3}, "up")):
        with pytest.raises(ConfigError, match=word):
            pipe("grass", init=image, outpaint=wrong)
    with pytest.raises(ConfigError, match="no image to extend"):
        pipe("grass", outpaint={"left": 8})


@pytest.mark.parametrize("spelling", ["basicsr", "esrgan", "trunk"])
@pytest.mark.parametrize("ups", [1, 2])
def test_esrgan_is_read_in_each_spelling(tmp_path: Path, spelling: str, ups: int) -> None:
    save_file(esrgan(spelling, ups=ups), tmp_path / "a.safetensors")
    save_file(esrgan("basicsr", ups=ups), tmp_path / "b.safetensors")
    own, plain = (open_upscaler(tmp_path / f"{name}.safetensors") for name in "ab")
    image = torch.rand(1, 3, 20, 24)
    assert own.scale == plain.scale == 2**ups
    assert torch.equal(own(image), plain(image)) and own(image).shape == (1, 3, 20 * own.scale, 24 * own.scale)


def test_a_network_sees_enough_around_a_tile(tmp_path: Path) -> None:
    save_file(compact(scale=2, layers=3), tmp_path / "a.safetensors")  # its view of 4 pixels is within CONTEXT
    upscaler, image = open_upscaler(tmp_path / "a.safetensors"), torch.rand(1, 3, 70, 51)
    assert CONTEXT > 4
    torch.testing.assert_close(upscaler(image, tile=32), upscaler(image, tile=100))


def test_files_that_are_no_upscalers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(b"PK")
    save_file({"x": torch.zeros(2)}, tmp_path / "b.safetensors")
    broken = esrgan("basicsr")
    broken["body.0.rdb2.conv1.weight"] = torch.zeros(9, 9)
    save_file(broken, tmp_path / "c.safetensors")
    missing = {name: tensor for name, tensor in esrgan("basicsr").items() if name != "conv_hr.weight"}
    save_file(missing, tmp_path / "d.safetensors")
    save_file(esrgan("basicsr") | {"conv_first.bias": torch.full((8,), torch.nan)}, tmp_path / "e.safetensors")
    for name, word in (
        ("a.pth", "pickle"),
        ("b", "no ESRGAN"),
        ("c", "do not make"),
        ("d", "conv_hr"),
        ("e", "finite"),
    ):
        with pytest.raises(FormatError, match=word):
            open_upscaler(tmp_path / (name if "." in name else f"{name}.safetensors"))
    assert set(UpscalerFinder([tmp_path]).names) >= {"lanczos", "latent", "a", "b"}
