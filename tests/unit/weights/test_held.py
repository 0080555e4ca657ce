"""Checkpoints that stay quantized: layers hold the stored bits, and compute with the numbers that are unpacked."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from inweave.formats.gguf import TYPES
from inweave.formats.read import read
from inweave.generate.pipeline import Pipeline
from inweave.models import embedded
from inweave.models.model import load_model
from inweave.ops.quantized import PACKED_FORMATS, QuantizedLayer, dequantizing, relative_error, requantized
from inweave.ops.quantized.bitsandbytes import Bnb4Weight
from inweave.ops.quantized.gguf import SIZES
from inweave.ops.quantized.gguf_encoding import ENCODERS
from inweave.targets.index import component_from_names
from inweave.training.config.schema import TrainConfig
from inweave.training.session import check, train
from inweave.weights.build import build
from inweave.weights.hold import held_summary, hold_weights
from inweave.weights.packed import open_source
from inweave.weights.source import DictSource, Renamed, Stacked
from tests.support import lora_pair
from tests.unit.training.image_sets import make_set
from tests.unit.weights.test_packed import four_bits, gguf, scaled, text, weight

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
        if kind in ENCODERS:
            raw = PACKED_FORMATS[f"gguf-{kind}"].weights.of(weight(OUT, INTO, 5)).blocks
        else:  # any bytes, with small scales
            raw = torch.randint(0, 60, (OUT * INTO // 256, TYPES[kind][1]), dtype=torch.uint8)
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
    same: Any = build(on_meta(), source, dtype=dtype, quantized="keep")
    plain: Any = build(on_meta(), source, dtype=dtype)
    assert isinstance(same.a, QuantizedLayer) and same.a.quantized.format() == format and type(plain.a) is nn.Linear
    assert torch.equal(same.a.weight, plain.a.weight) and same.a.weight.dtype == dtype
    assert torch.equal(same.a.quantized.dequantized(torch.float32), source.get("a.weight", dtype=torch.float32))
    x = torch.randn(5, INTO).to(dtype).requires_grad_()
    results = []
    for model in (same, plain):
        y = model(x)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), x)])
    assert all(map(torch.equal, *results)) and results[0][0].isfinite().all()
    assert f"1 as {format}" in held_summary({"unet": same}) and held_summary({"unet": plain}) == ""


@pytest.mark.parametrize("case", CASES)
def test_sizes_of_a_held_layer_are_known_without_reading(case: str, tmp_path: Path) -> None:
    _, write = CASES[case]
    source = open_source(write(tmp_path))
    same, blank = build(on_meta(), source, quantized="keep"), on_meta()
    assert hold_weights(blank, source, "meta") == ["a.weight"]
    facts = [{name: (t.shape, t.dtype) for name, t in each.state_dict().items()} for each in (same, blank)]
    assert facts[0] == facts[1] and blank.a.quantized[0].is_meta  # type: ignore[union-attr]
    stored = sum(t.nbytes for t in same.a.quantized)  # type: ignore[union-attr]
    file = sum(source._source.spec(n).dtype.itemsize * math.prod(source._source.spec(n).shape)  # type: ignore[attr-defined]
               for n in source._packed["a.weight"].parts.values()) if hasattr(source, "_packed") else None  # fmt: skip
    if file is not None:
        assert file <= stored <= file * 1.04 + 4 * OUT, "row scales, and codes of bitsandbytes with their tables"


@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith(("Q2_K", "Q3_K"))])
def test_other_numbers_take_the_layout_of_a_weight(case: str, tmp_path: Path) -> None:
    _, write = CASES[case]
    same: Any = build(on_meta(), open_source(write(tmp_path)), quantized="keep")
    stored = same.a.quantized
    other = weight(OUT, INTO, 7) * 3 + stored.dequantized(torch.float32)
    new = requantized(stored, other, "a")
    assert [(t.shape, t.dtype) for t in new] == [(t.shape, t.dtype) for t in stored]
    limit = {"scaled": 0.06, "int8": 0.02, "bitsandbytes-4bit": 0.13}.get(stored.format(), 0.11)
    assert relative_error(other, new) < limit
    zero = requantized(stored, torch.zeros_like(other), "a")
    assert not zero.dequantized(torch.float32).any()


def test_rows_of_a_fused_weight_are_held(tmp_path: Path) -> None:
    """As in original checkpoints, whose queries, keys and values are one tensor."""
    for case in ("gguf Q4_K", "nf4 nested", "fp8 blocks", "torch.int8 by row"):
        source = open_source(CASES[case][1](tmp_path))
        whole: Any = source
        part = whole.quantized("a.weight", "cpu", (32, 48))
        trimmed_copy = case.startswith("gguf") or all(t.untyped_storage().nbytes() <= t.nbytes for t in part)
        assert trimmed_copy, "the rest can be freed"
        assert torch.equal(part.dequantized(torch.float32), source.get("a.weight", dtype=torch.float32)[32:80])


def test_sizes_of_blocks_are_those_of_the_files() -> None:
    assert dict(TYPES) == SIZES


# whole models


def quantized_folder(folder: Path, kind: str) -> Path:
    """The embedded model with the weights of its denoiser's attention and its text encoder packed."""
    model = Path(shutil.copytree(embedded.folder(), folder / "model"))
    for part in (model / "unet", model / "transformer", model / "text_encoder"):
        for file in part.glob("*.safetensors"):
            packed = dict[str, torch.Tensor]()
            for name, tensor in load_file(file).items():
                fits = tensor.dim() == 2 and tensor.shape[1] % 64 == 0 and "embed" not in name
                if fits and re.search(r"(to_q|to_k|to_v|to_out\.0|[qkv]_proj|fc1)\.weight$", name):
                    if kind == "fp8":
                        packed |= scaled(name, tensor.float(), "scale_weight", "row", torch.float8_e4m3fn)[0]
                    elif kind == "int8":
                        packed |= scaled(name, tensor.float(), "scale_weight", "row", torch.int8)[0]
                    else:
                        weight = Bnb4Weight.of(tensor.float())
                        packed |= {
                            name: weight.codes.view(-1, 1), f"{name}.absmax": weight.scales.flatten(),
                            f"{name}.quant_map": weight.tables,
                            f"{name}.quant_state.bitsandbytes__nf4": text({"quant_type": "nf4", "blocksize": 64,
                                "dtype": "bfloat16", "shape": list(tensor.shape)}),
                        }  # fmt: skip
                else:
                    packed[name] = tensor
            save_file({name: tensor.contiguous().clone() for name, tensor in packed.items()}, file)
    return model


