"""The same image as diffusers, for every family: text to image, LoRAs, image to image, inpainting, samplers.

Both sides read one folder and one seed. Nothing here knows how an image is generated: whatever differs in tokens,
encoders, noise, schedule, guidance, merging or decoding shows in the pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from inweave.errors import ConfigError  # noqa: E402
from inweave.generate.enlarge import LATENT_MODES  # noqa: E402
from inweave.generate.pipeline import Pipeline  # noqa: E402
from inweave.models import bundled, samplers  # noqa: E402
from inweave.models.families.base import ConditioningRequest  # noqa: E402
from inweave.models.model import load_model  # noqa: E402
from tests.peers import tiny_models as tiny  # noqa: E402

PROMPT = "a red apple on a wooden table, 4k"
SEED, STEPS, SIDE = 7, 3, 64
#: a level of 256: sums taken in another order (a LoRA added to the output and not to the weight, another layout in
#: memory, another processor's vectors and fused multiply-adds) differ by about 1e-5 of the range, and a value that lies
#: that close to the border of two levels is rounded to the other one
CLOSE = 1
#: so of all values only 2 * 255 * 1e-5, half a percent, are expected to differ; a wrong image differs in most of them
FEW = 0.01
FAR = 8  #: the largest difference of two images, where a change must be visible

GUIDED = {"sdxl-turbo": 0.0, "flux1-schnell": 0.0, "flux1-dev": 3.5, "z-image-turbo": 0.0}
TEXT_TO_IMAGE = tuple(v for v in tiny.VARIANTS if "inpaint" not in v and "flux2" not in v)  # those in test_flux2
INPAINTING = tuple(variant for variant in tiny.VARIANTS if "inpaint" in variant)
CLASSES = {
    "sd1": "StableDiffusion", "sd2": "StableDiffusion", "sdx": "StableDiffusionXL", "sd3": "StableDiffusion3",
    "flu": "Flux", "z-i": "ZImage", "qwe": "QwenImage",
}  # fmt: skip
FLOWS = ("sd3", "flux", "z-image", "qwen")
SAMPLERS = {
    "euler": "EulerDiscreteScheduler", "euler_ancestral": "EulerAncestralDiscreteScheduler", "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler", "dpm_solver_multistep": "DPMSolverMultistepScheduler", "uni_pc": "UniPCMultistepScheduler",
    "heun": "HeunDiscreteScheduler", "dpm_2": "KDPM2DiscreteScheduler",
    "dpm_2_ancestral": "KDPM2AncestralDiscreteScheduler",
    "dpmpp_2s": "DPMSolverSinglestepScheduler", "dpmpp_sde": "DPMSolverSinglestepScheduler",
    "dpmpp_2m_sde": "DPMSolverMultistepScheduler", "dpmpp_2m_sde_heun": "DPMSolverMultistepScheduler",
    "dpmpp_3m_sde": "DPMSolverMultistepScheduler", "deis": "DEISMultistepScheduler", "lcm": "LCMScheduler",
    "lms": "LMSDiscreteScheduler",
    "plms": "PNDMScheduler", "sa_solver": "SASolverScheduler",
}  # fmt: skip
#: what makes the sampler of that name of the scheduler
SETTINGS: dict[str, dict[str, Any]] = {
    "dpmpp_2s": {"lower_order_final": True},
    "dpmpp_sde": {"algorithm_type": "sde-dpmsolver++", "lower_order_final": True},
    "dpmpp_2m_sde": {"algorithm_type": "sde-dpmsolver++"},
    "dpmpp_2m_sde_heun": {"algorithm_type": "sde-dpmsolver++", "solver_type": "heun"},
    "dpmpp_3m_sde": {"algorithm_type": "sde-dpmsolver++", "solver_order": 3},
    "plms": {"skip_prk_steps": True},
}


@cache
def ours(variant: str) -> Pipeline:
    with tiny.quick_tokenizers():
        return Pipeline(load_model(tiny.folder(variant)))


@cache
def _loaded(variant: str) -> Any:
    kind = "InpaintPipeline" if "inpaint" in variant else "Pipeline"
    tokenizers = {
        part: tiny.tokenizer(variant, part) for part in bundled.folders(variant) if part.startswith("tokenizer")
    }
    return getattr(diffusers, CLASSES[variant[:3]] + kind).from_pretrained(tiny.folder(variant), **tokenizers)


def theirs(variant: str, task: str = "", sampler: str | None = None, **options: Any) -> Any:
    """diffusers' pipeline for a task, with the scheduler inweave chooses unless another is named."""
    actual = _loaded(variant)
    pipe = getattr(diffusers, f"{CLASSES[variant[:3]]}{task}Pipeline")(**actual.components)
    pipe.set_progress_bar_config(disable=True)
    flow = variant.startswith(FLOWS)
    sampler = sampler or samplers.own_sampler(actual.scheduler.config)
    kind = "FlowMatchEulerDiscreteScheduler" if flow and sampler == "euler" else SAMPLERS[sampler]
    if flow and sampler != "euler":
        options |= {
            "use_flow_sigmas": True,
            "prediction_type": "flow_prediction",
            "flow_shift": actual.scheduler.config.shift,
        }
    options |= SETTINGS.get(sampler, {})
    pipe.scheduler = getattr(diffusers, kind).from_config(actual.scheduler.config, **options)
    return pipe


