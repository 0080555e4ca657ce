"""Inspect, check and convert adapters, on files that come with the project.

Run with `make demo-reading`. Nothing is downloaded.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

FILES = Path(__file__).parents[1] / "tests" / "data" / "files"


def inweave(*arguments: str | Path, expect: int = 0) -> None:
    """Print a command, run it, and stop unless it exits with ``expect``."""
    words = [str(word) for word in arguments]
    print(f"\n$ inweave {' '.join(word.replace(str(FILES), 'files') for word in words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "inweave", *words], check=False)
    if done.returncode != expect:
        sys.exit(f"expected exit code {expect}, got {done.returncode}")


def main() -> None:
    lokr = FILES / "lycoris_smart_falcon_4_lokr.safetensors"
    listed = FILES / "cloneofsimo_lora_disney.safetensors"
    attention = FILES / "catundchat_sd15_pytorch_lora_weights.safetensors"
    print("Three adapters in three dialects; none of them names its base model:")
    for file in (lokr, listed, attention):
        inweave("inspect", file)
    print("\nEvery tensor has its place on Stable Diffusion 1.5 ...")
    for file in (lokr, listed, attention):
        inweave("check", file, "--base", "sd1.5")
    print("\n... but none of them fits SDXL, and the check reports why:")
    inweave("check", lokr, "--base", "sdxl", expect=1)
    with tempfile.TemporaryDirectory() as folder:
        kohya, back = Path(folder) / "kohya.safetensors", Path(folder) / "diffusers.safetensors"
        print("\nConvert to another dialect and on to a third; the matrices stay the same, bit for bit:")
        inweave("convert", attention, kohya, "--to", "kohya")
        inweave("convert", kohya, back, "--to", "diffusers")
        inweave("check", back, "--base", "sd1.5")
        same = _contents(attention) == _contents(back)
        print(f"\nsame matrices after the round trip: {same}")
        if not same:
            sys.exit("the round trip changed a matrix")


def _contents(path: Path) -> list[bytes]:
    import inweave as library

    return sorted(bytes(tensor.data) for tensor in library.load(path).tensors.values())


if __name__ == "__main__":
    main()
