"""Fused blocks compute what diffusers' own do, with the same names and adapters, and store less."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

pytest.importorskip("diffusers")

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from inweave.layers import fused, inject, lora_layers
from inweave.layers.fused_conv import FusedConv
from inweave.models.fused.blocks import FusedResnetBlock2D, fuse_blocks, restore_blocks
from inweave.ops.conv import frozen_conv2d
from inweave.training.adapters.attach import attach_adapters
from inweave.training.memory.checkpointing import apply_checkpointing
from tests.peers import tiny_models
from tests.unit.training.image_sets import fresh_model, make_set, sample_inputs, task_on

CPU = torch.device("cpu")


def network(variant: str, device: torch.device = CPU, dtype: torch.dtype = torch.float64) -> tuple[Any, dict[str, Any]]:
    """A tiny U-Net with LoRA on linear layers and convolutions, and inputs for it."""
    unet = copy.deepcopy(tiny_models.pipeline(variant).unet)
    inject(unet, 2, targets=r".*(to_[qkv]|to_out\.0|ff\.net\.0\.proj|net\.2|proj_in|time_emb_proj|resnets\.1\.conv1)")
    torch.manual_seed(0)
    for parameter in unet.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    inputs: dict[str, Any] = {
        "sample": torch.randn(2, 4, 16, 24),
        "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": torch.randn(2, 7, unet.config.cross_attention_dim),
    }
    if variant == "sdxl":
        inputs["added_cond_kwargs"] = {"text_embeds": torch.randn(2, tiny_models.SECOND), "time_ids": torch.rand(2, 6)}
    return unet.to(device, dtype), inputs


def gradients(unet: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The output and the gradients of the adapters, in the network's dtype and on its device."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: moved(each) for name, each in value.items()}
        return value.to(unet.device, unet.dtype if value.is_floating_point() else None)

    unet.zero_grad()
    output = unet(**moved(inputs)).sample
    output.float().square().mean().backward()
    grads = {name: p.grad.clone() for name, p in unet.named_parameters() if p.grad is not None}
    return {"output": output.detach()} | grads


def largest_gap(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys() and len(one) > 20
    return max(float((one[name] - two[name]).norm() / two[name].norm()) for name in two)


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", ["sd1.5", "sdxl"])
def test_outputs_and_gradients_stay(variant: str) -> None:
    unet, inputs = network(variant)
    names, adapted = list(unet.state_dict()), list(lora_layers(unet))
    plain = gradients(unet, inputs)
    count = fuse_blocks(unet)
    assert count > 100 and fuse_blocks(unet) == 0
    kinds = {type(module).__name__ for module in unet.modules()}
    assert kinds >= {
        "FusedGroupNorm", "FusedResnetBlock2D", "FusedTransformer2DModel", "FusedBasicTransformerBlock", "FusedGEGLU",
        "FrozenConv2d", "FusedAttention",
    }  # fmt: skip
    assert not kinds & {
        "GroupNorm",
        "ResnetBlock2D",
        "Transformer2DModel",
        "BasicTransformerBlock",
        "GEGLU",
        "Conv2d",
        "Attention",
    }
    assert list(unet.state_dict()) == names and list(lora_layers(unet)) == adapted
    fused = gradients(unet, inputs)
    assert largest_gap(fused, plain) < 1e-6  # statistics of time steps and losses are float32
    assert fused["output"].is_contiguous(memory_format=torch.channels_last)
    assert restore_blocks(unet) == count
    restored = gradients(unet, inputs)
    assert all(torch.equal(restored[name], plain[name]) for name in plain)


@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.LayerNorm, nn.SiLU, nn.Conv2d])
def test_hooks_on_what_is_fused_with_its_neighbors_are_called(kind: type[nn.Module]) -> None:
    unet, inputs = network("sdxl")
    before = gradients(unet, inputs)
    for module in unet.modules():
        if isinstance(module, kind):
            module.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    plain = gradients(unet, inputs)
    assert largest_gap(plain, before) > 0.1
    fuse_blocks(unet)
    assert largest_gap(gradients(unet, inputs), plain) < 1e-6


@pytest.mark.parametrize("mode", ["off", "selective", "full"])
def test_layers_and_their_loras_as_one_operation_change_no_gradient(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, convolutions too; selective checkpointing stores their outputs, so they are computed separately."""
    unet, inputs = network("sd1.5")
    fuse_blocks(unet)
    plain = gradients(unet, inputs)
    monkeypatch.setattr(fused, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(fused, "DTYPES", (*fused.DTYPES, torch.float64))
    calls: list[bool] = []
    output = FusedConv.output

    def amount(self: FusedConv, *arguments: Any) -> Any:
        result = output(self, *arguments)
        calls.append(result is not None)
        return result

    monkeypatch.setattr(FusedConv, "output", amount)
    apply_checkpointing({"unet": unet}, mode, random=False)
    assert largest_gap(gradients(unet, inputs), plain) < 1e-9
    assert len(calls) > 3 and (any(calls) if mode == "selective" else all(calls))


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradient_checkpointing_changes_no_gradient(mode: str) -> None:
    unet, inputs = network("sdxl")
    fuse_blocks(unet)
    plain = gradients(unet, inputs)
    apply_checkpointing({"unet": unet}, mode, random=False)
    assert largest_gap(gradients(unet, inputs), plain) < 1e-12


@pytest.mark.parametrize("batch", [1, 2])
def test_convolutions_see_channels_last_images_forward_and_backward(batch: int) -> None:
    """Of a batch of one the first stride means nothing, and torch takes some of them for channels-first."""
    _, inputs = network("sdxl")
    unet = copy.deepcopy(tiny_models.pipeline("sdxl").unet)
    inject(unet, 2, targets=r".*to_[qkv]")
    fuse_blocks(unet)
    inputs = {name: first_examples(value, batch) for name, value in inputs.items()}
    strides: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            if operation is torch.ops.aten.convolution.default and (image := arguments[0]).shape[1] > 4:
                strides.append(image.stride())
            return operation(*arguments, **(keywords or {}))

    with Watch():
        gradients(unet, inputs)
    assert len(strides) > 20
    for examples, channels, rows, columns in strides:  # a slice of channels is one, too
        assert channels == 1 and examples > rows > columns > 1


def first_examples(value: Any, batch: int) -> Any:
    if isinstance(value, dict):
        return {name: first_examples(part, batch) for name, part in value.items()}
    return value[:batch]


def test_less_is_stored() -> None:
    """Of a resnet block without adapters: the inputs of its two norms, and nothing of image size besides."""
    unet, _ = network("sdxl")
    fuse_blocks(unet)
    block = unet.mid_block.resnets[0]
    assert isinstance(block, FusedResnetBlock2D)
    x = torch.randn(2, 16, 8, 8, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    temb = torch.randn(2, block.time_emb_proj.in_features, dtype=torch.float64)
    stored: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == x.shape or (tensor.dim() == 3 and tensor.numel() == x.numel()):
            stored[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, temb)
    assert len(stored) == 2 and x.data_ptr() in stored


def test_no_weight_is_held_twice() -> None:
    """A weight in another layout has memory of its own, and nothing else holds on to where it was."""
    unet, _ = network("sdxl")

    def storage_bytes() -> int:
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in unet.parameters()}
        return sum(storages.values())

    size = sum(p.numel() * p.itemsize for p in unet.parameters())
    for change in (fuse_blocks, restore_blocks):
        change(unet)
        assert storage_bytes() == size


def test_what_is_not_understood_stays_as_it_is() -> None:
    unet, inputs = network("sd1.5")
    odd = unet.down_blocks[0].resnets[0]
    odd.nonlinearity = nn.Mish()
    custom = unet.mid_block.resnets[0]
    custom.__class__ = type("CustomBlock", (type(custom),), {})
    unet.mid_block.resnets[1].output_scale_factor = 2.0
    plain = gradients(unet, inputs)
    fuse_blocks(unet)
    for block in (odd, custom, unet.mid_block.resnets[1]):
        assert not isinstance(block, FusedResnetBlock2D)
    assert largest_gap(gradients(unet, inputs), plain) < 1e-6


def test_trained_norms_and_convolutions_keep_their_gradients() -> None:
    unet, inputs = network("sd1.5")
    block = unet.mid_block.resnets[0]
    for trained in (block.norm1, block.conv2, unet.mid_block.attentions[0].transformer_blocks[0].norm2):
        trained.requires_grad_(True)
    plain = gradients(unet, inputs)
    fuse_blocks(unet)
    assert largest_gap(gradients(unet, inputs), plain) < 1e-6
    assert block.conv2.weight.grad is not None


@pytest.mark.parametrize(
    "stride,padding,dilation,groups,size", [(1, 1, 1, 1, (8, 9)), (2, 1, 1, 2, (8, 9)), (2, 0, 2, 1, (11, 12)),
                                             (3, 2, 1, 4, (7, 10))]
)  # fmt: skip
def test_a_frozen_convolution_has_torch_s_gradient(
    stride: int, padding: int, dilation: int, groups: int, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, *size, dtype=torch.float64, requires_grad=True)
    weight, bias = torch.randn(4, 8 // groups, 3, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    pairs: Any = [(number, number) for number in (stride, padding, dilation)]
    ours = frozen_conv2d(x, weight, bias, *pairs, groups)  # type: ignore[call-arg]
    theirs = nn.functional.conv2d(x, weight, bias, *pairs, groups)  # type: ignore[call-overload]
    assert torch.equal(ours, theirs)
    one, two = (torch.autograd.grad(y.square().sum(), x)[0] for y in (ours, theirs))
    assert torch.allclose(one, two, rtol=1e-12, atol=1e-12)


def test_attention_with_a_mask_or_a_processor_of_its_own_stays_as_it_is() -> None:
    from diffusers.models.attention_processor import AttnProcessor

    unet, inputs = network("sd1.5")
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]]).bool()
    plain = gradients(unet, inputs | {"encoder_attention_mask": mask})
    other = copy.deepcopy(unet)
    fuse_blocks(unet)
    assert largest_gap(gradients(unet, inputs | {"encoder_attention_mask": mask}), plain) < 1e-6
    assert largest_gap(gradients(unet, inputs), plain) > 1e-3, "the mask matters"
    other.set_attn_processor(AttnProcessor())
    plain = gradients(other, inputs)
    fuse_blocks(other)
    assert largest_gap(gradients(other, inputs), plain) < 1e-6


