"""Fused blocks of Flux and Stable Diffusion 3 compute what diffusers' own do, eagerly, compiled and recomputed."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

pytest.importorskip("diffusers")

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from inweave.layers import inject, lora_layers
from inweave.models.fused.blocks import fuse_blocks, restore_blocks
from inweave.models.fused.joint import FusedFluxAttention, FusedJointAttention, _normalized
from inweave.training.memory.checkpointing import apply_checkpointing
from tests.peers import tiny_models

CPU = torch.device("cpu")
VARIANTS = ["flux1-dev", "sd3-medium", "sd3.5-medium"]
TARGETS = r".*(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out|proj_mlp|net\.2)"


def network(
    variant: str, device: torch.device = CPU, dtype: torch.dtype = torch.float64, targets: str = TARGETS
) -> tuple[Any, dict[str, Any]]:
    """A tiny transformer with LoRA on both streams, and inputs for two examples."""
    transformer = copy.deepcopy(tiny_models.pipeline(variant).transformer)
    if variant == "sd3.5-medium":
        assert transformer.config.qk_norm == "rms_norm" and transformer.config.dual_attention_layers
    inject(transformer, 2, targets=targets)
    torch.manual_seed(0)
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    config = transformer.config
    if variant.startswith("flux"):
        rows, columns, words = 4, 6, 7
        ids = torch.zeros(rows, columns, 3)
        ids[..., 1], ids[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)
        inputs = {
            "hidden_states": torch.randn(2, rows * columns, config.in_channels),
            "encoder_hidden_states": torch.randn(2, words, config.joint_attention_dim),
            "pooled_projections": torch.randn(2, config.pooled_projection_dim),
            "timestep": torch.tensor([0.3, 0.9]),
            "guidance": torch.tensor([1.0, 3.5]),
            "img_ids": ids.view(-1, 3),
            "txt_ids": torch.zeros(words, 3),
        }
    else:
        inputs = {
            "hidden_states": torch.randn(2, config.in_channels, 8, 12),
            "encoder_hidden_states": torch.randn(2, 7, config.joint_attention_dim),
            "pooled_projections": torch.randn(2, config.pooled_projection_dim),
            "timestep": torch.tensor([3.0, 500.0]),
        }
    return transformer.to(device, dtype), inputs


def gradients(transformer: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The output and the gradients of the adapters, in the network's dtype and on its device."""
    transformer.zero_grad()
    output = transformer(
        **{name: each.to(transformer.device, transformer.dtype) for name, each in inputs.items()}
    ).sample
    output.float().square().mean().backward()
    grads = {name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None}
    return {"output": output.detach()} | grads


