"""LoRAs computed beside quantized weights: exact, reported, and gone with the stack."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from inweave.adapter import Adapter
from inweave.errors import TargetError
from inweave.formats.read import read
from inweave.ops.quantized import FORMATS, PACKED_FORMATS, requantized
from inweave.ops.quantized.gguf import SIZES
from inweave.ops.quantized.scaled import ScaledWeight
from inweave.ops.tensors.decode import encode
from inweave.weights.weaver import Weaver
from tests.unit.weights.test_quantized_weaver import bits, lora, net, same


def adapter(**factors: torch.Tensor) -> Adapter:
    """An adapter of a model's only layer."""
    return read({f"lora_unet_0.{name.replace('__', '.')}": encode(tensor) for name, tensor in factors.items()})


def plain_copy(model: Any) -> Any:
    """The model with its weights dequantized."""
    other = net("int8")
    for name in ("first", "second"):
        layer = nn.Linear(*reversed(getattr(model, name).shape))
        layer.weight.data, layer.bias.data = getattr(model, name).weight, getattr(model, name).bias.data
        setattr(other, name, layer.requires_grad_(False))
    other.last.load_state_dict(model.last.state_dict())
    return other


@pytest.mark.parametrize("format", ("int8", "int8-hadamard", "nf4"))
def test_a_change_that_rounding_would_lose_is_computed_beside_the_weight(format: str) -> None:
    model, x = net(format), torch.randn(5, 128)
    reference, base, before = plain_copy(model), bits(model), model(x)
    weaver, exact = Weaver(model, max_loss=0.0), Weaver(reference)
    one, two = lora(1, "first", "second", "last"), lora(5, "second")
    for stack in ([(one, 0.02)], [(two, -0.4), (one, 0.2)], [(two, 1.0)], [(one, 0.02)]):
        weaver.apply(stack)
        exact.apply(stack)
        torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-5)
        assert not torch.equal(model(x), before)
        layers = {"second"} if stack == [(two, 1.0)] else {"first", "second"}
        assert weaver.side_products.keys() == {f"unet.{name}.weight" for name in layers}
        assert set(weaver.rounding_loss.values()) == {0.0}
        now = bits(model)
        assert all(torch.equal(now[n], base[n]) for n in base if not n.startswith("last"))
    model.to(torch.bfloat16)
    assert model(x.bfloat16()).isfinite().all()
    weaver.apply([])
    model.to(torch.float32)
    assert weaver.side_products == {} and not weaver.woven and not model.first._forward_hooks


def test_the_bound_decides_for_each_weight() -> None:
    model = net("int8")
    loose = Weaver(model)
    loose.apply([(lora(1, "first"), 1.0)])
    (loss,) = loose.rounding_loss.values()
    loose.apply([])
    weaver = Weaver(model, max_loss=loss * 1.01)
    weaver.apply([(lora(1, "first"), 1.0)])
    assert weaver.side_products == {} and weaver.rounding_loss == {"unet.first.weight": loss}
    weaver.apply([(lora(1, "first"), 1e-3)])
    assert weaver.side_products == {"unet.first.weight": 4}
    weaver.apply([(lora(1, "first"), 1.0)])
    assert weaver.side_products == {} and not model.first._forward_hooks


def test_a_stack_that_fails_puts_the_changes_of_the_last_one_back() -> None:
    model, x = net("nf4"), torch.randn(3, 128)
    weaver = Weaver(model, max_loss=0.1)
    weaver.apply([(lora(1, "first", "second"), 0.5)])
    before = model(x)
    with pytest.raises(TargetError, match="would overflow"):
        weaver.apply([(lora(3, "first"), 3e38)])
    assert torch.equal(model(x), before) and weaver.side_products.keys() == {"unet.first.weight", "unet.second.weight"}
    weaver.restore()
    assert weaver.side_products == {} and same(bits(model), bits(net("nf4")))


def test_what_a_deleted_weaver_computed_beside_ends_with_its_stack() -> None:
    model, x = net("int8"), torch.randn(3, 128)
    before, weaver = model(x), Weaver(model, max_loss=0.0)
    weaver.apply([(lora(1, "first"), 0.5)])
    assert not torch.equal(model(x), before)
    del weaver
    other = Weaver(model)
    other.apply([(lora(2, "last"), 0.5)])
    other.apply([])
    assert torch.equal(model(x), before) and not model.first._forward_hooks


