"""Trained differences of normalization layers, against lycoris-lora."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from inweave import activate, attach, collect, disabled, eject, inject, merge, set_strength, unmerge
from inweave.errors import TargetError
from inweave.layers import lora_layers
from inweave.layers.norms import NormLayer, inject_norms, norm_names

NORMS = ["tokens", "image"]


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.tokens = nn.Linear(8, 8), nn.LayerNorm(8)
        self.image, self.plain = nn.GroupNorm(2, 8), nn.LayerNorm(8, elementwise_affine=False)
        self.root = nn.RMSNorm(8)
        for norm in (self.tokens, self.image):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.image(self.root(self.plain(self.tokens(self.linear(x)))).transpose(1, 2))


def adapted(model: nn.Module | None = None, seed: int = 1) -> Any:
    model = model or Net()
    inject(model, 4, 4.0, ["linear"])
    inject_norms(model, norm_names(model), "default")
    torch.manual_seed(seed)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            for parameter in layer.branch("default").parameters():
                parameter.normal_()
    return model


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return numbers(9, 3, 5, 8).to(dtype)


def stored(path: Path, **values: Tensor) -> Path:
    save_file({name.replace("__", "."): value for name, value in values.items()}, path)
    return path


def test_fresh_ones_change_nothing_and_are_trained() -> None:
    model, x = Net(), batch()
    inject(model, 4, 4.0, ["linear"])
    inject_norms(model, norm_names(model), "default")
    assert norm_names(model) == NORMS == [name for name, each in lora_layers(model).items() if type(each) is NormLayer]
    assert torch.equal(model(x), Net()(x))
    model(x).square().sum().backward()
    trained = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    norms = {f"{norm}.adapters.default.{leaf}" for norm in NORMS for leaf in ("w_norm", "b_norm")}
    assert norms < set(trained) and len(trained) == 6
    assert all(trained[name].abs().min() > 0 for name in norms)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("strength", [1.0, -0.5])
def test_output_and_gradients_are_those_of_lycoris(name: str, strength: float) -> None:
    norms = pytest.importorskip("lycoris.modules.norms")
    ours, base = adapted(), Net()
    set_strength(ours, "default", strength)
    branch = ours.get_submodule(name).branch("default")
    theirs = norms.NormModule(name, base.get_submodule(name), strength)
    with torch.no_grad():
        theirs.w_norm.copy_(branch.w_norm)
        theirs.b_norm.copy_(branch.b_norm)
    x, weights = numbers(3, 2, 8, 8), numbers(4, 2, 8, 8)
    own, other = ours.get_submodule(name)(x), theirs(x)
    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    (own * weights).sum().backward()
    (other * weights).sum().backward()
    torch.testing.assert_close(branch.w_norm.grad, theirs.w_norm.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(branch.b_norm.grad, theirs.b_norm.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("further", [False, True])
def test_what_is_collected_is_attached_with_the_same_output(further: bool) -> None:
    model, again, x = adapted(), Net(), batch()
    attach(again, collect(model), trainable=further)
    torch.testing.assert_close(again(x), model(x), rtol=1e-4, atol=1e-4)
    trained = [name for name, each in again.named_parameters() if each.requires_grad]
    assert len(trained) == (6 if further else 0)
    one, two = collect(model), collect(again)
    assert [entry.ref.name for entry in one] == [entry.ref.name for entry in two]
    for mine, other in zip(one, two, strict=True):
        assert (mine.param, mine.factors.tensors()) == (other.param, other.factors.tensors())


def test_one_value_of_a_file_is_enough(tmp_path: Path) -> None:
    again = Net()
    attach(again, stored(tmp_path / "a.safetensors", lora_unet_tokens__b_norm=numbers(1, 8)), trainable=True)
    branch = again.tokens.branch("default")
    assert not branch.w_norm.any() and torch.equal(branch.b_norm, numbers(1, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_gives_the_same_output_and_unmerging_the_bits(dtype: torch.dtype) -> None:
    model, x = adapted(Net(dtype)), batch(dtype)
    before, base = model(x), {name: each.clone() for name, each in model.named_parameters()}
    merge(model)
    assert not torch.equal(model.tokens.weight, base["tokens.weight"])
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(model(x), before, rtol=tolerance, atol=tolerance)
    unmerge(model)
    assert torch.equal(model(x), before)
    assert all(torch.equal(each, base[name]) for name, each in model.named_parameters())
    merge(model)
    merged = model(x)
    eject(model, keep_merged=True)
    assert type(model.tokens) is nn.LayerNorm and torch.equal(model(x), merged)


def test_they_are_switched_with_their_adapter() -> None:
    model, x = adapted(), batch()
    on, base = model(x), Net()(x)
    with disabled(model):
        assert torch.equal(model(x), base)
    activate(model, [])
    assert torch.equal(model(x), base)
    activate(model, {"default": 1.0})
    assert torch.equal(model(x), on)
    eject(model)
    assert type(model.image) is nn.GroupNorm and torch.equal(model(x), base)


def test_factors_are_refused_on_a_norm() -> None:
    model = adapted()
    with pytest.raises(TargetError, match="LayerNorm is not a layer that takes LoRA"):
        inject(model, 4, targets=["tokens"], name="other")
    inject(model, 4, targets="all-linear", name="other")
    assert model.linear.adapters.keys() == {"default", "other"} and model.tokens.adapters.keys() == {"default"}


def test_norms_without_such_a_weight_are_refused() -> None:
    model = Net()
    inject(model, 4, targets=["linear"])
    for name in ("plain", "root"):
        with pytest.raises(TargetError, match=f"{name}: differences are those of LayerNorm and GroupNorm"):
            inject_norms(model, [name], "default")
    model.tokens.weight = model.image.weight
    with pytest.raises(TargetError, match="its weight is also that of"):
        inject_norms(model, ["tokens"], "default")


def test_channels_last_images_without_a_gradient_are_normalized() -> None:
    model = adapted()
    x = numbers(3, 2, 8, 4, 4)
    expected = model.image(x)
    actual = model.image(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(actual, expected)
    actual.square().sum().backward()
    assert model.image.branch("default").w_norm.grad.any()


def test_the_torch_encoder_calls_its_norms() -> None:
    model = nn.ModuleDict({"encoder": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)}).eval()
    inject(model, 4, targets=["encoder.linear1"])
    inject_norms(model, norm_names(model), "default")
    x = batch()
    before = model["encoder"](x)
    with torch.no_grad():
        model["encoder"].norm1.branch("default").w_norm.normal_()
        assert not torch.allclose(model["encoder"](x), before)


def test_other_values_of_a_file_stay_whole(tmp_path: Path) -> None:
    model, file = Net(), {"lora_unet_tokens__w_norm": numbers(1, 8), "lora_unet_linear__diff": numbers(2, 8, 8)}
    attach(model, stored(tmp_path / "a.safetensors", **file, lora_unet_root__w_norm=numbers(3, 8)), trainable=True)
    assert [type(each) for each in (model.tokens, model.linear, model.root)] == [NormLayer, nn.Linear, nn.RMSNorm]
    assert {entry.ref.name for entry in collect(model)} == {"tokens", "linear", "root"}


class ImageNorm(nn.LayerNorm):
    """Over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Named(nn.LayerNorm):
    """The plain one under another name."""


