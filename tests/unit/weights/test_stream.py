"""Files read ahead in their own order: the same bytes as tensor by tensor, and changes of a file are noticed."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from inweave.errors import FormatError, TargetError
from inweave.exchange.load import open_base
from inweave.weights import transfer
from inweave.weights.source import DictSource, FileSource, Renamed, streamed
from inweave.weights.transfer import FileSpan, stream
from tests.unit.weights.models import bits, flux, write_file, write_shards

CPU = torch.device("cpu")


@pytest.fixture(params=[1 << 10, 1 << 25], ids=["small buffers", "one buffer"])
def buffers(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STREAM_BUFFER", request.param)


@pytest.mark.parametrize("shards", [0, 3])
def test_a_file_is_streamed_as_it_is_read(shards: int, buffers: None, tmp_path: Path) -> None:
    tensors = flux(dtype=torch.bfloat16) | {"empty": torch.zeros(0, 4), "one": torch.ones(())}
    path = write_shards(tmp_path, tensors) if shards else write_file(tmp_path / "a.safetensors", tensors)
    source = FileSource(path)
    names = [name for number, name in enumerate(tensors) if number % 5 or name in ("empty", "one")]
    random.Random(0).shuffle(names)
    got = dict(source.stream(names, CPU))
    assert got.keys() == set(names)
    for name, value in got.items():
        assert value.dtype == tensors[name].dtype and torch.equal(value, tensors[name]), name
    addresses = {value.untyped_storage().data_ptr() for value in got.values() if value.numel()}
    assert len(addresses) == len(got) - 1  # memory of their own
    with pytest.raises(TargetError, match="the source has no tensor 'nothing'"):
        list(source.stream(["nothing"], CPU))


def test_small_tensors_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand turns of a thread pool made a model take twice as long to build."""
    reads: list[int] = []
    preadv = os.preadv

    def counted(file: int, buffers: Any, offset: int) -> int:
        reads.append(count := preadv(file, buffers, offset))
        return count

    tensors = {f"{number:04}": torch.full((16, 8), float(number)) for number in range(1000)}
    source = FileSource(write_file(tmp_path / "a.safetensors", tensors))
    monkeypatch.setattr(os, "preadv", counted)
    assert all(bool((value == float(name)).all()) for name, value in source.stream(list(tensors), CPU))
    assert reads == [1000 * 16 * 8 * 4]


def test_a_checkpoint_in_other_names_is_streamed_as_it_is_read(buffers: None, tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.safetensors", flux())
    component = open_base(path).components["unet"]
    for base in (FileSource(path), DictSource(flux())):
        source = Renamed(base, component)
        got = dict(streamed(source, source.names(), CPU))
        assert got.keys() == set(source.names())
        for name, value in got.items():
            assert bits(value) == bits(source.get(name)), name


def test_a_file_that_changes_while_it_is_streamed_is_refused(buffers: None, tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.safetensors", flux())
    source = FileSource(path)
    reading = source.stream(list(source.names()), CPU)
    next(reading)
    os.utime(path, ns=(1, 1))
    with pytest.raises(FormatError, match="changed on disk since it was opened"):
        list(reading)
    with pytest.raises(FormatError, match="changed on disk since it was opened"):
        next(source.stream(list(source.names()), CPU))
    path.unlink()
    with pytest.raises(FormatError, match="cannot be read again"):
        next(source.stream(list(source.names()), CPU))


def test_a_file_that_ends_early_is_refused(buffers: None, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    with (tmp_path / "a").open("rb", buffering=0) as file:
        assert [
            t.numel() for t in stream([FileSpan(file, 4000, 1000), FileSpan(file, 0, 0), FileSpan(file, 1, 9)], CPU)
        ] == [
            1000,
            0,
            9,
        ]
        with pytest.raises(FormatError, match="ends before byte"):
            list(stream([FileSpan(file, 10, 20), FileSpan(file, 4000, 1001)], CPU))
