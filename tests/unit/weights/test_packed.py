"""Packed checkpoints: every weight that is read has the numbers that its own library would compute with."""

from __future__ import annotations

import ast
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inweave.errors import FormatError
from inweave.exchange.load import open_base
from inweave.formats.gguf import TYPES
from inweave.models import embedded
from inweave.models.identify import identify
from inweave.models.model import load_model
from inweave.ops.adam8bit.reference import code_book
from inweave.ops.quantized.nf4 import BOOK, Nf4Weight
from inweave.targets.bases import known_index
from inweave.weights.packed import open_source, packed_summary, source_shapes

Tensors = dict[str, torch.Tensor]
FP4 = (0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25,
       0.0, -0.0052083333, -0.6666667, -1.0, -0.3333333, -0.5, -0.1666667, -0.25)  # fmt: skip


def weight(out: int = 48, into: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randn(out, into, generator=torch.Generator().manual_seed(seed))


def text(document: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)


def four_bits(name: str, values: torch.Tensor, kind: str, nested: bool) -> tuple[Tensors, torch.Tensor]:
    """A weight as bitsandbytes stores it, computed value by value, and the dequantized weight."""
    book = BOOK if kind == "nf4" else FP4
    flat, block, inner = values.flatten().tolist(), 64, code_book(True, torch.device("cpu"))
    blocks = [flat[at : at + block] for at in range(0, len(flat), block)]
    largest = [max(map(abs, each)) for each in blocks]
    parts: Tensors = {f"{name}.quant_map": torch.tensor(book)}
    state: dict[str, Any] = {
        "quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(values.shape),
    }  # fmt: skip
    stored = largest
    if nested:
        offset = sum(largest) / len(largest)
        groups = [largest[at : at + 4] for at in range(0, len(largest), 4)]
        outer = [max(abs(each - offset) for each in group) for group in groups]
        codes = [int((inner - (each - offset) / outer[at // 4]).abs().argmin()) for at, each in enumerate(largest)]
        stored = [float(inner[code]) * outer[at // 4] + offset for at, code in enumerate(codes)]
        parts |= {f"{name}.absmax": torch.tensor(codes, dtype=torch.uint8), f"{name}.nested_quant_map": inner,
                  f"{name}.nested_absmax": torch.tensor(outer)}  # fmt: skip
        state |= {"nested_blocksize": 4, "nested_offset": offset, "nested_dtype": "float32"}
    else:
        parts[f"{name}.absmax"] = torch.tensor(largest)
    nearest = [
        [min(range(16), key=lambda code: abs(book[code] - one / scale)) for one in each]
        for each, scale in zip(blocks, largest, strict=True)
    ]
    codes = [code for each in nearest for code in each]
    codes += [0] * (len(codes) % 2)
    packed = [codes[at] << 4 | codes[at + 1] for at in range(0, len(codes), 2)]
    parts[name] = torch.tensor(packed, dtype=torch.uint8).view(-1, 1)
    parts[f"{name}.quant_state.bitsandbytes__{kind}"] = text(state)
    expected = [book[code] * scale for each, scale in zip(nearest, stored, strict=True) for code in each]
    return parts, torch.tensor(expected).view(values.shape)


def scaled(name: str, values: torch.Tensor, scale: str, by: str, dtype: torch.dtype) -> tuple[Tensors, torch.Tensor]:
    limit = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    largest = {
        "tensor": values.abs().amax().view(()), "one": values.abs().amax().view(1), "row": values.abs().amax(1),
        "column": values.abs().amax(1, keepdim=True),
    }[by]  # fmt: skip
    scales = largest / limit
    wide = scales.view(-1, 1) if scales.numel() > 1 else scales.reshape(())
    numbers = (values / wide).round().to(dtype) if dtype == torch.int8 else (values / wide).to(dtype)
    module = name.removesuffix("weight")
    return {name: numbers, f"{module}{scale}": scales}, numbers.float() * wide


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize(("scale", "by"), [("scale_weight", "tensor"), ("weight_scale", "one"),
                                           ("weight_scale", "row"), ("weight_scale", "column")])  # fmt: skip
def test_comfyui_scales(scale: str, by: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors, expected = scaled("a.weight", weight(), scale, by, dtype)
    kind = {torch.int8: "int8_tensorwise", torch.float8_e5m2: "float8_e5m2"}.get(dtype, "float8_e4m3fn")
    tensors |= {"a.scale_input": torch.ones(()), "a.bias": torch.ones(48), "scaled_fp8": torch.empty(2).to(dtype),
                "a.comfy_quant": text({"format": kind})}  # fmt: skip
    save_file(tensors, tmp_path / "a.safetensors")
    source = open_source(tmp_path / "a.safetensors")
    assert set(source.names()) == {"a.weight", "a.bias"} and source.spec("a.weight").shape == (48, 128)
    assert torch.equal(source.get("a.weight", dtype=torch.float32), expected)
    assert torch.equal(source.get("a.weight", dtype=torch.float32, rows=(3, 5)), expected[3:8])
    assert torch.equal(source.get("a.weight"), expected.bfloat16()), "rounded once"
    assert torch.equal(source.get("a.bias"), torch.ones(48))


def test_scales_of_blocks_and_plain_casts(tmp_path: Path) -> None:
    values, scales = weight(200, 300).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.5
    save_file(
        {"a.weight": values, "a.weight_scale_inv": scales, "b.weight": values.clone()}, tmp_path / "a.safetensors"
    )
    source = open_source(tmp_path / "a.safetensors")
    expected = values.float()
    for row in range(2):
        for column in range(3):
            expected[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128] *= scales[row, column]
    assert torch.equal(source.get("a.weight", dtype=torch.float32), expected)
    assert torch.equal(source.get("b.weight", dtype=torch.float32), values.float())


@pytest.mark.parametrize("shape", [(300, 64), (300, 128), (64, 300), (1, 300), (2, 200), (300,), (200, 3, 130), (9, 9)])
def test_scales_of_blocks_of_every_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = weight(math.prod(shape), 1).view(shape).to(torch.float8_e4m3fn)
    scales = torch.rand([-(-side // 128) for side in shape]) + 0.5
    save_file({"a.weight": values, "a.weight_scale_inv": scales}, tmp_path / "a.safetensors")
    places = torch.meshgrid(*(torch.arange(side) // 128 for side in shape), indexing="ij")
    actual = open_source(tmp_path / "a.safetensors").get("a.weight", dtype=torch.float32)
    assert torch.equal(actual, values.float() * scales[places])


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(24, 64), (7, 33)])
def test_bitsandbytes_four_bits(shape: tuple[int, int], kind: str, nested: bool, tmp_path: Path) -> None:
    tensors, expected = four_bits("a.weight", weight(*shape), kind, nested)
    save_file(tensors, tmp_path / "a.safetensors")
    source = open_source(tmp_path / "a.safetensors")
    assert list(source.names()) == ["a.weight"] and source.spec("a.weight").dtype == torch.bfloat16
    torch.testing.assert_close(source.get("a.weight", dtype=torch.float32), expected, rtol=1e-6, atol=1e-7)


def test_our_nf4_is_read_by_the_definition_of_bitsandbytes(tmp_path: Path) -> None:
    """Its rows as one nested block each: the same code book and the same order of codes."""
    own = Nf4Weight.of(weight(8, 256))
    tensors = {
        "a.weight": own.codes.view(-1, 1), "a.weight.absmax": own.scales.flatten(),
        "a.weight.nested_absmax": own.row_scales.flatten(), "a.weight.quant_map": torch.tensor(BOOK),
        "a.weight.nested_quant_map": code_book(False, torch.device("cpu")),
        "a.weight.quant_state.bitsandbytes__nf4": text({"quant_type": "nf4", "blocksize": 64, "dtype": "float32",
            "shape": [8, 256], "nested_blocksize": 4, "nested_offset": 0.0, "nested_dtype": "float32"}),
    }  # fmt: skip
    save_file(tensors, tmp_path / "a.safetensors")
    assert torch.equal(open_source(tmp_path / "a.safetensors").get("a.weight"), own.dequantized(torch.float32))


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    values = weight()
    largest = values.abs().amax(1)
    numbers = (values * (127 / largest.view(-1, 1))).round().to(torch.int8)
    tensors = {"a.weight": numbers, "a.SCB": largest, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "a.safetensors")
    source = open_source(tmp_path / "a.safetensors")
    assert list(source.names()) == ["a.weight"]
    expected = numbers.float() * largest.view(-1, 1) / 127
    torch.testing.assert_close(source.get("a.weight", dtype=torch.float32), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"a.weight": torch.zeros(48, 64, dtype=torch.uint8), "a.weight_scale_2": torch.ones(()),
          "a.weight_scale": torch.zeros(48, 8).to(torch.float8_e4m3fn)}, "nvfp4"),
        ({"a.weight_scale": torch.zeros(48, 4, dtype=torch.uint8)}, "mxfp8"),
        ({"a.weight_scale": torch.ones(()), "a.comfy_quant": text({"format": "mxfp4"})}, "mxfp4"),
        ({"a.weight_scale": torch.ones(()), "a.comfy_quant": text({"format": "int8_tensorwise", "convrot": True})},
         "rotated inputs"),
        ({"a.weight_scale": torch.ones(7)}, r"scales \[7\]"),
    ],
    ids=["nvfp4", "mxfp8", "mxfp4", "convrot", "scales"],
)  # fmt: skip
def test_other_formats_are_refused_by_name_but_have_shapes(extra: Tensors, name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a.weight": weight().to(torch.float8_e4m3fn)} | extra, path)
    with pytest.raises(FormatError, match=name):
        open_source(path)
    (component,) = open_base(path).components.values()
    assert dict(component.tensors) == {"a.weight": (48, 128)}


@pytest.mark.parametrize("broken", ["absmax", "map", "state"])
def test_broken_states_are_errors(broken: str, tmp_path: Path) -> None:
    tensors, _ = four_bits("a.weight", weight(8, 64), "nf4", nested=True)
    if broken == "absmax":
        tensors["a.weight.absmax"] = tensors["a.weight.absmax"][:-1].clone()
    elif broken == "map":
        tensors["a.weight.quant_map"] = torch.ones(15)
    else:
        tensors["a.weight.quant_state.bitsandbytes__nf4"] = text([1, 2])
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(FormatError):
        open_source(tmp_path / "a.safetensors").get("a.weight")


@pytest.mark.parametrize(
    "hostile",
    [
        {"shape": [math.inf, 2]}, {"shape": [1] * 300 + [8, 64]}, {"blocksize": 0}, {"blocksize": -1},
        {"blocksize": 1 << 40}, {"blocksize": math.inf}, {"nested_blocksize": 0}, {"nested_blocksize": -4},
        {"nested_blocksize": 1 << 40}, {"nested_offset": math.inf},
    ],
)  # fmt: skip
def test_hostile_states_are_refused_before_anything_is_unpacked(hostile: dict[str, Any], tmp_path: Path) -> None:
    tensors, _ = four_bits("a.weight", weight(8, 64), "nf4", nested=True)
    (stored,) = (name for name in tensors if "quant_state" in name)
    tensors[stored] = text(json.loads(tensors[stored].numpy().tobytes()) | hostile)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(FormatError, match=r"a\.weight: "):
        open_source(tmp_path / "a.safetensors")


def test_too_many_nested_scales_are_refused_without_expanding_them(tmp_path: Path) -> None:
    tensors, _ = four_bits("a.weight", weight(8, 64), "nf4", nested=True)
    (stored,) = (name for name in tensors if "quant_state" in name)
    state = json.loads(tensors[stored].numpy().tobytes()) | {"nested_blocksize": 1 << 20}
    tensors |= {stored: text(state), "a.weight.nested_absmax": torch.ones(1 << 22)}  # 16 TiB if expanded
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(FormatError, match="nested scales"):
        open_source(tmp_path / "a.safetensors").get("a.weight")


# GGUF


def peer_functions() -> dict[str, Callable[..., torch.Tensor]]:
    """The decoders of diffusers, whose module needs the `gguf` package for everything else."""
    import diffusers

    path = Path(diffusers.__file__).parent / "quantizers" / "gguf" / "utils.py"
    names_of = ("dequantize_blocks", "to_uint32", "split_block_dims", "get_scale_min")
    body: list[ast.stmt] = [
        node
        for node in ast.parse(path.read_text()).body
        if (isinstance(node, ast.FunctionDef) and node.name.startswith(names_of))
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("QK_K", "K_SCALE_SIZE"))
    ]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(body, []), str(path), "exec"), names)
    return names


NUMBER = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
          "Q5_K": 13, "Q6_K": 14, "BF16": 30, "IQ4_NL": 20}  # fmt: skip


def gguf(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    alignment: int = 32,
    original: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    def string(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    rows, data = b"", b""
    for name, (kind, shape, raw) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        rows += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), NUMBER[kind], len(data))
        data += raw
    values = string("general.alignment") + struct.pack("<II", 4, alignment)
    for name, shape in (original or {}).items():
        values += string(f"comfy.gguf.orig_shape.{name}") + struct.pack(f"<IIQ{len(shape)}i", 9, 5, len(shape), *shape)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1 + len(original or {})) + values + rows
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_have_the_numbers_of_diffusers(kind: str, tmp_path: Path) -> None:
    block, size = TYPES[kind]
    generator = torch.Generator().manual_seed(3)
    count = 512 * 6 // block
    raw = torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=generator)
    tensors = {"a": (kind, (6, 512), raw.numpy().tobytes()), "b": ("F32", (3,), struct.pack("<3f", 1, 2, 3))}
    source = open_source(gguf(tmp_path / "a.gguf", tensors, alignment=64))
    mine = source.get("a", dtype=torch.float32)
    if kind in ("F32", "F16"):
        theirs = raw.view(torch.float32 if kind == "F32" else torch.float16).float()
    else:
        theirs = peer_functions()[f"dequantize_blocks_{kind}"](raw, block, size, torch.float32).float()
    assert torch.equal(mine.nan_to_num(), theirs.view(6, 512).nan_to_num())
    assert torch.equal(source.get("a", dtype=torch.float32, rows=(2, 3)).nan_to_num(), mine[2:5].nan_to_num())
    assert source.get("b").tolist() == [1, 2, 3]


def test_gguf_of_other_types_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="stored as IQ4_NL"):
        open_source(gguf(tmp_path / "a.gguf", {"a": ("IQ4_NL", (2, 32), bytes(36))}))
    path = gguf(tmp_path / "b.gguf", {"a": ("Q8_0", (2, 32), bytes(68))})
    source = open_source(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match="changed on disk"):
        source.get("a")
    with pytest.raises(FormatError, match="damaged"):
        open_source(path)


def test_a_gguf_rewritten_in_place_with_its_size_and_time_is_refused(tmp_path: Path) -> None:
    path = gguf(tmp_path / "a.gguf", {"a": ("Q8_0", (2, 32), bytes(68))})
    source, status = open_source(path), path.stat()
    source.get("a")
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(FormatError, match="changed on disk"):
        source.get("a")


@pytest.mark.parametrize("original", [(-2, -3), (0, 6), (-1, -6), (), (1,) * 9 + (2, 3)], ids=str)
def test_an_original_shape_of_a_gguf_that_is_none_is_refused(original: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {"a": ("F32", (6,), bytes(24))}
    assert open_source(gguf(tmp_path / "b.gguf", tensors, original={"a": (2, 3)})).get("a").shape == (2, 3)
    with pytest.raises(FormatError, match="orig_shape"):
        open_source(gguf(tmp_path / "a.gguf", tensors, original={"a": original}))


@pytest.mark.parametrize("shape", [(0, 2**63), (2**62, 0, 2**62), (2**32, 2**32)], ids=str)
def test_a_gguf_of_a_shape_beyond_every_memory_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="broken header"):
        open_source(gguf(tmp_path / "a.gguf", {"a": ("F32", shape, b"")}))


def test_a_gguf_of_a_known_model_is_identified(tmp_path: Path) -> None:
    """By its header: the file has no numbers here, only their room."""
    listed = known_index("flux1-dev", "original").components["unet"]
    shapes = {name.removeprefix(listed.prefix): shape for name, shape in listed.tensors.items()}
    path, at, rows = tmp_path / "flux1-dev-Q8_0.gguf", 0, b""
    for name, shape in shapes.items():
        kind = "Q8_0" if len(shape) == 2 else "F32"
        rows += struct.pack("<Q", len(name)) + name.encode()
        rows += struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), NUMBER[kind], at)
        block, size = TYPES[kind]
        at += -(-(math.prod(shape) // block * size) // 32) * 32
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(shapes), 0) + rows)
        file.truncate(file.tell() + 32 + at)
    source = open_source(path)
    assert identify(source_shapes(source), {}).variant.name.startswith("flux1-dev")
    assert "as Q8_0" in packed_summary(source)


