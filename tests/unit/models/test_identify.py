"""A single file's variant is identified from its tensors; what tensors cannot tell is reported as assumed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inweave.errors import FormatError
from inweave.models.identify import identify
from inweave.targets.bases import known_index, listing
from tests.support import base_listing

Shapes = dict[str, tuple[int, ...]]
CLIP_L, CLIP_H = "cond_stage_model.transformer.", "cond_stage_model.model."
UNET = "model.diffusion_model."


def known(base: str) -> Shapes:
    """A base as a single file, from the package's index: denoiser and text encoders."""
    return {name: shape for part in known_index(base, "original") for name, shape in part.tensors.items()}


@pytest.mark.parametrize(
    ("file", "variant", "parts"),
    [
        ("sd15_singlefile_ldm", "sd1.5", {"unet": UNET, "vae": "first_stage_model.", "text_encoder": CLIP_L}),
        ("sd21_singlefile_ldm", "sd2.1", {"unet": UNET, "vae": "first_stage_model.", "text_encoder": CLIP_H}),
        (
            "sdxl_singlefile_sgm", "sdxl",
            {
                "unet": UNET, "vae": "first_stage_model.", "text_encoder": "conditioner.embedders.0.transformer.",
                "text_encoder_2": "conditioner.embedders.1.model.",
            },
        ),
        ("sd3_medium_singlefile", "sd3-medium", {"transformer": UNET}),
        ("sd35_medium_singlefile", "sd3.5-medium", {"transformer": UNET}),
        ("sd35_large_singlefile", "sd3.5-large", {"transformer": UNET}),
        ("flux1_dev_bfl", "flux1-dev", {"transformer": ""}),
        ("flux1_schnell_bfl", "flux1-schnell", {"transformer": ""}),
    ],
)  # fmt: skip
def test_published_files(file: str, variant: str, parts: dict[str, str]) -> None:
    identity = identify(base_listing(file), {})
    assert identity.variant.name == variant
    assert identity.parts == parts
    assert any(variant in line or "assumed" in line for line in identity.evidence)


@pytest.mark.parametrize("base", ["sd1.5-inpaint", "sd2-inpaint", "sdxl-inpaint"])
def test_inpainting_models_have_nine_channels(base: str) -> None:
    identity = identify(known(base), {})
    assert identity.variant.name == base
    assert identity.variant.inpaint
    assert identity.variant.prediction == "epsilon"
    assert any("9 input channels" in line for line in identity.evidence)


def test_text_encoders_with_the_denoiser() -> None:
    three = identify(known("sd3.5-large"), {})
    assert three.parts["text_encoder_3"] == "text_encoders.t5xxl.transformer."
    two = identify({n: s for n, s in known("sd3-medium").items() if "t5xxl" not in n}, {})
    assert set(two.parts) == {"transformer", "text_encoder", "text_encoder_2"}
    flux = identify(known("flux1-dev") | {"vae.decoder.conv_in.weight": (512, 16, 3, 3)}, {})
    assert flux.parts["text_encoder_2"] == "text_encoders.t5xxl.transformer."
    assert flux.parts["vae"] == "vae."


def test_other_prefixes_and_what_comes_with_a_checkpoint() -> None:
    bare = {name.removeprefix(UNET): shape for name, shape in known("sdxl").items() if name.startswith(UNET)}
    assert identify(bare, {}).parts == {"unet": ""}
    short = {f"diffusion_model.{name}": shape for name, shape in bare.items()}
    assert identify(short, {}).parts == {"unet": "diffusion_model."}
    training = {"betas": (1000,), "alphas_cumprod": (1000,), "model_ema.decay": (), "model_ema.num_updates": ()}
    assert identify(base_listing("sd15_singlefile_ldm") | training, {}).variant.name == "sd1.5"
    scaled = {f"{UNET}scaled_fp8": (2,), f"{UNET}input_blocks.4.1.proj_in.scale_weight": ()}
    assert not any("does not have" in line for line in identify(known("sdxl") | scaled, {}).evidence)
    more = identify(known("sdxl") | {f"{UNET}time_embed.cond_proj.weight": (320, 256)}, {})
    assert any("1 tensors sdxl does not have" in line for line in more.evidence)


def test_what_sd2_predicts() -> None:
    shapes = base_listing("sd21_singlefile_ldm")

    def variant(**metadata: str) -> tuple[str, str]:
        identity = identify(shapes, {f"modelspec.{key}": value for key, value in metadata.items()})
        return identity.variant.name, identity.variant.prediction

    assert variant() == ("sd2.1", "v_prediction")
    assert "assumed" in identify(shapes, {}).evidence[-1]
    assert variant(prediction_type="epsilon") == ("sd2.1-base", "epsilon")
    assert variant(prediction_type="v") == ("sd2.1", "v_prediction")
    assert variant(architecture="stable-diffusion-v2-512") == ("sd2.1-base", "epsilon")
    assert variant(architecture="stable-diffusion-v2-768-v") == ("sd2.1", "v_prediction")
    assert variant(architecture="stable-diffusion-v2-768-v", prediction_type="epsilon") == ("sd2.1-base", "epsilon")


