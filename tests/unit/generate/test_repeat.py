"""`--from`: what an image says is repeated or named in a warning; it is data of a stranger."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from inweave.errors import ConfigError, InweaveError, RequestError
from inweave.exchange.hashes import autov1, hash_file
from inweave.generate.config import GenerateConfig, LoraChoice
from inweave.generate.find import LoraFinder, check_request
from inweave.generate.infotext import parse_fields, parse_infotext
from inweave.generate.record import read_settings
from inweave.generate.repeat import input_warnings, lora_warnings, model_of, model_warnings
from inweave.generate.source import ImageSettings
from inweave.models import embedded
from inweave.models.open import open_model
from tests.support import stopwatch


def image(path: Path, **texts: str) -> Path:
    info = PngInfo()
    for name, text in texts.items():
        info.add_itxt(name, text)
    Image.new("RGB", (8, 8)).save(path, pnginfo=info)
    return path


A1111 = (
    "a cat <lora:pixel:0.8> {dog|cat}\nNegative prompt: bad\n"
    "Steps: 28, Sampler: Euler a, Schedule type: Karras, CFG scale: 7, Seed: 5, Size: 512x768, Model hash: 6ce0161689, "
    "Model: v1-5-pruned, VAE hash: 735e4c3a44, VAE: kl-f8.ckpt, Denoising strength: 0.4, Clip skip: 2, "
    "Hires upscale: 2, "
    'Hires steps: 10, Hires upscaler: Latent, Lora hashes: "pixel: 0123456789ab", '
    'TI hashes: "easynegative: c74b4e810b03", '
    'Hashes: {"lora:ink": "0011223344", "embed:bad": "8e1a"}, ControlNet 0: "Module: canny, Model: x", Version: v1.10.1'
)


def test_each_field_that_is_not_reproduced_has_a_warning_of_its_own() -> None:
    settings = parse_infotext(A1111)
    assert settings.config == {
        "prompt": "a cat <lora:pixel:0.8> \\{dog|cat}", "negative_prompt": "bad", "steps": 28, "sampler": "Euler a",
        "schedule": "Karras", "guidance": 7.0, "seed": 5, "width": 512, "height": 768, "clip_skip": 2,
        "upscale": {"upscaler": "Latent", "scale": 2.0, "strength": 0.4, "steps": 25},
    }  # fmt: skip
    assert settings.hashes == {"pixel": "0123456789ab", "ink": "0011223344"}
    assert settings.model == {"name": "v1-5-pruned", "hash": "6ce0161689"}
    for field in (
        "VAE (", "VAE hash (", "TI hashes (", "embedding bad (", "ControlNet 0 (",
    ):  # fmt: skip
        assert len([text for text in settings.warnings if field in text]) == 1, field
    assert len(settings.warnings) == 5 and not settings.inputs


def test_samplers_that_inweave_lacks_are_named_and_the_models_own_is_used() -> None:
    settings = parse_infotext(
        "a\nSteps: 5, Sampler: DPM adaptive, Schedule type: Align Your Steps, Denoising strength: 0.3"
    )
    assert settings.config == {"prompt": "a", "steps": 5, "strength": 0.3} and settings.inputs == ("init",)
    assert [text.partition(" (")[0] for text in settings.warnings] == ["Sampler", "Schedule type"]
    assert "--init" in input_warnings(settings, {})[0] and not input_warnings(settings, {"init": "x.png"})


GRAPH = {
    "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sd\\v1-5.safetensors"}},
    "2": {"class_type": "LoraLoader", "inputs": {"lora_name": "styles/pixel.safetensors", "strength_model": 0.8,
          "strength_clip": 0.5, "model": ["1", 0], "clip": ["1", 1]}},
    "3": {"class_type": "CLIPTextEncode", "inputs": {"text": "a cat", "clip": ["2", 1]}},
    "4": {"class_type": "CLIPTextEncode", "inputs": {"text": "embedding:bad", "clip": ["2", 1]}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 640, "batch_size": 1}},
    "6": {"class_type": "KSampler", "inputs": {"seed": 9, "steps": 12, "cfg": 6.5, "sampler_name": "dpmpp_2m",
          "denoise": 1.0, "scheduler": "karras", "positive": ["3", 0], "negative": ["4", 0], "latent_image": ["5", 0],
          "model": ["2", 0]}},
    "7": {"class_type": "VAELoader", "inputs": {"vae_name": "x.pt"}},
    "8": {"class_type": "VAEDecode", "inputs": {"samples": ["6", 0], "vae": ["7", 0]}},
    "9": {"class_type": "SaveImage", "inputs": {}},
    "10": {"class_type": "LatentUpscale", "inputs": {}},
    "11": {"class_type": "KSampler", "inputs": {"model": ["2", 0]}},
}  # fmt: skip


def test_a_graph_of_comfyui(tmp_path: Path) -> None:
    settings = read_settings(image(tmp_path / "a.png", prompt=json.dumps(GRAPH), workflow="{}"))
    assert settings.config == {
        "prompt": "a cat", "negative_prompt": "embedding:bad", "steps": 12, "guidance": 6.5, "seed": 9, "width": 512,
        "height": 640, "sampler": "dpmpp_2m", "schedule": "karras",
        "loras": [{"name": "styles/pixel", "te": 0.5, "unet": 0.8}],
    }  # fmt: skip
    assert settings.model == {"name": "v1-5"}
    assert [text.partition(")")[0] for text in settings.warnings] == [
        "embeddings (textual inversion", "node 7 ('VAELoader'", "node 10 ('LatentUpscale'", "node 11 ('KSampler'",
    ]  # fmt: skip
    assert GenerateConfig(**settings.config).sampler == "dpm_solver_multistep"


def test_brackets_and_and_of_comfyui_are_text(tmp_path: Path) -> None:
    """It knows neither edits nor composed prompts: `[dog:cat:0.5]` is what its text encoder read."""
    graph = GRAPH | {
        "3": {"class_type": "CLIPTextEncode", "inputs": {"text": "a [dog:cat:0.5] AND (b:1.2)", "clip": ["2", 1]}}
    }
    settings = read_settings(image(tmp_path / "a.png", prompt=json.dumps(graph)))
    prompt = GenerateConfig(**settings.config).prompts[0]
    assert prompt.composition is None
    assert prompt.pieces == (("a [dog:cat:0.5] and", 1.0), ("b", 1.2))


def ui(nodes: list[tuple[Any, ...]]) -> dict[str, Any]:
    """A workflow as the editor saves it, of (id, type, {input: (from, output)}, values, mode)."""
    links: list[list[Any]] = []
    rows = []
    for number, kind, inputs, values, *mode in nodes:
        slots: list[Any] = []
        for name, (origin, slot) in inputs.items():
            links.append([len(links) + 1, origin, slot, number, len(slots), name.upper()])
            slots.append({"name": name, "type": name.upper(), "link": len(links)})
        outputs = [{"name": "x", "type": "MODEL"}]
        rows.append({"id": number, "type": kind, "mode": mode[0] if mode else 0, "inputs": slots, "outputs": outputs,
                     "widgets_values": values})  # fmt: skip
    return {"nodes": rows, "links": links, "version": 0.4}


FLUX = {
    "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "flux1-dev.safetensors", "weight_dtype": "default"}},
    "2": {"class_type": "DualCLIPLoader", "inputs": {"clip_name1": "t5", "clip_name2": "l", "type": "flux"}},
    "3": {"class_type": "LoraLoaderModelOnly",
          "inputs": {"lora_name": "a.safetensors", "strength_model": 0.9, "model": ["1", 0]}},
    "4": {"class_type": "Reroute", "inputs": {"": ["3", 0]}},
    "5": {"class_type": "CLIPTextEncode", "inputs": {"text": ["20", 0], "clip": ["2", 0]}},
    "6": {"class_type": "FluxGuidance", "inputs": {"guidance": 3.5, "conditioning": ["5", 0]}},
    "7": {"class_type": "BasicGuider", "inputs": {"model": ["4", 0], "conditioning": ["6", 0]}},
    "8": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "euler"}},
    "9": {"class_type": "BasicScheduler",
          "inputs": {"scheduler": "simple", "steps": 22, "denoise": 1.0, "model": ["4", 0]}},
    "10": {"class_type": "RandomNoise", "inputs": {"noise_seed": 77}},
    "11": {"class_type": "EmptySD3LatentImage", "inputs": {"width": ["21", 0], "height": 768, "batch_size": 1}},
    "12": {"class_type": "SamplerCustomAdvanced", "inputs": {"noise": ["10", 0], "guider": ["7", 0],
           "sampler": ["8", 0], "sigmas": ["9", 0], "latent_image": ["11", 0]}},
    "13": {"class_type": "VAEDecode", "inputs": {"samples": ["12", 0], "vae": ["14", 0]}},
    "14": {"class_type": "VAELoader", "inputs": {"vae_name": "ae.safetensors"}},
    "15": {"class_type": "SaveImage", "inputs": {"images": ["13", 0]}, "is_changed": [float("nan")]},
    "20": {"class_type": "PrimitiveStringMultiline", "inputs": {"value": "a red fox"}},
    "21": {"class_type": "PrimitiveInt", "inputs": {"value": 1344}},
}  # fmt: skip


def test_a_graph_with_a_node_for_every_part(tmp_path: Path) -> None:
    settings = read_settings(image(tmp_path / "a.png", prompt=json.dumps(FLUX)))
    assert settings.config == {
        "prompt": "a red fox", "steps": 22, "guidance": 3.5, "seed": 77, "width": 1344, "height": 768,
        "sampler": "euler",
        "schedule": "simple", "loras": [{"name": "a", "te": 0.0, "unet": 0.9}],
    }  # fmt: skip
    assert settings.model == {"name": "flux1-dev"}
    assert [text.partition(")")[0] for text in settings.warnings] == ["node 14 ('VAELoader'"]


def test_the_first_of_two_passes_is_repeated(tmp_path: Path) -> None:
    """Hires fix: whichever order the nodes have, the pass that starts from nothing is the image's."""
    inputs: dict[str, Any] = dict(GRAPH["6"]["inputs"])  # type: ignore[call-overload, arg-type]
    first: dict[str, Any] = {"class_type": "KSamplerAdvanced", "inputs": {**inputs, "noise_seed": 9, "start_at_step": 0,
             "end_at_step": 10000}}  # fmt: skip
    del first["inputs"]["seed"]
    second = {"class_type": "KSampler", "inputs": {**inputs, "steps": 5, "denoise": 0.4, "latent_image": ["12", 0]}}
    graph = {
        "20": second, "12": {"class_type": "LatentUpscaleBy", "inputs": {"samples": ["6", 0], "scale_by": 2}},
        **{key: GRAPH[key] for key in "12345"}, "6": first,
        "8": {"class_type": "VAEDecode", "inputs": {"samples": ["20", 0]}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0]}},
    }  # fmt: skip
    settings = read_settings(image(tmp_path / "a.png", prompt=json.dumps(graph)))
    assert (settings.config["steps"], settings.config["seed"], settings.config["width"]) == (12, 9, 512)
    assert "strength" not in settings.config and not settings.inputs
    assert [text.partition(" (")[0] for text in settings.warnings[1:]] == ["node 20", "node 12"]


