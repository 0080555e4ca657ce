"""Baking: the file on disk equals `MergedSource`, bit for bit, in every layout; or there is no file."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from inweave.errors import ConfigError, FormatError, InweaveError, TargetError
from inweave.exchange.load import component_folders, open_base
from inweave.formats.files import read_header
from inweave.targets.resolve import resolve
from inweave.weights.merged import MergedSource
from inweave.weights.offline import bake as baking
from inweave.weights.offline.bake import Baked, BakeItem, write_merged
from inweave.weights.source import FileSource
from inweave.weights.stack import Strength
from tests.support import random, sized, summation_error, tensor, write, write_sparse
from tests.unit.weights.models import (
    DENOISER,
    adapter,
    bits,
    flux,
    flux_lora,
    merged_with,
    pair,
    write_file,
    write_folder,
    write_shards,
)

STACK = [(flux_lora(1), Strength(0.7)), (flux_lora(50), Strength(components={"unet": -0.4, "te": 1.5}))]


def baked(base: Path, out: Path, stack=STACK, **options) -> Baked:  # type: ignore[no-untyped-def]
    index = open_base(base)
    layers = [BakeItem(resolve(adapter(lora), index), s, f"{n}.safetensors", "00") for n, (lora, s) in enumerate(stack)]
    return write_merged(base, layers, out, index=index, folders=component_folders(base), **options)


def expected(base: Path, source: FileSource | None = None, component: str | None = None) -> MergedSource:
    tensors = {name: (source or FileSource(base)).get(name) for name in (source or FileSource(base)).names()}
    return merged_with(tensors, open_base(base), [(adapter(lora), s) for lora, s in STACK], component)


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same(path: Path, want: MergedSource, dtype: torch.dtype | None = None) -> None:
    source = FileSource(path)
    assert set(source.names()) == set(want.names())
    for name in want.names():
        plain = not want.spec(name).dtype.is_floating_point
        exact = want.get(name, dtype=None if plain else dtype)
        got = source.get(name)
        assert got.dtype == exact.dtype and got.shape == exact.shape, name
        assert bits(got) == bits(exact), name


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [None, torch.bfloat16, torch.float16, torch.float32])
def test_a_file_is_the_merged_source_bit_for_bit(
    tmp_path: Path, stored: torch.dtype, target: torch.dtype | None
) -> None:
    base = write_file(tmp_path / "base.safetensors", flux(dtype=stored), **{"modelspec.title": "Warp"})
    report = baked(base, tmp_path / "out.safetensors", dtype=target)
    assert_same(tmp_path / "out.safetensors", expected(base), target)
    assert report.merged == 7 and report.tensors == len(flux())
    assert listed(tmp_path) == ["base.safetensors", "out.safetensors"]


def test_8_bit_floats_merge_too(tmp_path: Path) -> None:
    base = write_file(tmp_path / "base.safetensors", flux(dtype=torch.float8_e4m3fn))
    baked(base, tmp_path / "out.safetensors")
    assert_same(tmp_path / "out.safetensors", expected(base))
    baked(base, tmp_path / "wide.safetensors", dtype=torch.bfloat16)
    assert_same(tmp_path / "wide.safetensors", expected(base), torch.bfloat16)


def test_metadata_is_kept_and_adapters_are_listed(tmp_path: Path) -> None:
    metadata = {"modelspec.title": "Warp", "modelspec.hash_sha256": "0xold", "inweave.merged": '[{"name": "first"}]'}
    base = write_file(tmp_path / "base.safetensors", flux(), **metadata)
    baked(base, tmp_path / "out.safetensors")
    written_metadata = read_header(tmp_path / "out.safetensors").metadata
    assert written_metadata["modelspec.title"] == "Warp"
    assert written_metadata["format"] == "pt"  # transformers refuses files with metadata but without it
    assert "modelspec.hash_sha256" not in written_metadata
    assert json.loads(written_metadata["inweave.merged"]) == [
        {"name": "first"},
        {"name": "0.safetensors", "sha256": "00", "strength": 0.7},
        {"name": "1.safetensors", "sha256": "00", "strength": {"overall": 1.0, "unet": -0.4, "te": 1.5}},
    ]


def test_data_is_aligned_and_readable_by_others(tmp_path: Path) -> None:
    base = write_file(tmp_path / "base.safetensors", flux(dtype=torch.float16))
    baked(base, tmp_path / "out.safetensors")
    header = read_header(tmp_path / "out.safetensors")
    assert header.data_start % 8 == 0
    for name, span in header.spans.items():
        assert span.begin % torch.empty(0, dtype=FileSource(base).spec(name).dtype).itemsize == 0
    order = sorted(header.spans, key=lambda name: header.spans[name].begin)
    spans = read_header(base).spans
    assert order == sorted(spans, key=lambda name: spans[name].begin)  # both files are read from front to end
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert set(file.keys()) == set(flux())


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_shards_keep_their_files_and_index(tmp_path: Path, dtype: torch.dtype | None) -> None:
    index = write_shards(tmp_path / "base", flux())
    report = baked(index, tmp_path / "out", dtype=dtype)
    assert listed(tmp_path / "out") == listed(tmp_path / "base")
    assert_same(tmp_path / "out" / index.name, expected(index), dtype)
    before, after = (json.loads((tmp_path / name / index.name).read_text()) for name in ("base", "out"))
    assert after["weight_map"] == before["weight_map"]
    assert after["metadata"] == {"note": "kept", "total_size": report.bytes}
    shard = next(path for path in (tmp_path / "out").glob("*.safetensors"))
    assert read_header(shard).metadata["shard"] == shard.name
    assert "inweave.merged" in read_header(shard).metadata


def test_a_bias_the_base_lacks_is_created(tmp_path: Path) -> None:
    tensors = {"first.weight": torch.randn(4, 3), "second.weight": torch.randn(4, 4)}
    index = write_shards(tmp_path / "base", tensors, 2)
    lora = pair("unet.first", 4, 3) | {"unet.first.diff_b": random(9, 4)}
    report = baked(index, tmp_path / "out", [(lora, Strength(0.5))])
    assert report.created == ["first.bias"]
    source = FileSource(tmp_path / "out" / index.name)
    want = merged_with(tensors, open_base(index), [(adapter(lora), Strength(0.5))])
    assert set(source.names()) == {"first.weight", "second.weight", "first.bias"}
    for name in source.names():
        assert bits(source.get(name)) == bits(want.get(name))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_diffusers_folder_is_copied_with_its_networks_merged(tmp_path: Path, dtype: torch.dtype | None) -> None:
    base = write_folder(tmp_path / "base", flux())
    unet = base / "transformer" / "diffusion_pytorch_model.safetensors"
    half = {name: value.half() for name, value in load_file(unet).items()}
    write_file(unet.with_name("diffusion_pytorch_model.fp16.safetensors"), half)
    (base / "transformer" / "diffusion_pytorch_model.bin").write_bytes(b"old")
    write_file(base / "transformer" / "something_else_entirely.safetensors", {"x.weight": torch.ones(2)})
    write_file(base / "model.safetensors", {"x.weight": torch.ones(2)})
    (base / ".cache").mkdir()
    (base / ".cache" / "lock").write_text("")
    (tmp_path / "blob.txt").write_text("blob")
    (base / "README.md").symlink_to(tmp_path / "blob.txt")  # how the hub's cache stores every file
    report = baked(base, tmp_path / "out", dtype=dtype)
    out = tmp_path / "out"
    for name, component in ((unet, "unet"), (base / "text_encoder" / "model.safetensors", "te1")):
        want = expected(base, FileSource(name), component)
        assert_same(out / name.relative_to(base), want, dtype)
    variant = unet.with_name("diffusion_pytorch_model.fp16.safetensors")
    assert_same(out / variant.relative_to(base), expected(base, FileSource(variant), "unet"), dtype)
    vae = Path("vae") / "diffusion_pytorch_model.safetensors"
    if dtype is None:
        assert (out / vae).read_bytes() == (base / vae).read_bytes()
    else:
        assert FileSource(out / vae).spec("decoder.conv_in.weight").dtype == dtype
    for same in ("model_index.json", "scheduler/config.json", "transformer/config.json", "README.md"):
        assert (out / same).read_text() == (base / same).read_text()
    assert not (out / "README.md").is_symlink()
    left = {str(Path(path).relative_to(base)) for path in report.left_out}
    assert left == {"transformer/diffusion_pytorch_model.bin", "transformer/something_else_entirely.safetensors",
                    "model.safetensors"}  # fmt: skip
    assert not [name for name in (*left, ".cache") if (out / name).exists()]


def test_an_unchanged_network_is_copied(tmp_path: Path) -> None:
    base = write_folder(tmp_path / "base", flux())
    baked(base, tmp_path / "out", [(pair("lora_unet_final_layer_linear", 6, 8), Strength())])
    encoder = Path("text_encoder") / "model.safetensors"
    assert (tmp_path / "out" / encoder).read_bytes() == (base / encoder).read_bytes()


def test_one_network_in_a_folder_of_shards(tmp_path: Path) -> None:
    tensors = {name.removeprefix(DENOISER): value for name, value in flux().items() if name.startswith(DENOISER)}
    index = write_shards(tmp_path / "base", tensors, 2, "diffusion_pytorch_model")
    (tmp_path / "base" / "config.json").write_text("{}")
    lora = {key: value for key, value in flux_lora().items() if "te1" not in key}
    baked(tmp_path / "base", tmp_path / "out", [(lora, Strength())])
    assert listed(tmp_path / "out") == listed(tmp_path / "base")
    want = merged_with(tensors, open_base(tmp_path / "base"), [(adapter(lora), Strength())])
    assert_same(tmp_path / "out" / index.name, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_tensor_is_merged_in_runs_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Fused rows, a part of them and the whole; each run within one rounding of the whole's."""
    base = write_file(tmp_path / "base.safetensors", flux(dtype=dtype))
    stack = [
        (flux_lora(), Strength(0.7)),
        (pair("lora_unet_double_blocks_0_img_attn_qkv", 24, 8, 5, 31), Strength(-1.0)),
        (pair("transformer.single_transformer_blocks.0.attn.to_k", 8, 8, 2, 41), Strength(2.0)),
    ]
    monkeypatch.setattr(baking, "LARGE", 100)
    monkeypatch.setattr(baking, "RUN", 7 * 8 * 4)
    baked(base, tmp_path / "out.safetensors", stack)
    tensors = load_file(base)
    want = merged_with(tensors, open_base(base), [(adapter(lora), strength) for lora, strength in stack])
    source = FileSource(tmp_path / "out.safetensors")
    changed = 0
    for name in want.names():
        got, exact = source.get(name), want.get(name)
        if exact.is_floating_point():
            size = exact.abs().float()
            bound = torch.finfo(dtype).eps * size + summation_error(10, size + 1)  # ranks 3, 5 and 2
            assert ((got.float() - exact.float()).abs() <= bound).all(), name
            changed += not torch.equal(got, tensors[name])
    assert changed == 7


