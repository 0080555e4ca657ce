"""Pipelines that no family knows: the derived call is the pipeline's own, and everything works on it."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("diffusers")

import diffusers
import numpy as np
import transformers

import inweave
from inweave.errors import CancelledError, ConfigError, FormatError
from inweave.models.derived.arguments import classify
from inweave.models.derived.layout import find, order_of
from inweave.models.derived.recording import denoiser_of, guidance_option
from inweave.models.model import Model, load_model
from inweave.models.open import open_model
from tests.peers import tiny_pipelines as tiny

SIZES = ((64, 96), (128, 64))
#: those that a pipeline makes which chooses its size by itself
OWN_SIZES = {"HiDreamImage": ((256, 256), (360, 180)), "Kandinsky5T2I": ((1024, 1024), (640, 1408))}
TEXTS = ("a red apple", "two dogs in the snow, oil on canvas")
#: a model with each kind of argument; all others run with `--full`
SAMPLE = ("BriaFibo", "HunyuanDiT", "PixArtSigma", "QwenImage21")


def sampled(names: Iterable[str], sample: tuple[str, ...]) -> list[Any]:
    return [name if name in sample else pytest.param(name, marks=pytest.mark.full) for name in names]


def own_pipeline(name: str) -> Any:
    """The pipeline of diffusers, of networks of its own."""
    made = tiny.pipeline(name)  # processors of text alone cannot be read by transformers
    processors = {part: each for part, each in made.components.items() if isinstance(each, transformers.ProcessorMixin)}
    pipe = getattr(diffusers, type(made).__name__).from_pretrained(tiny.folder(name), **processors)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def options_of(pipe: Any, guidance: float) -> dict[str, Any]:
    known = inspect.signature(pipe.__call__).parameters
    options: dict[str, Any] = {"use_resolution_binning": False, "pag_scale": 0.0, "use_kv_cache": False}
    strength = guidance_option(known)
    return {name: value for name, value in options.items() if name in known} | (
        {strength: guidance} if strength else {}
    )


def own_call(
    name: str, texts: tuple[str, ...], size: tuple[int, int], guidance: float
) -> tuple[Any, dict[str, Any], Any, torch.Tensor]:
    """(the pipeline of diffusers, the arguments of its first call, the time, what its scheduler received)."""
    pipe = own_pipeline(name)
    calls: list[dict[str, Any]] = []
    received: list[Any] = []
    step = pipe.scheduler.step
    denoiser_of(pipe).register_forward_pre_hook(
        lambda network, args, options: calls.append(bound(network, args, options)), with_kwargs=True
    )

    def recorded(prediction: torch.Tensor, t: Any, *args: Any, **options: Any) -> Any:
        received.append((t, prediction.clone()))
        return step(prediction, t, *args, **options)

    pipe.scheduler.step = recorded
    prompt = list(texts) if len(texts) > 1 else texts[0]
    pipe(
        prompt, width=size[0], height=size[1], num_inference_steps=2, generator=torch.Generator().manual_seed(3),
        **options_of(pipe, guidance),
    )  # fmt: skip
    return pipe, calls[0], *received[0]


def bound(network: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(inspect.signature(type(network).forward).bind(network, *args, **options).arguments)
    del arguments["self"]
    return arguments


def own_noise(name: str, model: Model, size: tuple[int, int], batch: int = 1) -> torch.Tensor:
    """The noise that a pipeline draws, as latents."""
    rows, channels, height, width = model.latent_space.shape(*size, batch)
    generator = torch.Generator().manual_seed(3)
    if name == "Kandinsky5T2I":  # it draws a frame with the channels last
        return torch.randn(rows, 1, height, width, channels, generator=generator)[:, 0].movedim(-1, 1)
    return torch.randn(rows, channels, height, width, generator=generator)


def derived(model: Model, texts: tuple[str, ...], latents: torch.Tensor, t: Any) -> torch.Tensor:
    family: Any = model.family
    with torch.no_grad():
        text = family.join_text([family.encode(model, family.token_ids(model, text), None) for text in texts])
    sizes = torch.zeros(len(texts), 6)
    return family.denoise(model, latents, t, family.batch_inputs(model, text, sizes, latents.shape, 1.0))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sampled(tiny.DERIVED, SAMPLE))
def test_prediction_loss_and_gradients_are_those_of_the_pipelines_own_call(name: str) -> None:
    model = load_model(tiny.folder(name), device="cpu")
    model.release_weaver()
    model.denoiser.requires_grad_(True)
    family: Any = model.family
    strength = family.derivation.strength  # at which nothing is guided
    sizes = OWN_SIZES.get(name, SIZES)
    for size in sizes:
        pipe, call, t, received = own_call(name, TEXTS[:1], size, strength)
        noise = own_noise(name, model, size)
        noise = model.scheduler.scale_model_input(noise, t) if hasattr(model.scheduler, "scale_model_input") else noise
        prediction = derived(model, TEXTS[:1], noise, t)
        torch.testing.assert_close(prediction.flatten().sort().values, received.flatten().sort().values)
        prediction.square().mean().backward()
        call["return_dict"] = False
        own = denoiser_of(pipe)(**call)[0]
        if family.derivation.cut is not None:
            own = family.derivation.cut(own, received.shape[family.derivation.cut.axis])
        own.square().mean().backward()
        gradients = {n: p.grad for n, p in denoiser_of(pipe).named_parameters() if p.grad is not None}
        ours = {n: p.grad for n, p in model.denoiser.named_parameters() if p.grad is not None}
        assert ours.keys() == gradients.keys() and len(ours) > 10
        for key, gradient in gradients.items():
            torch.testing.assert_close(ours[key], gradient, rtol=1e-4, atol=1e-6)
        model.denoiser.zero_grad()
    _, _, t, received = own_call(
        name, (TEXTS[0], TEXTS[0]), sizes[0], strength
    )  # rows of one length fit every pipeline
    rows = own_noise(name, model, sizes[0], 2)
    prediction = derived(model, (TEXTS[0], TEXTS[0]), rows, t)
    torch.testing.assert_close(prediction.flatten().sort().values, received.flatten().sort().values)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sampled(tiny.DERIVED, ("BriaFibo", "LongCatImage")))
def test_it_generates_trains_and_its_file_loads_in_diffusers(name: str, tmp_path: Path) -> None:
    folder = tiny.folder(name)
    width, height = OWN_SIZES.get(name, ((64, 96),))[0]
    request: dict[str, Any] = {"seed": 3, "steps": 2, "width": width, "height": height, "guidance": 3.0}
    previews: list[Any] = []
    made = inweave.pipeline(str(folder), device="cpu")(
        "a red apple", **request, preview_every=1, preview_first=True, progress=lambda at: previews.append(at.preview)
    )
    ours = made.images[0]
    with pytest.raises(CancelledError, match="after step 1 of 2"):
        inweave.pipeline(str(folder), device="cpu")("a red apple", **request, cancelled=lambda: True)
    pipe = own_pipeline(name)
    options: dict[str, Any] = {"num_inference_steps": 2, "width": width, "height": height}
    options |= {option: value for option, value in options_of(pipe, 3.0).items() if option != "pag_scale"}
    output = pipe("a red apple", generator=torch.Generator().manual_seed(3), **options)
    (image,) = next(iter(output.values()))
    apart = np.abs(np.asarray(ours).astype(int) - np.asarray(image).astype(int))
    assert (
        np.asarray(image).std() > 20 and apart.max() <= 1 and (apart > 0).mean() < 0.01
    )  # the order of sums in memory
    opaque = np.asarray(ours.convert("RGB")).astype(int)
    last = np.asarray(previews[-1]).astype(int)  # the preview of the last step is the image
    assert len(previews) == 2 and last.shape == opaque.shape and np.abs(last - opaque).max() <= 1
    config = inweave.TrainConfig(
        dataset="inweave/pixel", model=str(folder), steps=3, resolution=width, rank=2, upscale=name in OWN_SIZES,
        output=str(tmp_path / "out"),
        cache_dir=str(tmp_path / "cache"), precision="fp32", learning_rate=0.1,
    )  # fmt: skip
    inweave.train(config)
    file = tmp_path / "out" / "lora.safetensors"
    network = "transformer." if hasattr(pipe, "transformer") else "unet."
    with safe_open(file, "pt") as tensors:
        assert all(key.startswith(network) for key in tensors.keys())  # noqa: SIM118
    assert inweave.pipeline(str(folder), loras=[str(file)], device="cpu")("a red apple", **request).images[0] != ours
    if hasattr(pipe, "load_lora_weights"):
        pipe.load_lora_weights(str(file))
        assert pipe.get_active_adapters()


@pytest.mark.parametrize("name", sampled(tiny.REFUSED, ("SanaSprint",)))
def test_a_pipeline_that_cannot_be_derived_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(FormatError, match=tiny.REFUSED[name]):
        open_model(tiny.folder(name))


def test_a_folder_whose_weights_were_replaced_is_opened_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder("AuraFlow"), folder)
    family = open_model(folder).family
    assert open_model(folder).family is family  # nothing changed: it is not derived twice
    (file,) = (folder / "transformer").glob("*.safetensors")
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    assert load_model(folder, device="cpu").family is not family


def test_what_cannot_be_derived_is_refused_by_name(tmp_path: Path) -> None:
    numbers = torch.randn(2, 4, 4)
    mixed = torch.arange(4.0)
    with pytest.raises(FormatError, match="states depends on the text and on the size"):
        classify("states", mixed, mixed + 1, mixed + 2, mixed, None)
    assert order_of(numbers, numbers.square()) is None
    shuffled = numbers.flatten()[torch.randperm(32, generator=torch.Generator().manual_seed(0))]
    assert find(numbers, shuffled.view(1, 2, 4, 4)) is None and find(numbers, -numbers[None]) is None


def test_a_layout_is_told_from_known_numbers() -> None:
    latents = torch.randn(1, 3, 4, 6)
    packed = latents.view(1, 3, 2, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 6, 12)
    assert order_of(latents[0], 2.5 * packed[0]) is not None
    layout = find(latents[0], 2.5 * packed)
    assert layout is not None and str(layout) == "c (h p) (w q), p = q = 2 -> (h w) (c p q)"
    assert torch.equal(layout.pack(latents), packed) and torch.equal(layout.unpack(packed, (3, 4, 6)), latents)


def test_equal_numbers_do_not_hide_a_layout() -> None:
    latents = torch.randint(0, 5, (1, 4, 16, 24)).float()
    layout = find(latents[0], latents.permute(0, 2, 3, 1)[:, None])
    assert layout is not None and str(layout) == "c h w -> 1 h w c"


def test_sizes_that_a_pipeline_does_not_make_are_refused(tmp_path: Path) -> None:
    folder = str(tiny.folder("Kandinsky5T2I"))
    pipe = inweave.pipeline(folder, device="cpu")
    with pytest.raises(ConfigError, match="Kandinsky5T2IPipeline makes 1024x1024 where 512x512 are asked for"):
        pipe("a red apple", width=512, height=512)
    config = inweave.TrainConfig(
        dataset="inweave/pixel", model=folder, steps=1, resolution=512, rank=2, output=str(tmp_path / "out"),
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="buckets: Kandinsky5T2IPipeline makes 1024x1024 where"):
        inweave.train(config)


def test_inspect_says_what_was_derived() -> None:
    evidence = "\n".join(open_model(tiny.folder("LongCatImage")).evidence)
    assert "LongCatImagePipeline" in evidence and "timestep: t / 1000" in evidence and "(h w) (c p q)" in evidence


def test_inspect_of_a_model_folder_prints_it() -> None:
    from typer.testing import CliRunner

    from inweave.cli.app import app

    printed = CliRunner().invoke(app, ["inspect", str(tiny.folder("AuraFlow")), "--json"])
    assert printed.exit_code == 0 and "AuraFlowPipeline" in printed.stdout