def test_an_image_made_from_an_image_in_comfyui(tmp_path: Path) -> None:
    graph = GRAPH | {
        "5": {"class_type": "VAEEncode", "inputs": {"pixels": ["15", 0], "vae": ["1", 2]}},
        "15": {"class_type": "LoadImage", "inputs": {"image": "cat.png"}},
        "6": {"class_type": "KSampler", "inputs": {**GRAPH["6"]["inputs"], "denoise": 0.6}},  # type: ignore[dict-item]
    }
    settings = read_settings(image(tmp_path / "a.png", prompt=json.dumps(graph)))
    assert settings.inputs == ("init",) and settings.config["strength"] == 0.6 and "width" not in settings.config


def test_a_workflow_without_a_prompt_says_the_same(tmp_path: Path) -> None:
    """What the editor saves: values without names, links by number, primitives, reroutes, bypassed and muted nodes."""
    workflow = ui([
        (1, "CheckpointLoaderSimple", {}, ["sd/v1-5.safetensors"]),
        (2, "LoraLoader", {"model": (1, 0), "clip": (1, 1)}, ["styles/pixel.safetensors", 0.8, 0.5]),
        (30, "LoraLoader", {"model": (2, 0), "clip": (2, 1)}, ["off.safetensors", 1, 1], 4),
        (31, "Reroute", {"": (30, 0)}, []),
        (7, "CLIPSetLastLayer", {"clip": (2, 1)}, [-2]),
        (3, "CLIPTextEncode", {"clip": (7, 0), "text": (32, 0)}, ["not this"]),
        (4, "CLIPTextEncode", {"clip": (7, 0)}, ["bad"]),
        (5, "EmptyLatentImage", {}, [512, 640, 1]),
        (6, "KSampler", {"model": (31, 0), "positive": (3, 0), "negative": (4, 0), "latent_image": (5, 0),
                         "seed": (33, 0)}, [1, "randomize", 12, 6.5, "dpmpp_2m", "karras", 1]),
        (8, "VAEDecode", {"samples": (6, 0), "vae": (1, 2)}, []),
        (9, "SaveImage", {"images": (8, 0)}, ["ComfyUI"]),
        (32, "PrimitiveNode", {}, ["a cat", "fixed"]),
        (33, "PrimitiveNode", {}, [9, "fixed"]),
        (40, "LatentUpscale", {"samples": (6, 0)}, [], 2),
    ])  # fmt: skip
    for texts in ({}, {"prompt": "{}"}, {"prompt": "{broken"}):
        settings = read_settings(image(tmp_path / "a.png", workflow=json.dumps(workflow), **texts))
        assert settings.config == {
            "prompt": "a cat", "negative_prompt": "bad", "steps": 12, "guidance": 6.5, "seed": 9, "width": 512,
            "height": 640,
            "sampler": "dpmpp_2m", "schedule": "karras", "clip_skip": 2,
            "loras": [{"name": "styles/pixel", "te": 0.5, "unet": 0.8}],
        }  # fmt: skip
        assert settings.model == {"name": "v1-5"} and settings.warnings == []


