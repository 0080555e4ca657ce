"""FLUX.2 against diffusers' pipelines: images, image to image, inpainting, LoRAs, and three steps of training.

These pipelines have no image to image, and their inpainting is another one (it shows the model the image as a
reference). What is expected of them is written here with their own parts: the noised latents they start from, and
a callback that puts the known part back.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import inweave  # noqa: E402
from inweave.exchange.check import check  # noqa: E402
from inweave.generate.pipeline import Pipeline  # noqa: E402
from inweave.models.families.base import ConditioningRequest  # noqa: E402
from inweave.models.model import file_index, load_model  # noqa: E402
from inweave.training.loop import Run  # noqa: E402
from tests.peers import tiny_models as tiny  # noqa: E402
from tests.peers.test_families import PROMPT, SEED, SIDE, assert_other, assert_same, hole, picture  # noqa: E402
from tests.unit.training.image_sets import fresh_model, make_set, sample_inputs, shared_model, task_on  # noqa: E402

DEV, KLEIN, KLEIN_BASE = VARIANTS = ("flux2-dev", "flux2-klein-4b", "flux2-klein-base-4b")
STEPS = 3
#: dialect -> what its names of the projections of a block begin with
DIALECTS = {
    "diffusers": "transformer.transformer_blocks.0.attn.to_q.", "kohya": "lora_unet_double_blocks_0_img_attn_qkv.",
    "comfy": "diffusion_model.double_blocks.0.img_attn.qkv.",
    "onetrainer": "lora_transformer_transformer_blocks_0_attn_to_q.",
}  # fmt: skip


@cache
def ours(variant: str) -> Pipeline:
    with tiny.quick_tokenizers():
        return Pipeline(load_model(tiny.folder(variant)))


@cache
def theirs(variant: str) -> Any:
    kind, published = type(tiny.pipeline(variant)), tiny.pipeline(variant)
    options = {"is_distilled": variant == KLEIN} if variant != DEV else {}
    transformer = diffusers.Flux2Transformer2DModel.from_pretrained(tiny.folder(variant) / "transformer")
    pipe = kind(**published.components | {"transformer": transformer}, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def guidance(variant: str) -> float:
    return 0.0 if variant == KLEIN else 4.0


def made(variant: str, prompt: str = PROMPT, **more: Any) -> Image.Image:
    options = {"steps": STEPS, "guidance": guidance(variant), "seed": SEED, "width": SIDE, "height": SIDE}
    return ours(variant)(prompt, **options | more).images[0]


def expected(variant: str, prompt: str = PROMPT, **more: Any) -> Image.Image:
    options = {
        "num_inference_steps": STEPS, "guidance_scale": guidance(variant), "height": SIDE, "width": SIDE,
        "generator": torch.Generator().manual_seed(SEED),
    }  # fmt: skip
    image: Image.Image = theirs(variant)(prompt=prompt, **options | more).images[0]
    return image


@pytest.mark.parametrize("variant", VARIANTS)
def test_text_to_image(variant: str) -> None:
    image = made(variant)
    assert_same(image, expected(variant))
    assert_other(image, made(variant, "a green pear"))


@pytest.mark.parametrize("variant", [DEV, KLEIN])
def test_a_non_square_image_of_a_text_that_is_too_long(variant: str) -> None:
    text = " ".join(f"word{number}" for number in range(200))
    result = ours(variant)(text, steps=2, guidance=guidance(variant), seed=SEED, width=2 * SIDE, height=SIDE)
    assert any("the model reads 512" in warning for warning in result.warnings)
    other = expected(variant, text, num_inference_steps=2, width=2 * SIDE)
    assert_same(result.images[0], other)


@pytest.mark.parametrize("variant", [DEV, KLEIN])
@pytest.mark.parametrize("text", ["", PROMPT, "an [IMG] of a dog, <think> [INST] </s>", "many words " * 120])
def test_states_of_a_text(variant: str, text: str) -> None:
    """Padding has states of its own; the mark of an image in a text is not read as one."""
    model = ours(variant).model
    with torch.no_grad():
        actual = model.family.encode(model, model.family.token_ids(model, text), None)
    states, ids = theirs(variant).encode_prompt(text)
    assert torch.equal(actual["encoder_hidden_states"], states)
    inputs = model.family.batch_inputs(model, actual, torch.zeros(1, 6), (1, 16, 4, 8), 1.0)
    assert torch.equal(inputs["txt_ids"], ids[0])
    assert torch.equal(inputs["img_ids"], theirs(variant)._prepare_latent_ids(torch.zeros(1, 16, 4, 8))[0])


@pytest.mark.parametrize(("tokens", "steps"), [(16, 4), (1024, 28), (4096, 50), (4301, 50), (8192, 4)])
def test_the_shift_is_that_of_diffusers(tokens: int, steps: int) -> None:
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    assert ours(DEV).model.family.mu(tokens, steps) == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_which_settings_have_no_effect_is_said(variant: str) -> None:
    model = ours(variant).model
    negative = ConditioningRequest(((PROMPT, 1.2),), (("blurry", 1.0),), 4.0, SIDE, SIDE, clip_skip=2)
    warnings = model.family.condition(model, negative).warnings
    texts = {
        DEV: ("no CLIP", "does not use a negative prompt", "weights in the prompt"),
        KLEIN: ("no CLIP", "negative prompt has no effect", "distilled and does not use guidance", "weights"),
        KLEIN_BASE: ("no CLIP", "weights"),
    }[variant]
    assert len(warnings) == len(texts)
    for text in texts:
        assert any(text in warning for warning in warnings), text


def noised(variant: str, steps: int, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[float]]:
    """(the image's latents, the noise, the noised latents at step ``first``, the sigmas from there on)."""
    pipe = theirs(variant)
    generator = torch.Generator().manual_seed(SEED)
    pixels = pipe.image_processor.preprocess(picture())
    with torch.no_grad():
        original = pipe._patchify_latents(pipe.vae.encode(pixels).latent_dist.sample(generator))
    deviation = torch.sqrt(pipe.vae.bn.running_var + pipe.vae.config.batch_norm_eps).view(1, -1, 1, 1)
    original = (original - pipe.vae.bn.running_mean.view(1, -1, 1, 1)) / deviation
    noise = torch.randn(original.shape, generator=generator)
    sigmas = np.linspace(1.0, 1 / steps, steps)[first:]
    mu = diffusers.pipelines.flux2.pipeline_flux2.compute_empirical_mu(noise[0, 0].numel(), steps)
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    scheduler.set_timesteps(sigmas=sigmas, mu=mu)
    level = scheduler.sigmas[0]
    return original, noise, (1 - level) * original + level * noise, sigmas.tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_image_to_image(variant: str) -> None:
    steps, strength = 4, 0.5
    _, _, start, sigmas = noised(variant, steps, steps - int(steps * strength))
    other = expected(variant, num_inference_steps=steps, latents=start, sigmas=sigmas)
    assert_same(made(variant, init=picture(), steps=steps, strength=strength), other)


@pytest.mark.parametrize("variant", [DEV, KLEIN_BASE])
def test_inpainting(variant: str) -> None:
    steps, strength = 4, 0.5
    original, noise, start, sigmas = noised(variant, steps, steps - int(steps * strength))
    small = torch.from_numpy(np.asarray(hole()) / 255.0).float()[None, None]
    mask = torch.nn.functional.interpolate(small, size=original.shape[-2:]).round()
    assert 0 < float(mask.mean()) < 1

    def put_back(pipe: Any, step: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        level = pipe.scheduler.sigmas[step + 1]
        known = pipe._pack_latents((1 - level) * original + level * noise)
        inside = pipe._pack_latents(mask.expand_as(original))
        return {"latents": inside * tensors["latents"] + (1 - inside) * known}

    other = expected(variant, num_inference_steps=steps, latents=start, sigmas=sigmas, callback_on_step_end=put_back)
    image = made(variant, init=picture(), mask=hole(), keep_unmasked=False, steps=steps, strength=strength)
    assert_same(image, other)
    assert_other(image, made(variant, init=picture(), steps=steps, strength=strength))


def drawn_by_diffusers(variant: str, file: Path, strength: float = 1.0) -> Image.Image:
    pipe = theirs(variant)
    try:
        pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name="style")
        pipe.set_adapters(["style"], [strength])
        return expected(variant)
    finally:
        pipe.unload_lora_weights()


@pytest.mark.parametrize("variant", [DEV, KLEIN])
def test_lora_in_every_dialect(variant: str, tmp_path: Path) -> None:
    """Names of diffusers, of the original file (apart or fused), flat or with dots: one image."""
    plain = made(variant)
    file = tiny.lora(tmp_path / "style.safetensors", variant, dialect="diffusers")
    expected_image = drawn_by_diffusers(variant, file, 0.7)
    assert_other(expected_image, plain)
    for dialect, mark in DIALECTS.items():
        written = tmp_path / f"{dialect}.safetensors"
        inweave.save(inweave.load(file), written, dialect=dialect, base=file_index(ours(variant).model))
        assert any(key.startswith(mark) for key in load_file(written))
        assert_same(made(variant, loras=[f"{written}:0.7"]), expected_image)
    assert made(variant).tobytes() == plain.tobytes()


def plain_loop(variant: str, file: Path, inputs: dict[str, torch.Tensor], rate: float) -> list[float]:
    """The loss of three steps of AdamW, with the pipeline's parts and PEFT's layers of a file."""
    pipe = theirs(variant)
    try:
        pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name="style")
        transformer = pipe.transformer
        trained = [weight for name, weight in transformer.named_parameters() if "lora_" in name]
        for weight in trained:
            weight.requires_grad_(True)
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
        latents, noise = inputs["latents"], inputs["noise"]
        level = inputs["times"].view(-1, 1, 1, 1)
        noisy = (1 - level) * latents + level * noise
        rows = [pipe.encode_prompt(text)[0] for text in CAPTIONS]
        ids = pipe._prepare_latent_ids(latents), pipe._prepare_text_ids(torch.cat(rows))
        guide = {"guidance": torch.ones(2)} if variant == DEV else {}
        losses = []
        for _ in range(STEPS):
            prediction = transformer(
                hidden_states=pipe._pack_latents(noisy), encoder_hidden_states=torch.cat(rows).detach(),
                timestep=inputs["times"], img_ids=ids[0], txt_ids=ids[1], return_dict=False, **guide,
            )[0]  # fmt: skip
            loss = torch.nn.functional.mse_loss(prediction, pipe._pack_latents(noise - latents))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses
    finally:
        pipe.unload_lora_weights()


