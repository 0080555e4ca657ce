"""Baking into quantized checkpoints: the form they have, the bytes of what does not change, and what rounding costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inweave.errors import FormatError, TargetError
from inweave.exchange.load import open_base, open_weights
from inweave.formats.packed import BLOCK, Packed
from inweave.targets.resolve import resolve
from inweave.weights.merged import MergedSource
from inweave.weights.offline.bake import Baked, BakeItem, write_merged
from inweave.weights.offline.commands import extract
from inweave.weights.offline.requantize import requantized_parts
from inweave.weights.packed import open_source, unpacked_weight
from inweave.weights.source import DictSource
from inweave.weights.stack import Strength
from tests.unit.weights.models import adapter, pair
from tests.unit.weights.test_packed import Tensors, four_bits, scaled, weight

E4M3, E5M2, I8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FORMS = {
    "fp8, one scale": lambda name, w: scaled(name, w, "weight_scale", "tensor", E4M3),
    "fp8 of ComfyUI": lambda name, w: scaled(name, w, "scale_weight", "one", E5M2),
    "fp8, rows": lambda name, w: scaled(name, w, "weight_scale", "column", E4M3),
    "int8, rows": lambda name, w: scaled(name, w, "weight_scale", "row", I8),
    "fp8, blocks": lambda name, w: by_blocks(name, w),
    "bitsandbytes int8": lambda name, w: eight_bits(name, w),
    "nf4": lambda name, w: four_bits(name, w, "nf4", nested=False),
    "nf4, nested": lambda name, w: four_bits(name, w, "nf4", nested=True),
    "fp4": lambda name, w: four_bits(name, w, "fp4", nested=False),
}
#: the largest relative error of a weight of normal numbers in a form
ERRORS = {"fp8 of ComfyUI": 0.06, "nf4": 0.11, "nf4, nested": 0.12, "fp4": 0.16}


def by_blocks(name: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale per block of 128 x 128, as DeepSeek stores it."""
    rows, columns = (-(-side // BLOCK) for side in values.shape)
    scales = torch.empty(rows, columns)
    for r in range(rows):
        for c in range(columns):
            scales[r, c] = values[r * BLOCK : (r + 1) * BLOCK, c * BLOCK : (c + 1) * BLOCK].abs().max() / 448
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: values.shape[0], : values.shape[1]]
    numbers = (values / wide).to(E4M3)
    return {name: numbers, f"{name}_scale_inv": scales}, numbers.float() * wide


def eight_bits(name: str, values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    largest = values.abs().amax(1)
    numbers = (values * 127 / largest.view(-1, 1)).round().to(I8)
    return {name: numbers, f"{name.removesuffix('weight')}SCB": largest}, numbers.float() * largest.view(-1, 1) / 127


def written(path: Path, form: str) -> tuple[Path, Tensors]:
    """Two packed weights, and a plain one."""
    tensors: Tensors = {"third.weight": weight(8, 128, seed=3).bfloat16()}
    for number, name in enumerate(("first.weight", "second.weight")):
        tensors |= FORMS[form](name, weight(192, 320, seed=number))[0]
    tensors = {name: each.clone() for name, each in tensors.items()}
    save_file(tensors, path, metadata={"kept": "yes"})
    return path, tensors


def baked(base: Path, out: Path, lora: Any, strength: float = 1.0, **options: Any) -> Baked:
    index = open_base(base)
    items = [BakeItem(resolve(adapter(lora), index), Strength(strength), "a.safetensors", "00")]
    return write_merged(base, items, out, index=index, **options)


def change_of(base: Path, lora: Any, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unpacked weight and the exact sum, by the plain road."""
    before = open_source(base).get("first.weight", dtype=torch.float32)
    index = open_base(base)
    source = MergedSource(DictSource({"first.weight": before}), [(resolve(adapter(lora), index), Strength(strength))])
    return before, source.get("first.weight")


@pytest.mark.parametrize("form", FORMS)
def test_the_same_form_is_written_and_reads_back_as_the_sum(form: str, tmp_path: Path) -> None:
    base, tensors = written(tmp_path / "base.safetensors", form)
    lora = pair("unet.first", 192, 320)
    before, total = change_of(base, lora, 1.0)
    done = baked(base, tmp_path / "out.safetensors", lora)
    result = load_file(done.path)
    assert {n: (t.shape, t.dtype) for n, t in result.items()} == {n: (t.shape, t.dtype) for n, t in tensors.items()}
    for name in tensors:
        if not name.startswith("first."):
            assert same(result[name], tensors[name]), name
    read = open_source(done.path).get("first.weight", dtype=torch.float32)
    error = float((read - total).norm() / total.norm())
    assert error < ERRORS.get(form, 0.035)
    lost = float((read - total).norm() / (total - before).norm())
    assert done.rounding_loss == {"first.weight": pytest.approx(lost, rel=1e-4)}
    assert done.merged == 1 and (tmp_path / "out.safetensors").stat().st_size == done.bytes + header_bytes(done.path)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.flatten().view(torch.uint8), two.flatten().view(torch.uint8))


def header_bytes(path: str) -> int:
    return 8 + int.from_bytes(Path(path).read_bytes()[:8], "little")


@pytest.mark.parametrize("form", FORMS)
def test_a_change_of_nothing_keeps_the_bytes(form: str, tmp_path: Path) -> None:
    """Where the old scales hold the sum, numbers that do not change keep their bits."""
    base, tensors = written(tmp_path / "base.safetensors", form)
    lora = pair("unet.first", 192, 320)
    done = baked(base, tmp_path / "out.safetensors", lora, strength=1e-12)
    result = load_file(done.path)
    if form == "fp4":  # its book has two zeros
        assert torch.equal(open_source(done.path).get("first.weight"), open_source(base).get("first.weight"))
    elif "nested" not in form:  # bitsandbytes rounds packed scales of its own
        assert all(same(result[name], each) for name, each in tensors.items())


@pytest.mark.parametrize("form", ["fp8, rows", "nf4, nested", "bitsandbytes int8"])
def test_a_dtype_unpacks(form: str, tmp_path: Path) -> None:
    base, _ = written(tmp_path / "base.safetensors", form)
    lora = pair("unet.first", 192, 320)
    _, total = change_of(base, lora, 1.0)
    done = baked(base, tmp_path / "out.safetensors", lora, dtype=torch.bfloat16)
    result = load_file(done.path)
    assert result.keys() == {"first.weight", "second.weight", "third.weight"}
    assert torch.equal(result["first.weight"], total.bfloat16())
    plain = open_source(base).get("second.weight", dtype=torch.float32)
    assert torch.equal(result["second.weight"], plain.bfloat16()) and done.rounding_loss == {}


def test_the_change_can_be_extracted_again(tmp_path: Path) -> None:
    base, _ = written(tmp_path / "base.safetensors", "nf4")
    done = baked(base, tmp_path / "tuned.safetensors", pair("unet.first", 192, 320), 20.0, dtype=torch.float32)
    extraction = extract(done.path, base, tmp_path / "lora", rank=4, dialect="peft")
    assert [row.module for row in extraction.rows if "first" in row.module] and extraction.energy > 0.99


def test_a_folder_of_another_dtype_no_longer_says_that_it_is_quantized(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    written(folder / "model.safetensors", "nf4")
    (folder / "config.json").write_text(json.dumps({"a": 1, "quantization_config": {"quant_method": "bitsandbytes"}}))
    lora = pair("unet.first", 192, 320)
    report = baked(folder, tmp_path / "same", lora)
    assert "quantization_config" in json.loads((Path(report.path) / "config.json").read_text())
    wide = baked(folder, tmp_path / "wide", lora, dtype=torch.bfloat16)
    assert json.loads((Path(wide.path) / "config.json").read_text()) == {"a": 1}


def test_what_is_packed_in_another_way_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(FormatError, match="GGUF file with a broken header"):
        open_weights(tmp_path / "m.gguf")
    base = tmp_path / "i.safetensors"
    save_file({"first.weight": torch.ones(4, 3, dtype=torch.int8)}, base)
    with pytest.raises(TargetError, match="in a way that inweave does not know"):
        baked(base, tmp_path / "out.safetensors", pair("unet.first", 4, 3))


def test_rows_of_zeros_stay_zeros_whatever_their_scale_is() -> None:
    """The smallest scale that there is in float32 is zero in float16."""
    total = torch.randn(8, 32)
    total[3] = 0
    packed = Packed("scaled F8_E4M3", (8, 32), "BF16", {"numbers": "w", "scales": "s"})
    parts = {"numbers": torch.zeros(8, 32).to(torch.float8_e4m3fn), "scales": torch.zeros(8, dtype=torch.float16)}
    new = unpacked_weight("w", packed, requantized_parts("w", packed, parts, total))
    assert not new[3].any() and float((new - total).norm() / total.norm()) < 0.04
