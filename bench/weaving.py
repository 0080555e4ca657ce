"""Merging and swapping on one GPU compared with diffusers + PEFT, on the same model in the same run.

    make gpu-bundle && make bench-gpu

SDXL's UNet at full size with random weights in bf16; LoRAs of rank 32 on all 560 attention linears. Every row is
wall time including the synchronization at its end, the median of several runs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from inweave.exchange.load import load
from inweave.formats.files import open_container
from inweave.formats.read import read
from inweave.targets.bases import known_index
from inweave.targets.resolve import resolve
from inweave.weights.build import build
from inweave.weights.factors import _key
from inweave.weights.gc_pause import collector_waits
from inweave.weights.merged import MergedSource
from inweave.weights.source import FileSource
from inweave.weights.stack import Strength
from inweave.weights.weaver import Weaver

SDXL: dict[str, Any] = {
    "sample_size": 128, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "block_out_channels": (320, 640, 1280),
    "layers_per_block": 2, "cross_attention_dim": 2048, "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip


def timed(work: Callable[[], object], runs: int = 7, before: Callable[[], object] | None = None) -> float:
    """Median milliseconds."""
    samples = []
    for _ in range(runs):
        if before is not None:
            before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def attention_lora(path: Path, rank: int, seed: int) -> Path:
    """A LoRA in the diffusers dialect on every attention linear of SDXL."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in known_index("sdxl").components["unet"].shapes.items():
        module = name.removesuffix(".weight")
        if ".attn" in module and len(shape) == 2 and name.endswith(".weight"):
            tensors[f"unet.{module}.lora_A.weight"] = (
                torch.randn(rank, shape[1], generator=generator) * 0.02
            ).bfloat16()
            tensors[f"unet.{module}.lora_B.weight"] = (
                torch.randn(shape[0], rank, generator=generator) * 0.02
            ).bfloat16()
    save_file(tensors, path)
    return path


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    loras = [attention_lora(folder / f"lora{i}.safetensors", 32, i) for i in range(5)]
    rows = swapping(folder, loras)
    torch.cuda.empty_cache()
    checkpoint = next((folder / "unet").glob("*.safetensors"))
    rows += loading(folder, checkpoint, loras[:3])
    width = max(len(name) for name, _ in rows)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name, value in rows:
        print(f"{name:<{width}}  {value:10.2f} ms")


