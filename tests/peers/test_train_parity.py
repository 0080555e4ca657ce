"""The loss of every step is that of diffusers and peft: the embedded model, the same images, the same noise.

Theirs is a plain training loop: diffusers' UNet with peft's LoRA, transformers' CLIP, diffusers' DDPM schedule, torch's
AdamW and clipping. Ours is a whole run. Both start from the same factors and see the same latents, noise and times.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

from inweave.layers import lora_layers  # noqa: E402
from inweave.models import embedded  # noqa: E402
from inweave.models.model import file_index, load_model  # noqa: E402
from inweave.training.adapters.attach import NAME  # noqa: E402
from inweave.training.config.schema import TrainConfig  # noqa: E402
from inweave.training.data.cache import TensorCache  # noqa: E402
from inweave.training.data.reader import read_dataset  # noqa: E402
from inweave.training.loop import Run  # noqa: E402
from inweave.training.tasks.diffusion import DiffusionTask  # noqa: E402
from tests.support import sized  # noqa: E402

STEPS = sized(10, 100)
RATE, DECAY, RANK, CLIP = 2e-3, 0.01, 4, 1.0
PICTURES = 6
SIDE = 64  # half of the model's own resolution: a hundred steps of both take half a minute on one core
CLOSE = 0.01
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


class Theirs:
    """A training loop as the examples of diffusers have it."""

    def __init__(self) -> None:
        folder = embedded.folder()
        self.unet = diffusers.UNet2DConditionModel.from_pretrained(
            folder / "unet", torch_dtype=torch.float32
        ).requires_grad_(False)
        self.text = transformers.CLIPTextModel.from_pretrained(
            folder / "text_encoder", dtype=torch.float32
        ).requires_grad_(False)
        self.tokenizer = transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer")
        self.schedule = diffusers.DDPMScheduler.from_pretrained(folder / "scheduler")
        self.unet.add_adapter(peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS))
        self.trainable = [parameter for parameter in self.unet.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trainable, lr=RATE, weight_decay=DECAY)

    def start_from(self, factors: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        modules = {n: m for n, m in self.unet.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
        assert modules.keys() == factors.keys()
        with torch.no_grad():
            for name, module in modules.items():
                module.lora_A["default"].weight.copy_(factors[name][0])
                module.lora_B["default"].weight.copy_(factors[name][1])

    def step(self, latents: torch.Tensor, noise: torch.Tensor, times: torch.Tensor, captions: list[str]) -> float:
        ids = self.tokenizer(
            captions,
            padding="max_length",
            truncation=True,
            max_length=self.tokenizer.model_max_length,
            return_tensors="pt",
        ).input_ids
        with torch.no_grad():
            text = self.text(ids)[0]
        noisy = self.schedule.add_noise(latents, noise, times)
        target = self.schedule.get_velocity(latents, noise, times)
        prediction = self.unet(noisy, times, text).sample
        loss = torch.nn.functional.mse_loss(prediction.float(), target.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trainable, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def ours(folder: Path) -> tuple[Run, list[tuple[tuple[int, ...], dict[str, torch.Tensor]]]]:
    """(a run that has not started, the noise and times it will sample)."""
    data = folder / "set"
    data.mkdir()
    for picture in sorted(embedded.style_folder("ink").glob("*.png"))[:PICTURES]:
        shutil.copy(picture, data)
        shutil.copy(picture.with_suffix(".txt"), data)
    model = load_model(embedded.NAME, device="cpu", dtype="fp32", keep="file")
    config = TrainConfig.of(
        model=embedded.NAME, dataset=str(data), output=str(folder / "out"), steps=STEPS, batch_size=2, rank=RANK,
        learning_rate=RATE, weight_decay=DECAY, max_grad_norm=CLIP, targets=TARGETS, precision="fp32", resolution=SIDE,
        min_bucket=32, bucket_step=32, save_dtype="fp32",
    )  # fmt: skip
    task = DiffusionTask(model, read_dataset(data), config, TensorCache(None))
    batches: list[tuple[tuple[int, ...], dict[str, torch.Tensor]]] = []
    sample_batch = task.sample_batch

    def recording(batch: tuple[int, ...], generators: Sequence[torch.Generator]) -> dict[str, torch.Tensor]:
        inputs = sample_batch(batch, generators)
        batches.append((batch, inputs))
        return inputs

    task.sample_batch = recording  # type: ignore[method-assign]
    return Run(task, model, file_index(model), config), batches


def test_every_loss_is_that_of_diffusers_and_peft(tmp_path: Path) -> None:
    run, batches = ours(tmp_path)
    theirs = Theirs()
    layers: dict[str, Any] = lora_layers(run.task.networks["unet"])
    factors = {
        n: (layer.branch(NAME).down.detach().clone(), layer.branch(NAME).up.detach().clone())
        for n, layer in layers.items()
    }
    assert all(not up.any() and down.any() for down, up in factors.values())
    theirs.start_from(factors)
    losses = run.train().losses
    examples: Any = run.task.examples  # type: ignore[attr-defined]
    expected = []
    for batch, inputs in batches:
        captions = [examples[number].captions[0] for number in batch]
        expected.append(theirs.step(inputs["latents"], inputs["noise"], inputs["times"], captions))
    assert len(losses) == len(expected) == STEPS
    apart = [abs(mine - other) / other for mine, other in zip(losses, expected, strict=True)]
    assert max(apart) < CLOSE, f"step {apart.index(max(apart))} is {max(apart):.2%} apart"
    moved = sum(float((layer.branch(NAME).up.detach() - factors[name][1]).norm()) for name, layer in layers.items())
    assert moved > STEPS / 100, "nothing was trained: equal losses would prove nothing"
    modules = {n: m for n, m in theirs.unet.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    for name, layer in layers.items():
        torch.testing.assert_close(
            layer.branch(NAME).up.detach(), modules[name].lora_B["default"].weight.detach(), rtol=0.05, atol=5e-3
        )
