"""Checkpoints that stay quantized: layers hold the stored bits, and compute with the numbers that are unpacked."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from inweave.formats.gguf import TYPES
from inweave.ops.quantized import PACKED_FORMATS, QuantizedLayer, dequantizing, relative_error, requantized
from inweave.ops.quantized.gguf import SIZES
from inweave.weights.build import build
from inweave.weights.hold import held_summary, hold_weights
from inweave.weights.packed import open_source
from tests.unit.weights.test_packed import four_bits, gguf, scaled, weight

OUT, INTO = 96, 256
Write = Callable[[Path], Path]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(INTO, OUT)
        self.norm = nn.LayerNorm(OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.a(x))
        return y


REST = {"a.bias": torch.randn(OUT), "norm.weight": torch.rand(OUT) + 0.5, "norm.bias": torch.randn(OUT)}


def safetensors(parts: dict[str, torch.Tensor]) -> Write:
    def write(folder: Path) -> Path:
        save_file({**parts, **REST}, folder / "a.safetensors")
        return folder / "a.safetensors"

    return write


def ggml(kind: str) -> Write:
    def write(folder: Path) -> Path:
        blocks = PACKED_FORMATS[f"gguf-{kind}"].weights.of(weight(OUT, INTO, 5))
        if blocks is None:  # no encoder: any bytes, with small scales
            raw = torch.randint(0, 60, (OUT * INTO // 256, TYPES[kind][1]), dtype=torch.uint8)
        else:
            raw = blocks.blocks
        tensors = {"a.weight": (kind, (OUT, INTO), raw.numpy().tobytes())}
        plain = {name: ("F32", tuple(t.shape), t.numpy().tobytes()) for name, t in REST.items()}
        return gguf(folder / "a.gguf", {**tensors, **plain})

    return write


def blocks_of_128(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    numbers = (weight(OUT, INTO) * 30).to(dtype)
    return {"a.weight": numbers, "a.weight_scale_inv": torch.rand(1, 2) + 0.5}


CASES: dict[str, tuple[str, Write]] = {
    "plain fp8": ("scaled", safetensors({"a.weight": weight(OUT, INTO).to(torch.float8_e4m3fn)})),
    **{
        f"{dtype} by {by}": (
            "int8" if dtype == torch.int8 else "scaled",
            safetensors(scaled("a.weight", weight(OUT, INTO), "weight_scale", by, dtype)[0]),
        )
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
        for by in ("tensor", "row", "column")
    },
    "fp8 blocks": ("scaled", safetensors(blocks_of_128(torch.float8_e4m3fn))),
    "int8 blocks": ("scaled", safetensors(blocks_of_128(torch.int8))),
    "bnb int8": ("int8", safetensors({
        "a.weight": (weight(OUT, INTO) * 30).round().to(torch.int8), "a.SCB": torch.rand(OUT) + 1})),
    **{
        f"{kind}{' nested' * nested}": (
            "bitsandbytes-4bit", safetensors(four_bits("a.weight", weight(OUT, INTO), kind, nested)[0]))
        for kind in ("nf4", "fp4") for nested in (False, True)
    },
    **{f"gguf {kind}": (f"gguf-{kind}", ggml(kind)) for kind, (count, _) in TYPES.items() if count > 1},
}  # fmt: skip


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


@pytest.mark.parametrize(("dtype", "piece"), [(torch.float32, 1 << 22), (torch.bfloat16, 7 * INTO)])
@pytest.mark.parametrize("case", CASES)
def test_a_held_layer_computes_what_the_unpacked_one_does(
    case: str, dtype: torch.dtype, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits: the weight, the output and the gradient of the input; also if it is decoded in pieces."""
    monkeypatch.setattr(dequantizing, "_PIECE", piece)
    format, write = CASES[case]
    source = open_source(write(tmp_path))
    kept: Any = build(on_meta(), source, dtype=dtype, quantized="keep")
    plain: Any = build(on_meta(), source, dtype=dtype)
    assert isinstance(kept.a, QuantizedLayer) and kept.a.quantized.format() == format and type(plain.a) is nn.Linear
    assert torch.equal(kept.a.weight, plain.a.weight) and kept.a.weight.dtype == dtype
    assert torch.equal(kept.a.quantized.dequantized(torch.float32), source.get("a.weight", dtype=torch.float32))
    x = torch.randn(5, INTO).to(dtype).requires_grad_()
    results = []
    for model in (kept, plain):
        y = model(x)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), x)])
    assert all(map(torch.equal, *results)) and results[0][0].isfinite().all()
    assert f"1 as {format}" in held_summary({"unet": kept}) and held_summary({"unet": plain}) == ""


@pytest.mark.parametrize("case", CASES)
def test_sizes_of_a_held_layer_are_known_without_reading(case: str, tmp_path: Path) -> None:
    _, write = CASES[case]
    source = open_source(write(tmp_path))
    kept, blank = build(on_meta(), source, quantized="keep"), on_meta()
    assert hold_weights(blank, source, "meta") == ["a.weight"]
    facts = [{name: (t.shape, t.dtype) for name, t in each.state_dict().items()} for each in (kept, blank)]
    assert facts[0] == facts[1] and blank.a.quantized[0].is_meta  # type: ignore[union-attr]
    stored = sum(t.nbytes for t in kept.a.quantized)  # type: ignore[union-attr]
    file = sum(source._source.spec(n).dtype.itemsize * math.prod(source._source.spec(n).shape)  # type: ignore[attr-defined]
               for n in source._packed["a.weight"].parts.values()) if hasattr(source, "_packed") else None  # fmt: skip
    if file is not None:
        assert file <= stored <= file * 1.04 + 4 * OUT, "row scales, and codes of bitsandbytes with their tables"


@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith(("Q2_K", "Q3_K"))])
def test_other_numbers_take_the_layout_of_a_weight(case: str, tmp_path: Path) -> None:
    _, write = CASES[case]
    kept: Any = build(on_meta(), open_source(write(tmp_path)), quantized="keep")
    stored = kept.a.quantized
    other = weight(OUT, INTO, 7) * 3 + stored.dequantized(torch.float32)
    new = requantized(stored, other)
    assert new is not None and [(t.shape, t.dtype) for t in new] == [(t.shape, t.dtype) for t in stored]
    limit = {"scaled": 0.06, "int8": 0.02, "bitsandbytes-4bit": 0.13}.get(stored.format(), 0.11)
    assert relative_error(other, new) < limit
    zero = requantized(stored, torch.zeros_like(other))
    assert zero is not None and not zero.dequantized(torch.float32).any()


def test_rows_of_a_fused_weight_are_held(tmp_path: Path) -> None:
    """As in original checkpoints, whose queries, keys and values are one tensor."""
    for case in ("gguf Q4_K", "nf4 nested", "fp8 blocks", "torch.int8 by row"):
        source = open_source(CASES[case][1](tmp_path))
        whole: Any = source
        part = whole.quantized("a.weight", "cpu", (32, 48))
        assert torch.equal(part.dequantized(torch.float32), source.get("a.weight", dtype=torch.float32)[32:80])


def test_sizes_of_blocks_are_those_of_the_files() -> None:
    assert dict(TYPES) == SIZES
