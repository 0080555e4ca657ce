"""Baking into GGUF files: types, header and other tensors stay, and the sum is encoded as it would be by itself."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inweave.errors import ConfigError, FormatError, TargetError
from inweave.exchange.load import open_base
from inweave.formats.gguf import TYPES, read_gguf
from inweave.ops.quantized.gguf import dequantized_blocks
from inweave.ops.quantized.gguf_encoding import ENCODERS, encoded_blocks, encoded_like
from inweave.ops.tensors.decode import TORCH
from inweave.targets.resolve import resolve
from inweave.weights.merged import MergedSource
from inweave.weights.offline.bake import Baked
from inweave.weights.offline.commands import bake, extract
from inweave.weights.packed import GgufSource
from inweave.weights.source import DictSource
from inweave.weights.stack import Strength
from tests.unit.weights.models import adapter, pair
from tests.unit.weights.test_packed import gguf, weight

OUT, INTO = 96, 512
#: one for all: a product of the same numbers at another place in memory may differ in the last bit
LORA = adapter(pair("unet.first", OUT, INTO))
WRITABLE = [*ENCODERS, "F32", "F16", "BF16"]


def stored(kind: str, values: torch.Tensor, old: bytes = b"") -> bytes:
    """``old``: the bytes of the tensor that these numbers replace."""
    if kind in TORCH:
        return bytes(values.to(TORCH[kind]).contiguous().view(torch.uint8).numpy().tobytes())
    numbers = values.reshape(-1, TYPES[kind][0])
    before = torch.frombuffer(bytearray(old), dtype=torch.uint8).view(len(numbers), -1) if old else None
    blocks = encoded_blocks(kind, numbers) if before is None else encoded_like(kind, numbers, before)
    return bytes(blocks.numpy().tobytes())


def base_file(path: Path, kind: str, second: str = "Q6_K") -> Path:
    tensors = {
        "bias": ("F32", (3,), struct.pack("<3f", 1, 2, 3)),
        "first.weight": (kind, (OUT, INTO), stored(kind, weight(OUT, INTO, seed=1))),
        "second.weight": (second, (OUT, INTO), stored(second, weight(OUT, INTO, seed=2))),
    }
    return gguf(path, tensors, alignment=64, original={"bias": (3,)})


def merged_sum(base: Path, strength: float = 5.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decoded weight, and the sum by the plain road."""
    before, index = GgufSource(base).get("first.weight", dtype=torch.float32), open_base(base)
    plain = DictSource({"first.weight": before})
    merged = MergedSource(plain, [(resolve(LORA, index), Strength(strength))], component=None, index=index)
    return before, merged.get("first.weight", dtype=torch.float32)


def raw(path: Path, name: str) -> bytes:
    tensor = read_gguf(path).tensors[name]
    return path.read_bytes()[tensor.begin : tensor.begin + tensor.size]


def baked(base: Path, out: Path, strength: float = 5.0, **options: Any) -> Baked:
    return bake(base, [(LORA, strength)], out, **options)


@pytest.mark.parametrize("kind", WRITABLE)
def test_a_changed_tensor_is_the_sum_in_its_type_and_the_others_keep_their_bytes(kind: str, tmp_path: Path) -> None:
    base = base_file(tmp_path / "base.gguf", kind)
    steps: list[tuple[int, int]] = []
    done = baked(base, tmp_path / "out.gguf", progress=lambda at, total: steps.append((at, total)))
    before, total = merged_sum(base)
    assert float((total - before).norm()) > 0.05 * float(before.norm())
    out = Path(done.path)
    old = raw(base, "first.weight")
    assert raw(out, "first.weight") == stored(kind, total, old) and raw(out, "first.weight") != old
    for name in ("bias", "second.weight"):
        assert raw(out, name) == raw(base, name)
    one, two = read_gguf(base), read_gguf(out)
    assert [(name, each.type, each.shape) for name, each in one.tensors.items()] == [
        (name, each.type, each.shape) for name, each in two.tensors.items()
    ]
    assert two.alignment == 64 and two.data % 64 == 0 and one.values.keys() | {"inweave.merged"} == two.values.keys()
    assert done.merged == 1 and done.tensors == 3 and steps[-1][0] == steps[-1][1] == done.bytes
    if kind in ENCODERS:
        assert 0 < done.rounding_loss["first.weight"] < 1.5
    assert len(json.loads(two.texts["inweave.merged"])) == 1


def test_a_second_bake_extends_the_list_of_adapters_and_nothing_else_moves(tmp_path: Path) -> None:
    base = base_file(tmp_path / "base.gguf", "Q8_0")
    first = baked(base, tmp_path / "one.gguf", 0.5)
    second = baked(Path(first.path), tmp_path / "two.gguf", 0.25)
    header = read_gguf(Path(second.path))
    assert [each["strength"] for each in json.loads(header.texts["inweave.merged"])] == [0.5, 0.25]
    assert len(header.values) == len(read_gguf(Path(first.path)).values)
    assert raw(Path(second.path), "second.weight") == raw(base, "second.weight")
    assert GgufSource(second.path).get("bias").tolist() == [1, 2, 3]


