"""The embedded model on the CPU compared with diffusers and PEFT: an image, a cold start, a training step.

    .venv/bin/python bench/embedded.py

image     20 steps with guidance, with everything loaded
start     a new process, from nothing to a PNG on disk
step      batch size 2, rank 8 on attention and feed-forward, float32, AdamW, latents and prompts encoded beforehand
matmul    the throughput of a matrix product on the same threads: an upper bound for all of it
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from peft import LoraConfig

import inweave
from inweave.models import embedded
from inweave.training.session import prepare

PEER = """
import sys, torch
from diffusers import StableDiffusionPipeline
pipe = StableDiffusionPipeline.from_pretrained(sys.argv[1], dtype=torch.float32)
pipe.set_progress_bar_config(disable=True)
pipe("red apple", num_inference_steps=20, guidance_scale=3.0, height=128, width=128).images[0].save(sys.argv[2])
"""
LINEAR = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


def seconds(work: Callable[[], object], runs: int) -> float:
    """Return the median, after one warm-up run."""
    samples = []
    for _ in range(runs + 1):
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples[1:])


def matmul_gflops() -> float:
    factor = torch.randn(1024, 1024)
    return 2 * 1024**3 / seconds(lambda: factor @ factor, 30) / 1e9


def images() -> tuple[float, float]:
    ours = inweave.pipeline(embedded.NAME, device="cpu")
    peer = StableDiffusionPipeline.from_pretrained(embedded.folder(), dtype=torch.float32)
    peer.set_progress_bar_config(disable=True)
    return (
        seconds(lambda: ours("red apple", seed=7, steps=20), 5),
        seconds(lambda: peer("red apple", num_inference_steps=20, guidance_scale=3.0, height=128, width=128), 5),
    )


def starts(folder: Path) -> tuple[float, float]:
    ours = [sys.executable, "-P", "-m", "inweave", "generate", "red apple", "--seed", "7", "--force"]
    ours += ["-o", str(folder / "a.png")]
    peer = [sys.executable, "-W", "ignore", "-c", PEER, str(embedded.folder()), str(folder / "b.png")]
    run = lambda command: lambda: subprocess.run(command, check=True, capture_output=True)  # noqa: E731
    return seconds(run(ours), 3), seconds(run(peer), 3)


def steps(folder: Path) -> tuple[float, float]:
    config = inweave.TrainConfig.of(
        dataset="inweave/pixel", output=str(folder), steps=300, device="cpu", cache_dir=str(folder / "cache")
    )
    run, _ = prepare(config)
    ours = seconds(run.train_step, 15)
    unet = StableDiffusionPipeline.from_pretrained(embedded.folder(), dtype=torch.float32).unet
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=LINEAR))
    trainable = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=2e-3)

    def step() -> None:
        noisy, goal, text = torch.randn(2, 8, 16, 16), torch.randn(2, 8, 16, 16), torch.randn(2, 32, 192)
        loss = (unet(noisy, torch.randint(1000, (2,)), text).sample - goal).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return ours, seconds(step, 15)


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        print(f"{torch.get_num_threads()} threads, matmul {matmul_gflops():.0f} GFLOP/s")
        print("| what | inweave s | diffusers, PEFT s |\n|---|---|---|")
        for name, (ours, peer) in (
            ("image, 20 steps", images()),
            ("start to first image", starts(Path(folder))),
            ("training step", steps(Path(folder) / "run")),
        ):
            print(f"| {name} | {ours:.3f} | {peer:.3f} |", flush=True)


if __name__ == "__main__":
    main()