def requests(variant: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """One request in both vocabularies."""
    guidance = GUIDED.get(variant, 5.0)
    negative = "blurry, dark" if not variant.startswith("flux") and guidance > 1 else ""
    common: dict[str, Any] = {"negative_prompt": negative} if negative else {}
    steps = more.pop("steps", STEPS)
    mine = common | {"steps": steps, "guidance": guidance, "seed": SEED, "width": SIDE, "height": SIDE} | more
    other = common | {"num_inference_steps": steps, "guidance_scale": guidance, "height": SIDE, "width": SIDE} | more
    other["generator"] = torch.Generator("cpu").manual_seed(SEED)
    if variant == "flux1-schnell":
        other["max_sequence_length"] = 256
    if variant == "qwen-image":  # whose guidance_scale is for distilled models
        other["true_cfg_scale"] = other.pop("guidance_scale")
    return mine, other


def pixels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture).astype(int)


def difference(one: Image.Image, other: Image.Image) -> np.ndarray:
    """Of every value, in levels of 256."""
    assert one.size == other.size
    return np.abs(pixels(one) - pixels(other))


def assert_same(mine: Image.Image, other: Image.Image) -> None:
    """The same image as a peer's, up to rounding."""
    assert float(pixels(mine).std()) > 20, "an image of one color proves nothing"
    apart = difference(mine, other)
    assert apart.max() <= CLOSE
    assert (apart > 0).mean() < FEW


def assert_other(mine: Image.Image, other: Image.Image) -> None:
    assert difference(mine, other).max() > FAR