def test_strength_zero_is_the_base(tmp_path: Path) -> None:
    base = write_file(tmp_path / "base.safetensors", flux())
    report = baked(base, tmp_path / "out.safetensors", [(flux_lora(), Strength(0.0))])
    assert report.merged == 0
    assert {k: bits(v) for k, v in load_file(tmp_path / "out.safetensors").items()} == {
        k: bits(v) for k, v in flux().items()
    }


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    base = write_file(tmp_path / "base.safetensors", flux())
    calls: list[tuple[int, int]] = []
    report = baked(base, tmp_path / "out.safetensors", progress=lambda now, total: calls.append((now, total)))
    assert calls[-1] == (report.bytes, report.bytes)
    assert [now for now, _ in calls] == sorted(now for now, _ in calls)


def test_targets_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    base = write_file(tmp_path / "base.safetensors", flux())
    folder = write_folder(tmp_path / "folder", flux())
    (tmp_path / "there").mkdir()
    for source, out, words in (
        (base, tmp_path / "base.safetensors", "the base itself"),
        (base, tmp_path / "out", r"one file, so --out ends in \.safetensors"),
        (folder, tmp_path / "out.safetensors", "several files"),
        (folder, folder / "out", "the base itself"),
        (folder, tmp_path / "there", "already exists"),
    ):
        with pytest.raises(ConfigError, match=words):
            baked(source, out)
    for source, out in ((base, tmp_path / "file" / "out.safetensors"), (folder, tmp_path / "file" / "out")):
        (tmp_path / "file").write_text("no folder")
        with pytest.raises(FormatError, match=r"cannot be|not a directory|Not a directory"):
            baked(source, out)
    (folder / "linked").symlink_to(tmp_path / "there")
    with pytest.raises(ConfigError, match="a symbolic link to a folder"):
        baked(folder, tmp_path / "out")


