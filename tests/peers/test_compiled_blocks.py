"""diffusers' blocks with LoRA layers are traced without graph breaks, and equal blocks share a trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import inweave
from inweave.layers import lora_layers
from inweave.training.execution.compilation import CompiledBlocks
from inweave.training.memory.checkpointing import apply_checkpointing
from tests.peers.tiny_models import pipeline

INPUTS: dict[str, Any] = {
    "flux1-dev": lambda: {
        "hidden_states": torch.randn(2, 16, 64), "encoder_hidden_states": torch.randn(2, 7, 40),
        "pooled_projections": torch.randn(2, 16), "timestep": torch.full((2,), 0.5), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3), "guidance": torch.ones(2),
    },
    "sdxl": lambda: {
        "sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor(5), "encoder_hidden_states": torch.randn(2, 77, 40),
        "added_cond_kwargs": {"text_embeds": torch.randn(2, 24), "time_ids": torch.zeros(2, 6)},
    },
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize(("variant", "kinds", "checkpointing"), [("flux1-dev", 2, "off"), ("sdxl", 2, "full")])
def test_blocks_are_traced_whole_and_shared(variant: str, kinds: int, checkpointing: str) -> None:
    """``kinds``: classes of blocks, or their widths."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    parts = pipeline(variant)
    network = copy.deepcopy(parts.transformer if variant.startswith("flux") else parts.unet).requires_grad_(False)
    inweave.inject(network, rank=4, alpha=4, targets=["to_q", "to_out.0"])
    for layer in lora_layers(network).values():
        for name in layer.adapters:
            torch.nn.init.normal_(layer.branch(name).up, std=0.1)
    apply_checkpointing({"unet": network}, checkpointing, random=False)
    network.train()
    inputs = INPUTS[variant]()

    def gradients() -> tuple[torch.Tensor, list[torch.Tensor]]:
        network.zero_grad()
        output: torch.Tensor = network(**inputs, return_dict=False)[0]
        output.square().mean().backward()
        return output.detach(), [p.grad.clone() for p in network.parameters() if p.grad is not None]

    output, eager = gradients()
    blocks = CompiledBlocks({"unet": network}, backend="eager")
    blocks.start()
    with blocks.call("size"):
        compiled, traced = gradients()
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"], counters["graph_break"]
    # a block is traced once where its input needs a gradient and once where it does not (the first)
    assert counters["stats"]["unique_graphs"] <= 2 * kinds < 2 * len(blocks.blocks)
    torch.testing.assert_close(compiled, output)
    for one, two in zip(eager, traced, strict=True):
        torch.testing.assert_close(one, two)
