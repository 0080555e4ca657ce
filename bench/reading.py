"""Time of reading: startup, inspect, check, hash. Prints a table; asserts nothing about time.

make bench
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import lora_listing, write_sparse  # noqa: E402

FILES = ROOT / "tests" / "data" / "files"


def cpu(*arguments: str | Path, runs: int = 5) -> tuple[float, float]:
    """Return CPU and wall seconds of a command, the best of a few runs."""
    best = (float("inf"), float("inf"))
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        subprocess.run([sys.executable, "-P", "-m", "inweave", *map(str, arguments)], check=False, capture_output=True)
        wall = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        best = min(best, (seconds, wall))
    return best


def main() -> None:
    small = FILES / "cloneofsimo_lora_disney.safetensors"
    print(f"{'command':<64}{'CPU s':>8}{'wall s':>8}")
    rows: list[tuple[str, tuple[float, float]]] = [
        ("inweave --help", cpu("--help")),
        ("inweave inspect (1.6 MB, 386 tensors)", cpu("inspect", small)),
        ("inweave check  (1.6 MB, 386 tensors) --base sd1.5", cpu("check", small, "--base", "sd1.5")),
        ("inweave hash   (1.6 MB)", cpu("hash", small)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        flux = write_sparse(Path(folder) / "flux.safetensors", _flux_with_encoders())
        size = flux.stat().st_size / 1e6
        start = time.perf_counter()
        flux.read_bytes()
        print(f"(only reading the {size:.0f} MB of the Flux file: {time.perf_counter() - start:.2f} s)")
        rows += [
            (f"inweave inspect (Flux, 1,632 tensors, {size:.0f} MB)", cpu("inspect", flux, runs=3)),
            (
                "inweave check  (Flux) --base flux1-dev --values none",
                cpu("check", flux, "--base", "flux1-dev", "--values", "none", runs=3),
            ),
            (
                "inweave check  (Flux) --base flux1-dev --values sample",
                cpu("check", flux, "--base", "flux1-dev", "--values", "sample", runs=3),
            ),
            ("inweave check  (Flux) --base flux1-dev --values full", cpu("check", flux, "--base", "flux1-dev", runs=3)),
        ]
    for name, (seconds, wall) in rows:
        print(f"{name:<64}{seconds:>8.2f}{wall:>8.2f}")


def _flux_with_encoders() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Write a kohya Flux file with CLIP and T5 layers: 304 + 72 + 168 modules."""
    tensors = dict(lora_listing("invokeai_flux_lora_kohya_with_te1_format")["tensors"])
    for layer in range(24):
        for leaf, out, into in (
            ("0_SelfAttention_q", 4096, 4096), ("0_SelfAttention_k", 4096, 4096), ("0_SelfAttention_v", 4096, 4096),
            ("0_SelfAttention_o", 4096, 4096), ("1_DenseReluDense_wi_0", 10240, 4096),
            ("1_DenseReluDense_wi_1", 10240, 4096), ("1_DenseReluDense_wo", 4096, 10240),
        ):  # fmt: skip
            module = f"lora_te3_encoder_block_{layer}_layer_{leaf}"
            tensors[f"{module}.lora_down.weight"] = ("BF16", (16, into))
            tensors[f"{module}.lora_up.weight"] = ("BF16", (out, 16))
            tensors[f"{module}.alpha"] = ("BF16", ())
    return tensors


if __name__ == "__main__":
    main()