def test_a_full_disk_is_detected_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_file(tmp_path / "base.safetensors", flux())
    monkeypatch.setattr(baking.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="10 are free"):
        baked(base, tmp_path / "out.safetensors")


def test_integers_without_scales_are_refused(tmp_path: Path) -> None:
    base = write_file(tmp_path / "i.safetensors", {"first.weight": torch.ones(4, 3, dtype=torch.int8)})
    with pytest.raises(TargetError, match="quantized"):
        baked(base, tmp_path / "out.safetensors", [(pair("unet.first", 4, 3), Strength())])


def test_overflow_is_an_error_and_old_nan_is_not(tmp_path: Path) -> None:
    tensors = {"first.weight": torch.full((4, 3), 6e4).half(), "second.weight": torch.full((4, 3), float("nan")).half()}
    base = write_file(tmp_path / "base.safetensors", tensors)
    big = pair("unet.first", 4, 3) | {"unet.first.alpha": tensor(3e6)}
    with pytest.raises(TargetError, match=r"first\.weight: the result would overflow F16"):
        baked(base, tmp_path / "out.safetensors", [(big, Strength())])
    baked(base, tmp_path / "wide.safetensors", [(big, Strength())], dtype=torch.float32)
    baked(base, tmp_path / "nan.safetensors", [(pair("unet.second", 4, 3), Strength())])
    wide = write_file(
        tmp_path / "f32.safetensors", {"first.weight": torch.ones(4, 3), "second.weight": torch.full((2,), 1e6)}
    )
    with pytest.raises(TargetError, match=r"second\.weight: the result would overflow F16"):
        baked(wide, tmp_path / "half.safetensors", [(pair("unet.first", 4, 3), Strength())], dtype=torch.float16)
    assert sorted(p.name for p in tmp_path.glob("*")) == [
        "base.safetensors", "f32.safetensors", "nan.safetensors", "wide.safetensors",
    ]  # fmt: skip