def largest_gap(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys() and len(one) > 20
    scale = max(float(each.norm()) for name, each in two.items() if name != "output")
    return max(float((one[name] - two[name]).norm()) / max(float(two[name].norm()), 1e-6 * scale) for name in two)


def kinds_of(transformer: nn.Module) -> set[str]:
    return {type(module).__name__ for module in transformer.modules()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients_stay(variant: str) -> None:
    transformer, inputs = network(variant)
    names, adapted = list(transformer.state_dict()), list(lora_layers(transformer))
    plain = gradients(transformer, inputs)
    count = fuse_blocks(transformer)
    fused = "FusedFluxAttention" if variant.startswith("flux") else "FusedJointAttention"
    assert fused in kinds_of(transformer) and not kinds_of(transformer) & {"Attention", "FluxAttention"}
    assert fuse_blocks(transformer) == 0
    assert list(transformer.state_dict()) == names and list(lora_layers(transformer)) == adapted
    assert largest_gap(gradients(transformer, inputs), plain) < 1e-5  # diffusers rotates in float32
    assert restore_blocks(transformer) == count
    restored = gradients(transformer, inputs)
    assert all(torch.equal(restored[name], plain[name]) for name in plain)


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", ["flux1-dev", "sd3.5-medium"])
def test_compiled_and_recomputed_blocks_compute_the_same(variant: str) -> None:
    transformer, inputs = network(variant)
    fuse_blocks(transformer)
    plain = gradients(transformer, inputs)
    for mode in ("selective", "full"):
        again = copy.deepcopy(transformer)
        apply_checkpointing({"unet": again}, mode, random=False)
        assert largest_gap(gradients(again, inputs), plain) < 1e-12
    blocks = [transformer.transformer_blocks[0], *getattr(transformer, "single_transformer_blocks", [])[:1]]
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    assert largest_gap(gradients(transformer, inputs), plain) < 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_trained_norms_keep_their_gradients(variant: str) -> None:
    if variant == "sd3-medium":
        pytest.skip("has no norms of queries and keys")
    transformer, inputs = network(variant)
    transformer.transformer_blocks[0].attn.norm_q.requires_grad_(True)
    plain = gradients(transformer, inputs)
    fuse_blocks(transformer)
    fused = gradients(transformer, inputs)
    assert "transformer_blocks.0.attn.norm_q.weight" in fused
    assert largest_gap(fused, plain) < 1e-5


@pytest.mark.parametrize("variant", ["flux1-dev", "sd3.5-medium"])
def test_norms_with_hooks_are_called(variant: str) -> None:
    transformer, inputs = network(variant)
    for name, module in transformer.named_modules():
        if name.endswith(("norm_q", "norm_added_k")):
            module.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    plain = gradients(transformer, inputs)
    fuse_blocks(transformer)
    assert largest_gap(gradients(transformer, inputs), plain) < 1e-5


def test_norms_of_another_dtype_are_called_themselves() -> None:
    """diffusers' result has the wider dtype, torch's that of the input."""
    from diffusers.models.normalization import RMSNorm

    parts = [torch.randn(1, rows, 3, 8, dtype=torch.bfloat16) for rows in (2, 5)]
    for kind, dtype in ((RMSNorm, torch.float32), (nn.RMSNorm, torch.bfloat16)):
        norms = [kind(8, eps=1e-6) for _ in range(2)]
        joined = _normalized(parts, norms, None)
        assert joined.dtype == dtype
        assert torch.equal(joined, torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], 1))


def test_processors_of_their_own_stay_as_they_are() -> None:
    from diffusers.models.attention_processor import JointAttnProcessor2_0
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    for variant, kind in (("flux1-dev", FluxAttnProcessor), ("sd3.5-medium", JointAttnProcessor2_0)):

        class Halved(kind):  # type: ignore[misc, valid-type]
            def __call__(self, attention: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
                return super().__call__(attention, 0.5 * hidden_states, *args, **kwargs)

        transformer, inputs = network(variant)
        before, after = (transformer.transformer_blocks[number].attn for number in range(2))
        before.set_processor(Halved())
        fuse_blocks(transformer)
        after.set_processor(Halved())
        fused = gradients(transformer, inputs)
        restore_blocks(transformer)
        assert largest_gap(fused, gradients(transformer, inputs)) < 1e-5


def test_norms_that_differ_are_not_fused() -> None:
    for variant, kind in (("flux1-dev", FusedFluxAttention), ("sd3.5-medium", FusedJointAttention)):
        transformer, inputs = network(variant)
        attention = transformer.transformer_blocks[0].attn
        attention.norm_k.eps = 0.1
        plain = gradients(transformer, inputs)
        fuse_blocks(transformer)
        assert not isinstance(attention, kind) and kind.__name__ in kinds_of(transformer)
        assert largest_gap(gradients(transformer, inputs), plain) < 1e-5


def test_a_compiled_single_block_leaves_no_gradients_of_slices_to_autograd() -> None:
    transformer, _ = network("flux1-dev", dtype=torch.float32)
    block, width = transformer.single_transformer_blocks[0], transformer.inner_dim
    image, text = (torch.randn(2, rows, width, requires_grad=True) for rows in (6, 3))
    angles = torch.randn(9, transformer.config.attention_head_dim)
    arguments = (image, text, torch.randn(2, width), (angles.cos(), angles.sin()))
    fuse_blocks(transformer)
    plain = block(*arguments)
    block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    results = block(*arguments)
    assert [type(result.grad_fn).__name__ for result in plain] == ["SliceBackward0"] * 2
    assert [type(result.grad_fn).__name__ for result in results] == ["CompiledFunctionBackward"] * 2
    for one, two in zip(plain, results, strict=True):
        torch.testing.assert_close(one, two)
    grads = [torch.autograd.grad([each.sum() for each in pair], [image, text]) for pair in (plain, results)]
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two)