def test_a_subclass_with_its_own_forward_has_no_differences_but_whole_values(tmp_path: Path) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return nn.ModuleDict({"linear": nn.Linear(8, 8), "norm": ImageNorm(8), "named": Named(8)})

    fresh, further, x = model(), model(), numbers(3, 2, 8, 8, 8)
    assert norm_names(fresh) == ["named"]
    inject(fresh, 4, targets=["linear"])
    with pytest.raises(TargetError, match="norm: ImageNorm has a forward of its own"):
        inject_norms(fresh, ["norm"], "default")
    values = {"lora_unet_norm__w_norm": numbers(1, 8), "lora_unet_norm__b_norm": numbers(2, 8)}
    attach(further, stored(tmp_path / "a.safetensors", **values), trainable=True)
    expected = ImageNorm(8)
    with torch.no_grad():
        expected.weight.add_(numbers(1, 8))
        expected.bias.add_(numbers(2, 8))
    torch.testing.assert_close(further["norm"](x), expected(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_in_float32_and_fused_ones_have_differences(dtype: torch.dtype) -> None:
    tokens = pytest.importorskip("diffusers.models.normalization").FP32LayerNorm
    image = pytest.importorskip("inweave.models.fused.blocks").FusedGroupNorm
    model, x = Net(dtype), batch(dtype)
    model.tokens.__class__, model.image.__class__ = tokens, image
    assert norm_names(adapted(model)) == NORMS
    before = model(x)
    merge(model)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(model(x), before, rtol=tolerance, atol=tolerance)
