"""Containers: what is not an adapter is refused by its content and named; what is written is whole or not there."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import inweave
from inweave.adapter import Tensor
from inweave.errors import FormatError
from inweave.files.documents import read_json
from inweave.files.writing import write_atomic
from inweave.formats.files import open_container, read_header, shard_files, write_file
from tests.bad_files import (
    BAD,
    HOW_TO_CONVERT,
    PAIR,
    PAIR_BYTES,
    armed,
    executed,
    good_file,
    pack,
    peft_directory,
    pickled,
    shards,
    without_root,
)

SOURCE = Path(inweave.__file__).parent


@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_an_adapter_is_refused(kind: str, tmp_path: Path) -> None:
    bad = BAD[kind]
    path = bad.make(tmp_path)
    with pytest.raises(FormatError) as caught:
        inweave.load(path)
    assert bad.message in str(caught.value)
    assert str(path) in str(caught.value) or path.name.endswith(".index.json")  # an index may name its shard instead
    assert "\n" not in str(caught.value)
    assert not executed(tmp_path)


@pytest.mark.parametrize("kind", [kind for kind, bad in BAD.items() if "hash" not in bad.accepted_by])
def test_reading_only_the_header_refuses_the_same(kind: str, tmp_path: Path) -> None:
    path = BAD[kind].make(tmp_path)
    with pytest.raises(FormatError):
        read_header(path)
    assert not executed(tmp_path)


@pytest.mark.parametrize("where", ["", "sub"])
def test_a_named_pipe_never_blocks(where: str, tmp_path: Path) -> None:
    """Nothing writes to it, so opening it would block forever."""
    directory = tmp_path / where
    directory.mkdir(exist_ok=True)
    pipe = directory / "adapter_model.safetensors"
    os.mkfifo(pipe)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "adapter_model.safetensors"}}')
    tried: list[BaseException] = []

    def look() -> None:
        for path in (pipe, directory, tmp_path / "model.safetensors.index.json"):
            try:
                open_container(path)
            except FormatError as error:
                tried.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert len(tried) == 3


@pytest.mark.parametrize("kind", ["file", "index", "shard", "config", "directory"])
def test_what_may_not_be_read(kind: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to others
        folder = Path(name)
        folder.chmod(0o755)
        if kind in ("index", "shard"):
            path = shards({"a": "one.safetensors"}, one=["a"])(folder)
        else:
            path = good_file(folder / "x.safetensors") if kind == "file" else peft_directory(folder / "peft")
        closed = {"shard": folder / "one.safetensors", "config": path / "adapter_config.json"}.get(kind, path)
        open_container(path)
        closed.chmod(0o000)
        try:
            with without_root(), pytest.raises(FormatError, match="Permission denied"):
                open_container(path)
        finally:
            closed.chmod(0o755)


# -- pickles


def test_the_payload_is_live(tmp_path: Path) -> None:
    """The traps in these tests would go off if anything opened them."""
    for protocol in range(6):
        folder = tmp_path / str(protocol)
        folder.mkdir()
        pickle.loads(pickled(protocol, "x.pt")(folder).read_bytes())
        assert executed(folder)


SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".PT", "")
VALUES: tuple[object, ...] = ({}, [], {"a": 1}, [1, 2], [[]], ({}, 1), {"a": {"b": b"c"}})


def with_protocols(values: Sequence[object]) -> list[Any]:
    """Every value with every protocol of pickle; without --full each value once and each protocol at least once."""
    return [
        pytest.param(protocol, value, marks=() if protocol == row % 6 else pytest.mark.full, id=f"{value!r}-{protocol}")
        for row, value in enumerate(values)
        for protocol in range(6)
    ]


@pytest.mark.parametrize(("protocol", "suffix"), with_protocols(SUFFIXES))
def test_pickles_are_known_by_content_and_never_opened(protocol: int, suffix: str, tmp_path: Path) -> None:
    path = pickled(protocol, f"model{suffix}")(tmp_path)
    for reader in (inweave.load, inweave.inspect, open_container, read_header):
        with pytest.raises(FormatError, match=HOW_TO_CONVERT):
            reader(path)
    if suffix != ".safetensors":  # any file has a hash, whatever it holds
        assert inweave.hash_file(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    else:
        with pytest.raises(FormatError, match=HOW_TO_CONVERT):
            inweave.hash_file(path)
    with pytest.raises(FormatError, match=HOW_TO_CONVERT):
        inweave.check(path, "sd1.5")
    with pytest.raises(FormatError, match=HOW_TO_CONVERT):
        inweave.check(good_file(tmp_path / "good.safetensors"), path)
    assert not executed(tmp_path)


@pytest.mark.parametrize(("protocol", "value"), with_protocols(VALUES))
def test_any_pickled_value_is_known(protocol: int, value: object, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(pickle.dumps({"state_dict": value}, protocol))
    with pytest.raises(FormatError, match=HOW_TO_CONVERT):
        read_header(path)


def test_an_archive_is_never_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(armed(tmp_path)))
    with pytest.raises(FormatError, match=HOW_TO_CONVERT):
        inweave.load(path)
    assert not executed(tmp_path)


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".ckpt"])
def test_a_renamed_safetensors_file_is_read(suffix: str, tmp_path: Path) -> None:
    assert list(open_container(good_file(tmp_path / f"x{suffix}")).tensors) == list(PAIR)


@pytest.mark.parametrize(
    "width", [0x3C, 0x13C, 0x3C20, 0x3C09, 0x3C0A, 0x280, 0x480, 0x580, 0x7128, 0x717D, 0x715D, 0x6428]
)
def test_a_header_length_that_looks_like_something_else(width: int, tmp_path: Path) -> None:
    """The first bytes of a good file are a number: it may read as `<`, white space and `<`, or as a pickle's mark."""
    path = tmp_path / "x.safetensors"
    header: Mapping[str, object] = PAIR if width > 300 else {"__metadata__": {}}
    path.write_bytes(pack(header, PAIR_BYTES if width > 300 else b"", width=width))
    assert path.read_bytes()[:8] == width.to_bytes(8, "little")
    assert read_header(path).data_start == 8 + width


_LOADERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch.serialization"}


def test_the_source_has_no_unpickler() -> None:
    """No import of one, no torch.load or numpy.load, no eval or exec, anywhere in the package."""
    uses: list[str] = []
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 30
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("torch.load", "np.load", "numpy.load", "eval", "exec", "__import__"):
                    names = ["pickle"]
            uses += [
                f"{file}:{getattr(node, 'lineno', 0)}" for name in names if name in _LOADERS or name == "torch.load"
            ]
    assert uses == []


_AUDITED = """
import sys
from pathlib import Path
opened = []
sys.addaudithook(lambda event, args: opened.append(args) if event == "pickle.find_class" else None)
import inweave
from inweave.errors import InweaveError
for path in sys.argv[1:]:
    try:
        inweave.hash_file(path)
    except InweaveError:
        pass
    for reader in (inweave.load, inweave.inspect, lambda p: inweave.check(p, "gpt2")):
        try:
            reader(path)
        except InweaveError:
            continue
        raise SystemExit(f"{path} was read")
assert opened == [], opened
assert "torch" not in sys.modules
import pickle
pickle.loads(Path(sys.argv[1]).read_bytes())
assert opened, "the hook sees an unpickler at work"
"""


def test_no_unpickler_runs(tmp_path: Path) -> None:
    """In a process of its own, Python itself reports every global an unpickler looks up: there is none."""
    paths = []
    for kind in (
        "pickle-4-pt",
        "pickle-0-renamed",
        "payload-2-renamed",
        "torch-zip-pt",
        "torch-old-bin",
        "peft-with-pickle",
    ):
        (tmp_path / kind).mkdir()
        paths.append(BAD[kind].make(tmp_path / kind))
    result = subprocess.run(
        [sys.executable, "-c", _AUDITED, *map(str, paths)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert [executed(path.parent) for path in paths[:5]] == [True, False, False, False, False]  # the last line's doing
    assert not executed(paths[5])


# -- shards and directories


def test_shards_are_joined(tmp_path: Path) -> None:
    index = shards({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, one=["a"], two=["b", "c"])(
        tmp_path
    )
    for path in (index, tmp_path):
        container = open_container(path)
        assert {name: bytes(tensor.data) for name, tensor in container.tensors.items()} == {
            "a": b"\0",
            "b": b"\0",
            "c": b"\1",
        }
        assert [file.name for file in container.files] == ["one.safetensors", "two.safetensors"]
    assert shard_files(index) == [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "./x.safetensors", "..", ".", "", "x.bin",
     "x.safetensors/", "x\0.safetensors", "\ud800.safetensors", "y" * 300 + ".safetensors", 3, None, ["x.safetensors"]],
    ids=lambda name: str(name)[:20].encode("unicode_escape").decode(),
)  # fmt: skip
def test_a_shard_is_a_file_next_to_the_index(name: object, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    for folder in (tmp_path, inner / "a"):
        folder.mkdir(exist_ok=True)
        (folder / "x.safetensors").write_bytes(pack({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"1"))
    with pytest.raises(FormatError):
        open_container(shards({"a": name})(inner))


def test_a_peft_directory_comes_with_its_configuration(tmp_path: Path) -> None:
    peft_directory(tmp_path)
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        container = open_container(path)
        assert container.config == {"peft_type": "LORA", "r": 1, "lora_alpha": 2}
        assert len(container.tensors) == 2
        assert inweave.load(path).entries[0].factors.scale == 2


def test_named_adapters_are_listed_and_each_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="holds the adapters character, style; name one"):
        open_container(BAD["directory-of-named"].make(tmp_path))
    assert open_container(tmp_path / "style").config is not None


@pytest.mark.parametrize("name", ["adapter_model", "adapter", "pytorch_lora_weights", "anything"])
def test_the_file_in_a_directory_is_found(name: str, tmp_path: Path) -> None:
    good_file(tmp_path / f"{name}.safetensors")
    (tmp_path / "README.md").write_text("a style")
    assert list(open_container(tmp_path).tensors) == list(PAIR)


def test_a_known_name_wins_over_other_files(tmp_path: Path) -> None:
    peft_directory(tmp_path)
    good_file(tmp_path / "optimizer.safetensors")
    assert "base_model.model.x.lora_A.weight" in open_container(tmp_path).tensors


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to(good_file(tmp_path / "x.safetensors"))
    assert list(open_container(tmp_path / "link.safetensors").tensors) == list(PAIR)


def test_json_files_have_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    with path.open("wb") as file:
        file.truncate(64 * 1024 * 1024 + 1)
    with pytest.raises(FormatError, match="more than"):
        read_json(path)


def test_a_path_that_is_no_path() -> None:
    with pytest.raises(FormatError, match="null"):
        open_container("a\0b")
    with pytest.raises(FormatError, match="File name too long"):
        open_container("x" * 5000)


def test_reading_does_not_copy_or_hold_the_file(tmp_path: Path) -> None:
    """The data is a view of the file, which may be replaced or removed while the view is in use."""
    path = good_file(tmp_path / "x.safetensors")
    container = open_container(path)
    path.unlink()
    assert bytes(container.tensors["lora_unet_x.lora_down.weight"].data) == PAIR_BYTES[:8]
    first, second = (container.tensors[name].data for name in PAIR)
    assert isinstance(first, memoryview) and isinstance(second, memoryview)
    assert first.obj is second.obj  # one map, no copies


# -- writing

ONE = {"a": Tensor("U8", (4,), b"1111")}
TWO = {"other": Tensor("U8", (6,), b"222222")}


def test_a_file_is_replaced_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, ONE)
    assert write_file(path, TWO, {"k": "v"}) == path
    assert list(open_container(path).tensors) == ["other"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_may_be_written_over_what_it_was_read_from(tmp_path: Path) -> None:
    path = good_file(tmp_path / "x.safetensors")
    container = open_container(path)
    write_file(path, {f"new.{name}": tensor for name, tensor in container.tensors.items()})
    again = open_container(path)
    assert {name: bytes(tensor.data) for name, tensor in again.tensors.items()} == {
        f"new.{name}": bytes(tensor.data) for name, tensor in container.tensors.items()
    }


_SLOW_WRITER = """
import sys, time
from pathlib import Path
from inweave.files.writing import write_atomic
def chunks():
    yield b"new" * 1_000_000
    print("half", flush=True)
    time.sleep(60)
    yield b"end"
write_atomic(Path(sys.argv[1]), chunks())
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_writer_leaves_the_old_file(end: signal.Signals, tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.safetensors", ONE)
    before = path.read_bytes()
    with subprocess.Popen(
        [sys.executable, "-c", _SLOW_WRITER, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        half = [file for file in tmp_path.iterdir() if file != path]
        assert len(half) == 1 and half[0].stat().st_size > 1_000_000  # it was in the middle of it
        assert path.read_bytes() == before
        writer.send_signal(end)
        assert writer.wait(30) != 0
    assert path.read_bytes() == before
    assert list(open_container(tmp_path).tensors) == ["a"]  # a leftover of the other is not mistaken for an adapter
    if end == signal.SIGINT:
        assert list(tmp_path.iterdir()) == [path]
    write_file(path, TWO)
    assert list(open_container(path).tensors) == ["other"]


def test_a_failing_source_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.safetensors", ONE)
    before = path.read_bytes()

    def chunks() -> Iterator[bytes]:
        yield b"new"
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_atomic(path, chunks())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "name", ["missing/x.safetensors", "file/x.safetensors", "x" * 300 + ".safetensors", "directory", "."]
)
def test_an_unwritable_output_is_reported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("directory").mkdir()
    for write in (lambda: write_file(name, ONE), lambda: write_atomic(Path(name), [b"x"])):
        with pytest.raises(FormatError):
            write()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["directory", "file"]


_FULL_DISK = """
import resource, sys
from pathlib import Path
from inweave.errors import FormatError
from inweave.files.writing import write_atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_atomic(Path(sys.argv[1]), [bytes(64_000)] * 4)
except FormatError as error:
    print(error)
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """The system stops the writer at 100 kB, as it would on a full disk."""
    path = write_file(tmp_path / "x.safetensors", ONE)
    result = subprocess.run([sys.executable, "-c", _FULL_DISK, str(path)], capture_output=True, text=True, timeout=60)
    assert "x.safetensors: cannot be written: File too large" in result.stdout, result.stderr
    assert list(open_container(path).tensors) == ["a"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """Header and data always belong together, however often the file is replaced meanwhile."""
    path = write_file(tmp_path / "x.safetensors", ONE)
    variants = [{"a": Tensor("U8", (4,), b"1111")}, {"b": Tensor("U8", (4,), b"2222")}]
    blobs = [write_file(tmp_path / f"{i}.safetensors", tensors).read_bytes() for i, tensors in enumerate(variants)]
    stop = threading.Event()

    def replace() -> None:
        number = 0
        while not stop.is_set():
            (tmp_path / "next").write_bytes(blobs[number % 2])
            (tmp_path / "next").replace(path)
            number += 1

    thread = threading.Thread(target=replace)
    thread.start()
    contents = set()
    try:
        end = time.monotonic() + 0.7
        while time.monotonic() < end:
            ((name, tensor),) = open_container(path).tensors.items()
            contents.add((name, bytes(tensor.data)))
    finally:
        stop.set()
        thread.join()
    assert contents == {("a", b"1111"), ("b", b"2222")}


def test_what_is_written_is_json_a_person_can_read(tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.safetensors", ONE, {"title": "Größe \N{SNOWMAN}"})
    raw = path.read_bytes()
    header = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    assert "Größe \N{SNOWMAN}".encode() in header
    assert json.loads(header)["a"] == {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