def test_a_base_with_nan_takes_lora_beside() -> None:
    model, plain, x = net("int8"), net("int8"), torch.randn(3, 128)
    model.first.scales[3] = torch.nan
    before = bits(model)
    weaver = Weaver(model)
    weaver.apply([(lora(1, "first"), 0.5)])
    Weaver(plain, max_loss=0.0).apply([(lora(1, "first"), 0.5)])
    rows = [number for number in range(64) if number != 3]
    assert torch.equal(model.first(x)[:, rows], plain.first(x)[:, rows]) and same(bits(model), before)
    with pytest.raises(TargetError, match="would overflow"):
        Weaver(plain).apply([(lora(1, "second"), 3e38)])


def test_a_format_without_an_encoder_takes_lora_beside_and_nothing_else() -> None:
    model: Any = nn.Sequential(nn.Linear(256, 64)).requires_grad_(False)
    raw = torch.randint(0, 60, (64, SIZES["Q2_K"][1]), dtype=torch.uint8)
    kind = PACKED_FORMATS["gguf-Q2_K"]
    kind.hold(model[0], kind.weights(raw), torch.float32)
    weaver, x = Weaver(model), torch.randn(2, 256)
    before = model(x)
    down, up = torch.randn(4, 256), torch.randn(64, 4)
    weaver.apply([(adapter(lora_down__weight=down, lora_up__weight=up), 0.5)])
    torch.testing.assert_close(model(x), before + 0.5 * x @ down.T @ up.T, rtol=1e-3, atol=1e-3)
    with pytest.raises(TargetError, match="takes plain LoRA only"):
        weaver.apply([(adapter(diff=torch.randn(64, 256)), 1.0)])
    weaver.apply([])
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("format", ["scaled", "bitsandbytes-4bit", "gguf-Q4_K", "gguf-Q8_0"])
def test_layouts_of_files_are_merged_into(format: str) -> None:
    """Also those with tables, which stay; factors of zeros change no bit."""
    torch.manual_seed(0)
    kind, model = PACKED_FORMATS[format], nn.Sequential(nn.Linear(256, 64)).requires_grad_(False)
    stored, layer = kind.weights.of(torch.randn(64, 256) * 0.05), cast("Any", model[0])
    if format == "scaled":
        stored = ScaledWeight(stored.dequantized(torch.float32).to(torch.float8_e4m3fn), torch.ones(64, 1))
    before, stored = stored.dequantized(torch.float32), type(stored)(*(each.clone() for each in stored))
    kind.hold(layer, stored, torch.float32)
    base, weaver, down, up = bits(model), Weaver(model), torch.randn(4, 256) * 0.1, torch.randn(64, 4) * 0.1
    weaver.apply([(adapter(lora_down__weight=down, lora_up__weight=up), 1.0)])
    expected = requantized(type(stored)(*(base[f"0.{name}"] for name in stored._fields)), before + up @ down, "0")
    torch.testing.assert_close(layer.weight, expected.dequantized(torch.float32), rtol=1e-5, atol=1e-6)
    weaver.apply([(adapter(lora_down__weight=down, lora_up__weight=0 * up), 1.0)])
    assert same(bits(model), base) and weaver.rounding_loss == {"unet.0.weight": 0.0}


def test_a_convolution_takes_lora_beside() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(64, 96, 3, 2, 1)).requires_grad_(False)
    FORMATS["nf4"].quantize(model[0])
    plain = nn.Sequential(nn.Conv2d(64, 96, 3, 2, 1)).requires_grad_(False)
    plain[0].weight.data, plain[0].bias.data = model[0].weight, model[0].bias.data  # type: ignore[union-attr, assignment]
    down, up = torch.randn(4, 64, 3, 3) * 0.1, torch.randn(96, 4, 1, 1) * 0.1
    one = adapter(lora_down__weight=down, lora_up__weight=up)
    x = torch.randn(2, 64, 9, 9)
    weaver = Weaver(model, max_loss=0.01)
    weaver.apply([(one, 0.7)])
    Weaver(plain).apply([(one, 0.7)])
    assert weaver.side_products == {"unet.0.weight": 4}
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