def test_marks_of_velocity_and_zero_snr() -> None:
    shapes = base_listing("sdxl_singlefile_sgm")
    plain = identify(shapes, {}).variant
    assert (plain.prediction, plain.zero_terminal_snr) == ("epsilon", False)
    marked = identify(shapes | {"v_pred": (0,), "ztsnr": (0,)}, {"modelspec.prediction_type": "epsilon"})
    assert marked.variant.name == "sdxl"
    assert (marked.variant.prediction, marked.variant.zero_terminal_snr) == ("v_prediction", True)
    half = identify(shapes | {"v_pred": (0,)}, {}).variant
    assert (half.prediction, half.zero_terminal_snr) == ("v_prediction", False)
    old = identify(base_listing("sd15_singlefile_ldm"), {"modelspec.prediction_type": "v"}).variant
    assert (old.name, old.prediction) == ("sd1.5", "v_prediction")


def test_z_image_is_assumed_turbo_unless_metadata_says_otherwise() -> None:
    unnamed = identify(known("z-image-turbo"), {})
    assert (unnamed.variant.name, unnamed.parts) == ("z-image-turbo", {"transformer": UNET})
    assert "assumed" in unnamed.evidence[-1]
    assert identify(known("z-image-turbo"), {"modelspec.title": "Z-Image Base"}).variant.name == "z-image"


@pytest.mark.parametrize("prefix", [UNET, ""])
def test_flux2_is_identified_by_its_guidance_and_width(prefix: str) -> None:
    for base in ("flux2-dev", "flux2-klein-4b", "flux2-klein-9b"):
        shapes = {
            prefix + name.removeprefix(UNET): shape for name, shape in known(base).items() if name.startswith(UNET)
        }
        identity = identify(shapes, {})
        assert (identity.variant.name, identity.parts) == (base, {"transformer": prefix})
        assert any("tensors of the denoiser are there" in line for line in identity.evidence)
    assert "flux2-klein-base-9b has the same tensors" in identity.evidence[-1]
    assert identify(shapes, {"modelspec.title": "FLUX.2 klein base"}).variant.name == "flux2-klein-base-9b"


def test_qwen_image_has_one_naming_with_and_without_a_prefix() -> None:
    prefixed = known("qwen-image")
    assert identify(prefixed, {}).parts == {"transformer": UNET}
    bare = {name.removeprefix(UNET): shape for name, shape in prefixed.items()}
    identity = identify(bare, {})
    assert (identity.variant.name, identity.parts) == ("qwen-image", {"transformer": ""})


@pytest.mark.parametrize(("base", "turbo"), [("sdxl", "sdxl-turbo"), ("sd3.5-large", "sd3.5-large-turbo")])
def test_only_metadata_tells_turbo(base: str, turbo: str) -> None:
    unsaid = identify(known(base), {"modelspec.title": "a model"})
    assert unsaid.variant.name == base
    assert any(f"{turbo} has the same tensors" in line for line in unsaid.evidence)
    assert identify(known(base), {"modelspec.title": "SD Turbo 1.0"}).variant.name == turbo


def cut(base: str, ending: str) -> Shapes:
    return {name: shape for name, shape in known(base).items() if not name.endswith(ending)}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (dict, "0 tensors: nothing"),
        (lambda: {"lora_unet_x.lora_up.weight": (4, 4)}, r"looked for a UNet \(input_blocks\).*lora_unet_x"),
        (lambda: {n: s for n, s in base_listing("sd15_singlefile_ldm").items() if "first_stage" in n}, "248 tensors"),
        (lambda: known("sdxl-refiner"), "text of width 1280; known are 768"),
        (lambda: known("ssd-1b"), r"close to sdxl, but \d+ of its 1,680 tensors are missing"),
        (lambda: cut("sd1.5", "input_blocks.1.0.in_layers.0.bias"), r"1 of its 686 .*input_blocks\.1\.0\.in_layers"),
        (lambda: known("sdxl") | {f"{UNET}out.2.weight": (8, 320, 3, 3)}, r"out\.2\.weight \[8, 320, 3, 3\], not \[4"),
        (lambda: known("sd1.5") | {f"{UNET}input_blocks.0.0.weight": (320, 8, 3, 3)}, "8 input channels; expected 4"),
        (lambda: base_listing("flux1_fill_dev_bfl"), "width 384; expected 64"),
        (lambda: known("lumina2"), "family lumina2"),
        (lambda: known("flux2-klein-4b") | {f"{UNET}img_in.weight": (2048, 128)}, "2048 wide; known are 3072"),
        (
            lambda: known("qwen-image") | {f"{UNET}time_text_embed.addition_t_embedding.weight": (2, 3072)},
            "Qwen-Image-Layered",
        ),
        (lambda: listing("unet-sd1.5"), "in diffusers names"),
        (lambda: known("sd3.5-medium") | {f"{UNET}joint_blocks.24.x_block.attn.qkv.weight": (1, 1)}, "depth 25 with"),
    ],
)  # fmt: skip
def test_other_files_are_refused_with_a_reason(shapes: Callable[[], Shapes], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        identify(shapes(), {})
