"""Batches of a diffusion task: latents of the autoencoder, text encoded as in generation, masks, weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch
from PIL import Image

from inweave.errors import ConfigError, MemoryBudgetError
from inweave.layers import inject, lora_layers
from inweave.models.families.base import ConditioningRequest
from inweave.training.data.images import load_image
from inweave.training.tasks.diffusion_data import batches_of
from tests.unit.training.image_sets import (
    CAPTIONS,
    color_image,
    fresh_model,
    make_set,
    sample_inputs,
    shared_model,
    task_on,
)

FAMILIES = ("sd1.5", "sd2.1", "sdxl", "sd3-medium", "flux1-dev", "flux1-schnell", "z-image-turbo", "qwen-image")


@pytest.mark.parametrize("clip_skip", [None, 2])
@pytest.mark.parametrize("variant", [*FAMILIES, "flux2-dev", "flux2-klein-4b"])
def test_text_conditioning_is_that_of_generation(variant: str, clip_skip: int | None) -> None:
    model = shared_model(variant)
    text = "a red apple on a wooden table"
    guidance = 0.0 if model.family.is_guided(model, 1.0) else 1.0
    request = ConditioningRequest(((text, 1.0),), (), guidance, 64, 64, clip_skip)
    expected = dict(model.family.condition(model, request).inputs)
    with torch.no_grad():
        encoded = model.family.encode(model, model.family.token_ids(model, text), clip_skip)
    shape = model.latent_space.shape(64, 64)
    inputs = model.family.batch_inputs(model, encoded, torch.tensor([[64.0, 64, 0, 0, 64, 64]]), shape, 1.0)
    assert inputs.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(inputs[name], expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("variant", FAMILIES)
def test_latents_are_sampled_from_the_autoencoders_distribution(variant: str, tmp_path: Path) -> None:
    model, task = shared_model(variant), task_on(make_set(tmp_path / "set"), model=shared_model(variant))
    pixels = torch.from_numpy(np.asarray(color_image(0), dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
    config, frames = model.vae.config, variant == "qwen-image"  # which has a frame axis and values per channel
    with torch.no_grad():
        distribution = model.vae.encode(pixels[:, :, None] if frames else pixels).latent_dist
    mean, std = (each[0, :, 0] if frames else each[0] for each in (distribution.mean, distribution.std))
    shift = torch.tensor(config.latents_mean)[:, None, None] if frames else config.shift_factor or 0.0
    scale = 1 / torch.tensor(config.latents_std)[:, None, None] if frames else config.scaling_factor
    stored = task._latents(0, False, 0)
    torch.testing.assert_close(stored["mean"], (mean - shift) * scale)
    torch.testing.assert_close(stored["std"], std * scale)
    many = torch.stack([sample_inputs(task, step, (0,))["latents"][0] for step in range(200)])
    assert float(((many.mean(0) - stored["mean"]) / stored["std"]).abs().mean()) < 0.15
    assert float((many.std(0) / stored["std"]).mean()) == pytest.approx(1.0, rel=0.05)


def test_long_captions_are_chunks_and_all_rows_have_as_many(tmp_path: Path) -> None:
    long = ", ".join(f"word{number}" for number in range(60))
    task = task_on(make_set(tmp_path / "set", {"a": long, "b": "short"}))
    text = sample_inputs(task)["text.encoder_hidden_states"]
    assert task.chunks > 1 and text.shape[1] == 77 * task.chunks


def test_captions_that_make_steps_slow_are_named(tmp_path: Path) -> None:
    long = ", ".join(f"word{number}" for number in range(200))
    data = make_set(tmp_path / "set", {"a": "short", "b": long, "c": "short too"})
    task = task_on(data, max_token_length=100_000)
    assert task.chunks > 3
    message = f"captions: the longest takes {task.chunks} chunks of the text encoder, which makes its steps slow; "
    advice = "shorten long ones, or lower max_token_length"
    assert task.notes() == [f"{message}{advice}: {tmp_path / 'set' / 'b.png'}"]
    assert task_on(make_set(tmp_path / "other")).notes() == []


@pytest.mark.parametrize(("length", "chunks"), [(75, 1), (76, 2), (150, 2), (225, 3)])
def test_a_caption_is_read_to_the_token_that_is_set(length: int, chunks: int, tmp_path: Path) -> None:
    """kohya's max_token_length: the first tokens, without start and end, in chunks of 75."""
    long = ", ".join(f"word{number}" for number in range(200))
    data = make_set(tmp_path / "set", {"a": long, "b": "short", "c": f"{long}, and more"})
    task = task_on(data, max_token_length=length)
    assert task.chunks == chunks == task_on(data).chunks - 3 + chunks  # 225 where nothing is set
    model = shared_model("sd1.5")
    tokenizer = model.tokenizers["tokenizer"]
    whole = tokenizer(long, add_special_tokens=False, verbose=False).input_ids
    (ids,) = model.family.token_ids(model, long, None, length)["text_encoder"]
    read = [token for row in ids.tolist() for token in row[1:] if token != tokenizer.eos_token_id]
    assert len(whole) > 225 and read == whole[:length]
    (line,) = task.notes()
    assert line.startswith("captions: 2 are longer than the text encoder reads, and their end is ignored")
    assert f"max_token_length = {length}" in line and line.endswith(f"{data / 'a.png'}, {data / 'c.png'}")