def test_compiled_blocks_compute_the_same() -> None:
    unet, inputs = network("sdxl")
    fuse_blocks(unet)
    plain = gradients(unet, inputs)
    block = unet.mid_block.attentions[0].transformer_blocks[0]
    block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    unet.mid_block.resnets[0].compile(backend="aot_eager", fullgraph=True, dynamic=False)
    assert largest_gap(gradients(unet, inputs), plain) < 1e-6


@pytest.mark.parametrize("variant", ["sd3.5-medium", "z-image-turbo", "qwen-image", "flux1-dev"])
def test_transformers_train_as_before(variant: str, tmp_path: Path) -> None:
    """A loss of the training task: norms of queries and keys are fused, in place of diffusers' own class."""
    task = task_on(make_set(tmp_path / "set"), model=fresh_model(variant), targets="attention", rank=2)
    trained = attach_adapters(task.networks, task.config)
    for number, parameter in enumerate(trained.parameters.values()):
        parameter.data = 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    inputs = sample_inputs(task)

    def results() -> dict[str, torch.Tensor]:
        for parameter in trained.parameters.values():
            parameter.grad = None
        loss = task.loss(inputs)
        loss.backward()
        grads = {name: p.grad for name, p in trained.parameters.items() if p.grad is not None}
        return {"loss": loss.detach()} | grads

    plain = results()
    changed = sum(fuse_blocks(module) for module in task.networks.values())
    kinds = {type(module).__name__ for module in task.networks["unet"].modules()}
    fused = {
        "z-image-turbo": "FusedZImageAttention",
        "qwen-image": "FusedQwenAttention",
        "flux1-dev": "FusedFluxAttention",
    }
    assert changed and fused.get(variant, "FusedJointAttention") in kinds and "Attention" not in kinds
    again = results()
    scale = max(float(grad.norm()) for name, grad in plain.items() if name != "loss")
    assert again.keys() == plain.keys() and float(again["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-5)
    assert max(float((again[name] - plain[name]).norm()) for name in plain if name != "loss") < 1e-5 * scale
