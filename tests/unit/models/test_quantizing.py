"""A denoiser that is quantized while it loads: the bits of one that is quantized after it, never whole in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch
from torch import nn

from inweave.errors import FormatError
from inweave.models.model import load_model
from inweave.models.open import open_model
from inweave.models.quantization import Quantizer, quantize_layers, quantized_names
from inweave.ops.quantized import QuantizedLinear
from inweave.ops.quantized.dequantizing import DequantizingLinear
from tests.peers import tiny_models as tiny

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DequantizingLinear, "SMALLEST_SIDE", 8)


@pytest.mark.parametrize(("variant", "format"), [("flux1-dev", "int8"), ("z-image-turbo", "int8")])
def test_each_layer_is_quantized_when_its_weight_is_there(variant: str, format: str) -> None:
    quantizers: dict[str, Quantizer] = {}
    waiting: list[int] = []

    def arrived(folder: str, network: nn.Module, name: str) -> None:
        if folder not in ("unet", "transformer"):
            return
        quantizer = quantizers.setdefault(folder, Quantizer(network, format, CPU, CPU))
        quantizer.arrived(name)
        modules = [network.get_submodule(each) for each in names]
        waiting.append(sum(not isinstance(each, QuantizedLinear) and not each.weight.is_meta for each in modules))

    with tiny.quick_tokenizers():
        blueprint = open_model(tiny.folder(variant))
        after = load_model(blueprint, device="cpu", dtype="bf16", keep="file")
        names = quantized_names(after.denoiser, format)
        during = load_model(blueprint, device="cpu", dtype="bf16", arrived=arrived)
    text = quantize_layers(after.denoiser, format, CPU)
    one, two = after.denoiser.state_dict(), during.denoiser.state_dict()
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert 0 < max(waiting) < 12 < len(names), "those of the attention that is being read"
    (quantizer,) = quantizers.values()
    assert quantizer.note() == text and text.startswith(f"{len(names)} of the") and f"are stored in {format}" in text
    assert during.weaver is None and after.weaver is not None


def test_a_file_that_is_cut_while_it_is_read_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Tensors are read, and never mapped: reading a map of a file that was cut would end the process."""
    folder = shutil.copytree(tiny.folder("flux1-dev"), tmp_path / "flux")
    (weights,) = (folder / "transformer").glob("*.safetensors")
    cut: list[str] = []

    def arrived(part: str, network: nn.Module, name: str) -> None:
        if part == "transformer" and not cut:
            cut.append(name)
            with weights.open("r+b") as file:
                file.truncate(weights.stat().st_size // 2)

    with tiny.quick_tokenizers(), pytest.raises(FormatError, match=r"changed on disk since it was opened|truncated"):
        load_model(open_model(folder), device="cpu", dtype="fp32", arrived=arrived)
    assert cut
