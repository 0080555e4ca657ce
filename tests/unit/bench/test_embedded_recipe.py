"""The recipe of the embedded model, whole, at a size that takes seconds: legs, resuming, files back, the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from tools.embedded import leg
from tools.embedded.captions import Emoji
from tools.embedded.export import export
from tools.embedded.lessons import edited_images, make_pool, masked_images
from tools.embedded.library import load_library
from tools.embedded.networks import (
    INPUT_CHANNELS,
    LATENT_CHANNELS,
    SIZES,
    load_tokenizer,
    new_unet,
    new_vae,
    token_ids,
)
from tools.embedded.pack import pack, packed_file, unpack
from tools.embedded.places import SHIPPED, weights_file
from tools.embedded.render import TRAINED
from tools.embedded.scenes import Drawer, Scene
from tools.embedded.shards import read_shards, write_shards
from tools.embedded.variations import FILTERS

import inweave

NAMES = ("red apple", "rocket", "cat face")
LENGTHS = ["--vae-steps", "2", "--unet-steps", "4", "--decoder-steps", "2"]
SMALL = [
    "--size", "tiny", "--device", "cpu", "--batch", "8", "--vae-batch", "4", "--pool", "6", "--pool-steps", "3",
    "--bank", "4", "--names", "0",
]  # fmt: skip


def sprite(number: int, shift: int) -> np.ndarray:
    image = Image.new("RGBA", (128, 128), (0, 0, 0, 0))
    pen = ImageDraw.Draw(image)
    box = (20 + shift, 24, 100 + shift, 104)
    (pen.ellipse, pen.rectangle, lambda at, fill: pen.polygon([(at[0], at[3]), (at[2], at[3]), (60, at[1])], fill))[
        number
    ](box, fill=((220, 40, 40, 255), (40, 90, 200, 255), (240, 180, 40, 255))[number])
    return np.asarray(image)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a work folder with three drawings in each of the sets."""
    work = tmp_path_factory.mktemp("packed")
    emojis = [Emoji(f"1f3{i:02x}", name, ("thing",), "object", "other") for i, name in enumerate(NAMES)]
    for shift, name in enumerate(TRAINED):
        pack(np.stack([sprite(i, 2 * shift) for i in range(3)]), emojis, packed_file(work, name))
    shutil.copytree(SHIPPED / "tokenizer", work / "packed" / "tokenizer")
    return work


def new_work(packed: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "packed").symlink_to(packed / "packed")
    return folder


def run_leg(work: Path, *more: str) -> bool:
    return leg.main(["--work", str(work), "--out", str(work / "out"), *SMALL, *LENGTHS, *more])


