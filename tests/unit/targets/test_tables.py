"""Tables of models that diffusers converts itself: its own loader gives the same names and the same rows."""

from __future__ import annotations

import pytest

from inweave.adapter import Tensor
from inweave.exchange.convert import rewrite
from inweave.formats.read import read
from inweave.targets.bases import known_index
from tests.support import random

CASES = {
    "minimax-h3": ("MiniMaxH3", "diffusion_model.", {
        "blocks.0.attn.qkv_proj": (21504, 5376), "blocks.0.attn.out_proj": (5376, 7168),
        "blocks.49.mlp.fc1": (28672, 5376), "token_refiner.blocks.1.attn.qkv_proj": (21504, 5376),
        "token_refiner.blocks.0.mlp.fc2": (5376, 14336), "condition_proj": (5376, 5120),
    }),
    "ideogram4": ("Ideogram4", "diffusion_model.", {
        "layers.0.attention.qkv": (13824, 4608), "layers.33.attention.o": (4608, 4608),
        "layers.3.feed_forward.w1": (12288, 4608), "layers.1.adaln_modulation": (18432, 512),
    }),
    "flux3": ("Flux3", "diffusion_model.", {
        "single_blocks.0.q_proj": (3072, 3072), "content_mode_blocks.image.0.attn_out": (3072, 3072),
        "txt_mode_blocks.4.mlp_in": (18432, 3072), "single_blocks.27.mlp_out": (3072, 9216),
    }),
    "anima": ("Anima", "diffusion_model.", {
        "llm_adapter.blocks.0.self_attn.q_proj": (1024, 1024), "llm_adapter.blocks.5.mlp.2": (1024, 4096),
        "blocks.3.cross_attn.output_proj": (2048, 2048), "llm_adapter.out_proj": (1024, 1024),
    }),
}  # fmt: skip


@pytest.mark.parametrize("base", CASES)
def test_the_table_is_that_of_diffusers(base: str) -> None:
    torch = pytest.importorskip("torch")
    pipelines = pytest.importorskip("diffusers.loaders.lora_pipeline")
    loader, prefix, modules = CASES[base]
    tensors: dict[str, Tensor] = {}
    for number, (module, (rows, columns)) in enumerate(modules.items()):
        tensors[f"{prefix}{module}.lora_A.weight"] = random(number, 2, columns)
        tensors[f"{prefix}{module}.lora_B.weight"] = random(number + 50, rows, 2)
    ours = rewrite(read(tensors), "diffusers", known_index(base))
    assert not ours.lost

    def decoded(tensor: Tensor) -> object:
        return torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).reshape(tensor.shape)

    state = {key: decoded(tensor) for key, tensor in tensors.items()}
    theirs = getattr(pipelines, f"{loader}LoraLoaderMixin").lora_state_dict(state)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    assert ours.tensors.keys() == theirs.keys()
    assert all(torch.equal(decoded(ours.tensors[key]), value) for key, value in theirs.items())
    back = rewrite(read(ours.tensors, ours.metadata), "comfy", known_index(base))
    names = {key.replace("lora_A", "lora_down").replace("lora_B", "lora_up"): key for key in tensors}
    assert not back.lost
    assert {key for key in back.tensors if not key.endswith("alpha")} == names.keys()
