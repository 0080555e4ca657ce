"""Host memory of a base that is read, quantized and streamed, and files that change meanwhile: in real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file
from torch import nn

from inweave.errors import FormatError, MemoryBudgetError
from inweave.models.quantization import Quantizer, join_groups
from inweave.ops.quantized import FORMATS, QuantizedLayer, base, relative_error
from inweave.ops.tensors.process import available_memory, process_memory
from inweave.weights import scratch
from inweave.weights.build import build
from inweave.weights.source import FileSource
from inweave.weights.streaming.stream import BlockStream
from inweave.weights.weaver import Weaver
from tests.support import sized

CPU, MIB = torch.device("cpu"), 1 << 20
DEPTH, WIDTH = 24, 1024
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="figures of /proc")


def in_child(work: Callable[[], None]) -> int:
    """Return the exit code, or -signal, of a process that calls a function."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def own_memory() -> int:
    known = process_memory()
    assert known is not None
    return known[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.to_out(torch.tanh(self.to_q(x)))  # type: ignore[no-any-return]


class Network(nn.Module):
    """Blocks of 4 MiB in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def blank() -> Network:
    with torch.device("meta"):
        return Network().to(torch.bfloat16)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    network = blank().to_empty(device="cpu")
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.03)
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_file(network.state_dict(), path)
    return path


def streamed(path: Path, format: str) -> tuple[Network, BlockStream]:
    """Load as for images with `offload`: read, quantize, hold for merging, stream."""
    network = blank()
    quantizer = Quantizer(network, format, CPU) if format else None
    build(network, FileSource(path), arrived=None if quantizer is None else quantizer.arrived, mapped=False)
    if quantizer is not None:
        join_groups(network)
    Weaver(network).apply([])
    stream = BlockStream(network, list(network.blocks), CPU)
    stream.start()
    return network, stream


def measure(path: Path, formats: list[str]) -> None:
    """Print, for each format: bytes of the blocks, host memory with them, and its peak, both above the start."""
    for format in formats:
        before, most, ended = own_memory(), [0], threading.Event()

        def watch(before: int = before, most: list[int] = most, ended: threading.Event = ended) -> None:
            while not ended.wait(0.002):
                most[0] = max(most[0], own_memory() - before)

        thread = threading.Thread(target=watch)
        thread.start()
        network, stream = streamed(path, format)
        ended.set()
        thread.join()
        views = [t for layer in network.modules() if isinstance(layer, QuantizedLayer) for t in layer.quantized]
        assert len(views) >= 2 * DEPTH * bool(format)
        assert all(tensor._base is None for tensor in views), "a view keeps the memory before"
        print(stream.streamed_bytes, own_memory() - before - stream.slot_bytes, most[0])


@LINUX
def test_host_memory_holds_the_base_once(stored: Path) -> None:
    """Its peak too, but for what quantizing one layer takes: the base is read in 92 MiB, and 46 remain of it in int8.

    In a process of its own: in one that was forked, pages that it shares count when they are touched.
    """
    formats = ["", "int8", "nf4"][: sized(2, 3)]
    program = f"from tests.unit.weights.test_host_memory import *; measure(Path({str(stored)!r}), {formats})"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert len(lines) == len(formats)
    for size, there, most in lines:
        sizes = [each / MIB for each in (size, there, most)]
        assert there < 1.1 * size + 4 * MIB, sizes
        assert most < 1.1 * size + 64 * MIB and most < 1.15 * stored.stat().st_size, sizes


@pytest.mark.parametrize("format", [*FORMATS])
def test_rows_are_quantized_some_at_a_time_with_the_bits_of_all(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PIECE", 640)
    weights = [torch.randn(40, 128) * 10.0**scale for scale in (0, 3)]
    layers = [nn.Linear(128, 40) for _ in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight.data = weight
    whole = FORMATS[format].weights.of(torch.cat(weights))
    error = FORMATS[format].quantize(*layers)
    parts: list[Any] = [layer.quantized for layer in layers]
    for number, expected in enumerate(whole):
        assert torch.equal(torch.cat([part[number].view(torch.uint8) for part in parts]), expected.view(torch.uint8))
    assert error == pytest.approx(relative_error(weights[0], parts[0]), rel=1e-5)


def test_a_network_in_memory_of_its_own_outlives_its_file(stored: Path, tmp_path: Path) -> None:
    """Reading a map of a file that was cut would end the process with a signal."""
    path = Path(shutil.copy(stored, tmp_path / "base.safetensors"))

    def work() -> None:
        network, stream = streamed(path, "")
        stream.stop()
        os.truncate(path, 4096)
        expected = blank()
        build(expected, FileSource(stored))
        x = torch.ones(1, 16, dtype=torch.bfloat16)
        with torch.no_grad():
            stream.start()
            assert torch.equal(network(x), expected(x))

    assert in_child(work) == 0


def test_a_file_that_is_written_to_under_a_model_is_an_error(tmp_path: Path) -> None:
    from inweave.models.model import load_model
    from tests.peers import tiny_models as tiny

    folder = shutil.copytree(tiny.folder("flux1-dev"), tmp_path / "flux")
    (weights,) = (folder / "transformer").glob("*.safetensors")
    copied_file = shutil.copy(weights, tmp_path / "copy")

    def work() -> None:
        with tiny.quick_tokenizers():
            resident = load_model(folder, device="cpu", dtype="fp32")
            own = load_model(folder, device="cpu", dtype="fp32", offload=True)
        expected = own.denoiser.proj_out.weight.clone()
        with resident.using("transformer"):
            pass
        Path(shutil.copy(copied_file, tmp_path / "new")).replace(weights)  # the mapped file still exists
        with resident.using("transformer"):
            assert torch.equal(resident.denoiser.proj_out.weight, expected)
        with tiny.quick_tokenizers():
            resident = load_model(folder, device="cpu", dtype="fp32")
        for change in (lambda: weights.write_bytes(copied_file.read_bytes()), lambda: os.truncate(weights, 4096)):
            change()
            with pytest.raises(FormatError, match=r"transformer/.*: was written to while its weights are used"):
                resident.using("transformer")
            with pytest.raises(FormatError, match="load the model again"):
                resident.predict(torch.empty(0), torch.empty(0), {})
        for part in folder.rglob("*.safetensors"):
            os.truncate(part, 4096)
        with own.using("vae", "transformer", "text_encoder"):
            assert torch.equal(own.denoiser.proj_out.weight, expected)
        tensors = [value for each in own.networks.values() for value in each.parameters()]
        assert all(bool(value.isfinite().all()) for value in tensors)

    assert in_child(work) == 0


@LINUX
def test_too_little_host_memory_is_an_error_that_names_the_file(stored: Path) -> None:
    """Of the process (`ulimit -v`), and of the machine, where the system would end the process later."""
    import resource

    def limited() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 48 * MIB, resource.RLIM_INFINITY))
        with pytest.raises(MemoryBudgetError, match=r"base.safetensors: not enough host memory to read 96 MiB"):
            source.get("weight", owned=True)
        with pytest.raises(MemoryBudgetError, match=r"block 1 of 1 of Linear \(0.09 GiB: .*offload"):
            BlockStream(layer, [layer], CPU)

    def exhausted() -> None:
        scratch.available_memory = lambda: 100 * MIB  # type: ignore[attr-defined]
        with pytest.raises(MemoryBudgetError, match=r"to read 96 MiB of it \(0.10 GiB are available\); quantize"):
            source.get("weight", owned=True)

    large = stored.with_name("large-base.safetensors")
    save_file({"weight": torch.zeros(24, MIB)}, large)
    source, layer = FileSource(large), nn.Linear(1, 1)
    layer.weight = nn.Parameter(source.get("weight"), requires_grad=False)
    assert in_child(limited) == 0 and in_child(exhausted) == 0
    left = available_memory()
    assert left is not None and left > MIB
