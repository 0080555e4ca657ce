"""Layers of one input share a product in a training step, with the same outputs, gradients, names and parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

pytest.importorskip("diffusers")

from inweave.layers import disabled, inject, lora_layers
from inweave.layers.siblings import SharedSiblings
from inweave.models.fused import joint as fused_joint
from inweave.models.fused.blocks import fuse_blocks, restore_blocks
from inweave.models.quantization import quantize_denoiser
from inweave.models.siblings import stack_siblings
from inweave.ops.linear import autograd
from inweave.ops.quantized import fp8
from inweave.training.adapters.attach import attach_adapters
from inweave.training.adapters.order import side_by_side
from inweave.training.execution.compilation import CompiledBlocks
from inweave.training.memory.checkpointing import apply_checkpointing
from inweave.training.optim.flat import FlatParameters
from inweave.training.optim.rounding import RoundedFactors, sibling_groups
from tests.peers import tiny_models
from tests.unit.training.image_sets import fresh_model, make_set, sample_inputs, task_on


class Net:
    """A tiny SDXL U-Net with LoRAs of rank 8 whose factors are in a flat buffer."""

    def __init__(self, targets: str = r".*(to_[qkv]|to_out\.0)", **options: Any) -> None:
        self.unet = copy.deepcopy(tiny_models.pipeline("sdxl").unet)
        inject(self.unet, 8, targets=targets, **options)
        parameters = {
            f"unet.{module}.{role}": factor
            for module, layer in lora_layers(self.unet).items()
            for role, factor in layer.branch("default").roles().items()
        }
        for number, parameter in enumerate(parameters.values()):
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        self.flat = FlatParameters(side_by_side(parameters))
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.inputs = {
            "sample": numbers(2, 4, 16, 24),
            "timestep": torch.tensor([3, 500]),
            "encoder_hidden_states": numbers(2, 7, self.unet.config.cross_attention_dim),
            "added_cond_kwargs": {"text_embeds": numbers(2, tiny_models.SECOND), "time_ids": numbers(2, 6)},
        }

    def rounded(self) -> RoundedFactors:
        return RoundedFactors(self.flat, {"unet": self.unet}, torch.float32)

    def results(self, context: Any = None) -> list[torch.Tensor]:
        self.flat.zero_grads()
        with context or nullcontext():
            output = self.unet(**self.inputs).sample
            output.square().mean().backward()
        return [output.detach(), self.flat.grads.clone()]


def products(net: Net, context: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each product of a forward pass serves."""
    counts: list[int] = []
    plain = autograd.forward  # type: ignore[attr-defined]

    def forward(x: torch.Tensor, *others: Any) -> Any:
        counts.append(others[2].shape[0] // others[3].shape[1])
        return plain(x, *others)

    monkeypatch.setattr(autograd, "forward", forward)
    net.results(context)
    monkeypatch.setattr(autograd, "forward", plain)
    return counts


@pytest.mark.sample(1)
@pytest.mark.parametrize("shared", [True, False])
def test_outputs_and_gradients_stay(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    names = list(net.unet.state_dict())
    values = {name: value.clone() for name, value in net.unet.state_dict().items()}
    plain = net.results()
    fuse_blocks(net.unet)
    layers = stack_siblings(net.unet)
    blocks = sum(type(module).__name__ == "FusedBasicTransformerBlock" for module in net.unet.modules())
    assert layers == 5 * blocks, "queries, keys and values of self attention, keys and values of cross attention"
    rounded = net.rounded()
    counts = products(net, rounded.active(shared=shared), monkeypatch)
    if shared:
        assert counts.count(3) == blocks and sum(counts) == layers and len(counts) > blocks
    else:
        assert counts == [3] * blocks
    ours = net.results(rounded.active(shared=shared))
    for one, other in zip(ours, plain, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5
    assert all(group.factors is None for group in sibling_groups(net.unet))
    assert products(net, None, monkeypatch) == [], "outside of a step each layer computes for itself"
    assert list(net.unet.state_dict()) == names
    assert all(torch.equal(value, values[name]) for name, value in net.unet.state_dict().items())
    restore_blocks(net.unet)
    assert sibling_groups(net.unet) == []
    again = net.results()
    assert all(torch.equal(one, other) for one, other in zip(again, plain, strict=True))


@pytest.mark.parametrize("shared", [True, False])
def test_disabled_adapters_do_not_act_in_a_joint_product(shared: bool) -> None:
    """As in a step of prior prediction, which needs the base's own prediction."""
    net = Net()
    with torch.no_grad(), disabled(net.unet):
        base = net.unet(**net.inputs).sample
    fuse_blocks(net.unet)
    stack_siblings(net.unet)
    rounded = net.rounded()
    with rounded.active(shared=shared), torch.no_grad():
        adapted = net.unet(**net.inputs).sample
        with disabled(net.unet):
            off = net.unet(**net.inputs).sample
        assert torch.equal(net.unet(**net.inputs).sample, adapted)
    assert float((off - base).norm() / base.norm()) < 1e-5 < float((adapted - base).norm() / base.norm())


def test_nothing_is_stored_twice() -> None:
    net = Net()
    before = {parameter.untyped_storage().data_ptr() for parameter in net.unet.parameters()}
    fuse_blocks(net.unet)
    stack_siblings(net.unet)
    sizes: dict[int, int] = {}
    for parameter in net.unet.parameters():
        storage = parameter.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    assert len(sizes) < len(before)
    own = sum(parameter.nbytes for parameter in net.unet.parameters() if not parameter.requires_grad)
    flat = net.flat.values.nbytes
    assert sum(sizes.values()) == own + flat


def test_a_trained_text_encoder_gets_its_gradient() -> None:
    net = Net()
    text: Any = net.inputs["encoder_hidden_states"].requires_grad_()  # type: ignore[attr-defined]
    net.results()
    expected = text.grad.clone()
    fuse_blocks(net.unet)
    stack_siblings(net.unet)
    text.grad = None
    net.results(net.rounded().active(shared=True))
    assert float((text.grad - expected).norm() / expected.norm()) < 1e-5


def test_recomputed_blocks_share_the_products_of_one_block() -> None:
    net = Net()
    fuse_blocks(net.unet)
    stack_siblings(net.unet)
    rounded = net.rounded()
    plain = net.results(rounded.active(shared=False))
    for mode in ("selective", "full"):
        apply_checkpointing({"unet": net.unet}, mode, random=False)
        for one, other in zip(net.results(rounded.active(shared=False)), plain, strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-6


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "change",
    [
        "dropout",
        "hidden_dropout",
        "inactive",
        "strength",
        "weight",
        "hook",
        "hook of the layer",
        "missing",
        "not adjacent",
    ],
)
def test_layers_that_differ_compute_for_themselves(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(
        r".*(to_[qv]|to_out\.0)" if change == "missing" else r".*(to_[qkv]|to_out\.0)",
        **({change: 0.5} if change.endswith("dropout") else {}),
    )
    if change == "not adjacent":
        net.flat = FlatParameters(dict(sorted(net.flat.parameters.items())))
    layers = list(lora_layers(net.unet).values())
    fuse_blocks(net.unet)
    stack_siblings(net.unet)
    for layer in layers:
        if change == "inactive" and layer.names[0].endswith("to_k"):
            layer.activate([])
        elif change == "weight":
            layer.weight.data = layer.weight.data.clone()
        elif change == "hook":
            layer.base.register_forward_hook(lambda *_: None)
        elif change == "hook of the layer":
            layer.register_forward_hook(lambda *_: None)
        elif change == "strength" and layer.names[0].endswith("to_k"):
            layer.set_strength("default", 0.5)
    rounded = net.rounded()
    net.unet.eval()
    with rounded.active(shared=True):  # a validation that comes before the first step, without dropout
        pass
    net.unet.train()
    assert products(net, rounded.active(shared=True), monkeypatch) == []


def test_adapters_that_change_between_steps_act_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    layers = list(lora_layers(net.unet).values())
    expected: list[list[torch.Tensor]] = []
    states: list[tuple[Any, bool]] = [
        (lambda layer: layer.set_strength("default", -0.5), True),
        (lambda layer: layer.enable(not layer.names[0].endswith("to_k")), False),
        (lambda layer: layer.enable(True), True),
        (lambda layer: layer.set_strength("default", 2.0 if layer.names[0].endswith("to_v") else 1.0), False),
    ]

    def visit() -> Iterator[bool]:
        for change, together in states:
            for layer in layers:
                change(layer)
            yield together

    expected = [net.results() for _ in visit()]
    for layer in layers:
        layer.set_strength("default", 1.0)
    fuse_blocks(net.unet)
    stack_siblings(net.unet)
    rounded = net.rounded()
    net.results(rounded.active(shared=True))
    for plain, together in zip(expected, visit(), strict=True):
        assert bool(products(net, rounded.active(shared=True), monkeypatch)) == together
        for one, other in zip(net.results(rounded.active(shared=True)), plain, strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-5


def test_a_text_that_the_network_projects_first_is_not_shared() -> None:
    """As Kolors has it: blocks read another tensor, of another width, than the network gets."""
    net = Net()
    net.unet.register_to_config(encoder_hid_dim=12, encoder_hid_dim_type="text_proj")
    net.unet.encoder_hid_proj = torch.nn.Linear(12, net.unet.config.cross_attention_dim).requires_grad_(False)
    net.inputs["encoder_hidden_states"] = torch.randn(2, 7, 12)
    plain = net.results()
    fuse_blocks(net.unet)
    assert stack_siblings(net.unet) > 0
    for one, other in zip(net.results(net.rounded().active(shared=True)), plain, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5


def test_another_text_is_not_confused_with_the_shared_one() -> None:
    net = Net()
    fuse_blocks(net.unet)
    stack_siblings(net.unet)
    group = next(group for group in sibling_groups(net.unet) if isinstance(group, SharedSiblings))
    text: Any = net.inputs["encoder_hidden_states"]
    with net.rounded().active(shared=True):
        group.share(text)
        assert group.output(text.clone(), 0) is None
        first = group.output(text, 0)
        assert first is not None
        torch.testing.assert_close(first, group.layers[0](text))
        group.forget()
        assert group.output(text, 0) is None


def test_compiled_blocks_share_products_and_one_compilation() -> None:
    net = Net()
    fuse_blocks(net.unet)
    stack_siblings(net.unet)
    rounded = net.rounded()
    plain = net.results(rounded.active(shared=False))
    blocks = CompiledBlocks({"unet": net.unet}, backend="eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    blocks.start()
    ours = net.results(rounded.active(shared=False))
    for one, other in zip(ours, plain, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-5
    versions = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert versions <= 3 < len(blocks.blocks), "two sizes of images, and the first block, whose input has no gradient"


@pytest.mark.parametrize("variant", ["sd3", "flux1-dev"])
def test_streams_of_text_and_image_have_a_product_each(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_on(make_set(tmp_path / "set"), model=fresh_model(variant), targets="attention", rank=8)
    trained = attach_adapters(task.networks, task.config)
    for number, parameter in enumerate(trained.parameters.values()):
        parameter.data = 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    flat = FlatParameters(trained.parameters, trained.multipliers)
    inputs = sample_inputs(task)

    def results(context: Any) -> list[torch.Tensor]:
        flat.zero_grads()
        with context:
            loss = task.loss(inputs)
            loss.backward()
        return [loss.detach(), flat.grads.clone()]

    plain = results(nullcontext())
    denoiser = task.networks["unet"]
    fuse_blocks(denoiser)
    layers = stack_siblings(denoiser)
    groups = sibling_groups(denoiser)
    attentions = [module for module in denoiser.modules() if type(module).__name__.startswith("Fused")]
    assert layers == 3 * len(groups) > 0 and {group.count for group in groups} == {3}
    assert len(groups) > sum("Attention" in type(module).__name__ for module in attentions), "text has its own"
    counts: list[int] = []
    plain_forward = autograd.forward  # type: ignore[attr-defined]

    def forward(x: torch.Tensor, *others: Any) -> Any:
        counts.append(others[2].shape[0] // others[3].shape[1])
        return plain_forward(x, *others)

    monkeypatch.setattr(autograd, "forward", forward)
    joins: list[int] = []
    plain_join = fused_joint.join_projections  # type: ignore[attr-defined]
    monkeypatch.setattr(
        fused_joint,
        "join_projections",
        lambda parts, **how: joins.append(len(parts)) or plain_join(parts, **how),  # type: ignore[func-returns-value]
    )
    ours = results(RoundedFactors(flat, task.networks, torch.float32).active(shared=True))
    assert counts == [3] * len(groups) and sum(joins) == len(groups), "heads are read from the products"
    for one, other in zip(ours, plain, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-4


def test_layers_in_8_bits_are_quantized_together_and_share_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "SMALLEST_SIDE", 16)
    net = Net()
    fuse_blocks(net.unet)
    text = quantize_denoiser(
        SimpleNamespace(denoiser=net.unet, release_weaver=lambda: None), "fp8", torch.device("cpu")
    )
    assert "8 bits" in text
    plain = net.results()
    blocks = sum(type(module).__name__ == "FusedBasicTransformerBlock" for module in net.unet.modules())
    assert stack_siblings(net.unet) == 5 * blocks, "layers of the text are not quantized"
    rounded = net.rounded()
    assert products(net, rounded.active(shared=False), monkeypatch) == [3] * blocks
    output, grads = net.results(rounded.active(shared=False))
    # where a product's last place depends on its width (MKL on some processors), a later layer rounds some numbers to
    # the neighboring 8-bit value; 1e-5 elsewhere
    assert float((output - plain[0]).norm() / plain[0].norm()) < 0.05, "the same products"
    gap = float((grads - plain[1]).norm() / plain[1].norm())
    assert 1e-4 < gap < 0.1, "gradients are quantized with one scale for all three"
    first = next(group for group in sibling_groups(net.unet) if isinstance(group.weight, fp8.Fp8Weight))
    layer = first.layers[1].base
    layer._buffers["rows"] = layer._buffers["rows"].clone()
    assert net.rounded()._of_group(first) is None, "moved since"