CAPTIONS = ("a red apple, table, still life", "a blue boat, sea, sail, sky")


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", [DEV, KLEIN_BASE])
def test_three_steps_of_training_are_those_of_a_plain_loop(variant: str, tmp_path: Path) -> None:
    """From one file with PEFT's layers in diffusers' own pipeline; what is written loads there."""
    start = tiny.lora(tmp_path / "start.safetensors", variant, dialect="diffusers")
    rate, model = 1e-3, fresh_model(variant)
    task = task_on(
        make_set(tmp_path / "set", dict(zip("ab", CAPTIONS, strict=True))), model=model, targets="attention-mlp",
        steps=STEPS, learning_rate=rate, weight_decay=0.0, max_grad_norm=0, start_from=str(start), dialect="diffusers",
        guidance=1.0, timestep_sampling="shift", output=str(tmp_path / "out"),
    )  # fmt: skip
    task.prepare()
    same = sample_inputs(task)
    task.sample_batch = lambda batch, generators: same  # type: ignore[method-assign]
    report = Run(task, model, file_index(model), task.config).train()
    expected_losses = plain_loop(variant, start, same, rate)
    assert report.losses == pytest.approx(expected_losses, rel=2e-4)
    assert len({round(loss, 5) for loss in report.losses}) == STEPS
    verdict = check(report.path, file_index(shared_model(variant)))
    assert verdict.ok and verdict.report.placed == verdict.report.tensors == len(load_file(report.path))
    image = made(variant, loras=[str(report.path)])
    assert_other(image, made(variant))
    assert_same(image, drawn_by_diffusers(variant, report.path))
