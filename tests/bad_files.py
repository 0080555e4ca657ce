"""Everything that is not an adapter but may appear where one is expected, created on demand.

Each kind is a function of an empty directory that returns the path to try, with a part of the message that
must come back. Nothing here is a mock: the pickles are real (and armed), the pipes and links too.
"""

from __future__ import annotations

import collections
import json
import os
import pickle
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PAIR = {
    "lora_unet_x.lora_down.weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]},
    "lora_unet_x.lora_up.weight": {"dtype": "F32", "shape": [2, 1], "data_offsets": [8, 16]},
}
PAIR_BYTES = struct.pack("<4f", 0.5, -1.0, 2.0, 0.25)
HOW_TO_CONVERT = "safetensors.torch.save_file"


def pack(header: object, data: bytes = b"", *, width: int | None = None) -> bytes:
    """A safetensors file, right or wrong; ``width`` pads the header to a length."""
    raw = header if isinstance(header, bytes) else json.dumps(header, ensure_ascii=False).encode()
    raw += b" " * ((width or len(raw)) - len(raw))
    return struct.pack("<Q", len(raw)) + raw + data


def good_file(path: Path) -> Path:
    path.write_bytes(pack(PAIR, PAIR_BYTES))
    return path


class Payload:
    """Makes a directory when it is unpickled: what a hostile file would do, only tamer."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.marker,)


def armed(directory: Path) -> dict[str, object]:
    """What a checkpoint looks like, with a payload inside; `executed` reports whether it ran."""
    return {"weight": [1.0, 2.0], "payload": Payload(directory / "executed")}


def executed(directory: Path) -> bool:
    return (directory / "executed").exists()


@contextmanager
def without_root() -> Iterator[None]:
    """Root may read everything; be somebody else inside the block."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(65534)
    except OSError:
        pytest.skip("this root cannot become another user")
    try:
        yield
    finally:
        os.seteuid(0)


def pickled(protocol: int, name: str, *, bare: bool = False) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        content = armed(directory)
        path = directory / name
        path.write_bytes(pickle.dumps(content["payload"] if bare else content, protocol))
        return path

    return make


def torch_saved(name: str, *, zipped: bool) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        import torch

        content = collections.OrderedDict(armed(directory), tensor=torch.ones(2))
        torch.save(content, directory / name, _use_new_zipfile_serialization=zipped)
        return directory / name

    return make


def content(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        (directory / name).write_bytes(data)
        return directory / name

    return make


def _lfs_pointer(directory: Path) -> Path:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0123456789abcdef' * 4}\nsize 144981184\n"
    assert len(text) == 134
    return content("pointer.safetensors", text.encode())(directory)


def _missing(directory: Path) -> Path:
    return directory / "nowhere.safetensors"


def _under_a_file(directory: Path) -> Path:
    return good_file(directory / "file.safetensors") / "inside.safetensors"


def _broken_link(directory: Path) -> Path:
    (directory / "link.safetensors").symlink_to(directory / "gone.safetensors")
    return directory / "link.safetensors"


def _link_loop(directory: Path) -> Path:
    (directory / "a.safetensors").symlink_to(directory / "b.safetensors")
    (directory / "b.safetensors").symlink_to(directory / "a.safetensors")
    return directory / "a.safetensors"


def _fifo(directory: Path) -> Path:
    os.mkfifo(directory / "pipe.safetensors")
    return directory / "pipe.safetensors"


def _socket(directory: Path) -> Path:
    here = Path.cwd()
    os.chdir(directory)  # the path of a socket may have a hundred characters only
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("s.safetensors")
    finally:
        os.chdir(here)
    return directory / "s.safetensors"


def _empty_directory(directory: Path) -> Path:
    (directory / "notes.txt").write_text("nothing here")
    return directory


def _several(directory: Path) -> Path:
    good_file(directory / "a.safetensors")
    good_file(directory / "b.safetensors")
    return directory


def peft_directory(directory: Path, config: object = None) -> Path:
    directory.mkdir(exist_ok=True)
    keys = ("base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight")
    header = dict(zip(keys, PAIR.values(), strict=True))
    (directory / "adapter_model.safetensors").write_bytes(pack(header, PAIR_BYTES))
    chosen = {"peft_type": "LORA", "r": 1, "lora_alpha": 2} if config is None else config
    raw = chosen if isinstance(chosen, bytes) else json.dumps(chosen).encode()
    (directory / "adapter_config.json").write_bytes(raw)
    return directory


def _named_adapters(directory: Path) -> Path:
    peft_directory(directory / "style")
    peft_directory(directory / "character")
    return directory


def _pickled_peft(directory: Path) -> Path:
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 2}')
    pickled(2, "adapter_model.bin")(directory)
    return directory


def broken_config(raw: bytes) -> Callable[[Path], Path]:
    return lambda directory: peft_directory(directory, raw)


def shards(weight_map: object, **files: object) -> Callable[[Path], Path]:
    """An index and its shards; a shard is a list of tensor names, each one byte."""

    def make(directory: Path) -> Path:
        for name, names in files.items():
            assert isinstance(names, list)
            header = {key: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, key in enumerate(names)}
            (directory / f"{name}.safetensors").write_bytes(pack(header, bytes(range(len(names)))))
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {"total_size": 2}, "weight_map": weight_map}))
        return index

    return make