class Operations(TorchDispatchMode):
    """Counts operations by name, with the size of the last axis of the first result."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        first = output[0] if isinstance(output, list | tuple) else output
        if isinstance(first, torch.Tensor) and first.dim():
            self.counts[operation.__name__.partition(".")[0], first.shape[-1]] += 1
        return output

    def total(self, name: str) -> int:
        return sum(count for (each, _), count in self.counts.items() if each == name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_gelu_is_the_operator_and_nothing_else_writes_the_wide_matrix(variant: str) -> None:
    from diffusers.models.activations import GELU

    transformer, inputs = network(variant)
    count = sum(isinstance(module, GELU | nn.GELU) for module in transformer.modules())
    single = len(getattr(transformer, "single_transformer_blocks", ()))
    wide = 5 * transformer.inner_dim  # attention and GELU side by side
    fuse_blocks(transformer)
    with Operations() as seen:
        gradients(transformer, inputs)
    assert count > 2 and seen.total("tanh_gelu") == seen.total("tanh_gelu_backward") == count
    assert seen.total("gelu") == seen.total("gelu_backward") == seen.counts["cat", wide] == 0
    assert seen.counts["tanh_gelu", wide] == single


def test_a_gelu_with_hooks_is_called() -> None:
    transformer, inputs = network("flux1-dev")
    for block in transformer.single_transformer_blocks:
        block.act_mlp.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    plain = gradients(transformer, inputs)
    fuse_blocks(transformer)
    assert largest_gap(gradients(transformer, inputs), plain) < 1e-5


def test_another_gelu_is_not_fused() -> None:
    transformer, inputs = network("flux1-dev")
    transformer.transformer_blocks[0].ff.net[0].approximate = "none"
    transformer.single_transformer_blocks[0].act_mlp = nn.GELU()
    plain = gradients(transformer, inputs)
    fuse_blocks(transformer)
    assert largest_gap(gradients(transformer, inputs), plain) < 1e-5
    assert {"FluxSingleTransformerBlock", "FusedFluxSingleTransformerBlock", "FusedGELU"} <= kinds_of(transformer)


def test_a_gelu_that_becomes_another_after_fusing() -> None:
    transformer, inputs = network("flux1-dev")
    original = copy.deepcopy(transformer)
    fuse_blocks(transformer)
    for each in (original, transformer):
        each.transformer_blocks[0].ff.net[0].approximate = "none"
        each.single_transformer_blocks[0].act_mlp.approximate = "none"
        each.single_transformer_blocks[1].act_mlp = nn.SiLU()
    assert largest_gap(gradients(transformer, inputs), gradients(original, inputs)) < 1e-5


def test_a_stream_in_float16_stays_finite() -> None:
    transformer, _ = network("flux1-dev", dtype=torch.float16)
    block, width = transformer.single_transformer_blocks[0], transformer.inner_dim
    image, text = (torch.full((1, rows, width), 65504.0, dtype=torch.float16) for rows in (6, 3))
    image[:, ::2] = -image[:, ::2]
    block.proj_out.bias.data.fill_(100.0)
    arguments = image, text, torch.ones(1, width, dtype=torch.float16)
    plain = block(*arguments)
    fuse_blocks(transformer)
    for one, two in zip(block(*arguments), plain, strict=True):
        assert float(one.detach().abs().max()) == 65504
        torch.testing.assert_close(one, two)
