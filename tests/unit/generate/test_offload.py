"""Images of a model whose weights stay in host memory: the bits of a resident one, and a report of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import numpy as np
import torch
from PIL import Image
from typer.testing import CliRunner

import inweave
from inweave.cli.app import app
from inweave.errors import CancelledError, ConfigError, MergeStateError
from inweave.generate.config import GenerateConfig
from inweave.models.model import load_model
from inweave.models.offload import weight_bytes
from inweave.models.open import open_model
from inweave.models.residency import RESERVE, Offload, fits, needed_bytes
from inweave.models.sd import steady
from inweave.serve.engine.contract import RunnerSettings
from inweave.serve.engine.runner import Runner
from inweave.serve.settings import ServeSettings
from inweave.weights.streaming import stream
from tests.unit.weights.test_streaming import Late

EMOJI = "inweave/emoji"
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "a red apple"},
    {"prompt": "a red apple", "loras": ["pixel:1.0"]},
    {"prompt": "a red apple", "loras": ["ink:0.5", "pixel:0.7"]},
    {"prompt": "a [red:green:0.5] apple", "loras": ["pixel:1.0"]},
    {"prompt": "a red apple"},
]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to slots happen at the last moment, and destroy what was there: nothing works that is not streamed."""
    monkeypatch.setattr(stream, "copies_to", lambda device: Late())


def images_of(pipe: Any, requests: list[dict[str, Any]]) -> list[Any]:
    previews: list[Any] = []
    images = []
    for request in requests:
        config = GenerateConfig(**request, seed=7, steps=2, width=64, height=64)
        made = pipe(config, progress=lambda at: previews.append(at.preview), preview_every=1)
        images.append(made.images[0])
    return [np.asarray(image) for image in (*images, *filter(None, previews))]


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", ["off", "int8"])
def test_images_have_the_bits_of_a_resident_model(format: Any, late: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with and without LoRAs, prompts encoded between two steps, previews decoded between two steps."""
    monkeypatch.setattr(steady, "is_faster", lambda network: False)  # it sums in another order
    resident = inweave.pipeline(EMOJI, device="cpu", quantize=format, loras=["ink:0.3"])
    streamed = inweave.pipeline(EMOJI, device="cpu", quantize=format, loras=["ink:0.3"], offload="blocks")
    expected, images = images_of(resident, REQUESTS), images_of(streamed, REQUESTS)
    assert len(expected) > len(REQUESTS)
    assert all(np.array_equal(one, other) for one, other in zip(expected, images, strict=True))
    assert not np.array_equal(images[0], images[1])
    for pipe in (resident, streamed):
        pipe.swap([])
    for folder, network in resident.model.networks.items():
        there = streamed.model.networks[folder].state_dict()
        assert all(torch.equal(value, there[name]) for name, value in network.state_dict().items()), folder
    assert streamed.model.offloader is not None and resident.model.offloader is None
    report, total = streamed.model.offloader.report(), sum(map(weight_bytes, streamed.model.networks.values()))
    assert report["host_bytes"] == total and 0 < report["device_bytes"] < 0.6 * total, report


def test_a_quantized_layer_stays_in_the_memory_of_its_block(late: None) -> None:
    """Merging writes to the memory that is copied to the device, which no swap replaces."""
    pipe = inweave.pipeline(EMOJI, device="cpu", quantize="int8", offload="blocks")
    images_of(pipe, REQUESTS[:1])
    places = {name: t.data_ptr() for name, t in pipe.model.denoiser.state_dict(keep_vars=True).items()}
    images_of(pipe, REQUESTS[1:])
    assert {name: t.data_ptr() for name, t in pipe.model.denoiser.state_dict(keep_vars=True).items()} == places


def test_cancelled_and_failed_requests_leave_the_weights_in_host_memory(late: None) -> None:
    pipe = inweave.pipeline(EMOJI, device="cpu", offload="blocks")
    (expected,) = images_of(pipe, [{"prompt": "a red apple", "loras": ["pixel:1.0"]}])[:1]

    def swap(_: Any) -> None:
        pipe.model.swap([])

    with pytest.raises(MergeStateError, match="unet: computing; swap adapters between two images"):
        pipe("a red apple", seed=7, steps=2, progress=swap)
    with pytest.raises(CancelledError):
        pipe("a red apple", seed=7, steps=2, cancelled=lambda: True)
    (again,) = images_of(pipe, [{"prompt": "a red apple", "loras": ["pixel:1.0"]}])[:1]
    assert np.array_equal(expected, again)


def test_an_interrupted_move_is_completed_before_adapters_are_merged(
    late: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = inweave.pipeline(EMOJI, device="cpu", offload="blocks")
    (plain, changed) = images_of(pipe, REQUESTS[:2])[:2]
    stop = stream.BlockStream.stop

    def interrupted(self: Any) -> None:
        if self._ring is not None:
            monkeypatch.setattr(stream.BlockStream, "stop", stop)
            raise KeyboardInterrupt

    monkeypatch.setattr(stream.BlockStream, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        images_of(pipe, REQUESTS[1:2])
    assert np.array_equal(images_of(pipe, REQUESTS[:1])[0], plain)
    assert np.array_equal(images_of(pipe, REQUESTS[1:2])[0], changed)


def test_a_model_is_offloaded_by_itself_where_it_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    blueprint, cpu = open_model(EMOJI), torch.device("cpu")
    assert fits(blueprint, cpu, torch.float32, "off"), "a CPU has no memory of its own"
    assert inweave.pipeline(EMOJI, device="cpu", offload="auto").model.offloader is None
    weights = sum(map(weight_bytes, load_model(EMOJI, device="cpu").networks.values()))
    needed = needed_bytes(blueprint, torch.float32, "off")
    assert weights < needed - RESERVE < weights + 2**28
    assert needed_bytes(blueprint, torch.float32, "int8") < needed
    free = [needed]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 2**40))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert fits(blueprint, torch.device("cuda"), torch.float32, "off")
    free[0] -= 1
    assert not fits(blueprint, torch.device("cuda"), torch.float32, "off")


def test_the_command_and_the_worker_have_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="offload: expected off, auto, blocks, got 'disk'"):
        inweave.pipeline(EMOJI, device="cpu", offload="disk")  # type: ignore[arg-type]
    assert set(get_args(ServeSettings.model_fields["offload"].annotation)) == set(get_args(Offload))
    assert Runner(RunnerSettings(device="cpu", offload="blocks")).load(EMOJI).model.offloader is not None
    options = ["a red apple", "--steps", "1", "--seed", "7", "--device", "cpu", "-o"]
    for name, more in (("off", ()), ("blocks", ("--offload", "blocks", "--json"))):
        result = CliRunner().invoke(app, ["generate", *options, str(tmp_path / f"{name}.png"), *more])
        assert result.exit_code == 0, result.output
    memory = json.loads(result.output)["memory"]
    assert memory["offload"] == "blocks" and 0 < memory["device_bytes"] < memory["host_bytes"]
    images = [np.asarray(Image.open(tmp_path / f"{name}.png"), int) for name in ("off", "blocks")]
    assert np.abs(images[0] - images[1]).max() <= 1