@pytest.mark.parametrize("kind", ["fp8", "int8", "nf4"])
def test_a_model_generates_the_same_image_with_its_weights_unpacked_or_not(kind: str, tmp_path: Path) -> None:
    folder = quantized_folder(tmp_path, kind)
    images, models = [], []
    for quantized in ("off", "keep"):
        model = load_model(folder, dtype=torch.float32, quantized=quantized)  # type: ignore[arg-type]
        models.append(model)
        images.append(Pipeline(model)("a red apple", seed=7, steps=2).images[0])
    assert images[0].tobytes() == images[1].tobytes()
    assert (
        "quantized weights were unpacked to float32" in models[0].quantization
        and "stay quantized" in models[1].quantization
    )
    formats = {type(m).__name__ for each in models[1].networks.values() for m in each.modules()}
    assert formats & {"ScaledLinear", "Int8Linear", "Bnb4Linear"}


def test_a_lora_is_merged_into_a_model_that_stays_quantized_and_taken_out(tmp_path: Path) -> None:
    folder = quantized_folder(tmp_path, "int8")
    base = load_model(folder, dtype=torch.float32, quantized="keep")
    names = [name for name, m in base.denoiser.named_modules() if isinstance(m, QuantizedLayer)]
    pair = lora_pair(f"lora_unet_{names[0].replace('.', '_')}", *base.denoiser.get_submodule(names[0]).shape, seed=3)
    bits = {name: tensor.clone() for name, tensor in base.denoiser.state_dict().items()}
    base.swap([(read(pair), 1.0)])
    loaded = load_model(folder, loras=[(read(pair), 1.0)], dtype=torch.float32, quantized="keep")
    changed = loaded.denoiser.state_dict()
    assert all(torch.equal(value, changed[name]) for name, value in base.denoiser.state_dict().items())
    assert not torch.equal(changed[f"{names[0]}.numbers"], bits[f"{names[0]}.numbers"])
    loaded.swap([])
    assert all(torch.equal(value, bits[name]) for name, value in loaded.denoiser.state_dict().items())


def test_a_base_that_stays_quantized_trains_what_the_unpacked_one_does(tmp_path: Path) -> None:
    """The same adapter file, and less memory for the weights, as planned before anything is read."""
    make_set(tmp_path / "set", {"one": "a cat"})
    folder, results, bytes_ = quantized_folder(tmp_path, "nf4"), [], []
    for quantize in ("off", "keep"):
        config = TrainConfig.of(
            model=str(folder), dataset=str(tmp_path / "set"), output=str(tmp_path / quantize), device="cpu", steps=1,
            cache_dir=str(tmp_path / "cache"), resolution=64, precision="fp32", quantize=quantize,
            targets="attention", seed=1,
        )  # fmt: skip
        _, _, needs = check(config)
        assert needs["problems"] == []
        bytes_.append(needs["weights_bytes"])
        results.append(load_file(train(config).path))
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    assert bytes_[1] < bytes_[0]