def test_a_webp_of_comfyui(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0110] = "prompt:" + json.dumps(GRAPH)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.webp", exif=exif)
    assert read_settings(tmp_path / "a.webp").config["seed"] == 9


def test_a_hostile_graph_ends(tmp_path: Path) -> None:
    """Circles through every kind of link, thousands of nodes, and nodes that are none."""
    circle: dict[str, Any] = {
        str(n): {"class_type": "Reroute", "inputs": {"": [str((n + 1) % 2000), 0]}} for n in range(2000)
    }
    keys: list[str] = list(GRAPH["6"]["inputs"])  # type: ignore[call-overload]
    circle["s"] = {"class_type": "KSampler", "inputs": {key: ["0", 0] for key in keys}}
    self = {"s": {"class_type": "SamplerCustomAdvanced", "inputs": {name: ["s", 0] for name in (
        "noise", "guider", "sampler", "sigmas", "latent_image", "model", "positive", "clip", "text",
        "steps")}}}  # fmt: skip
    many = {str(n): {"class_type": "X", "inputs": {}} for n in range(20_000)} | GRAPH
    links = [[f"t{n + 1}", 0] for n in range(60)]
    texts = {
        f"t{n}": {"class_type": "StringConcatenate", "inputs": {"string_a": link, "string_b": link}}
        for n, link in enumerate(links)
    }
    deep = GRAPH | texts | {"3": {"class_type": "CLIPTextEncode", "inputs": {"text": ["t20", 0]}}}
    joined = GRAPH | {
        "3": {
            "class_type": "ConditioningConcat",
            "inputs": {"conditioning_to": ["3", 0], "conditioning_from": ["3", 0]},
        }
    }
    for graph in (circle, self, many, deep, joined):
        with stopwatch(time.process_time) as cost:
            settings = read_settings(image(tmp_path / "a.png", prompt=json.dumps(graph)))
        assert len(settings.warnings) < 100 and cost.seconds < 2.0
    for value in VALUES:
        node = {"id": value, "type": "KSampler", "inputs": [value], "widgets_values": value, "mode": value}
        for workflow in (
            {"nodes": value},
            {"nodes": [value], "links": value},
            {"nodes": [node], "links": [value, [value] * 6]},
        ):
            try:
                read_settings(image(tmp_path / "a.png", workflow=json.dumps(workflow)))
            except InweaveError as error:
                assert 0 < len(str(error)) < 5000