def swapping(folder: Path, loras: list[Path]) -> list[tuple[str, float]]:
    from diffusers import UNet2DConditionModel

    rows: list[tuple[str, float]] = []
    torch.manual_seed(0)
    with torch.device("cuda"):
        unet = UNet2DConditionModel(**SDXL).to(torch.bfloat16).eval()
    unet.requires_grad_(False)
    unet.save_pretrained(folder / "unet")

    weaver = Weaver(unet, keep="device")
    weaver.apply([(loras[0], 1.0)])
    weaver.apply([(loras[1], 1.0)])
    weaver.apply([])
    state = {"turn": 0}

    def swap() -> None:
        state["turn"] ^= 1
        weaver.apply([(loras[state["turn"]], 0.8)])

    rows.append(("inweave: swap to another LoRA, factors on the GPU", timed(swap, 21)))
    rows.append(
        (
            "inweave: other strength of the same LoRA",
            timed(lambda: weaver.apply([(loras[0], time.time() % 1 + 0.1)]), 11),
        )
    )
    rows.append(
        ("inweave: restore the base", timed(lambda: weaver.apply([]), 7, lambda: weaver.apply([(loras[0], 1.0)])))
    )
    stacks = [[(path, 0.1 * (i + 1) + 0.05 * j) for i, path in enumerate(loras)] for j in range(2)]
    weaver.apply(stacks[0])
    rows.append(
        (
            "inweave: stack of 5 x rank 32, from the base",
            timed(lambda: weaver.apply(stacks[1]), 9, lambda: weaver.apply([])),
        )
    )
    weaver.apply([])
    program = next(iter(weaver._programs.values()))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    kernel_times = []
    for _ in range(10):
        events[0].record()
        program._launch.run()
        events[1].record()
        torch.cuda.synchronize()
        kernel_times.append(events[0].elapsed_time(events[1]))
    rows.append(("inweave: the kernel by itself (one LoRA)", statistics.median(kernel_times)))
    weaver._abandon(program.tensors)

    file_times: list[float] = []

    def from_file() -> None:
        weaver._cache._loaded.pop(weaver._cache.get(loras[2]).key)
        weaver._forget(_key(loras[2]))
        torch.cuda.synchronize()
        start = time.perf_counter()
        weaver.apply([(loras[2], 0.8)])
        torch.cuda.synchronize()
        file_times.append((time.perf_counter() - start) * 1e3)

    weaver.apply([(loras[0], 1.0)])
    for _ in range(7):
        weaver.apply([])
        from_file()
    rows.append(("inweave: from a file in the page cache, everything included", statistics.median(file_times)))
    rows.append(("inweave:   of which opening the file", timed(lambda: open_container(loras[2]))))
    weaver._cache._loaded.clear()
    rows.append(
        ("inweave:   of which opening and planning", timed(lambda: weaver._cache._plan_of(open_container(loras[2]))))
    )
    index = weaver.index

    def parse() -> None:
        container = open_container(loras[2])
        resolve(read(container.tensors, container.metadata), index)

    loaded = weaver._cache.get(loras[3])

    def upload() -> None:
        loaded.views.clear()
        loaded.slabs.clear()
        loaded.checked = False
        loaded.upload(weaver._cuda)
        loaded.check_finite()

    rows.append(("inweave:   of which uploading the factors, finite check", timed(upload)))
    rows.append(
        ("inweave:   of which preparing the launch", timed(lambda: weaver._compile([(loaded, Strength.of(1.0))])))
    )
    rows.append(("inweave: parsing and resolving an unknown layout", timed(parse)))
    weaver.apply([])
    original = {name: value.clone() for name, value in unet.state_dict().items()}

    for _ in range(2):
        start = time.perf_counter()
        unet.load_lora_adapter(_state(loras[0]), adapter_name="a", prefix="unet")
        torch.cuda.synchronize()
        load = (time.perf_counter() - start) * 1e3
        fuse = timed(lambda: unet.fuse_lora(lora_scale=0.8), 1)
        unfuse = timed(unet.unfuse_lora, 1)
        unet.delete_adapters("a")
    rows += [("peer: diffusers load_lora_adapter", load), ("peer: fuse_lora", fuse), ("peer: unfuse_lora", unfuse)]
    unet.unload_lora()
    drift = sum(int((value != original[name]).sum()) for name, value in unet.state_dict().items())
    total = sum(value.numel() for value in original.values())
    print(f"weights that differ from the base after the peer's 2 fuse/unfuse cycles: {drift:,} of {total:,}")

    return rows


def loading(folder: Path, checkpoint: Path, loras: list[Path]) -> list[tuple[str, float]]:
    """Building on the GPU from a file: the base, the base with three LoRAs, and the same with the peer."""
    from diffusers import UNet2DConditionModel

    def empty() -> torch.nn.Module:
        with torch.device("meta"):
            return UNet2DConditionModel(**SDXL).to(torch.bfloat16)

    def base() -> torch.nn.Module:
        with collector_waits():
            return build(empty(), FileSource(checkpoint), device="cuda")

    def woven() -> torch.nn.Module:
        with collector_waits():  # as `load_model` does it
            source = FileSource(checkpoint)
            with ThreadPoolExecutor(1) as pool:
                plans = pool.submit(lambda: [(resolve(load(path), known_index("sdxl")), 0.7) for path in loras])
                return build(empty(), MergedSource(source, plans, component="unet"), device="cuda")

    def peer() -> torch.nn.Module:
        unet = UNet2DConditionModel.from_pretrained(folder / "unet", torch_dtype=torch.bfloat16).to("cuda")
        for number, path in enumerate(loras):
            unet.load_lora_adapter(_state(path), adapter_name=f"l{number}", prefix="unet")
        unet.set_adapters([f"l{n}" for n in range(len(loras))], [0.7] * len(loras))
        unet.fuse_lora()
        return unet

    for _ in range(2):  # page cache, pinned memory and kernels are warm for both
        base()
        woven()
    return [
        ("inweave: build SDXL's UNet from a file", timed(base, 7)),
        ("inweave: the same with 3 LoRAs merged while loading", timed(woven, 7)),
        ("peer: from_pretrained + 3 load_lora + fuse", timed(peer, 2)),
    ]


def _state(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


if __name__ == "__main__":
    main()