def test_a_plain_base_cannot_stay_quantized(tmp_path: Path) -> None:
    make_set(tmp_path / "set", {"one": "a cat"})
    config = TrainConfig.of(dataset=str(tmp_path / "set"), output=str(tmp_path / "out"), device="cpu", quantize="keep")
    assert any("no weight of the denoiser is quantized in its file" in each for each in check(config)[2]["problems"])


def small_flux() -> Any:
    from diffusers import FluxTransformer2DModel

    model: Any = FluxTransformer2DModel(
        patch_size=1, in_channels=32, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=4,
        joint_attention_dim=64, pooled_projection_dim=32, axes_dims_rope=[8, 12, 12],
    )  # fmt: skip
    return model.eval()


@pytest.mark.parametrize("kind", ["fp8", "Q8_0", "Q5_1"])
def test_an_original_checkpoint_with_fused_weights_stays_quantized_under_other_names(kind: str, tmp_path: Path) -> None:
    """Rows of its fused projections, and swapped halves, are parts of the stored bits."""
    torch.manual_seed(0)
    state = small_flux().state_dict()
    component = component_from_names("unet", {name: tuple(tensor.shape) for name, tensor in state.items()})
    original = Stacked(DictSource(state), component)
    tensors = {name: original.get(name) for name in original.names()}
    path = tmp_path / "flux"
    if kind == "fp8":
        narrow = {name: t.to(torch.float8_e4m3fn) if t.dim() == 2 else t.clone() for name, t in tensors.items()}
        save_file(narrow, path)
    else:
        of = PACKED_FORMATS[f"gguf-{kind}"].weights.of
        rows = {
            name: (kind, tuple(t.shape), of(t).blocks.numpy().tobytes()) if t.dim() == 2 else
            ("F32", tuple(t.shape), t.numpy().tobytes()) for name, t in tensors.items()
        }  # fmt: skip
        gguf(path, rows)
    source = open_source(path)
    shapes = {name: source.spec(name).shape for name in source.names()}
    renamed = Renamed(source, component_from_names("unet", shapes))
    models = []
    for quantized in ("off", "keep"):
        with torch.device("meta"):
            blank = small_flux()
        models.append(build(blank, renamed, dtype=torch.float32, quantized=quantized))  # type: ignore[arg-type]
    plain, same = models
    linear = [name for name, module in plain.named_modules() if isinstance(module, nn.Linear)]
    assert all(isinstance(same.get_submodule(name), QuantizedLayer) for name in linear) and len(linear) > 20
    for name in linear:
        assert torch.equal(same.get_submodule(name).weight, plain.get_submodule(name).weight), name  # type: ignore[arg-type]
    inputs = {
        "hidden_states": torch.randn(1, 6, 32), "encoder_hidden_states": torch.randn(1, 3, 64),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5]), "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(3, 3), "return_dict": False,
    }  # fmt: skip
    with torch.no_grad():
        assert torch.equal(plain(**inputs)[0], same(**inputs)[0])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(64, 32, 3, padding=1), nn.Conv2d(32, 64, 1)
        self.grouped = nn.Conv2d(64, 64, 3, groups=2)
        self.same = nn.Conv2d(64, 64, 3, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.same(self.grouped(self.b(self.a(x))))
        return y


def test_convolutions_of_a_file_stay_quantized(tmp_path: Path) -> None:
    """Also those that a converter to GGUF flattened, as every weight of more than two axes."""
    torch.manual_seed(0)
    model = Convolutions()
    fp8 = {n: t.to(torch.float8_e4m3fn) if t.dim() == 4 else t.clone() for n, t in model.state_dict().items()}
    save_file(fp8, tmp_path / "a.safetensors")
    of = PACKED_FORMATS["gguf-Q8_0"].weights.of
    rows = {
        n: ("Q8_0", (t.numel() // 32, 32), of(t.reshape(-1, 32)).blocks.numpy().tobytes()) if t.dim() == 4 else
        ("F32", tuple(t.shape), t.numpy().tobytes()) for n, t in model.state_dict().items()
    }  # fmt: skip
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items() if t.dim() == 4}
    x = torch.randn(1, 64, 5, 5)
    for path in (tmp_path / "a.safetensors", gguf(tmp_path / "a.gguf", rows, original=shapes)):
        source = open_source(path)
        with torch.device("meta"):
            blanks = [Convolutions() for _ in range(2)]
        plain, same = (build(b, source, quantized=q) for b, q in zip(blanks, ("off", "keep"), strict=True))  # type: ignore[arg-type]
        kinds = [isinstance(module, QuantizedLayer) for module in same.children()]
        assert kinds == [True, True, False, False], "groups, and a padding by name, stay plain"
        assert torch.equal(plain(x), same(x))