# whole models


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_a_packed_folder_loads_as_the_model_that_it_stands_for(kind: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(embedded.folder(), tmp_path / "model"))
    (part,) = [path for path in (folder / "unet", folder / "transformer") if path.exists()]
    (file,) = part.glob("*.safetensors")
    plain, packed = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(file).items():
        plain[name] = packed[name] = tensor
        if tensor.dim() == 2 and name.endswith(("0.attn1.to_q.weight", "0.attn1.to_v.weight")):
            if kind == "nf4":
                parts, expected = four_bits(name, tensor.float(), "nf4", nested=True)
            elif kind == "fp8":
                parts, expected = scaled(name, tensor.float(), "scale_weight", "tensor", torch.float8_e4m3fn)
            else:
                largest = tensor.float().abs().amax(1).clamp_min(1e-6)
                numbers = (tensor.float() * (127 / largest.view(-1, 1))).round().to(torch.int8)
                parts = {name: numbers, f"{name.removesuffix('weight')}SCB": largest}
                expected = numbers.float() * (largest.view(-1, 1) / 127)
            plain[name] = expected
            packed = {key: value for key, value in packed.items() if key != name} | parts
    assert len(packed) > len(plain)
    save_file({name: tensor.clone() for name, tensor in packed.items()}, file)
    config = part / "config.json"
    settings = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": kind == "int8"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | ({} if kind == "fp8" else settings)))
    state = load_model(folder, dtype=torch.float32).denoiser.state_dict()
    for name, value in plain.items():
        torch.testing.assert_close(state[name], value.float(), rtol=1e-5, atol=1e-7)