def test_a_table_of_invokeai(tmp_path: Path) -> None:
    table = {
        "app_version": "5.6", "generation_mode": "sdxl_txt2img", "positive_prompt": "a cat", "negative_prompt": "",
        "width": 1024,
        "height": 1024, "seed": 3, "cfg_scale": 5.5, "steps": 30, "scheduler": "euler", "clip_skip": 0,
        "hrf_enabled": True,
        "model": {"name": "sdxl", "hash": "blake3:" + "ab" * 32}, "vae": {"name": "fix"},
        "loras": [{"model": {"name": "pixel", "hash": "blake3:" + "cd" * 32}, "weight": 0.7}],
    }  # fmt: skip
    settings = read_settings(image(tmp_path / "a.png", invokeai_metadata=json.dumps(table)))
    assert settings.config["loras"] == [{"name": "pixel", "strength": 0.7}] and settings.hashes == {"pixel": "cd" * 32}
    assert settings.model == {"name": "sdxl", "hash": "ab" * 32}
    assert [text.partition(" (")[0] for text in settings.warnings] == ["hrf_enabled", "vae"]


def test_the_comment_of_a_jpeg(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9286] = b"UNICODE\0" + "a cat\nSteps: 4, Seed: 7".encode("utf-16-be")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg", exif=exif)
    assert read_settings(tmp_path / "a.jpg").config == {"prompt": "a cat", "steps": 4, "seed": 7}