@pytest.fixture(scope="module")
def whole(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the work folder of a run in one leg."""
    work = new_work(packed, tmp_path_factory.mktemp("runs") / "whole")
    assert run_leg(work)
    return work


def test_packed_images_come_back_nearly_as_they_were(packed: Path) -> None:
    images, emojis = unpack(packed_file(packed, "noto"))
    assert [emoji.name for emoji in emojis] == list(NAMES) and images.shape == (3, 128, 128, 4)
    true = sprite(1, 2 * TRAINED.index("noto"))
    visible = true[..., 3] > 0
    assert np.abs(images[1].astype(int) - true)[visible].mean() < 4
    assert np.abs(images[1][..., 3].astype(int) - true[..., 3]).mean() < 2


def test_a_run_in_two_legs_equals_one_leg(packed: Path, whole: Path, tmp_path: Path) -> None:
    work = new_work(packed, tmp_path / "two")
    assert not run_leg(work, "--most-steps", "2")
    stages = json.loads((work / "out" / "run.json").read_text())["stages"]
    assert stages["vae"]["done"] and stages["unet"] == {**stages["unet"], "steps": 2, "done": False}
    assert run_leg(work)
    for name in ("vae", "unet", "text_encoder", "vae_adapted"):
        one, two = load_file(weights_file(whole, name)), load_file(weights_file(work, name))
        assert all(torch.equal(one[key], two[key]) for key in one), name


def test_a_new_machine_goes_on_from_the_files_of_a_leg(packed: Path, tmp_path: Path) -> None:
    first = new_work(packed, tmp_path / "first")
    run_leg(first, "--most-steps", "2")
    second = new_work(packed, tmp_path / "second")
    assert run_leg(second, "--restart", str(first / "out"))
    facts = json.loads((second / "out" / "run.json").read_text())
    assert facts["stages"]["unet"]["steps"] == 4 and facts["stages"]["vae"]["done"]
    vae = load_file(weights_file(second, "vae"))
    assert all(
        torch.equal(vae[name].half(), value.half()) for name, value in load_file(weights_file(first, "vae")).items()
    )


def test_the_folder_generates_and_repaints(whole: Path, tmp_path: Path) -> None:
    export(whole, tmp_path / "plain")
    image = inweave.pipeline(str(tmp_path / "plain"), device="cpu")("rocket", steps=2, seed=1).images[0]
    assert image.size == (128, 128)
    export(whole, tmp_path / "inpaint", "inpaint")
    pipe = inweave.pipeline(str(tmp_path / "inpaint"), device="cpu")
    assert pipe.model.inpaints
    mask = Image.new("L", image.size, 0)
    mask.paste(255, (0, 64, 128, 128))
    made = pipe("rocket", steps=2, seed=1, init=image, mask=mask, strength=1.0).images[0]
    assert np.array_equal(np.asarray(made)[:64], np.asarray(image)[:64])


def test_a_plain_unet_is_the_trained_one_with_nothing_else_to_see() -> None:
    torch.manual_seed(0)
    unet = new_unet(SIZES["tiny"])
    with torch.no_grad():
        unet.conv_in.weight.normal_(std=0.1)
    latents, text = torch.randn(2, LATENT_CHANNELS, 16, 16), torch.randn(2, 32, SIZES["tiny"].text_width)
    times = torch.tensor([10, 900])
    absent = torch.zeros(2, INPUT_CHANNELS - LATENT_CHANNELS, 16, 16)
    with torch.no_grad():
        seen = unet(torch.cat([latents, absent], 1), times, text)[0]
        unet.conv_in.weight = torch.nn.Parameter(unet.conv_in.weight[:, :LATENT_CHANNELS].clone())
        torch.testing.assert_close(unet(latents, times, text)[0], seen, rtol=1e-4, atol=1e-5)


def test_pools_are_drawn_by_number_alone_and_hold_what_is_known(packed: Path) -> None:
    library, tokenizer = load_library(packed, torch.device("cpu")), load_tokenizer(packed)
    torch.manual_seed(0)
    vae = new_vae(SIZES["tiny"]).eval()
    one, again, other = (make_pool(vae, tokenizer, library, 6, 1, number) for number in (0, 0, 1))
    assert all(torch.equal(a.latents, b.latents) for (a, _), (b, _) in zip(one.kinds, again.kinds, strict=True))
    assert not torch.equal(one.kinds[0][0].latents, other.kinds[0][0].latents)
    batch = one.batch(20, INPUT_CHANNELS, torch.Generator().manual_seed(0))
    extra, shares = batch["extra"], [share for _, share in one.kinds]
    plain, masked = round(20 * shares[0]), round(20 * shares[1])
    assert not extra[:plain].any() and extra[plain : plain + masked, :9].any()
    assert not extra[plain : plain + masked, 9:].any() and not extra[plain + masked :, :9].any()
    assert extra[plain + masked :, 9:].any()


def test_an_edit_changes_one_thing_and_a_mask_hides_a_part(packed: Path) -> None:
    import random

    drawer = Drawer(load_library(packed, torch.device("cpu")), random.Random(3))
    made = edited_images(drawer, 8, torch.Generator().manual_seed(1))
    assert made.before is not None and len(made.captions) == 8
    assert all(not torch.equal(a, b) for a, b in zip(made.before, made.images, strict=True))
    masks = masked_images(drawer, 8, torch.Generator().manual_seed(1)).masks
    assert masks is not None and {0.0, 1.0} == set(masks.unique().tolist())


@pytest.mark.parametrize("style", FILTERS)
def test_a_style_changes_a_drawing_and_keeps_it_in_range(packed: Path, style: str) -> None:
    sprites = load_library(packed, torch.device("cpu"), names=("noto",)).images
    made = FILTERS[style](sprites, torch.Generator().manual_seed(0))
    assert made.shape == sprites.shape and not torch.equal(made, sprites)
    assert made.min() >= -1e-4 and made.max() <= 1 + 1e-4
    assert (made[:, :3] <= made[:, 3:] + 1e-3).all()  # premultiplied


def test_a_held_out_combination_is_never_drawn(packed: Path) -> None:
    library = load_library(packed, torch.device("cpu"))
    cat = next(i for i in range(len(library)) if library.name(i) == "cat face")
    assert Scene("full", cat, cat, "blue").held_out(library) and not Scene("full", cat, cat, "red").held_out(library)


def test_weights_travel_in_files_below_the_limit(tmp_path: Path) -> None:
    states = {"unet": {f"{i}": torch.randn(1 << 20, 3) for i in range(4)}, "vae": {"a.b": torch.ones(3)}}
    assert write_shards(states, {"size": {}}, tmp_path) == 2
    assert all(path.stat().st_size <= 16 << 20 for path in tmp_path.iterdir())
    back, _ = read_shards(tmp_path)
    assert torch.equal(back["unet"]["3"], states["unet"]["3"].half().float()) and back["vae"]["a.b"].tolist() == [1] * 3


def test_long_captions_are_cut_and_short_ones_end(packed: Path) -> None:
    tokenizer = load_tokenizer(packed)
    ids = token_ids(tokenizer, ["cat", "cat " * 60], torch.device("cpu"))
    assert ids.shape == (2, 32) and ids[1, -1] == tokenizer.end and ids[0, 0] == tokenizer.start
