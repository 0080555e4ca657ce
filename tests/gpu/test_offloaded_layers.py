"""Layers on a model that accelerate and diffusers offload from a GPU: the same outputs as without, and PEFT's files."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)
accelerate = pytest.importorskip("accelerate")
diffusers = pytest.importorskip("diffusers")

from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

from torch import nn  # noqa: E402

import inweave  # noqa: E402
from inweave.layers import lora_layers  # noqa: E402


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 8)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(self.table(rows)).relu())
        return out


ROWS = torch.arange(14).reshape(2, 7) % 7


def randomized(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            for parameter in layer.adapters.parameters():
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter))
    return model


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"network": "loha"}, {"network": "lokr"}], ids=str)
@torch.no_grad()
def test_a_model_offloaded_to_memory_computes_the_same(options: dict[str, Any]) -> None:
    model = randomized(inweave.inject(Small().eval(), 4, 8, ["first", "last"], **options)).cuda()
    expected = model(ROWS.cuda())
    accelerate.cpu_offload(model, torch.device("cuda"))
    for _ in range(2):  # the parameters are put away and loaded again
        torch.testing.assert_close(model(ROWS.cuda()), expected, rtol=1e-5, atol=1e-5)
    assert all(tensor.is_meta for tensor in model.parameters())
    adapter = inweave.collect(model)
    assert {entry.ref.name for entry in adapter} == {"first", "last"}
    inweave.merge(model)
    torch.testing.assert_close(model(ROWS.cuda()), expected, rtol=1e-4, atol=1e-4)
    inweave.unmerge(model)
    torch.testing.assert_close(model(ROWS.cuda()), expected, rtol=1e-5, atol=1e-5)


def unet() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 16),
        norm_num_groups=4, attention_head_dim=8, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).eval()  # fmt: skip


def pipeline() -> Any:
    return diffusers.DDPMPipeline(unet(), diffusers.DDPMScheduler(num_train_timesteps=10))


def image(pipe: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    pixels = pipe(generator=generator, num_inference_steps=2, output_type="np").images
    return torch.from_numpy(pixels)


OFFLOADS: dict[str, Callable[[Any], None]] = {
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(),
    "model": lambda pipe: pipe.enable_model_cpu_offload(),
}


@pytest.mark.parametrize("how", OFFLOADS)
def test_an_offloaded_pipeline_computes_with_its_adapters(how: str) -> None:
    pipe, plain = pipeline(), pipeline()
    for each in (pipe, plain):
        each.set_progress_bar_config(disable=True)
        inweave.inject(each.unet, 4, 8, ["to_q", "to_v", "conv1"])
        randomized(each.unet)
    expected = image(plain.to("cuda"))
    with inweave.disabled(plain.unet):
        assert (image(plain) - expected).abs().max() > 1e-4
    OFFLOADS[how](pipe)
    for _ in range(2):
        torch.testing.assert_close(image(pipe), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("how", OFFLOADS)
def test_an_adapter_attached_to_an_offloaded_pipeline_computes(how: str) -> None:
    source = randomized(inweave.inject(unet(), 4, 8, ["to_q", "to_v", "conv1"]))
    adapter = inweave.collect(source)
    pipe, plain = pipeline(), pipeline()
    for each in (pipe, plain):
        each.set_progress_bar_config(disable=True)
    OFFLOADS[how](pipe)
    inweave.attach(pipe.unet, adapter)
    inweave.attach(plain.unet, adapter)
    torch.testing.assert_close(image(pipe), image(plain.to("cuda")), rtol=1e-3, atol=1e-3)
