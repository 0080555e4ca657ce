"""Small real models, adapters for them, and merging by our own formula, to compare with what peers compute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from inweave.adapter import Adapter, Tensor
from inweave.formats.read import read
from inweave.ops.delta import change
from inweave.targets.index import ModelIndex, component_from_names
from inweave.targets.resolve import resolve
from tests.support import tensor


def sd_unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        block_out_channels=(16, 32, 32, 32), layers_per_block=2, cross_attention_dim=24, attention_head_dim=4,
        norm_num_groups=8, sample_size=8,
    )  # fmt: skip


def sdxl_unet() -> UNet2DConditionModel:
    torch.manual_seed(1)
    return UNet2DConditionModel(
        block_out_channels=(16, 32, 32), layers_per_block=2, cross_attention_dim=24, attention_head_dim=(2, 4, 4),
        norm_num_groups=8, sample_size=8, use_linear_projection=True, transformer_layers_per_block=(1, 2, 3),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=80,
    )  # fmt: skip


def flux() -> FluxTransformer2DModel:
    torch.manual_seed(2)
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=24, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip


def clip() -> CLIPTextModel:
    torch.manual_seed(3)
    return CLIPTextModel(
        CLIPTextConfig(vocab_size=64, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    )


def index_of(**networks: torch.nn.Module) -> ModelIndex:
    """unet=..., te1=...: the index of live modules, as if read from a diffusers folder."""
    components = {}
    for name, module in networks.items():
        shapes = {key: tuple(value.shape) for key, value in module.state_dict().items()}
        if name.startswith("te") and not any(key.startswith("text_model.") for key in shapes):
            shapes = {f"text_model.{key}": shape for key, shape in shapes.items()}  # the names on disk
        components[name] = component_from_names(name, shapes)
    return ModelIndex(components)


def random_lora(
    prefix: str, module: torch.nn.Module, select: Callable[[str], bool], *, alpha: float | None, dtype: str = "F32",
    ranks: tuple[int, ...] = (4,), vary: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """LoRA pairs in diffusers' dialect for every selected Linear and Conv2d."""
    rng = np.random.default_rng(len(prefix))
    pairs: dict[str, Tensor] = {}
    layers = [
        (n, m) for n, m in module.named_modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d) and select(n)
    ]
    assert layers
    for number, (name, layer) in enumerate(layers):
        rank = ranks[number % len(ranks)]
        shape = tuple(layer.weight.shape)
        tail = (1,) * (len(shape) - 2)
        pairs[f"{prefix}{name}.lora_A.weight"] = tensor(rng.standard_normal((rank, *shape[1:])) * 0.2, dtype)
        pairs[f"{prefix}{name}.lora_B.weight"] = tensor(rng.standard_normal((shape[0], rank, *tail)) * 0.2, dtype)
        if alpha is not None:
            pairs[f"{prefix}{name}.alpha"] = tensor(alpha + (number % 3 if vary else 0), dtype)
    return pairs


def adapter_from(tensors: dict[str, Tensor]) -> Adapter:
    adapter = read(tensors)
    assert not adapter.problems
    return adapter


def merged(adapter: Adapter, index: ModelIndex, component: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's state with the adapter merged by our formula."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    for placement in resolve(adapter, index).placements:
        if placement.component != component:
            continue
        name = placement.tensor if placement.tensor in state else placement.tensor.removeprefix("text_model.")
        delta = change(placement.factors, state[name] if placement.factors.needs_base() else None)
        start, length = placement.source or (0, delta.shape[0])
        assert not placement.transpose and placement.target is None
        rows = delta[start : start + length]
        if placement.swap:
            rows = torch.cat(rows.chunk(2)[::-1])
        state[name] += rows.reshape(state[name].shape)
    return state


def assert_same_state(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], touched: int) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert touched > 0