@dataclass(frozen=True, slots=True)
class Bad:
    make: Callable[[Path], Path]
    message: str
    accepted_by: tuple[str, ...] = ()  # commands that accept it nevertheless


_WHOLE = pack(PAIR, PAIR_BYTES)
_HTML = b"\n<!DOCTYPE html>\n<html><head><title>Log in</title></head><body>Sign in to download</body></html>\n"
_DUNDER = {"lora_unet_x.__class__.__init__.lora_up.weight": PAIR["lora_unet_x.lora_down.weight"]}

BAD: dict[str, Bad] = {
    "empty": Bad(content("empty.safetensors", b""), "is empty"),
    "two-bytes": Bad(content("two.safetensors", b"\x02\x00"), "has 2 bytes"),
    "cut-in-header": Bad(content("cut.safetensors", _WHOLE[:40]), "cut short"),
    "cut-in-data": Bad(content("cut.safetensors", _WHOLE[:-3]), "download or copy it again"),
    "trailing-bytes": Bad(content("long.safetensors", _WHOLE + b"extra"), "5 bytes follow the last tensor"),
    "git-lfs-pointer": Bad(_lfs_pointer, "git lfs pull"),
    "web-page": Bad(content("page.safetensors", _HTML), "a web page"),
    "gguf": Bad(content("model.safetensors", b"GGUF\x03\0\0\0" + bytes(56)), "a GGUF file"),
    "noise": Bad(content("noise.safetensors", bytes(range(255, 127, -1))), "header claims"),
    "dunder-name": Bad(content("dunder.safetensors", pack(_DUNDER, bytes(8))), "__class__"),
    "no-tensors": Bad(content("none.safetensors", pack({})), "no tensors", accepted_by=("hash",)),
    "missing": Bad(_missing, "no such file or directory"),
    "under-a-file": Bad(_under_a_file, "no such file or directory"),
    "broken-link": Bad(_broken_link, "no such file or directory"),
    "link-loop": Bad(_link_loop, "leads back to itself"),
    "named-pipe": Bad(_fifo, "a named pipe"),
    "socket": Bad(_socket, "a socket"),
    "device": Bad(lambda directory: Path("/dev/zero"), "a device"),
    "directory-without": Bad(_empty_directory, "without an adapter"),
    "directory-of-several": Bad(_several, "holds 2 .safetensors files", accepted_by=("inspect",)),
    "directory-of-named": Bad(_named_adapters, "character, style", accepted_by=("inspect",)),
    "peft-with-pickle": Bad(_pickled_peft, HOW_TO_CONVERT),
    "config-not-json": Bad(broken_config(b"{'peft_type': 'LORA'}"), "adapter_config.json: not valid JSON",
        accepted_by=("hash",)),
    "config-a-list": Bad(broken_config(b"[]"), "a JSON object was expected", accepted_by=("hash",)),
    "config-not-text": Bad(broken_config(b'{"a": "\xff"}'), "not valid JSON", accepted_by=("hash",)),
    "config-too-deep": Bad(broken_config(b"[" * 100_000), "not valid JSON", accepted_by=("hash",)),
    "shard-missing": Bad(shards({"a": "one.safetensors", "b": "two.safetensors"}, one=["a"]),
        "two.safetensors: no such"),
    "shard-outside": Bad(shards({"a": "../one.safetensors"}), "next to the index"),
    "shard-absolute": Bad(shards({"a": "/etc/one.safetensors"}), "next to the index"),
    "shard-pickle": Bad(shards({"a": "one.bin"}), "next to the index"),
    "shard-repeats": Bad(shards({"a": "one.safetensors", "b": "two.safetensors"}, one=["a", "b"], two=["b"]),
        "earlier shard"),
    "shard-lacks": Bad(shards({"a": "one.safetensors", "b": "one.safetensors"}, one=["a"]), "no shard holds it"),
    "shard-map-absent": Bad(shards([]), "no weight_map"),
    "torch-zip-pt": Bad(torch_saved("model.pt", zipped=True), HOW_TO_CONVERT, accepted_by=("hash",)),
    "torch-zip-renamed": Bad(torch_saved("model.safetensors", zipped=True), HOW_TO_CONVERT),
    "torch-old-bin": Bad(torch_saved("model.bin", zipped=False), HOW_TO_CONVERT, accepted_by=("hash",)),
    "torch-old-ckpt": Bad(torch_saved("model.ckpt", zipped=False), HOW_TO_CONVERT, accepted_by=("hash",)),
    "torch-old-renamed": Bad(torch_saved("model.safetensors", zipped=False), HOW_TO_CONVERT),
    **{f"pickle-{p}-pt": Bad(pickled(p, "model.pt"), HOW_TO_CONVERT, accepted_by=("hash",)) for p in range(6)},
    **{f"pickle-{p}-renamed": Bad(pickled(p, "model.safetensors"), HOW_TO_CONVERT) for p in range(6)},
    **{f"payload-{p}-renamed": Bad(pickled(p, "model.safetensors", bare=True), HOW_TO_CONVERT) for p in range(6)},
}  # fmt: skip
