"""A scan reads headers, recognizes layouts it saw before, and reports the same as reading the whole file."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from inweave.adapter.tensor import scalar
from inweave.exchange.load import load
from inweave.formats.gate import split_header
from inweave.library import Library
from inweave.library.layouts import LayoutReader, exact_layout
from tests.support import (
    figure,
    lora_listing,
    lora_listings,
    lora_pair,
    random,
    sized,
    tensor,
    write,
    write_sparse,
)

KOHYA = "gen_kohya_sdxl_lora"


def write_listing(path: Path, name: str, metadata: Mapping[str, str] | None = None, value: float = 1.0) -> Path:
    """Write a sparse file with the tensors of a listing; its alphas and scales are ``value``."""
    listing = lora_listing(name)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = listing["tensors"]  # type: ignore[assignment]
    fields = {**(listing.get("metadata") or {}), **(metadata or {})}  # type: ignore[dict-item]
    write_sparse(path, tensors, fields)
    with path.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        for key, (dtype, shape) in tensors.items():
            if key.endswith((".alpha", ".scale")) and dtype.startswith(("F", "B")) and all(size == 1 for size in shape):
                file.seek(start + header[key]["data_offsets"][0])
                file.write(scalar(value, dtype, tuple(shape)).data)
    return path


LISTINGS = [name for name in lora_listings() if "adapter_config" not in lora_listing(name)]


@pytest.mark.parametrize("name", LISTINGS[:: sized(10, 1)])
def test_a_header_says_what_the_whole_file_says(tmp_path: Path, name: str) -> None:
    path = write_listing(tmp_path / "style.safetensors", name)
    adapter = load(path)
    reader = LayoutReader()
    expected = exact_layout(adapter)
    for _ in range(2):  # read, then recognized
        assert reader.read(path) == (expected, adapter.metadata)


def test_files_of_one_layout_differ_where_their_metadata_does(tmp_path: Path) -> None:
    """Metadata about the base, and metadata that decides how tensors are read, is read from each file."""
    shapes = lora_pair("lora_unet_double_blocks_0_img_attn_proj", 3072, 3072)
    lokr = {"lora_unet_x.lokr_w1": random(1, 4, 4), "lora_unet_x.lokr_w2": random(2, 8, 8)}
    reader = LayoutReader()
    files = [
        write(tmp_path / f"{number}.safetensors", tensors, metadata)
        for number, (tensors, metadata) in enumerate([
            (shapes, None),
            (shapes, {"ss_output_name": "a"}),
            (shapes, {"ss_network_module": "networks.lora_flux"}),
            (shapes, {"modelspec.architecture": "flux-1-dev/lora"}),
            (shapes, {"ss_sd_model_name": "flux1-schnell.safetensors"}),
            (shapes, {"ss_output_name": "chroma"}),
            (shapes, {"alpha": "3"}),
            (shapes, {"mflux_version": "1"}),
            (shapes, {next(iter(shapes)): "<embed>"}),
            (lokr | {"lora_unet_x.alpha": tensor(4.0)}, {"ss_network_dim": "16"}),
            (lokr | {"lora_unet_x.alpha": tensor(16.0)}, {"ss_network_dim": "16"}),
            (lokr | {"lora_unet_x.alpha": tensor(4.0)}, {"ss_network_dim": "8"}),
        ])
    ]  # fmt: skip
    for path in (*files, *reversed(files)):
        try:
            adapter = load(path)
        except Exception as error:
            with pytest.raises(type(error)) as raised:
                reader.read(path)
            assert str(raised.value) == str(error)
        else:
            assert reader.read(path) == (exact_layout(adapter), adapter.metadata), path


def raw_file(path: Path, header: str, data: bytes) -> Path:
    raw = header.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_a_header_that_differs_in_anything_else_is_read_anew(tmp_path: Path) -> None:
    """A recognized header does not skip the gate for cut files, repeated names and metadata of other types."""
    reader = LayoutReader()
    down, up = '"lora_unet_x.lora_down.weight"', '"lora_unet_x.lora_up.weight"'
    rest = (
        f'{down}:{{"dtype":"F32","shape":[1,8],"data_offsets":[0,32]}},'
        f'{up}:{{"dtype":"F32","shape":[8,1],"data_offsets":[32,64]}}}}'
    )
    good = raw_file(tmp_path / "good.safetensors", '{"__metadata__":{"a":"b"},' + rest, bytes(64))
    assert reader.read(good)[0].modules == 1
    spaced = raw_file(tmp_path / "spaced.safetensors", ' { "__metadata__" : {"a": "\\u0062"} ,' + rest, bytes(64))
    assert reader.read(spaced)[1] == {"a": "b"}
    behind = raw_file(tmp_path / "behind.safetensors", "{" + rest[:-1] + ',"__metadata__":{"z":"y"}}', bytes(64))
    escaped = raw_file(tmp_path / "e.safetensors", "{" + rest[:-1] + ',"__metad\\u0061ta__":{"z":"y"}}', bytes(64))
    for path in (behind, escaped, behind, escaped):
        assert reader.read(path)[1] == {"z": "y"}
    bad = {
        "cut": ('{"__metadata__":{"a":"b"},' + rest, bytes(60)),
        "longer": ('{"__metadata__":{"a":"b"},' + rest, bytes(68)),
        "twice": ('{"__metadata__":{"a":"b","a":"c"},' + rest, bytes(64)),
        "number": ('{"__metadata__":{"a":1},' + rest, bytes(64)),
        "NaN": ('{"__metadata__":{"a":NaN},' + rest, bytes(64)),
        "surrogate": ('{"__metadata__":{"a":"\\ud800"},' + rest, bytes(64)),
        "list": ('{"__metadata__":["a"],' + rest, bytes(64)),
        "many": ('{"__metadata__":{' + ",".join(f'"{n}":""' for n in range(10_001)) + "}," + rest, bytes(64)),
        "two": ('{"__metadata__":{"a":"b"},"__metadata__":{},' + rest, bytes(64)),
    }
    for name, (header, data) in bad.items():
        path = raw_file(tmp_path / f"{name}.safetensors", header, data)
        messages = []
        for attempt in (reader.read, load):
            with pytest.raises(Exception) as raised:
                attempt(path)
            messages.append(f"{type(raised.value).__name__} {raised.value}")
        assert messages[0] == messages[1], name
    assert split_header(b"{") is not None and split_header(b'{"__metadata__":') is None


def test_alphas_are_not_read_by_a_scan_and_count_once_the_file_is_read(tmp_path: Path) -> None:
    root = tmp_path / "loras"
    root.mkdir()
    for name, alpha in (("fine", 4.0), ("zero", 0.0), ("broken", float("nan"))):
        write(root / f"{name}.safetensors", lora_pair("lora_unet_x", 8, 8, alpha=alpha))
    (root / "broken.json").write_text("[]")
    library = Library(tmp_path / "library.sqlite3", [root])
    library.scan()
    assert [entry.health for entry in library.entries()] == [[], [], []]
    library.examine()
    broken, fine, zero = library.entries()
    assert "alpha is nan" in broken.facts.problems[0] and "NaN or infinity" in broken.health[-1]
    assert broken.facts.warnings[0].startswith("broken.json")
    assert (fine.facts.problems, fine.facts.warnings, zero.facts.problems) == ((), (), ())
    assert "alpha 0 is read as alpha = rank" in zero.facts.warnings[0]
    library.close()


def test_the_first_scan_of_large_files(tmp_path: Path) -> None:
    """Files of one layout take the time to read their header, not the time to place its thousands of tensors."""
    count, root = sized(8, 200), tmp_path / "loras"
    root.mkdir()
    for number in range(count):
        path = root / f"style-{number}.safetensors"
        if number < 2:
            write_listing(path, KOHYA, {"ss_output_name": f"style {number}"})
        else:
            write_sparse(path, lora_listing(KOHYA)["tensors"], {"ss_output_name": f"style {number}"})  # type: ignore[arg-type]
    library = Library(tmp_path / "library.sqlite3", [root])
    cpu = time.process_time()
    library.scan()
    cpu = time.process_time() - cpu
    assert {(entry.facts.base, entry.facts.ranks, entry.facts.tensors) for entry in library.entries()} == {
        ("sdxl", (8,), 2958)
    }
    began = time.process_time()
    exact_layout(load(root / "style-0.safetensors"))
    single_file = time.process_time() - began
    figure(
        f"{count} SDXL files of 2,958 tensors: {cpu / count * 1000:.1f} ms of CPU a file, "
        f"{single_file * 1000:.0f} ms to read and place one alone"
    )
    assert cpu / count < single_file / 2
    library.close()