def ours(**changes: Any) -> dict[str, Any]:
    config = {"prompt": "a cat", "steps": 2, "seed": 1, **changes.pop("config", {})}
    return {"config": config, "model": {"name": embedded.NAME, "family": "sd"}, "loras": [], "inputs": {}, **changes}


def test_our_own_images_name_no_path(tmp_path: Path) -> None:
    config = {
        "init": "/etc/shadow.png", "mask": "../m.png", "new_setting": 5,
        "loras": [{"path": "/etc/passwd"}, {"name": "pixel", "te": 1.0, "unet": 1.0}],
    }  # fmt: skip
    record = ours(config=config, inputs={"init": "ab", "mask": "cd"})
    settings = read_settings(image(tmp_path / "a.png", inweave=json.dumps(record)))
    assert settings.config == {
        "prompt": "a cat",
        "steps": 2,
        "seed": 1,
        "loras": [{"name": "pixel", "te": 1.0, "unet": 1.0}],
    }
    assert settings.inputs == ("init", "mask")
    assert [text.partition(" (")[0] for text in settings.warnings] == ["new_setting", "loras"]
    for name in ("/tmp/model", "../model", "model.safetensors", str(tmp_path), 5):
        with pytest.raises(ConfigError, match="--model"):
            model_of(ImageSettings({}, model={"name": name, "family": "sd"}))
    assert model_of(settings) == embedded.NAME
    assert model_of(ImageSettings({}, model={"name": "v1-5"})) is None


def test_a_sample_of_a_training_run_and_a_sheet_say_what_they_are(tmp_path: Path) -> None:
    record = ours(training={"name": "style", "step": 40})
    (warning,) = read_settings(image(tmp_path / "a.png", inweave=json.dumps(record))).warnings
    assert "style" in warning and "step 40" in warning and "--lora" in warning
    record = ours(grid={"axes": ["strength=0,1"], "cells": 2})
    (warning,) = read_settings(image(tmp_path / "a.png", inweave=json.dumps(record))).warnings
    assert "--grid strength=0,1" in warning


def loras(folder: Path) -> dict[str, Path]:
    """The bundled LoRAs under other names, with junk around them."""
    folder.mkdir()
    paths = {name: folder / f"my-{name}.safetensors" for name in ("ink", "pixel")}
    for name, path in paths.items():
        path.write_bytes(embedded.loras()[name].read_bytes())
    (folder / "dangling.safetensors").symlink_to(folder / "nowhere")
    (folder / "loop.safetensors").symlink_to(folder / "loop.safetensors")
    (folder / "empty.safetensors").touch()
    (folder / "broken.safetensors").write_bytes(b"\xff" * 64)
    (folder / "a folder.safetensors").mkdir()
    os.mkfifo(folder / "pipe.safetensors")
    return paths


