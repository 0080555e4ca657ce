"""Several processes on GPUs: NCCL with the one that any machine can have, and a run on two where there are two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402

from inweave.models.embedded import style_folder  # noqa: E402

ONE_RANK = """
import copy, torch
from torch import nn
from inweave.ops.quantized import FORMATS
from inweave.training.distributed.fsdp import shard_base
from inweave.training.distributed.world import World, _add_in_order
device = torch.device("cuda:0")
torch.cuda.set_device(device)
torch.distributed.init_process_group("nccl", rank=0, world_size=1)
values = torch.randn(1001, device=device)
total = values.clone()
_add_in_order(total, 1)
assert torch.equal(total, values)
torch.distributed.all_reduce(total)
torch.distributed.barrier()
assert torch.equal(total, values)
for name in ("off", "int8", "int8-hadamard", "nf4", "fp8"):
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256, bias=False)) for _ in range(3)]
    network = nn.Sequential(nn.ModuleList(blocks)).to(torch.bfloat16).requires_grad_(False)
    network.forward = lambda x, blocks=network[0]: [x := block(x) for block in blocks][-1]
    if name != "off":
        if FORMATS[name].device_problems(device):
            continue
        for block in blocks:
            for layer in block:
                FORMATS[name].quantize(layer, device=device)
    x = torch.randn(32, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    whole = copy.deepcopy(blocks)
    y = x
    for block in whole:
        y = block.to(device)(y)
    y.sum().backward()
    expected, x.grad = x.grad, None
    print(shard_base(network, World(), device))
    result = network(x)
    result.sum().backward()
    assert torch.equal(result, y) and torch.equal(x.grad, expected), name
torch.distributed.destroy_process_group()
"""


def test_nccl_with_one_rank() -> None:
    """The collectives and the sharding of a run, on a group of one: NCCL refuses two ranks on one GPU."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = subprocess.run(
        [sys.executable, "-c", ONE_RANK], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("more", [[], ["--set", "shard=true"], ["--set", "shard=true", "--set", "quantize=nf4"]])
def test_two_gpus(more: list[str], tmp_path: Path) -> None:
    """Two deterministic runs have the same bits, and train what one process does that accumulates twice."""

    def trained(name: str, *options: str) -> dict[str, torch.Tensor]:
        done = subprocess.run(
            [sys.executable, "-m", "inweave", "train", "-m", "inweave/emoji", "-d", str(style_folder("ink")), "--json",
             "--rank", "4", "--steps", "4", "-b", "2", "--set", "deterministic=true", "--set", "save_dtype=fp32",
             "--set", f"cache_dir={tmp_path / 'cache'}", "-o", str(tmp_path / name), *options],
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        return load_file(json.loads(done.stdout)["path"])

    first, second = (trained(name, "--gpus", "2", *more) for name in ("first", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    quantized = [each for each in more if each.startswith("quantize")]
    one = trained("one", "--set", "gradient_accumulation=2", *(["--set", *quantized] if quantized else []))
    gap = sum(float((first[name] - one[name]).square().sum()) for name in one)
    assert (gap / sum(float(value.square().sum()) for value in one.values())) ** 0.5 < 0.02