def test_a_type_without_an_encoder_can_stay_but_not_change(tmp_path: Path) -> None:
    blocks = torch.randint(0, 100, (OUT * INTO // 256, TYPES["Q2_K"][1]), dtype=torch.uint8)
    blocks[:, -4:] = torch.tensor([0, 60, 0, 60], dtype=torch.uint8)  # scales that are numbers
    packed = ("Q2_K", (OUT, INTO), blocks.numpy().tobytes())
    plain = ("F16", (OUT, INTO), stored("F16", weight(OUT, INTO)))
    base = gguf(tmp_path / "a.gguf", {"first.weight": plain, "second.weight": packed})
    assert raw(Path(baked(base, tmp_path / "kept.gguf").path), "second.weight") == packed[2]
    base = gguf(tmp_path / "b.gguf", {"first.weight": packed, "second.weight": plain})
    with pytest.raises(TargetError, match=r"first.weight: stored as Q2_K .*--dtype bf16"):
        baked(base, tmp_path / "changed.gguf")
    assert not (tmp_path / "changed.gguf").exists()
    wide = load_file(baked(base, tmp_path / "wide.safetensors", dtype="fp32").path)
    assert torch.equal(wide["first.weight"], merged_sum(base)[1])


def test_unpacked_to_a_dtype_it_is_a_safetensors_file_of_every_tensor(tmp_path: Path) -> None:
    base = base_file(tmp_path / "base.gguf", "Q4_K", "Q5_0")
    done = baked(base, tmp_path / "wide.safetensors", dtype="bf16")
    written, source = load_file(done.path), GgufSource(base)
    assert written.keys() == set(source.names()) and {each.dtype for each in written.values()} == {torch.bfloat16}
    assert torch.equal(written["second.weight"], source.get("second.weight", dtype=torch.bfloat16))
    total = merged_sum(base)[1]
    assert torch.equal(written["first.weight"], total.bfloat16()) and not done.rounding_loss


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("out.safetensors", {}, r"ends in \.gguf here"),
        ("out.gguf", {"dtype": "bf16"}, r"ends in \.safetensors here"),
        ("folder", {}, r"ends in \.gguf here"),
        ("base.gguf", {}, "the base itself"),
    ],
)
def test_an_output_of_another_form_is_refused(name: str, options: Any, message: str, tmp_path: Path) -> None:
    base = base_file(tmp_path / "base.gguf", "Q8_0")
    before = base.read_bytes()
    with pytest.raises(ConfigError, match=message):
        baked(base, tmp_path / name, **options)
    assert base.read_bytes() == before


def test_a_file_whose_tensors_share_the_bytes_of_a_changed_one_is_refused(tmp_path: Path) -> None:
    tensors = dict.fromkeys(("first.weight", "second.weight"), ("F32", (OUT, INTO), b""))
    base = gguf(tmp_path / "a.gguf", tensors)
    with base.open("ab") as file:
        file.write(bytes(OUT * INTO * 4))
    with pytest.raises(FormatError, match="share bytes"):
        baked(base, tmp_path / "out.gguf")


def test_a_sum_that_does_not_fit_a_type_is_refused(tmp_path: Path) -> None:
    base = base_file(tmp_path / "base.gguf", "Q8_0")
    with pytest.raises(Exception, match=r"first\.weight.*(infinit|finite|overflow|large)"):
        baked(base, tmp_path / "out.gguf", 1e30)
    assert not (tmp_path / "out.gguf").exists()


def test_a_difference_is_extracted_from_gguf_files(tmp_path: Path) -> None:
    base = base_file(tmp_path / "base.gguf", "Q8_0")
    done = baked(base, tmp_path / "tuned.gguf", 20.0)
    extraction = extract(done.path, base, tmp_path / "lora", rank=4, dialect="peft", dtype="fp32")
    assert [row.module for row in extraction.rows if "first" in row.module] and extraction.energy > 0.99
    tuned, before = (GgufSource(path).get("first.weight", dtype=torch.float32) for path in (done.path, base))
    back = bake(base, [(tmp_path / "lora", 1.0)], tmp_path / "back.safetensors", dtype="fp32")
    rest = load_file(back.path)["first.weight"] - tuned
    assert float(rest.norm()) < 0.2 * float((tuned - before).norm())


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_block_keeps_its_scales_where_they_are_better(kind: str) -> None:
    """So numbers that do not change keep their bits, which new scales would not give them back."""
    count = TYPES[kind][0]
    old = encoded_blocks(kind, weight(64, count))
    numbers = dequantized_blocks(kind, old).view(64, count)
    assert torch.equal(encoded_like(kind, numbers, old), old)
    changed = numbers.clone()
    changed[:8] *= 40  # beyond what the old scales hold
    largest = changed[8:16].abs().argmax(1, keepdim=True)
    changed[8:16] = changed[8:16].scatter(1, largest, changed[8:16].gather(1, largest) * 1.005)  # new scales move all
    new = encoded_like(kind, changed, old)
    assert torch.equal(new[16:], old[16:])
    assert torch.equal(new[:8], encoded_blocks(kind, changed[:8]))
    again, fresh = (dequantized_blocks(kind, raw).view(64, count) for raw in (new, encoded_blocks(kind, changed)))
    better, plain = ((each - changed).norm(dim=1) for each in (again, fresh))
    assert bool((better <= plain).all()) and float(better[8:16].sum()) < float(plain[8:16].sum())


@pytest.mark.parametrize("kind", ENCODERS)
def test_blocks_of_numbers_that_are_none_stay_so(kind: str) -> None:
    old = encoded_blocks(kind, weight(2, TYPES[kind][0]))
    numbers = dequantized_blocks(kind, old).view(2, -1).clone()
    numbers[0, 1] = float("nan")
    after = dequantized_blocks(kind, encoded_like(kind, numbers, old)).view(2, -1)
    assert not bool(after[0].isfinite().all()) and torch.equal(after[1], numbers[1])