def test_loras_are_matched_by_hash_before_name(tmp_path: Path) -> None:
    paths = loras(tmp_path / "loras")
    hashes = hash_file(paths["ink"])
    assert autov1(paths["ink"]) in (hashes.autov1, None)
    for digits in (hashes.sha256, hashes.autov2, hashes.autov3, hashes.autov3.upper()):
        finder = LoraFinder([tmp_path / "loras"], {"anything": digits, "my-pixel": digits})  # type: ignore[dict-item]
        assert finder.find(LoraChoice(name="anything")) == paths["ink"] == finder.find(LoraChoice(name="my-pixel"))
        assert finder.find(LoraChoice(hash=digits)) == paths["ink"]
        config = check_request({"prompt": "a <lora:anything:1>"}, finder)
        assert lora_warnings(config, finder) == []
    finder = LoraFinder([tmp_path / "loras"], {"my-pixel": "f" * 12, "my-ink": "nonsense"})
    config = check_request({"prompt": "a <lora:my-ink:1>", "loras": [{"name": "my-pixel"}]}, finder)
    first, second = lora_warnings(config, finder)
    assert "ffffffffffff" in first and "my-pixel" in first and "nonsense" in second
    with pytest.raises(ConfigError, match="none of"):
        finder.find(LoraChoice(hash="e3b0c442"))  # the hash of nothing is the hash of no file
    with pytest.raises(ConfigError, match="not found"):
        finder.find(LoraChoice(name="nope"))


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../outside", "../loras/../outside", "x/../../outside", "~/outside", "~nosuch/x", "outside\0",
     "a" * 300, "a" * 20_000, ".", "..", "\ud800"],
)  # fmt: skip
def test_names_stay_inside_of_the_lora_folders(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loras(tmp_path / "loras")
    (tmp_path / "outside.safetensors").write_bytes(embedded.loras()["ink"].read_bytes())
    (tmp_path / "outside").write_bytes(embedded.loras()["ink"].read_bytes())
    monkeypatch.chdir(tmp_path)
    finder = LoraFinder(["loras"])
    with pytest.raises(ConfigError, match="LoRA") as caught:
        finder.find(LoraChoice(name=name))
    assert len(str(caught.value)) < 1000
    with pytest.raises(ConfigError):
        check_request({"prompt": f"a <lora:{name}:1>"}, finder)


def test_a_name_may_lead_into_a_lora_folder(tmp_path: Path) -> None:
    (tmp_path / "loras" / "styles").mkdir(parents=True)
    file = tmp_path / "loras" / "styles" / "mine.safetensors"
    file.write_bytes(embedded.loras()["ink"].read_bytes())
    finder = LoraFinder([tmp_path / "loras"])
    for name in ("mine", "styles/mine", "styles\\mine", "styles/mine.safetensors"):
        assert finder.find(LoraChoice(name=name)) == file


def test_the_model_is_matched_by_hash_before_name() -> None:
    blueprint = open_model(embedded.NAME)
    file = embedded.folder() / "unet" / "diffusion_pytorch_model.safetensors"
    hashes = hash_file(file)
    for digits in (hashes.sha256, hashes.autov1, hashes.autov2, hashes.autov3):
        assert model_warnings(ImageSettings({}, model={"name": "other", "hash": digits}), blueprint) == []
    (warning,) = model_warnings(ImageSettings({}, model={"name": embedded.NAME, "hash": "0" * 10}), blueprint)
    assert "0000000000" in warning
    (warning,) = model_warnings(ImageSettings({}, model={"name": "v1-5", "hash": None}), blueprint)
    assert "v1-5" in warning
    assert model_warnings(ImageSettings({}, model={"name": embedded.NAME}), blueprint) == []
    assert model_warnings(ImageSettings({}), blueprint) == []


VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    10**400,
    1.5,
    1e300,
    "",
    "x",
    "\ud800",
    "a" * 100_000,
    [],
    [[]],
    {},
    {"a": {}},
    [None] * 9,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_a_hostile_record_is_an_error_or_a_warning(value: Any, tmp_path: Path) -> None:
    full = ours(
        config={"negative_prompt": "", "loras": [{"name": "pixel", "te": 1.0, "unet": 1.0}]}, training={}, grid={}
    )
    documents: list[tuple[str, Any]] = [("inweave", full | {name: value}) for name in full]
    documents += [("inweave", full | {"config": full["config"] | {name: value}}) for name in full["config"]]
    documents += [
        ("inweave", full | {"loras": [value]}),
        ("inweave", full | {"loras": [{"name": value, "sha256": value}]}),
    ]
    documents += [
        ("inweave", full | {"config": full["config"] | {"loras": [value, {"name": value}]}}),
        ("inweave", value),
    ]
    documents += [("prompt", value), ("prompt", {"1": value}), ("invokeai_metadata", value)]
    for key in ("class_type", "inputs"):
        documents.append(("prompt", GRAPH | {"6": GRAPH["6"] | {key: value}}))
    for key in GRAPH["6"]["inputs"]:  # type: ignore[attr-defined]
        documents.append(
            ("prompt", GRAPH | {"6": {"class_type": "KSampler", "inputs": GRAPH["6"]["inputs"] | {key: value}}})
        )  # type: ignore[operator]
    documents += [
        ("invokeai_metadata", {name: value})
        for name in ("loras", "model", "seed", "scheduler", "clip_skip", "strength")
    ]
    finder = LoraFinder()
    for name, document in documents:
        try:
            settings = read_settings(image(tmp_path / "a.png", **{name: json.dumps(document)}))
            assert all(len(warning) < 1000 for warning in settings.warnings)
            check_request(settings.config, LoraFinder((), settings.hashes))
            model_of(settings)
        except InweaveError as error:
            assert 0 < len(str(error)) < 5000
    assert finder.files()


@pytest.mark.parametrize(
    "text",
    [
        "a" * 300_000, "a" * 300_000 + "\nSteps: 1", "x\nSteps: 1, " + "a" * 300_000, "x\nSteps: 1, " + "a: " * 60_000,
        "x\nSteps: 1, " + 'a:"' * 60_000, "x\nSteps: 1, " + "a:[" * 60_000, "x\nSteps: 1," + "{" * 100_000,
        "x\nSteps: 1" + " " * 300_000,
        "x\nSteps: " + "9" * 5000, "x\nSteps: 1, Seed: " + "9" * 5000, "x\nSteps: 1, Size: " + "9" * 5000 + "x1",
        "\n" * 300_000,
        "[" * 100_000, "[a:" * 50_000, "[" + "a:" * 50_000 + "1]", "x\nSteps: 1, CFG scale: nan",
        "x\nSteps: 1, CFG scale: 1e999",
        "\ud800\nSteps: 1", "x\nSteps: 1, Lora hashes: " + "a: b, " * 20_000, "x\nSteps: 1, Hashes: [1]", "x\nSteps: ١",
        "x\nSteps: 1, Hashes: " + '{"lora:a": 5, "model": [], "embed:": {}}',
    ],
    ids=lambda text: repr(text[:24]),
)  # fmt: skip
def test_a_hostile_text_costs_no_time(text: str) -> None:
    with stopwatch(time.process_time) as cost:
        try:
            settings = parse_infotext(text)
            check_request(settings.config, LoraFinder((), settings.hashes))
        except InweaveError as error:
            assert 0 < len(str(error)) < 5000
    assert cost.seconds < 1.0


def test_fields_are_split_as_front_ends_write_them() -> None:
    line = 'Steps: 2, Model: "a, b: c", Hashes: {"a": "b, c"}, Odd: "open, Last: 5'
    assert parse_fields(line) == {
        "Steps": "2",
        "Model": "a, b: c",
        "Hashes": '{"a": "b, c"}',
        "Odd": '"open',
        "Last": "5",
    }


def test_a_damaged_text_is_named(tmp_path: Path) -> None:
    for text in ("{", "[" * 100_000, '{"config": 5}', "[]", '{"config": {}}', '{"a": ' + "9" * 5000 + "}"):
        with pytest.raises(RequestError, match="damaged"):
            read_settings(image(tmp_path / "a.png", inweave=text))
