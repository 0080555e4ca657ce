"""Devices by name: those of torch that can compute, with kernels on NVIDIA's alone and a word about the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from inweave.errors import ConfigError
from inweave.ops.common import select
from inweave.ops.tensors.device import choose_device, device_note

SRC = Path(select.__file__).parents[2]


@pytest.mark.parametrize("name", ["mps", "xpu", "xpu:3", "meta", "hpu", "xla"])
def test_a_device_that_cannot_compute_here_is_refused_with_the_reason_of_torch(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: torch .* cannot compute on it: .+"):
        choose_device(name)


def test_other_names_are_refused_with_examples() -> None:
    with pytest.raises(ConfigError, match="no device is called 'gpu'; use cpu, cuda, cuda:N, mps or xpu"):
        choose_device("gpu")
    assert choose_device("cpu") == torch.device("cpu")


def test_devices_without_tests_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_note(torch.device("cpu")) is None and device_note(torch.device("cuda:1")) is None
    assert "mps: inweave was not tested on this device" in str(device_note(torch.device("mps")))
    monkeypatch.setattr(select, "_ROCM", True)
    assert "cuda:1 (ROCm): inweave was not tested" in str(device_note(torch.device("cuda:1")))


@pytest.mark.parametrize(
    ("rocm", "triton", "name"),
    [(False, True, "triton"), (True, True, "reference"), (False, False, "reference")],
)
def test_kernels_run_on_nvidia_gpus_with_triton(
    rocm: bool, triton: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor without memory stands for one on a GPU; ROCm calls its devices cuda."""
    monkeypatch.setattr(select, "_ROCM", rocm)
    monkeypatch.setattr(select, "_TRITON", triton)
    modules = list[str]()
    monkeypatch.setattr(select, "import_module", modules.append)
    with FakeTensorMode():
        x = torch.empty(2, device="cuda")
    select.implementation("package", x)
    assert modules == [f"package.{name}"]


def test_only_one_module_asks_whether_kernels_can_run() -> None:
    """`is_cuda` is also true on ROCm, where the kernels do not run."""
    files = [path for path in (SRC / "ops").rglob("*.py") if path != Path(select.__file__)]
    wrong = [path for path in files if re.search(r"\.is_cuda\b", path.read_text("utf-8"))]
    assert len(files) > 50 and not wrong