class Injected(Exception):
    pass


@pytest.mark.parametrize("layout", ["file", "shards", "folder"])
def test_a_failure_at_any_chunk_leaves_nothing_behind(tmp_path: Path, layout: str) -> None:
    make = {"file": lambda: write_file(tmp_path / "base.safetensors", flux()),
            "shards": lambda: write_shards(tmp_path / "base", flux()),
            "folder": lambda: write_folder(tmp_path / "base", flux())}  # fmt: skip
    base = make[layout]()
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / ("out.safetensors" if layout == "file" else "out")
    for stop in (1, 2, 30, 60):
        calls = itertools.count(1)

        def failing(now: int, total: int, calls=calls, stop=stop) -> None:  # type: ignore[no-untyped-def]
            if next(calls) == stop:
                raise Injected

        with pytest.raises(Injected):
            baked(base, out, progress=failing)
        assert sorted(tmp_path.rglob("*")) == before


def test_a_base_cut_while_it_is_read_is_a_clear_error(tmp_path: Path) -> None:
    base = write_file(tmp_path / "base.safetensors", flux())

    def cut(now: int, total: int) -> None:
        os.truncate(base, base.stat().st_size // 2)

    with pytest.raises(FormatError, match="truncated while it was read"):
        baked(base, tmp_path / "out.safetensors", progress=cut)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_shard_named_twice_is_refused(tmp_path: Path) -> None:
    index = write_shards(tmp_path / "base", {"first.weight": torch.ones(4, 3), "second.weight": torch.ones(4, 3)}, 2)
    for shard in (tmp_path / "base").glob("*.safetensors"):
        write_file(shard, {"first.weight": torch.ones(4, 3), "second.weight": torch.ones(4, 3)})
    with pytest.raises(FormatError, match="also in an earlier shard"):
        baked(index, tmp_path / "out", [(pair("unet.first", 4, 3), Strength())])


def test_a_plan_for_another_base_is_refused(tmp_path: Path) -> None:
    one = write_file(tmp_path / "one.safetensors", {"first.weight": torch.ones(4, 3), "far.weight": torch.ones(2, 2)})
    two = write_file(tmp_path / "two.safetensors", {"first.weight": torch.ones(8, 3), "far.weight": torch.ones(2, 2)})
    index = open_base(one)
    layer = BakeItem(resolve(adapter(pair("unet.first", 4, 3)), index), Strength())
    with pytest.raises(TargetError, match=r"expects \[4, 3\], the file has \[8, 3\]"):
        write_merged(two, [layer], tmp_path / "out.safetensors", index=index)


MIB = 1024**2
CHILD = """
import sys
from pathlib import Path
from inweave.exchange.load import load, open_base
from inweave.targets.resolve import resolve
from inweave.weights.offline.bake import BakeItem, write_merged
from inweave.weights.stack import Strength
base, lora, out = sys.argv[1:]
index = open_base(base)
def high():  # in KiB; ru_maxrss would remember the process that started this one
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = high()
write_merged(base, [BakeItem(resolve(load(lora), index), Strength(0.5))], out, index=index)
print(before, high())
"""


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """1.7 GB (3 at full size) that take no disk, made like the largest checkpoints: one tensor of 680 MB (FLUX.2's
    linear1 in bfloat16, 1.36 GB as float32) among many of 64 MB; and a rank-16 adapter for the large one and two
    others."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"huge.weight": ("BF16", (55296, 6144))}
    shapes |= {f"blocks.{number}.weight": ("BF16", (8192, 4096)) for number in range(sized(16, 36))}
    folder = tmp_path_factory.mktemp("sparse")
    base = write_sparse(folder / "base.safetensors", shapes)
    lora = pair("huge", 55296, 6144, 16) | pair("blocks.0", 8192, 4096, 16) | pair("blocks.7", 8192, 4096, 16)
    return base, write(folder / "lora.safetensors", lora)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_far_below_the_checkpoint(tmp_path: Path, sparse: tuple[Path, Path]) -> None:
    """A whole process with torch in it peaks below 1.25 GB over a base of 1.7 or 3 GB; a larger base changes nothing,
    since one tensor (or one run of its rows) is in memory at a time. So 24 GB stay under 2 GB."""
    base, lora = sparse
    size = sized(1_700_000_000, 3_000_000_000)
    assert base.stat().st_size > size
    out = tmp_path / "out.safetensors"
    try:
        report = subprocess.run([sys.executable, "-c", CHILD, str(base), str(lora), str(out)],
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert report.returncode == 0, report.stderr
        before, peak = (int(number) * 1024 for number in report.stdout.split())
        assert out.stat().st_size > size
        assert peak < 1250 * MIB, f"{peak / MIB:.0f} MiB"
        assert peak - before < 900 * MIB, f"{(peak - before) / MIB:.0f} MiB"
    finally:
        out.unlink(missing_ok=True)


def test_a_killed_process_leaves_no_file_under_the_name(tmp_path: Path, sparse: tuple[Path, Path]) -> None:
    base, lora = sparse
    out = tmp_path / "out.safetensors"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(base), str(lora), str(out)])
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out.safetensors.*.part")):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    assert not out.exists()
    for part in tmp_path.glob(".out*"):
        part.unlink()


def test_every_error_is_ours(tmp_path: Path) -> None:
    (tmp_path / "base.safetensors").write_bytes(b"no")
    base = write_file(tmp_path / "good.safetensors", flux())
    index = open_base(base)
    layer = BakeItem(resolve(adapter(flux_lora()), index), Strength())
    with pytest.raises(InweaveError):
        write_merged(tmp_path / "base.safetensors", [layer], tmp_path / "out.safetensors", index=index)
    with pytest.raises(InweaveError):
        write_merged(tmp_path / "missing.safetensors", [layer], tmp_path / "out.safetensors", index=index)
