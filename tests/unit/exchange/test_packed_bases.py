"""Bases whose weights are packed: checked by the shapes that the model has, never by those of the bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

import inweave
from inweave.adapter import Tensor
from inweave.errors import FormatError
from inweave.exchange.load import open_base, open_weights
from inweave.formats.read import read
from inweave.targets.bases import known_index
from tests.support import dotted_pair, write, write_sparse

Shapes = Mapping[str, tuple[int, ...]]
LORA = dotted_pair("transformer.single_transformer_blocks.3.attn.to_q", 3072, 3072)


def flux() -> dict[str, tuple[int, ...]]:
    return dict(known_index("flux1-dev").components["unet"].parts)


def gguf(path: Path, shapes: Shapes, original: Shapes | None = None) -> Path:
    """A header as ComfyUI-GGUF's converter writes it: axes last first, and the shapes that it flattened."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    values = [text("general.architecture") + struct.pack("<I", 8) + text("flux")]
    values += [
        text(f"comfy.gguf.orig_shape.{name}") + struct.pack(f"<IIQ{len(shape)}i", 9, 5, len(shape), *shape)
        for name, shape in (original or {}).items()
    ]
    rows = [
        text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 8, 0)
        for name, shape in shapes.items()
    ]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(values)) + b"".join(values + rows))
    return path


def test_a_gguf_base_is_checked_by_its_header(tmp_path: Path) -> None:
    index = open_base(gguf(tmp_path / "flux.gguf", flux()))
    assert index.base == "flux1-dev"
    assert inweave.check(read(LORA), tmp_path / "flux.gguf", values="none").ok
    assert open_weights(tmp_path / "flux.gguf").components == index.components


def test_a_weight_that_a_gguf_converter_flattened_has_its_own_shape(tmp_path: Path) -> None:
    shapes = dict(known_index("sd1.5").components["unet"].parts)
    kernels = {name: shape for name, shape in shapes.items() if len(shape) == 4}
    flat = {name: (shape[0], shape[1] * shape[2] * shape[3]) for name, shape in kernels.items()}
    path = gguf(tmp_path / "sd.gguf", shapes | flat, kernels)
    assert open_base(path).components["unet"].parts["conv_in.weight"] == (320, 4, 3, 3)


@pytest.mark.parametrize("cut", [5, 30, 200, 4000])
def test_a_broken_gguf_header_is_an_error(tmp_path: Path, cut: int) -> None:
    path = gguf(tmp_path / "flux.gguf", flux())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(FormatError, match="broken header"):
        open_base(path)


def test_a_gguf_header_allocates_nothing_that_it_only_claims(tmp_path: Path) -> None:
    path = tmp_path / "claims.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    with pytest.raises(FormatError, match="broken header"):
        open_base(path)


def test_nvfp4_weights_have_two_values_in_a_byte(tmp_path: Path) -> None:
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in flux().items():
        shapes[name] = ("BF16", shape)
        if len(shape) == 2 and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            shapes[name] = ("U8", (shape[0], shape[1] // 2))
            shapes |= {
                f"{module}.weight_scale": ("F8_E4M3", (shape[0], max(1, shape[1] // 16))),
                f"{module}.weight_scale_2": ("F32", ()), f"{module}.comfy_quant": ("U8", (27,)),
            }  # fmt: skip
    path = write_sparse(tmp_path / "flux.safetensors", shapes)
    assert open_base(path).base == "flux1-dev"
    assert inweave.check(read(LORA), path, values="none").ok
    assert open_weights(path).components == open_base(path).components


def nf4(module: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    size = shape[0] * shape[1] // 2
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}).encode()
    return {
        f"{module}.weight": Tensor("U8", (size, 1), bytes(size)),
        f"{module}.weight.absmax": Tensor("U8", (4,), bytes(4)),
        f"{module}.weight.quant_map": Tensor("F32", (16,), bytes(64)),
        f"{module}.weight.quant_state.bitsandbytes__nf4": Tensor("U8", (len(state),), state),
    }


def test_bitsandbytes_weights_have_the_shape_that_their_state_names(tmp_path: Path) -> None:
    path = write(tmp_path / "base.safetensors", nf4("single_transformer_blocks.3.attn.to_q", (3072, 3072)))
    assert inweave.check(read(LORA), path, values="none").ok
    assert open_weights(path).components == open_base(path).components
    wrong = nf4("a", (64, 64)) | {"a.weight": Tensor("U8", (7, 1), bytes(7))}
    with pytest.raises(FormatError, match="cannot be packed"):
        open_base(write(tmp_path / "wrong.safetensors", wrong))


def test_torchao_is_refused_by_name(tmp_path: Path) -> None:
    """In the layout of its `flatten_tensor_state_dict`."""
    names = {"transformer_blocks.0.attn.to_q._weight_qdata": ("F8_E4M3", (64, 64)),
             "transformer_blocks.0.attn.to_q._weight_scale": ("F32", (64, 1))}  # fmt: skip
    path = write_sparse(tmp_path / "ao.safetensors", names)
    with pytest.raises(FormatError, match=r"torchao.*use the model in bf16"):
        inweave.check(read(LORA), path, values="none")
    with pytest.raises(FormatError, match="a model quantized by torchao"):
        inweave.load(path)


def test_svdquant_is_refused_by_name(tmp_path: Path) -> None:
    names = {"transformer_blocks.0.qkv_proj.qweight": ("I8", (9216, 1536)),
             "transformer_blocks.0.qkv_proj.wscales": ("BF16", (48, 9216))}  # fmt: skip
    with pytest.raises(FormatError, match="SVDQuant"):
        inweave.check(read(LORA), write_sparse(tmp_path / "svdq.safetensors", names), values="none")