def picture(seed: int = 0) -> Image.Image:
    """Something with edges and colors."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize(
        (SIDE, SIDE), Image.Resampling.BICUBIC
    )


def hole() -> Image.Image:
    """Off the grid of the latents on two sides."""
    mask = np.zeros((SIDE, SIDE), np.uint8)
    mask[13:48, 16:43] = 255
    return Image.fromarray(mask)


@pytest.mark.parametrize("variant", TEXT_TO_IMAGE)
def test_text_to_image(variant: str) -> None:
    mine, other = requests(variant)
    assert_same(ours(variant)(PROMPT, **mine).images[0], theirs(variant)(PROMPT, **other).images[0])


def test_a_prompt_that_changes_between_steps() -> None:
    """diffusers is given the other text by a callback, before the second step."""
    mine, other = requests("sd1.5")
    pipe = theirs("sd1.5")
    plain = pipe(PROMPT, **other).images[0]
    second = torch.cat(pipe.encode_prompt("a green pear", "cpu", 1, True, "blurry, dark")[::-1])

    def exchange(pipe: Any, step: int, t: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": second}

    other["generator"].manual_seed(SEED)
    expected = pipe(PROMPT, callback_on_step_end=exchange, **other).images[0]
    edited = ours("sd1.5")(f"[{PROMPT}:a green pear:0.34]", **mine).images[0]
    assert_same(edited, expected)
    assert_other(edited, plain)


@pytest.mark.parametrize("variant", ["sd1.5", "sdxl", "sd3-medium", "z-image", "qwen-image"])
def test_prompts_that_are_composed(variant: str) -> None:
    """One prediction is the sum of those for each prompt, weighted and guided."""
    model, pieces, others = ours(variant).model, ((PROMPT, 1.0),), ((("a pear", 1.0),), -0.4)
    request = ConditioningRequest(pieces, (("dark", 1.0),), 3.0, SIDE, SIDE, None, 0.7, (others,))
    latents = torch.randn(model.latent_space.shape(SIDE, SIDE), generator=torch.Generator().manual_seed(1))
    t, family = torch.tensor(500.0), model.family
    with torch.no_grad():
        conditioning = family.condition(model, request)
        predictions = family.denoise(model, conditioning.expand(latents), t, conditioning.inputs)
        composed = conditioning.combine(family, predictions)
        separate = [
            family.condition(model, replace(request, positive=each, weight=1.0, others=()))
            for each in (pieces, others[0])
        ]
        rows = [family.denoise(model, torch.cat([latents, latents]), t, each.inputs).chunk(2) for each in separate]
    negative = rows[0][0]
    positive = negative + 0.7 * (rows[0][1] - negative) - 0.4 * (rows[1][1] - negative)
    expected = family.guide(negative, positive, 3.0)
    assert torch.allclose(composed, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert not torch.allclose(composed, rows[0][1], rtol=0.1)


@pytest.mark.parametrize("variant", ["flux1-dev", "flux1-schnell", "sdxl-turbo", "z-image-turbo"])
def test_a_composition_is_refused_where_there_is_no_guidance(variant: str) -> None:
    mine, _ = requests(variant)
    with pytest.raises(ConfigError, match="flux.* does not have" if "flux" in variant else "starts above"):
        ours(variant)("a cat AND a dog", **mine)
    edited = ours(variant)("[a cat:a dog:1.0]", **mine).images[0]
    assert edited.tobytes() == ours(variant)("a cat", **mine).images[0].tobytes()


@pytest.mark.parametrize("variant", ["sd1.5", "sdxl", "sd3-medium", "z-image"])
def test_an_empty_negative_prompt_is_none_at_all(variant: str) -> None:
    mine, other = requests(variant)
    del mine["negative_prompt"], other["negative_prompt"]
    assert_same(ours(variant)(PROMPT, **mine).images[0], theirs(variant)(PROMPT, **other).images[0])


@pytest.mark.parametrize("variant", ["sd1.5", "sdxl", "sd3-medium", "flux1-dev", "z-image-turbo", "qwen-image"])
def test_a_non_square_image(variant: str) -> None:
    mine, other = requests(variant)
    mine["width"] = other["width"] = 2 * SIDE
    assert_same(ours(variant)(PROMPT, **mine).images[0], theirs(variant)(PROMPT, **other).images[0])


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("variant", "dialect"),
    [
        (variant, "diffusers" if variant.startswith(FLOWS) else "kohya")  # all that diffusers reads of these
        for variant in TEXT_TO_IMAGE
    ],
)
def test_lora(variant: str, dialect: str, tmp_path: Path) -> None:
    """On the denoiser and its CLIPs; the image without it is another one."""
    file = tiny.lora(tmp_path / "style.safetensors", variant, dialect=dialect)
    mine, other = requests(variant)
    pipe = theirs(variant)
    try:
        pipe.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="style")
        pipe.set_adapters(["style"], [0.7])
        expected = pipe(PROMPT, **other).images[0]
    finally:
        pipe.unload_lora_weights()
    plain = ours(variant)(PROMPT, **mine).images[0]
    actual = ours(variant)(PROMPT, **mine, loras=[f"{file}:0.7"]).images[0]
    assert_other(plain, expected)
    assert_same(actual, expected)
    if ours(variant).model.family.trainable_encoders:
        encoders = ours(variant)(PROMPT, **mine, loras=[{"path": str(file), "te": 0.7, "unet": 0.0}]).images[0]
        assert pixels(encoders).tolist() != pixels(plain).tolist()
    assert ours(variant)(PROMPT, **mine).images[0].tobytes() == plain.tobytes()


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("variant", "strength"), [(variant, 0.6) for variant in TEXT_TO_IMAGE] + [("sd1.5", 1.0), ("flux1-dev", 1.0)]
)
def test_image_to_image(variant: str, strength: float) -> None:
    mine, other = requests(variant, steps=4, strength=strength)
    if variant.startswith("sd") and not variant.startswith("sd3"):
        del other["width"], other["height"]  # the size of the image
    actual = ours(variant)(PROMPT, init=picture(), **mine).images[0]
    assert_same(actual, theirs(variant, "Img2Img")(PROMPT, image=picture(), **other).images[0])
    if strength < 1:
        assert_other(actual, ours(variant)(PROMPT, init=picture(1), **mine).images[0])


@pytest.mark.parametrize("upscaler", ["lanczos", "latent", "latent-bicubic-antialiased"])
@pytest.mark.parametrize("variant", ["sd1.5", pytest.param("sdxl", marks=pytest.mark.full)])
def test_hires_fix_is_their_two_pipelines_one_after_the_other(variant: str, upscaler: str) -> None:
    mine, first = requests(variant, steps=4)
    _, second = requests(variant, steps=5, strength=0.6)
    actual = ours(variant)(PROMPT, upscale={"upscaler": upscaler, "strength": 0.6, "steps": 5}, **mine).images[0]
    if upscaler == "lanczos":
        image = theirs(variant)(PROMPT, **first).images[0]
        large: Any = image.resize((2 * image.width, 2 * image.height), Image.Resampling.LANCZOS)
    else:
        latents = theirs(variant)(PROMPT, output_type="latent", **first).images
        mode, antialias = LATENT_MODES[upscaler]
        large = torch.nn.functional.interpolate(latents, scale_factor=2.0, mode=mode, antialias=antialias)
    del second["width"], second["height"]
    assert_same(actual, theirs(variant, "Img2Img")(PROMPT, image=large, **second).images[0])


@pytest.mark.sample(8)
@pytest.mark.parametrize("strength", [0.6, 1.0])
@pytest.mark.parametrize(
    "variant", ["sd1.5", "sd2.1", "sdxl", "sd3-medium", "flux1-dev", "z-image-turbo", "qwen-image", *INPAINTING]
)
def test_inpainting(variant: str, strength: float) -> None:
    mine, other = requests(variant, steps=4, strength=strength)
    pipe = theirs(variant, "Inpaint")
    actual = ours(variant)(PROMPT, init=picture(), mask=hole(), keep_unmasked=False, **mine).images[0]
    if variant.startswith("sd3"):  # diffusers forgets the autoencoder's shift when it decodes here, and only here
        latents = pipe(PROMPT, image=picture(), mask_image=hole(), output_type="latent", **other).images
        latents = latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
        with torch.no_grad():
            expected = pipe.image_processor.postprocess(pipe.vae.decode(latents).sample)[0]
    else:
        expected = pipe(PROMPT, image=picture(), mask_image=hole(), **other).images[0]
    assert_same(actual, expected)
    assert_other(actual, ours(variant)(PROMPT, init=picture(1), mask=hole(), keep_unmasked=False, **mine).images[0])


@pytest.mark.sample(8)
@pytest.mark.parametrize("sampler", samplers.offered_samplers())
def test_samplers(sampler: str) -> None:
    mine, other = requests("sd1.5", steps=5)
    actual = ours("sd1.5")(PROMPT, sampler=sampler, **mine).images[0]
    assert_same(actual, theirs("sd1.5", sampler=sampler)(PROMPT, **other).images[0])


def test_the_beta_schedule() -> None:
    pytest.importorskip("scipy")
    mine, other = requests("sd1.5", steps=5)
    actual = ours("sd1.5")(PROMPT, schedule="beta", sampler="euler", **mine).images[0]
    assert_same(actual, theirs("sd1.5", sampler="euler", use_beta_sigmas=True)(PROMPT, **other).images[0])
    assert_other(actual, ours("sd1.5")(PROMPT, sampler="euler", **mine).images[0])


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("variant", "sampler"),
    [
        (variant, sampler)
        for variant in (
            "sd3-medium",
            "flux1-dev",
            "flux1-schnell",
        )  # diffusers lays out the others' steps for Euler only
        for sampler in samplers.FLOW_SAMPLERS
    ],
)
def test_flow_samplers(variant: str, sampler: str) -> None:
    mine, other = requests(variant, steps=5)
    pipe = theirs(variant, sampler=sampler)
    if variant == "flux1-schnell" and SAMPLERS[sampler] == "DPMSolverMultistepScheduler":
        pipe.scheduler.set_timesteps = without_mu(pipe.scheduler.set_timesteps)
    if sampler.endswith(("_sde", "_sde_heun")):
        pipe.scheduler.step = with_noise_of(pipe, other["generator"])
    actual = ours(variant)(PROMPT, sampler=sampler, **mine).images[0]
    assert_same(actual, pipe(PROMPT, **other).images[0])


def without_mu(set_timesteps: Callable[..., None]) -> Callable[..., None]:
    """diffusers hands the shift of dynamic shifting to models without it too, where this scheduler refuses it."""

    def plain(*arguments: Any, mu: float, **options: Any) -> None:
        set_timesteps(*arguments, **options)

    return plain


def with_noise_of(pipe: Any, generator: Any) -> Callable[..., Any]:
    """diffusers' pipelines of flows have no generator for the noise of a step: it is that of the request here.

    Flux denoises rows of 2x2 patches; the noise is that of the image before it is cut up, like its first noise.
    """
    step = pipe.scheduler.step

    def seeded(prediction: Any, time: Any, latents: Any, **options: Any) -> Any:
        channels, side = pipe.vae.config.latent_channels, SIDE // pipe.vae_scale_factor
        noise = torch.randn((1, channels, side, side), generator=generator)
        if latents.ndim == 3:
            noise = pipe._pack_latents(noise, 1, channels, side, side)
        assert noise.shape == latents.shape
        return step(prediction, time, latents, variance_noise=noise, **options)

    return seeded