@pytest.mark.parametrize("variant", ["sd1.5", "qwen-image"])
def test_one_long_caption_pads_its_own_batch_alone(variant: str, tmp_path: Path) -> None:
    captions = {"a": " ".join(["a red apple on a table"] * 60), "b": "short", "c": "short too"}
    task = task_on(make_set(tmp_path / "set", captions), model=shared_model(variant), batch_size=2)
    task.prepare()
    lengths = {rows: sample_inputs(task, 0, rows)["text.encoder_hidden_states"].shape[1] for rows in ((0, 1), (1, 2))}
    if variant == "sd1.5":  # where no mask hides padding, no batch of the run has any
        assert {frozenset(batch) for batch in task.order.batches(0)} == {frozenset({0}), frozenset({1, 2})}
        assert batches_of([0, 1, 2], task.places, task.batch_lengths, 2) == [(0,), (1, 2)]
    else:
        assert sorted(map(len, task.order.batches(0))) == [1, 2]
    assert lengths[0, 1] == task.chunks * (77 if variant == "sd1.5" else 32) > 2 * lengths[1, 2]
    apart, together = (sample_inputs(task, 0, rows) for rows in ((1,), (0, 1)))
    states = together["text.encoder_hidden_states"][1:, : apart["text.encoder_hidden_states"].shape[1]]
    torch.testing.assert_close(states, apart["text.encoder_hidden_states"])


