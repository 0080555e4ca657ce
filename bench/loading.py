"""Loading and drift on the CPU compared with diffusers + PEFT: a UNet of about 870 MB with three LoRAs.

    .venv/bin/python bench/loading.py

Prints the time to build the network from a file, the same with three LoRAs merged while loading, the time the peer
needs for the same weights, the peak memory of each (in a separate process), and how many weights differ from the
base after 50 cycles of merging and unmerging.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG: dict[str, Any] = {
    "block_out_channels": (160, 320, 640, 640), "layers_per_block": 2, "cross_attention_dim": 512,
    "attention_head_dim": 8,
    "sample_size": 32,
}  # fmt: skip


def prepare(folder: Path, dtype: torch.dtype) -> None:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(**CONFIG).to(dtype)
    unet.save_pretrained(folder / "unet")
    for number in range(3):
        tensors = {}
        for name, module in unet.named_modules():
            if isinstance(module, torch.nn.Linear) and ".attn" in name:
                out, into = module.weight.shape
                tensors[f"unet.{name}.lora_A.weight"] = (torch.randn(16, into) * 0.02).to(dtype)
                tensors[f"unet.{name}.lora_B.weight"] = (torch.randn(out, 16) * 0.02).to(dtype)
        save_file(tensors, folder / f"lora{number}.safetensors")


def inweave_build(folder: Path, loras: int, dtype: torch.dtype) -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    from inweave.exchange.load import load
    from inweave.targets.index import ModelIndex, component_from_names
    from inweave.targets.resolve import resolve
    from inweave.weights.build import build
    from inweave.weights.merged import MergedSource
    from inweave.weights.source import FileSource

    with torch.device("meta"):
        unet = UNet2DConditionModel(**CONFIG).to(dtype)
    source = FileSource(next((folder / "unet").glob("*.safetensors")))
    index = ModelIndex({"unet": component_from_names("unet", {n: source.spec(n).shape for n in source.names()})})
    plans = [(resolve(load(folder / f"lora{n}.safetensors"), index), 0.7) for n in range(loras)]
    return read_all(build(unet, MergedSource(source, plans) if plans else source))


def read_all(network: torch.nn.Module) -> torch.nn.Module:
    """Touch every page of the weights, as any use would: files are memory-mapped, and read on access."""
    sum(float(p.flatten()[::1024].float().sum()) for p in network.parameters())
    return network


def peer_build(folder: Path, loras: int, dtype: torch.dtype) -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(folder / "unet", torch_dtype=dtype)
    for n in range(loras):
        unet.load_lora_adapter(load_file(folder / f"lora{n}.safetensors"), adapter_name=f"l{n}", prefix="unet")
    if loras:
        unet.set_adapters([f"l{n}" for n in range(loras)], [0.7] * loras)
        unet.fuse_lora()
    return read_all(unet)


BUILDERS = {"inweave": inweave_build, "peer": peer_build}


def measure(builder: str, folder: Path, loras: int, dtype: torch.dtype, runs: int = 5) -> float:
    BUILDERS[builder](folder, loras, dtype)
    samples = []
    for _ in range(runs):
        start = time.perf_counter()
        BUILDERS[builder](folder, loras, dtype)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples) * 1e3


def peak(builder: str, folder: Path, loras: int) -> float:
    """Return the peak resident megabytes of a new process that does nothing else."""
    done = subprocess.run(
        [sys.executable, __file__, builder, str(folder), str(loras)], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def drift(folder: Path) -> tuple[int, int, int]:
    """Count the weights that differ from the base after 50 cycles: (ours, the peer's, total), in bf16."""
    from inweave.weights.weaver import Weaver

    unet = inweave_build(folder, 0, torch.bfloat16)
    for module in unet.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.clone(), requires_grad=False)
    before = {name: value.clone() for name, value in unet.state_dict().items()}
    weaver = Weaver(unet, keep="device")
    for cycle in range(50):
        weaver.apply([(folder / f"lora{cycle % 3}.safetensors", 0.8)])
        weaver.apply([])
    ours = sum(int((value != before[name]).sum()) for name, value in unet.state_dict().items())
    unet.load_lora_adapter(load_file(folder / "lora0.safetensors"), adapter_name="a", prefix="unet")
    for _ in range(50):
        unet.fuse_lora(lora_scale=0.8)
        unet.unfuse_lora()
    unet.unload_lora()
    touched = [n for n in before if ".attn" in n and n.endswith("weight") and before[n].dim() == 2]
    after = unet.state_dict()
    theirs = sum(int((after[name] != before[name]).sum()) for name in touched)
    return ours, theirs, sum(before[name].numel() for name in touched)


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, torch.float32)
        size = next((folder / "unet").glob("*.safetensors")).stat().st_size / 1e6
        print(f"a UNet of {size:.0f} MB in float32, 3 LoRAs of rank 16, {torch.get_num_threads()} threads")
        for builder, loras in (("inweave", 0), ("inweave", 3), ("peer", 0), ("peer", 3)):
            milliseconds = measure(builder, folder, loras, torch.float32)
            print(f"{builder}: {loras} LoRAs  {milliseconds:8.0f} ms  peak {peak(builder, folder, loras):6.0f} MB")
        prepare(folder, torch.bfloat16)
        ours, theirs, total = drift(folder)
        print(
            f"weights that differ after 50 cycles in bf16: inweave {ours:,}, "
            f"peer {theirs:,} of {total:,} ({theirs / total:.1%})"
        )


if __name__ == "__main__":
    if len(sys.argv) == 4:
        BUILDERS[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]), torch.float32)
        status = Path("/proc/self/status").read_text()  # ru_maxrss would include the parent process
        print(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1e3)
    else:
        main()
