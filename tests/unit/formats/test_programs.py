"""Notes about other programs when a file is written, and small guarantees about files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import inweave
from inweave.errors import FormatError
from inweave.formats.files import write_file
from inweave.targets.bases import known_index
from tests.support import random, scalar_tensor

MODULE = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"


def notes(tmp_path: Path, dialect: str, *, alpha: float | None = None, dora: bool = False, base: str = "sd1.5") -> str:
    tensors = {f"{MODULE}.lora_down.weight": random(1, 4, 320), f"{MODULE}.lora_up.weight": random(2, 320, 4)}
    if alpha is not None:
        tensors[f"{MODULE}.alpha"] = scalar_tensor(alpha)
    if dora:
        tensors[f"{MODULE}.dora_scale"] = random(3, 320, 1)
    path = write_file(tmp_path / "in.safetensors", tensors)
    out = tmp_path / ("out" if dialect == "peft" else "out.safetensors")
    return " ".join(inweave.convert(path, out, to=dialect, base=base).notes)


def test_what_everybody_reads_needs_no_note(tmp_path: Path) -> None:
    assert notes(tmp_path, "kohya", alpha=2) == ""
    assert notes(tmp_path, "peft", alpha=2, dora=True) == ""


@pytest.mark.parametrize("dialect", ["kohya", "comfy", "onetrainer"])
def test_dora_is_read_differently(tmp_path: Path, dialect: str) -> None:
    text = notes(tmp_path, dialect, dora=True)
    assert "A1111" in text and "ComfyUI" in text and "Forge" in text and "DoRA" in text
    assert "DoRA" not in notes(tmp_path, dialect)


def test_a_scale_in_the_metadata_alone_is_said(tmp_path: Path) -> None:
    assert "0.5" in notes(tmp_path, "diffusers", alpha=2) and "scale 1" in notes(tmp_path, "diffusers", alpha=2)
    text = notes(tmp_path, "diffusers", alpha=4)
    assert "scale 1" not in text and "ComfyUI does not find" in text


@pytest.mark.parametrize("dialect", ["comfy", "onetrainer"])
def test_who_reads_these_names(tmp_path: Path, dialect: str) -> None:
    assert "ComfyUI" in notes(tmp_path, dialect)


@pytest.mark.parametrize(
    ("base", "who"),
    [
        ("sdxl", "read by OneTrainer and ComfyUI"), ("flux1-dev", "read by OneTrainer and ComfyUI"),
        ("qwen-image", "read by OneTrainer alone"), ("sana-1.6b", "read by OneTrainer alone"),
        ("flux1-schnell", "read by ComfyUI alone"), ("ssd-1b", "read by ComfyUI alone"),
        ("kolors", "neither OneTrainer nor ComfyUI reads these names of kolors"),
        ("wan2.1-t2v-14b", "neither OneTrainer nor ComfyUI reads"), ("cogvideox-2b", "neither OneTrainer nor ComfyUI"),
    ],
)  # fmt: skip
def test_who_reads_the_names_of_onetrainer_depends_on_the_model(base: str, who: str, tmp_path: Path) -> None:
    index = known_index(base)
    shapes = next(index.components[name].shapes for name in ("transformer", "unet") if name in index.components)
    name, (rows, columns) = next(
        (name.removesuffix(".weight"), shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and "attn" in name and name.endswith(".weight")
    )
    part = "unet" if "unet" in index.components else "transformer"
    key = f"{part}.{name}.lora_"
    tensors = {f"{key}A.weight": random(1, 2, columns), f"{key}B.weight": random(2, rows, 2)}
    adapter = inweave.load(write_file(tmp_path / "in.safetensors", tensors))
    saved = inweave.save(adapter, tmp_path / "out.safetensors", dialect="onetrainer", base=base)
    assert who in " ".join(saved.notes)


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a.bin"])
def test_arrays_of_numpy_are_not_called_a_pickle(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        arrays: dict[str, Any] = {"model.layers.0.lora_linear.a0.weight" if name == "a.npz" else "x": np.zeros(3)}
        np.savez(file, **arrays)
    with pytest.raises(FormatError, match="NumPy") as error:
        inweave.load(tmp_path / name)
    assert "is a pickle" not in str(error.value)
    with (tmp_path / "b.npy").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(FormatError, match="NumPy"):
        inweave.load(tmp_path / "b.npy")


def test_autov1_needs_a_file_that_reaches_its_window(tmp_path: Path) -> None:
    small = write_file(tmp_path / "small.safetensors", {"a": random(1, 8)})
    assert inweave.hash_file(small).autov1 is None
    large = write_file(tmp_path / "large.safetensors", {"a": random(1, 300_000)})
    raw = large.read_bytes()
    assert inweave.hash_file(large).autov1 == hashlib.sha256(raw[0x100000:0x110000]).hexdigest()[:8]


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_magnitudes_on_a_convolution_have_its_axes(tmp_path: Path, kind: str) -> None:
    module = "lora_unet_down_blocks_0_resnets_0_conv1"
    shapes = {"hada_w1_a": (320, 2), "hada_w1_b": (2, 2880), "hada_w2_a": (320, 2), "hada_w2_b": (2, 2880)}
    if kind == "lokr":
        shapes = {"lokr_w1": (2, 2), "lokr_w2": (160, 1440)}
    tensors = {f"{module}.{role}": random(1, *shape) for role, shape in shapes.items()}
    tensors[f"{module}.dora_scale"] = random(5, 320, 1)
    path = write_file(tmp_path / "in.safetensors", tensors)
    inweave.convert(path, tmp_path / "out.safetensors", to="kohya", base="sd1.5")
    written = inweave.load(tmp_path / "out.safetensors")
    assert written.tensors[f"{module}.dora_scale"].shape == (320, 1, 1, 1)
    assert inweave.check(written, "sd1.5").ok