def test_flux_reads_long_captions_with_t5_whatever_clip_reads(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", {"a": "short", "b": ", ".join(f"word{number}" for number in range(100))})
    model = shared_model("flux1-dev")
    assert task_on(data, model=model, max_token_length=75).notes() == []


def test_prior_weight(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", {"a": CAPTIONS["a"]})
    make_set(data / "reg", {"r": "an apple"}, first=5)
    task = task_on(data, prior_loss_weight=0.25)
    prior = next(n for n, example in enumerate(task.examples) if example.regularization)
    inputs = sample_inputs(task, 0, (1 - prior, prior))
    assert inputs["weights"].tolist() == [1.0, 0.25]
    loss = float(task.loss(inputs))
    each = [float(task.loss({name: value[row : row + 1] for name, value in inputs.items()})) for row in (0, 1)]
    assert loss == pytest.approx((each[0] + each[1]) / 2, rel=1e-5)
    heavy = dict(inputs, weights=torch.ones(2))
    assert float(task.loss(heavy)) == pytest.approx((each[0] + 4 * each[1]) / 2, rel=1e-5)
    assert "weave" not in "".join(task_on(data, trigger="weave").captions[prior]), "the class is not the subject"


@pytest.mark.parametrize(("variant", "encoders"), [("sd1.5", False), ("sd1.5", True), ("flux1-dev", False)])
def test_prior_prediction_is_the_mean_square_to_the_base(variant: str, encoders: bool, tmp_path: Path) -> None:
    """Held against a model without adapters and plain torch: the target of its rows is that model's prediction."""
    data = make_set(tmp_path / "set", {"a": CAPTIONS["a"]})
    make_set(data / "reg", {"r": "an apple"}, first=5)
    adapted, base = fresh_model(variant), fresh_model(variant)
    options: dict[str, Any] = {"prior_loss_weight": 0.25, "train_text_encoders": encoders}
    task = task_on(data, model=adapted, prior_prediction=True, **options)
    reference = task_on(data, model=base, **options)
    for network in task.networks.values():
        inject(network, 2)
        for layer in lora_layers(network).values():
            branch: Any = layer.branch("default")
            torch.nn.init.normal_(branch.up, std=0.05)
    prior = next(n for n, example in enumerate(task.examples) if example.regularization)
    inputs = sample_inputs(task, 0, (1 - prior, prior))
    noisy, target = task.objective.noised(inputs["latents"], inputs["noise"], inputs["times"])
    with torch.no_grad():
        expected = torch.stack([target[0], reference._predict(inputs, noisy)[1].float()])
        ours = task._predict(inputs, noisy).float()
    each = (ours - expected).square().mean((1, 2, 3))
    loss = task.loss(inputs)
    torch.testing.assert_close(loss.detach(), (each[0] + 0.25 * each[1]) / 2)
    to_noise = task.loss({name: value for name, value in inputs.items() if name != "prior"})
    assert abs(float((to_noise - loss).detach())) > 1e-4
    loss.backward()
    layers = [layer for network in task.networks.values() for layer in lora_layers(network).values()]
    assert all(layer.enabled for layer in layers)
    assert any(layer.branch("default").up.grad.any() for layer in layers)
    assert "prior" not in sample_inputs(task, 0, (1 - prior,)), "no second pass without images of the prior"
    assert "prior" not in sample_inputs(reference, 0, (prior,))
    with pytest.raises(ConfigError, match="prior_prediction: the dataset has no regularization images"):
        task_on(make_set(tmp_path / "plain"), model=base, prior_prediction=True)


def test_masks_are_those_of_the_latents(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", {"a": CAPTIONS["a"]})
    mask = np.zeros((64, 64), np.uint8)
    mask[:32, :16] = 255
    Image.fromarray(mask).save(data / "a-masklabel.png")
    task = task_on(data, masked_loss=True, flip=True, batch_size=1)
    plain, mirrored = (task._latents(0, flip, 0)["mask"] for flip in (False, True))
    assert plain.shape == (1, 8, 8)
    assert plain[0, :3, :1].min() > 0.9 and plain[0, 5:].max() < 0.1 and plain[0, :, 3:].max() < 0.1
    assert torch.allclose(mirrored, plain.flip(-1), atol=0.02)
    inputs = sample_inputs(task, 0, (0,))
    loss = task.loss(inputs)
    inside = dict(inputs, mask=torch.ones_like(inputs["mask"]))
    assert not torch.equal(task.loss(inside), loss)
    assert "mask" not in sample_inputs(task_on(data), 0, (0,))
    before = task.fingerprint()
    Image.fromarray(255 - mask).save(data / "a-masklabel.png")
    other = task_on(data, masked_loss=True)
    assert other._latents(0, False, 0)["mask"][0, 5:].min() > 0.9 and other.fingerprint() != before


def test_a_masked_loss_without_masks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="masklabel"):
        task_on(make_set(tmp_path / "set"), masked_loss=True)


def test_16_bit_masks_are_scaled_and_rotated_by_exif(tmp_path: Path) -> None:
    """The same mask in 8 and 16 bits, and as stored next to an image that EXIF rotates."""
    data = make_set(tmp_path / "set", {name: name for name in "abc"}, size=(96, 64))
    mask = np.zeros((64, 96), np.uint8)
    mask[:32, :32], mask[32:, 64:] = 255, 60
    Image.fromarray(mask).save(data / "a-masklabel.png")
    Image.fromarray(mask.astype(np.uint16) * 257).save(data / "b-masklabel.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 270 degrees
    for name, image in (("c", color_image(2, 96, 64)), ("c-masklabel", Image.fromarray(mask))):
        orientation = exif if name == "c" else Image.Exif()
        image.transpose(Image.Transpose.ROTATE_90).save(data / f"{name}.png", exif=orientation)
    task = task_on(data, masked_loss=True)
    assert [example.size for example in task.examples] == [(96, 64)] * 3
    masks = []
    for number, example in enumerate(task.examples):
        placement = task.places[number]
        assert placement is not None
        masks.append(load_image(example, placement, placement.crop, flip=False, masked=True)[1])
    assert 0.0 <= float(masks[0].min()) < 0.01 and float(masks[0].max()) > 0.99
    assert torch.equal(masks[1], masks[0]) and torch.equal(masks[2], masks[0])
    first, deep, stored = task._masks
    assert "/" not in first and deep.endswith("/16") and stored.endswith("/6"), "caches hold these read otherwise"


def test_masks_that_are_all_black_are_refused(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set", {name: name for name in "abc"})
    for name in "ab":
        Image.new("L", (64, 64), 0).save(data / f"{name}-masklabel.png")
    with pytest.raises(ConfigError, match=r"2 images have a mask, and all of the masks are black.*a\.png"):
        task_on(data, masked_loss=True)
    task_on(data)
    Image.new("L", (64, 64), 1).save(data / "b-masklabel.png")
    task_on(data, masked_loss=True)


def test_a_table_with_alpha_masks_the_loss_of_its_images_only(tmp_path: Path) -> None:
    half = np.full((64, 64, 4), 90, np.uint8)
    half[:, :, 3] = np.where(np.arange(64) < 32, 255, 0)
    for name, number in (("x", 0), ("y", 9)):
        make_set(tmp_path / name, {name: name}, first=number)
    Image.fromarray(half).save(tmp_path / "x" / "x.png")
    Image.fromarray(np.flip(half, 1)).save(tmp_path / "y" / "y.png")
    make_set(tmp_path / "x", {"z": "without alpha"}, first=5)
    file = tmp_path / "set.toml"
    file.write_text(
        '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "x"\nalpha_mask = true\n'
        '[[datasets.subsets]]\nimage_dir = "y"\n'
    )
    task = task_on(file)
    assert [(example.path.name, example.mask) for example in task.examples] == [
        ("x.png", "alpha"), ("z.png", None), ("y.png", None),
    ]  # fmt: skip
    mixed = sample_inputs(task, 0, (0, 1, 2))
    x, z, y = mixed["mask"]
    assert float(x[..., :3].min()) > 0.9 and float(x[..., 5:].max()) < 0.1
    assert torch.equal(y, torch.ones_like(y)) and torch.equal(z, torch.ones_like(z))
    each = [task.loss({name: value[row : row + 1] for name, value in mixed.items()}) for row in (0, 1, 2)]
    torch.testing.assert_close(torch.stack(each).mean(), task.loss(mixed), rtol=1e-5, atol=1e-6)
    off = tmp_path / "off.toml"
    off.write_text(file.read_text().replace("true", "false"))
    plain = task_on(off)
    unmasked = sample_inputs(plain, 0, (0, 1, 2))
    assert unmasked.keys() == mixed.keys() - {"mask"} and plain.fingerprint() != task.fingerprint()
    assert all(torch.equal(unmasked[name], mixed[name]) for name in unmasked)
    rows = [plain.loss({name: value[row : row + 1] for name, value in unmasked.items()}) for row in (0, 1, 2)]
    assert not torch.isclose(rows[0], each[0]) and torch.allclose(torch.stack(rows[1:]), torch.stack(each[1:]))


def test_transparent_images_are_composed_on_white_and_16_bit_ones_scaled(tmp_path: Path) -> None:
    data = tmp_path / "set"
    data.mkdir()
    half = np.zeros((64, 64, 4), np.uint8)
    half[:, 32:, 3] = 255
    Image.fromarray(half).save(data / "a.png")
    ramp = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (64, 1))
    Image.fromarray(ramp).save(data / "b.png")
    for name in "ab":
        (data / f"{name}.txt").write_text("x")
    task = task_on(data)
    images = []
    for number, example in enumerate(task.examples):
        placement = task.places[number]
        assert placement is not None
        images.append(load_image(example, placement, placement.crop, flip=False, masked=False)[0])
    assert images[0][:, :, :30].min() > 0.99 and images[0][:, :, 34:].max() < -0.99
    levels = images[1][0, 0]
    assert float(levels[0]) < -0.98 and float(levels[-1]) > 0.98 and bool((levels.diff() >= 0).all())
    assert float(levels[32]) == pytest.approx(0.0, abs=0.05)


def test_the_tables_of_a_dataset_file_count(tmp_path: Path) -> None:
    make_set(tmp_path / "set", {"a": "one; two; three ### four; five"})
    file = tmp_path / "set.toml"
    file.write_text(
        '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "set"\nshuffle_caption = true\ncaption_separator = ";"\n'
        'keep_tokens_separator = "###"\ncaption_prefix = "art of"\n'
    )
    (texts,) = task_on(file).captions
    assert len(texts) > 1 and all(text.startswith("art of one; two; three; ") for text in texts)


def test_a_subset_setting_overrides_the_run(tmp_path: Path) -> None:
    """Also where it asks for less; what it leaves open is the run's."""
    data = make_set(tmp_path / "set", {"a": "one, two, three, four"}, size=(96, 64))
    file, open_file = tmp_path / "set.toml", tmp_path / "open.toml"
    table = '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "set"\n'
    open_file.write_text(table)
    file.write_text(
        "[general]\nflip_aug = false\nrandom_crop = false\ncaption_dropout_rate = 0.0\n" + table
        + "shuffle_caption = false\ncaption_tag_dropout_rate = 0.0\n"
    )  # fmt: skip
    settings: dict[str, Any] = {
        "flip": True, "crop": "random", "caption_dropout": 1.0, "shuffle_tags": True, "tag_dropout": 0.5,
        "buckets": False,
    }  # fmt: skip
    own, left, folder = (task_on(source, **settings) for source in (file, open_file, data))
    assert own._views(0) == [(False, 0)] and own.captions == [["one, two, three, four"]]
    assert len(left._views(0)) == 8 and len(left.captions[0]) > 1
    plain = task_on(data, buckets=False)
    assert all(
        torch.equal(value, sample_inputs(plain, 0, (0,))[name]) for name, value in sample_inputs(own, 0, (0,)).items()
    )
    empty = sample_inputs(left, 0, (0,))["text.encoder_hidden_states"]
    assert torch.equal(empty, left._text("")["encoder_hidden_states"]), "all captions are dropped"
    assert left.captions == folder.captions and left._views(0) == folder._views(0)
    assert own.fingerprint() == plain.fingerprint(), "the settings that count are the same"
    assert left.fingerprint() == folder.fingerprint() != own.fingerprint()


def test_buckets_that_the_model_cannot_take_are_refused(tmp_path: Path) -> None:
    make_set(tmp_path / "set")
    file = tmp_path / "set.toml"
    file.write_text(
        '[[datasets]]\nbucket_reso_steps = 20\nmin_bucket_reso = 20\n[[datasets.subsets]]\nimage_dir = "set"\n'
    )
    with pytest.raises(ConfigError, match="multiples of 8"):
        task_on(file)


def test_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    task = task_on(make_set(tmp_path / "set", {name: name for name in "abcdefgh"}), validation_split=0.25)
    out = {number for batch in task.held_out for number in batch}
    trained = {number for batch in task.order.batches(0) for number in batch}
    assert len(out) == 2 and len(trained) == 6 and not out & trained
    assert task_on(make_set(tmp_path / "set"), validation_split=0.0).held_out == []


@pytest.mark.parametrize("variant", ["sd1.5-inpaint", "sdxl-inpaint"])
def test_inpainting_models_are_refused_with_a_way_out(variant: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train on the model it was made from"):
        task_on(make_set(tmp_path / "set"), model=shared_model(variant))


@pytest.mark.parametrize(
    ("variant", "components"),
    [
        ("sd1.5", {"unet", "te1"}),
        ("sdxl", {"unet", "te1", "te2"}),
        ("sd3-medium", {"unet", "te1", "te2"}),
        ("flux1-dev", {"unet", "te1"}),
    ],
)
def test_clip_is_trained_and_t5_is_not(variant: str, components: set[str], tmp_path: Path) -> None:
    """Token ids are batched; T5's embeddings are cached; the loss is that of cached text."""
    data, model = make_set(tmp_path / "set"), shared_model(variant)
    task = task_on(data, model=model, train_text_encoders=True)
    assert task.networks.keys() == components
    t5 = {"sd3-medium": "text_encoder_3", "flux1-dev": "text_encoder_2"}.get(variant)
    calls = []
    handle = model.networks[t5 or "vae"].register_forward_hook(lambda *_: calls.append(1))
    try:
        task.prepare()
        encoded = len(calls)
        inputs = sample_inputs(task)
        loss = task.loss(inputs)
        assert len(calls) == encoded and encoded == (3 if t5 else 0)
    finally:
        handle.remove()
    assert inputs["text.text_encoder"].dtype == torch.int64
    if t5:
        assert inputs[f"text.{t5}"].is_floating_point() and t5 not in task.needed
    with torch.no_grad():
        cached = task_on(data, model=model)
        torch.testing.assert_close(cached.loss(sample_inputs(cached)), loss, rtol=1e-5, atol=1e-6)


def test_sdxl_is_conditioned_on_exact_sizes_and_crops(tmp_path: Path) -> None:
    model = shared_model("sdxl")
    task = task_on(make_set(tmp_path / "set", size=(1365, 70)), model=model, buckets=False)
    text = {"encoder_hidden_states": torch.zeros(2, 77, 40)}
    inputs = model.family.batch_inputs(model, text, sample_inputs(task)["sizes"], (2, 4, 8, 8), 1.0)
    assert inputs["time_ids"].dtype == torch.float32
    height, width, top, left, *target = inputs["time_ids"][0].tolist()
    assert (height, width, target) == (70, 1365, [64, 64]) and top == 0 and left > 0


class Moves:
    """Where each network went, in order."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, str]] = []
        for folder, network in model.networks.items():
            monkeypatch.setattr(network, "to", self._recorded(folder), raising=False)

    def _recorded(self, folder: str) -> Any:
        return lambda device: self.log.append((folder, "in" if device == torch.device("cpu") else "out"))


def test_what_is_cached_leaves_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks go out by the word "cpu" and in by the model's device, which is the same here."""
    model, data = fresh_model("sdxl"), make_set(tmp_path / "set")
    task = task_on(data, model=model)
    assert task.needed == {"unet"}
    assert task_on(data, model=model, cache_latents=False).needed == {"unet", "vae"}
    assert task_on(data, model=model, cache_text=False).needed == {"unet", "text_encoder", "text_encoder_2"}
    assert task_on(data, model=model, train_text_encoders=True).needed == {"unet", "text_encoder", "text_encoder_2"}
    moves = Moves(model, monkeypatch)
    task.prepare(staged=True)
    phases = [{f for f, way in moves.log[start : start + 4] if way == "in"} for start in (0, 4, 8)]
    assert len(moves.log) == 12 and phases == [{"vae"}, {"text_encoder", "text_encoder_2"}, {"unet"}]
    firsts = [way for _, way in moves.log[:4]]
    assert firsts == ["out", "out", "out", "in"], "room is made first"
    moves.log.clear()
    inject(model.denoiser, 2, 2, ["to_q"], name="x")
    task.offload_unused()
    assert set(moves.log) == {("vae", "out"), ("text_encoder", "out"), ("text_encoder_2", "out")}
    assert lora_layers(model.denoiser), "a network with adapters is not moved: the optimizer knows its addresses"


def test_offloaded_networks_leave_the_device_even_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh_model("sdxl")
    task = task_on(make_set(tmp_path / "set"), model=model)
    task.prepare(staged=True)
    moves = Moves(model, monkeypatch)
    with task.on_device("vae"):
        assert ("vae", "in") in moves.log
        moves.log.clear()
    assert {("vae", "out"), ("text_encoder", "out")} <= set(moves.log)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model.vae, "to", lambda where: full() if where != "cpu" else moves.log.append(("vae", "out")))
    moves.log.clear()
    with (
        pytest.raises(MemoryBudgetError, match="not enough memory to move vae to cpu"),
        task.on_device("vae", "text_encoder"),
    ):
        raise AssertionError
    assert moves.log[-1][1] != "in" or moves.log[-1][0] == "unet"
    assert ("text_encoder", "out") in moves.log[-4:]


def test_the_fingerprint_is_of_the_data(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set")
    before = task_on(data).fingerprint()
    assert task_on(data, rank=8).fingerprint() == before
    (data / "a.txt").write_text("other")
    assert task_on(data).fingerprint() != before


def test_the_fingerprint_covers_settings_and_placement_of_every_example(tmp_path: Path) -> None:
    task = task_on(make_set(tmp_path / "set"), flip=True, keep_tokens=2)
    settings = {
        "repeats": 1, "regularization": False, "class_tokens": "", "caption_extensions": [".txt", ".caption"],
        "shuffle_tags": False, "keep_tokens": 2, "keep_separator": "|||", "tag_separator": ",", "prefix": "",
        "suffix": "", "wildcards": True, "caption_dropout": 0.0, "tag_dropout": 0.0, "flip": True, "random_crop": False,
        "alpha_mask": False, "resolution": None, "batch_size": None, "buckets": None, "min_bucket": None,
        "max_bucket": None, "bucket_step": None, "upscale": None,
    }  # fmt: skip
    facts = [
        [e.sha256, e.captions, 1, False, settings, "", [str(placement.bucket), placement.crop] if placement else None]
        for e, placement in zip(task.examples, task.places, strict=True)
    ]
    assert task.fingerprint() == hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def test_the_loss_of_rows_is_the_loss_of_the_batch(tmp_path: Path) -> None:
    task = task_on(make_set(tmp_path / "set"), min_snr_gamma=5.0)
    inputs = sample_inputs(task)
    each = [task.loss({name: value[row : row + 1] for name, value in inputs.items()}) for row in (0, 1)]
    torch.testing.assert_close(torch.stack(each).mean(), task.loss(inputs), rtol=1e-5, atol=1e-6)


def test_a_model_with_fused_blocks_swaps_no_adapters(tmp_path: Path) -> None:
    """Convolutions have other memory then: what is swapped in would go to weights that nobody reads."""
    from inweave.errors import MergeStateError
    from inweave.models.model import file_index, load_model
    from inweave.training.data.reader import read_dataset
    from inweave.training.tasks.diffusion_setup import LoadedDiffusionModel
    from tests.peers import tiny_models as tiny

    with tiny.quick_tokenizers():
        model = load_model(tiny.folder("sd1.5"), device="cpu", dtype="fp32", keep="file")
    task = task_on(make_set(tmp_path / "data"), model=model)
    loaded = LoadedDiffusionModel(task, model, file_index(model), None, read_dataset(tmp_path / "data"), False)
    assert model.swap([]) == 0
    loaded.fuse_blocks()
    with pytest.raises(MergeStateError, match="is being trained"):
        model.swap([])
