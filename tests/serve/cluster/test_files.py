"""Files of jobs on another machine: recognized, copied by hash, removed when nobody uses them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError, FormatError
from inweave.serve.cluster.files import Hashes, NodeFiles, paths_of, survey


def copy(node: NodeFiles, key: dict[str, Any], source: Path) -> str | None:
    """Send a tree to a node as the bridge does, and return its path there."""
    part = node.begin(key)
    for name, _, _ in key["files"]:
        content = (source.parent / name).read_bytes()
        for offset in range(0, max(len(content), 1), 3):
            node.write(part, name, offset, content[offset : offset + 3])
    node.complete(part, key)
    return node.find(key)


def key_of(path: Path, elsewhere: Path) -> dict[str, Any]:
    """Return the key of a file as another machine gets it, where its folder does not exist."""
    key = survey(str(path))
    assert key is not None
    return {**key, "hash": Hashes().tree(key), "path": str(elsewhere / path.name)}


def test_a_shared_folder_is_recognized(tmp_path: Path) -> None:
    path, node = tmp_path / "a.safetensors", NodeFiles(tmp_path / "cache", 1000)
    path.write_bytes(b"content")
    key = survey(str(path))
    assert key is not None and node.find(key) == str(path)
    os.utime(path, (1, 1))  # a copy with another time
    assert node.find(key) is None
    assert node.find({**key, "hash": Hashes().tree(key)}) == str(path), "the hash is the same"
    path.write_bytes(b"CONTENT")
    assert node.find({**key, "hash": "0" * 64}) is None
    assert survey("inweave/emoji") is None and paths_of(["inweave/emoji"]) == {}


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_tree_that_is_missing_is_copied_once_and_keeps_its_names(folder: bool, tmp_path: Path) -> None:
    source = tmp_path / "here" / ("model" if folder else "a.safetensors")
    names = ("unet/w.safetensors", "model_index.json", "empty.txt") if folder else ("",)
    for name in names:
        file = source / name if name else source
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"" if name == "empty.txt" else b"0123456789" + name.encode())
    (source.parent / "adapter_config.json").write_text("{}")
    key, node = key_of(source, tmp_path / "there"), NodeFiles(tmp_path / "cache", 1000)
    assert node.find(key) is None
    local = copy(node, key, source)
    assert local is not None and Path(local).name == source.name and Path(local).is_relative_to(tmp_path / "cache")
    for name in names:
        assert (Path(local) / name).read_bytes() == (source / name).read_bytes()
    assert (Path(local).parent / "adapter_config.json").is_file() is not folder, "it belongs to the adapter"
    assert NodeFiles(tmp_path / "cache", 1000).find(key) == local, "another runner of this machine"
    assert copy(node, key, source) == local, "of two copies at a time one is kept"
    assert not [*(tmp_path / "cache").glob(".*.part")]


def test_copies_that_no_job_uses_make_room_the_oldest_first(tmp_path: Path) -> None:
    node, other = (NodeFiles(tmp_path / "cache", 30) for _ in range(2))
    sources, keys = [], []
    for name in "abcd":
        source = tmp_path / f"{name}.safetensors"
        source.write_bytes(name.encode() * 10)
        sources.append(source)
        keys.append(key_of(source, tmp_path / "there"))
    for at, (key, source) in enumerate(zip(keys[:3], sources, strict=False)):
        copy(node, key, source)
        node.release()
        os.utime(tmp_path / "cache" / key["hash"], (at, at))
    assert other.use(keys[0]["hash"]), "a job of another runner uses the oldest"
    os.utime(tmp_path / "cache" / keys[0]["hash"], (0, 0))
    assert copy(node, keys[3], sources[3]) is not None
    assert [node.find(each) is not None for each in keys] == [True, False, True, True]
    with pytest.raises(ConfigError, match="--node-cache-gb"):
        NodeFiles(tmp_path / "small", 9).begin(keys[0])


def test_a_copy_that_differs_or_leads_out_is_refused(tmp_path: Path) -> None:
    source, node = tmp_path / "a.safetensors", NodeFiles(tmp_path / "cache", 1000)
    source.write_bytes(b"0123456789")
    key = key_of(source, tmp_path / "there")
    source.write_bytes(b"abcdefghij")
    with pytest.raises(FormatError, match="it changed while it was copied"):
        copy(node, key, source)
    assert node.find(key) is None and not [*(tmp_path / "cache").glob(".*.part")]
    for name in ("../x", "/etc/x", "", "."):
        with pytest.raises(ConfigError, match="leads out"):
            node.write(node.begin(key), name, 0, b"x")


def test_runners_of_one_machine_make_room_at_once(tmp_path: Path) -> None:
    """Folders vanish while another runner looks at them."""
    keys, sources = [], []
    for number in range(4):
        source = tmp_path / f"model-{number}"
        source.mkdir()
        for part in range(40):
            (source / f"{part}").write_bytes(b"%d-%d" % (number, part))
        sources.append(source)
        keys.append(key_of(source, tmp_path / "there"))

    def work(first: int) -> None:
        node = NodeFiles(tmp_path / "cache", 400)  # two of the four have room
        for number in range(first, first + 15):
            copy(node, keys[number % 4], sources[number % 4])
            node.release()

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(work, first) for first in range(4)]:
            each.result()
    assert not [*(tmp_path / "cache").glob(".*.part")]
