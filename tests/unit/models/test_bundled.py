"""The shipped configurations build the published networks, and the tokenizers number words as published."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import diffusers
import pytest
import torch
import transformers

from inweave.errors import ConfigError
from inweave.models import bundled
from inweave.models.variants import find_variant, variants
from inweave.targets.bases import find, listing
from inweave.targets.index import Component
from inweave.targets.tables import TABLES
from tests.support import base_listing

CONFIGS = resources.files("inweave.models").joinpath("configs")
ENCODER_FOLDERS = {"te1": "text_encoder", "te2": "text_encoder_2", "te3": "text_encoder_3"}


def networks() -> list[tuple[str, str, str]]:
    """(variant, folder, listing), each component once."""
    classes: dict[str, tuple[str, str, str]] = {}
    table = json.loads(CONFIGS.joinpath("variants.json").read_text())
    for variant in variants():
        known = find(variant.tensors)
        assert known is not None
        for part in known.parts:
            denoiser = "unet" if variant.family in ("sd", "sdxl") else "transformer"
            folder = ENCODER_FOLDERS.get(part.component, denoiser)
            classes.setdefault(table[variant.name][folder][1], (variant.name, folder, part.listing))
    return list(classes.values())


def built(variant: str, folder: str) -> dict[str, tuple[int, ...]]:
    class_name, config = bundled.component_config(variant, folder)
    with torch.device("meta"):
        if "_class_name" in config:
            model = getattr(diffusers, class_name).from_config(config)
        else:
            kind = getattr(transformers, class_name)
            model = kind(kind.config_class(**config))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.sample(12)
@pytest.mark.parametrize(("variant", "folder", "listed"), networks(), ids=lambda text: str(text))
def test_configurations_build_the_published_networks(variant: str, folder: str, listed: str) -> None:
    names = built(variant, folder)
    if "embeddings.token_embedding.weight" in names:  # files keep the root that newer libraries dropped in memory
        names = {f"text_model.{name}": shape for name, shape in names.items()}
    assert names == listing(listed)


@pytest.mark.parametrize(
    ("variant", "file"),
    [("sd1.5", "sd15_singlefile_ldm"), ("sd2.1", "sd21_singlefile_ldm"), ("sdxl", "sdxl_singlefile_sgm")],
)
def test_autoencoders_are_those_of_the_files(variant: str, file: str) -> None:
    prefix = "first_stage_model."
    shapes = {name[len(prefix) :]: s for name, s in base_listing(file).items() if name.startswith(prefix)}
    assert dict(Component("vae", TABLES["vae"], "original", shapes, "original", prefix).parts) == built(variant, "vae")


@pytest.mark.parametrize("name", bundled.variants())
def test_published_values(name: str) -> None:
    """The values that make images wrong without an error."""
    variant = find_variant(name)
    assert variant is not None
    class_name, vae = bundled.component_config(name, "vae")
    if class_name == "AutoencoderKL":
        assert (vae["scaling_factor"], vae.get("shift_factor"), vae["latent_channels"]) == {
            "sd": (0.18215, None, 4), "sdxl": (0.13025, None, 4),
            "sd3": (1.5305, 0.0609, 16), **dict.fromkeys(("flux", "chroma", "z-image"), (0.3611, 0.1159, 16)),
        }[variant.family]  # fmt: skip
        assert vae["force_upcast"] is True
        assert vae.get("use_quant_conv", True) is (variant.family in ("sd", "sdxl"))
    elif class_name == "AutoencoderKLFlux2":  # whose defaults are the published values too
        defaults = getattr(diffusers, class_name)().config
        assert all(defaults[key] == (tuple(value) if isinstance(defaults[key], tuple) else value)
                   for key, value in vae.items() if key != "_class_name")  # fmt: skip
    else:  # whose class has the published values as its defaults
        defaults = getattr(diffusers, class_name)().config
        assert {key: list(defaults[key]) for key in ("latents_mean", "latents_std", "temperal_downsample")} == {
            key: vae[key] for key in ("latents_mean", "latents_std", "temperal_downsample")
        }
    class_name, scheduler = bundled.component_config(name, "scheduler")
    if variant.prediction == "flow":
        plain = "qwen-image" if variant.family == "qwen-image-edit" else name
        assert class_name == "FlowMatchEulerDiscreteScheduler"
        assert scheduler["shift"] == {"flux1-schnell": 1.0, "z-image": 6.0, "qwen-image": 1.0}.get(plain, 3.0)
        assert scheduler.get("use_dynamic_shifting", False) is (
            name in ("flux1-dev", "flux1-kontext-dev", "chroma1-hd")
            or variant.family.startswith("qwen")
            or variant.family.startswith("flux2")
        )
    else:
        assert (scheduler["beta_start"], scheduler["beta_end"]) == (0.00085, 0.012)
        assert (scheduler["beta_schedule"], scheduler["steps_offset"]) == ("scaled_linear", 1)
        assert scheduler["timestep_spacing"] == ("trailing" if name == "sdxl-turbo" else "leading")
        assert scheduler["prediction_type"] == ("v_prediction" if name == "sd2.1" else "epsilon")
    if name.startswith("sd2"):
        _, encoder = bundled.component_config(name, "text_encoder")
        assert (encoder["num_hidden_layers"], encoder["hidden_act"]) == (23, "gelu")


@pytest.mark.parametrize("name", bundled.variants())
def test_schedulers_take_every_value(name: str, caplog: pytest.LogCaptureFixture) -> None:
    class_name, config = bundled.component_config(name, "scheduler")
    diffusers.utils.logging.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING):
            scheduler = getattr(diffusers, class_name).from_config(config)
    finally:
        diffusers.utils.logging.disable_propagation()
    assert not caplog.records
    for key, value in config.items():
        if key in scheduler.config and key != "_class_name":
            assert scheduler.config[key] == value


def test_a_schedule_of_zero_terminal_snr_reaches_the_scheduler() -> None:
    for name, expected in (("sdxl", "EulerDiscreteScheduler"), ("sd1.5", "DDIMScheduler")):
        plain = find_variant(name)
        assert plain is not None
        trained = replace(plain, prediction="v_prediction", zero_terminal_snr=True)
        class_name, config = bundled.component_config(trained, "scheduler")
        assert class_name == config["_class_name"] == expected
        scheduler = getattr(diffusers, class_name).from_config(config)
        assert scheduler.config.rescale_betas_zero_snr
        assert scheduler.config.prediction_type == "v_prediction"


def test_no_component_is_left_over_and_the_package_stays_small() -> None:
    table = json.loads(CONFIGS.joinpath("variants.json").read_text())
    used = {f"{component}.json" for parts in table.values() for _, component in parts.values()}
    assert used == {file.name for file in CONFIGS.joinpath("components").iterdir()}
    assert tuple(table) == bundled.variants() == tuple(variant.name for variant in variants())
    folder = Path(str(CONFIGS))
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 1_000_000


def test_clip_token_ids_are_the_published_ones() -> None:
    first, second = bundled.tokenizer("sdxl"), bundled.tokenizer("sdxl", "tokenizer_2")
    assert first("a photo of a cat").input_ids == [49406, 320, 1125, 539, 320, 2368, 49407]
    assert first("A  Photo of a CAT").input_ids == first("a photo of a cat").input_ids
    assert (len(first), first.model_max_length) == (49408, 77)
    padded = {"padding": "max_length", "max_length": 6, "truncation": True}
    assert first("a cat", **padded).input_ids == [49406, 320, 2368, 49407, 49407, 49407]
    assert second("a cat", **padded).input_ids == [49406, 320, 2368, 49407, 0, 0]
    assert bundled.tokenizer("sd2.1").pad_token_id == 0
    assert bundled.tokenizer("flux1-dev").pad_token_id == 49407


@pytest.mark.parametrize(("variant", "folder"), [("flux1-dev", "tokenizer_2"), ("sd3.5-medium", "tokenizer_3")])
def test_t5_token_ids_are_the_published_ones(variant: str, folder: str) -> None:
    t5 = bundled.tokenizer(variant, folder)
    assert t5("a photo of a cat").input_ids == [3, 9, 1202, 13, 3, 9, 1712, 1]
    german = [13959, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5, 1]
    assert t5("translate English to German: The house is wonderful.").input_ids == german
    assert t5("  translate English\nto German: The  house is wonderful. ").input_ids == german
    assert (len(t5), t5.pad_token_id, t5.eos_token_id, t5.model_max_length) == (32100, 0, 1, 512)
    assert t5.convert_tokens_to_ids("<extra_id_0>") == 32099


@pytest.mark.parametrize(
    ("size", "width", "joined"), [("dev", 5120, 15360), ("klein-4b", 2560, 7680), ("klein-9b", 4096, 12288)]
)
def test_three_layers_of_the_text_encoder_are_what_flux2_reads(size: str, width: int, joined: int) -> None:
    _, encoder = bundled.component_config(f"flux2-{size}", "text_encoder")
    _, transformer = bundled.component_config(f"flux2-{size}", "transformer")
    assert encoder.get("text_config", encoder)["hidden_size"] == width
    assert transformer["joint_attention_dim"] == joined == 3 * width


@pytest.mark.parametrize(("name", "distilled"), [("flux2-klein-4b", True), ("flux2-klein-base-9b", False)])
def test_a_skeleton_of_klein_says_whether_it_is_distilled(
    name: str, distilled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "_write_tokenizer", lambda *arguments: None)  # its vocabulary is not in the package
    index = json.loads((bundled.write_skeleton(name, tmp_path / "model") / "model_index.json").read_text())
    assert (index["_class_name"], index["is_distilled"]) == ("Flux2KleinPipeline", distilled)


@pytest.mark.parametrize("name", ["sd1.5", "sd1.5-inpaint", "sdxl-inpaint", "sd3.5-large", "flux1-schnell"])
def test_diffusers_reads_a_skeleton(name: str, tmp_path: Path) -> None:
    folder = bundled.write_skeleton(name, tmp_path / "model")
    without = {part: None for part in bundled.folders(name) if not part.startswith(("tokenizer", "scheduler"))}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True, **without)
    index = json.loads((folder / "model_index.json").read_text())
    assert type(pipeline).__name__ == index["_class_name"]
    assert pipeline.tokenizer("a cat").input_ids == [49406, 320, 2368, 49407]
    for part in without:
        assert (folder / part / "config.json").exists()
    with pytest.raises(ConfigError, match="already"):
        bundled.write_skeleton(name, folder)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no variant is called 'sd9'.*sd1\.5"):
        bundled.component_config("sd9", "unet")
    with pytest.raises(ConfigError, match=r"sd1\.5 has no 'transformer'; its parts are unet"):
        bundled.component_config("sd1.5", "transformer")
    with pytest.raises(ConfigError, match="'vae' is a AutoencoderKL, not a tokenizer"):
        bundled.tokenizer("sd1.5", "vae")


def test_reading_configurations_imports_no_library() -> None:
    program = (
        "import sys, inweave.models.identify, inweave.models.bundled as s\n"
        "for v in s.variants():\n    [s.component_config(v, f) for f in s.folders(v)]\n"
        "assert not {'torch', 'diffusers', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("v1-5", "sd1.5"), ("v1.5", "sd1.5"), ("1.5", "sd1.5"), ("SD 1.5", "sd1.5"),
        ("stable-diffusion-v1-5/stable-diffusion-v1-5", "sd1.5"), ("sd15-inpainting", "sd1.5-inpaint"),
        ("stabilityai/stable-diffusion-2-1", "sd2.1"), ("stabilityai/stable-diffusion-2-1-base", "sd2.1-base"),
        ("SDXL", "sdxl"), ("turbo", "sdxl-turbo"), ("stabilityai/sdxl-turbo", "sdxl-turbo"), ("sd3.5", "sd3.5-large"),
        ("sd3.5-large-turbo", "sd3.5-large-turbo"), ("FLUX.1-dev", "flux1-dev"), ("schnell", "flux1-schnell"),
        ("chroma", "chroma1-hd"), ("gpt2", None), ("", None),
    ],
)  # fmt: skip
def test_variants_by_name(text: str, name: str | None) -> None:
    variant = find_variant(text)
    assert (variant.name if variant else None) == name
