"""The plain style loop on the embedded model: few steps, and everything that must hold after any number of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import weft
from weft.adapter import Adapter
from weft.bench.embedded import style_set
from weft.errors import ConfigError
from weft.train.plain import encode, noised, pace, train_style

diffusers = pytest.importorskip("diffusers")

EMOJI = Path(weft.__file__).parent / "models" / "emoji"
FEW: dict[str, Any] = {"steps": 2, "batch": 1, "rank": 2, "targets": ["to_q", "conv1"]}


@pytest.fixture(scope="module")
def pipe() -> Iterator[Any]:
    yield diffusers.StableDiffusionPipeline.from_pretrained(EMOJI, dtype=torch.float32)


@pytest.fixture(scope="module")
def lesson() -> tuple[list[Image.Image], list[str]]:
    captions, images = style_set("pixel")
    return images[:3], captions[:3]


@pytest.fixture(scope="module")
def trained(pipe: Any, lesson: tuple[list[Image.Image], list[str]]) -> tuple[Adapter, list[float]]:
    return train_style(pipe, *lesson, alpha=2, seed=5, **FEW)


def digest(network: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in network.state_dict().items():
        found.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def bits(adapter: Adapter) -> dict[str, bytes]:
    return {key: bytes(tensor.data) for key, tensor in adapter.tensors.items()}


def test_it_learns_something_finite(trained: tuple[Adapter, list[float]]) -> None:
    adapter, losses = trained
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)
    ups = [value for key, value in bits(adapter).items() if "lora_B" in key]
    assert ups and all(any(value) for value in ups)  # they start as zeros


def test_the_model_is_left_as_it_was(pipe: Any, lesson: tuple[list[Image.Image], list[str]]) -> None:
    parts = (pipe.unet, pipe.vae, pipe.text_encoder)
    before = [digest(part) for part in parts]
    modules = [id(module) for module in pipe.unet.modules()]
    asked = [parameter.requires_grad for parameter in pipe.unet.parameters()]
    state = torch.get_rng_state()
    train_style(pipe, *lesson, **(FEW | {"steps": 1}))
    assert [digest(part) for part in parts] == before
    assert [id(module) for module in pipe.unet.modules()] == modules
    assert [parameter.requires_grad for parameter in pipe.unet.parameters()] == asked
    assert all(parameter.grad is None for parameter in pipe.unet.parameters())
    assert not pipe.unet.training
    assert torch.equal(torch.get_rng_state(), state)


def test_the_seed_alone_decides(
    pipe: Any, lesson: tuple[list[Image.Image], list[str]], trained: tuple[Adapter, list[float]]
) -> None:
    torch.manual_seed(1234)
    again, losses = train_style(pipe, *lesson, alpha=2, seed=5, **FEW)
    assert losses == trained[1] and bits(again) == bits(trained[0])
    other, others = train_style(pipe, *lesson, alpha=2, seed=6, **FEW)
    assert others != losses and bits(other) != bits(again)


def test_a_failure_leaves_no_layers_behind(pipe: Any, lesson: tuple[list[Image.Image], list[str]]) -> None:
    def stop(step: int, steps: int, loss: float) -> None:
        assert (step, steps) == (1, 2)
        raise KeyboardInterrupt

    before = digest(pipe.unet)
    with pytest.raises(KeyboardInterrupt):
        train_style(pipe, *lesson, progress=stop, **FEW)
    assert digest(pipe.unet) == before


def test_saved_as_kohya_every_tensor_finds_its_place(trained: tuple[Adapter, list[float]], tmp_path: Path) -> None:
    path = tmp_path / "style.safetensors"
    adapter = replace(trained[0], metadata={"ss_network_dim": "2"})
    weft.save(adapter, path, dialect="kohya", base=EMOJI)
    loaded = weft.load(path)
    verdict = weft.check(loaded, base=EMOJI)
    assert verdict.ok, verdict.report
    assert loaded.dialects == ("kohya",) and set(loaded.algorithms) == {"lora", "locon"}
    assert len(loaded) == len(adapter) and loaded.metadata["ss_network_dim"] == "2"
    keys = loaded.tensors
    assert all(key.startswith("lora_unet_") for key in keys)
    assert {tensor.dtype for key, tensor in keys.items() if not key.endswith(".alpha")} == {"F16"}
    assert sum(key.endswith(".alpha") for key in keys) == len(loaded)


def test_woven_and_taken_out_again(pipe: Any, trained: tuple[Adapter, list[float]], tmp_path: Path) -> None:
    path = tmp_path / "style.safetensors"
    weft.save(trained[0], path, dialect="kohya", base=EMOJI)
    before = digest(pipe.unet)
    weaver = weft.Weaver({"unet": pipe.unet})
    weaver.apply([(path, 1.0)])
    assert digest(pipe.unet) != before
    weaver.apply([])
    assert digest(pipe.unet) == before


@pytest.mark.parametrize("name", ["pixel", "ink"])
def test_the_shipped_styles_fit_and_say_what_they_are(name: str) -> None:
    path = EMOJI / "loras" / f"{name}.safetensors"
    assert path.stat().st_size < 1_000_000
    adapter = weft.load(path)
    assert weft.check(adapter, base=EMOJI).ok
    assert adapter.metadata["ss_output_name"] == name
    assert adapter.metadata["ss_base_model_version"] == "weft-emoji"
    assert "Apache-2.0" in adapter.metadata["modelspec.license"]


def test_half_precision_models_are_trained_on_a_copy(lesson: tuple[list[Image.Image], list[str]]) -> None:
    half = diffusers.StableDiffusionPipeline.from_pretrained(EMOJI, dtype=torch.float16)
    before = digest(half.unet)
    adapter, losses = train_style(half, *lesson, **(FEW | {"steps": 1}))
    assert losses[0] > 0 and len(adapter) > 0
    assert digest(half.unet) == before and half.unet.dtype == torch.float16


def test_latents_have_the_scale_the_unet_knows(pipe: Any, lesson: tuple[list[Image.Image], list[str]]) -> None:
    found = encode(pipe, *lesson)
    assert found.latents.shape == (3, 8, 16, 16) and found.captions.shape == (3, 32, 192)
    assert found.empty.shape == (1, 32, 192)
    assert 0.5 < float(found.latents.std()) < 2.0


def test_targets_of_the_three_predictions() -> None:
    z, e = torch.tensor([2.0]), torch.tensor([-1.0])
    kept = torch.tensor([0.64])
    noisy, goal = noised(z, e, kept, "v_prediction")
    assert torch.allclose(noisy, 0.8 * z + 0.6 * e) and torch.allclose(goal, 0.8 * e - 0.6 * z)
    assert torch.equal(noised(z, e, kept, "epsilon")[1], e)
    assert torch.equal(noised(z, e, kept, "sample")[1], z)
    # zero terminal SNR: nothing of the picture is left, and v is all picture
    noisy, goal = noised(z, e, torch.zeros(1), "v_prediction")
    assert torch.equal(noisy, e) and torch.equal(goal, -z)


def test_the_schedule_of_the_model_ends_in_pure_noise(pipe: Any) -> None:
    assert pipe.scheduler.config.rescale_betas_zero_snr
    assert float(pipe.scheduler.alphas_cumprod[-1]) == 0.0


def test_the_pace_rises_and_falls() -> None:
    paces = [pace(step, 300) for step in range(300)]
    assert paces[0] == pytest.approx(1 / 20) and paces[40] == 1.0 and 0 < paces[-1] < 0.01
    assert all(value > 0 for value in (pace(0, 1), pace(1, 2)))


def test_everything_wrong_is_said_at_once(pipe: Any) -> None:
    images = [Image.new("RGB", (128, 128)), Image.new("RGB", (64, 64))]
    with pytest.raises(ConfigError) as caught:
        train_style(pipe, images, ["one"], steps=0, batch=0, learning_rate=-1.0, caption_dropout=2.0)
    assert len(caught.value.problems) == 6
    assert "2 pictures and 1 captions" in str(caught.value) and "64x64, 128x128" in str(caught.value)


def test_a_scheduler_without_alphas_is_refused(pipe: Any) -> None:
    flow = SimpleNamespace(config=SimpleNamespace(prediction_type="flow_prediction"))
    model = SimpleNamespace(
        unet=pipe.unet, vae=pipe.vae, text_encoder=pipe.text_encoder, tokenizer=pipe.tokenizer, scheduler=flow
    )
    with pytest.raises(ConfigError, match="flow_prediction"):
        train_style(model, [Image.new("RGB", (128, 128))], ["one"])
