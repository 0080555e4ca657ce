"""A second start reads the quantized base: the same bits, and never those of a damaged file or of another base."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import numpy as np
import torch

import inweave
from inweave.errors import ConfigError
from inweave.generate import loading
from inweave.generate.loading import cache_folder
from inweave.models import quantization, quantized_cache
from inweave.models.open import open_model
from inweave.models.quantized_cache import QuantizedCache
from inweave.weights.source import stamps_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quantized_cache, "SMALLEST", 0)
    monkeypatch.setattr(loading, "cache_folder", lambda: tmp_path / "cache")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of the embedded model, whose files may be changed."""
    source = open_model("inweave/emoji").path
    shutil.copytree(source if source.is_dir() else source.parent, tmp_path / "base")
    return tmp_path / "base"


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def loaded(base: Path, format: Any, **options: Any) -> Any:
    return inweave.pipeline(base, device="cpu", quantize=format, **options)


def weights_of(pipe: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in pipe.model.denoiser.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_the_second_start_has_the_same_bits_and_quantizes_nothing(
    format: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = loaded(base, format)
    (file,) = files(tmp_path / "cache")
    assert f"the next start reads the quantized base from {file}" in first.model.quantization
    expected = weights_of(first)
    settings: dict[str, Any] = {"seed": 7, "steps": 1, "width": 64, "height": 64, "loras": ["pixel:1.0"]}
    image = np.asarray(first("a red apple", **settings).images[0])
    monkeypatch.delattr(quantization.Quantizer, "arrived")
    second = loaded(base, format)
    assert_same(weights_of(second), expected)
    assert "read from the cache" in second.model.quantization and f"are stored in {format}" in second.model.quantization
    assert np.array_equal(np.asarray(second("a red apple", **settings).images[0]), image)
    if format == "int8":
        streamed = loaded(base, format, offload="blocks")
        assert np.array_equal(np.asarray(streamed("a red apple", **settings).images[0]), image)
    assert files(tmp_path / "cache") == [file], "merging LoRAs writes to no file"
    second.swap([])
    assert_same(weights_of(loaded(base, format)), expected)


def test_what_decides_the_bits_is_in_the_key(base: Path) -> None:
    cache, part = QuantizedCache(base, 1.0), open_model(base).denoiser
    key = cache.key(part, "int8", torch.float32, CPU)
    others = [("nf4", torch.float32, CPU), ("int8", torch.bfloat16, CPU), ("int8", torch.float32, torch.device("cuda"))]
    keys = {key, *(cache.key(part, *facts) for facts in others)}
    assert len(keys) == 4 and "" not in keys
    assert cache.key(open_model(base).denoiser, "int8", torch.float32, CPU) == key
    assert QuantizedCache(base, 0).key(part, "int8", torch.float32, CPU) == "", "no budget, no cache"
    (file,) = stamps_of(part.source)
    os.utime(file)
    assert cache.key(open_model(base).denoiser, "int8", torch.float32, CPU) != key, "the base has changed"


def test_a_base_that_changes_is_quantized_again_and_its_old_file_removed(base: Path, tmp_path: Path) -> None:
    before = weights_of(loaded(base, "int8"))
    (old,) = files(tmp_path / "cache")
    (file,) = stamps_of(open_model(base).denoiser.source)
    raw, status = bytearray(file.read_bytes()), file.stat()
    raw[-1_000_000:] = raw[-2_000_000:-1_000_000]
    file.write_bytes(raw)  # in place: same inode, same size
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not all(torch.equal(value, before[name]) for name, value in weights_of(loaded(base, "int8")).items())
    (new,) = files(tmp_path / "cache")
    assert new != old, "the file of a base that is gone helps nobody"


def test_a_base_that_changes_while_it_loads_is_not_stored(base: Path, tmp_path: Path) -> None:
    cache, part = QuantizedCache(tmp_path / "cache", 1.0), open_model(base).denoiser
    key = cache.key(part, "int8", torch.float32, CPU)
    denoiser = loaded(base, "int8", quantized_cache_gb=0).model.denoiser
    (file,) = stamps_of(part.source)
    os.utime(file)
    assert cache.store(key, denoiser, "", {}) == "" and not files(tmp_path / "cache")


@pytest.mark.sample(3)
@pytest.mark.parametrize("damage", ["half", "bit", "empty", "metadata", "other"])
def test_a_damaged_file_is_reported_and_made_again(damage: str, base: Path, tmp_path: Path) -> None:
    expected = weights_of(loaded(base, "int8"))
    (file,) = files(tmp_path / "cache")
    raw = bytearray(file.read_bytes())
    if damage == "half":
        raw = raw[: len(raw) // 2]
    elif damage == "bit":
        raw[-1000] ^= 1
    elif damage == "empty":
        raw.clear()
    elif damage == "metadata":
        raw = raw.replace(b"checksums", b"checksumz")
    else:
        raw = raw.replace(b"float32", b"float16")
    file.unlink()
    file.write_bytes(raw)
    again = loaded(base, "int8")
    assert "the quantized base is made again, since its file cannot be used" in again.model.quantization
    assert_same(weights_of(again), expected)
    assert "read from the cache" in loaded(base, "int8").model.quantization


def test_files_that_were_used_longest_ago_make_room(base: Path, tmp_path: Path) -> None:
    cache, part = QuantizedCache(tmp_path / "cache", 1.0), open_model(base).denoiser
    denoiser = loaded(base, "int8", quantized_cache_gb=0).model.denoiser
    keys = [cache.key(part, "int8", dtype, CPU) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    for age, key in zip((30, 20), keys, strict=False):
        assert "the next start reads" in cache.store(key, denoiser, "", {})
        path = max(files(tmp_path / "cache"), key=lambda path: path.stat().st_mtime)
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    size = path.stat().st_size
    abandoned = tmp_path / "cache" / ".half.1234.part"
    abandoned.write_bytes(b"half")
    os.utime(abandoned, (0, 0))
    assert cache.find(keys[0]) is not None, "used now"
    tight = QuantizedCache(tmp_path / "cache", 2.5 * size / 2**30)
    assert "1 older ones were removed" in tight.store(keys[2], denoiser, "", {})
    assert [cache.find(key) is not None for key in keys] == [True, False, True]
    assert not abandoned.exists()
    assert QuantizedCache(tmp_path / "cache", 0.5 * size / 2**30).store(keys[1], denoiser, "", {}) == "", "too large"


def test_a_full_or_unwritable_disk_is_no_error(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    assert "the quantized base is not kept" in loaded(base, "int8").model.quantization
    (tmp_path / "cache").unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1))
    assert "0.00 GiB are free" in loaded(base, "int8").model.quantization
    with pytest.raises(ConfigError, match="quantized_cache_gb: expected gigabytes, 0 or more, got -1"):
        loaded(base, "int8", quantized_cache_gb=-1)
    assert cache_folder().parts[-2:] == ("inweave", "quantized")
