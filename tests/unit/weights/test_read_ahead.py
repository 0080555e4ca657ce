"""What a GPU gets is read ahead and merged there: the same weights as tensor by tensor. Here, the GPU is the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import inweave
from inweave.errors import TargetError
from inweave.formats.read import read
from inweave.weights import build as builds
from inweave.weights.build import build
from inweave.weights.merged import MergedSource
from inweave.weights.source import DictSource, FileSource, WeightSource
from tests.support import random
from tests.unit.weights.models import bits, write_file

NAMES = [f"block{number}" for number in range(8)]


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in NAMES:
            self.add_module(name, nn.Linear(6, 4))
        self.register_buffer("table", torch.arange(3))
        if tied:
            self.block6.weight = self.block7.weight


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "_on_gpu", lambda device: True)


def lora(seed: int, kinds: str) -> inweave.Adapter:
    tensors = {}
    for number, name in enumerate(NAMES[:6]):
        tensors[f"unet.{name}.lora_down.weight"] = random(seed + number, 2, 6)
        tensors[f"unet.{name}.lora_up.weight"] = random(seed + 50 + number, 4, 2)
        if kinds == "mixed" and number % 3 == 0:
            tensors[f"unet.{name}.dora_scale"] = random(seed + 90, 4, 1)
    return read(tensors)


class Late:
    """A source that lets the stack arrive while its third tensor is read."""

    def __init__(self, source: WeightSource, pending: Future[Any], stack: Any) -> None:
        self._source, self._pending, self._stack, self.reads = source, pending, stack, 0
        self.names, self.spec = source.names, source.spec

    def _read(self) -> None:
        self.reads += 1
        if self.reads == 3:
            self._pending.set_result(self._stack)

    def get(self, name: str, **options: Any) -> torch.Tensor:
        self._read()
        return self._source.get(name, **options)


class LateStream(Late):
    def stream(self, names: Any, device: torch.device) -> Iterable[tuple[str, torch.Tensor]]:
        for pair in self._source.stream(names, device):  # type: ignore[attr-defined]
            self._read()
            yield pair


@pytest.mark.parametrize("kinds", ["lora", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_read_ahead_are_those_read_one_by_one(
    kinds: str, dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    state = {name: value.clone() for name, value in Net(tied).state_dict().items()}
    file = FileSource(write_file(tmp_path / "a.safetensors", state))
    stack = [(lora(1, kinds), 0.7), (lora(300, "lora"), -0.5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builds, "_on_gpu", lambda device: False)
        expected = build(Net(tied), MergedSource(DictSource(state), stack), dtype=dtype).state_dict()
    late: list[tuple[Any, Any]] = (
        [(Late, DictSource(state)), (Late, file), (LateStream, file)] if dtype == torch.float32 else []
    )
    for kind, source in (
        *late,
        (None, file),
    ):  # what is rounded is not read ahead, so nothing would let the stack arrive
        pending: Future[Any] = Future()
        base: Any = kind(source, pending, stack) if kind else source
        sizes: list[int] = []
        net = build(Net(tied), MergedSource(base, pending if kind else stack), dtype=dtype, progress=sizes.append)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
            if not name.startswith(tuple(NAMES[:6])):
                assert bits(value) == bits(expected[name])
        assert len(sizes) == len(state) - tied
        assert not tied or net.block6.weight is net.block7.weight


def test_a_misfit_is_reported_before_anything_is_read(tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in Net().state_dict().items()}
    state["block3.weight"] = torch.zeros(5, 6)
    file = FileSource(write_file(tmp_path / "a.safetensors", state))
    progress: list[int] = []
    sources: list[WeightSource] = [file, MergedSource(file, [])]
    for source in sources:
        with pytest.raises(
            TargetError, match=r"shape: block3\.weight is \[5, 6\] in the source, \[4, 6\] in the model"
        ):
            build(Net(), source, progress=progress.append)
    assert not progress
