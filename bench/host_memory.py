"""Host memory while a base loads, on a CPU: `PYTHONPATH=src:. python bench/host_memory.py [CASE ...]`.

A model of FLUX.1's kind with random weights (0.8 GB in bf16), loaded as `train` and `generate` load it, in a process of
its own each time that has loaded a tiny model before. Figures are above those of that process, in MiB:

    stored     the file that is loaded: the safetensors files of the transformer
    held       what the loaded transformer takes
    own        the peak of anonymous memory (RssAnon), sampled every 5 ms
    all        the same with resident pages of mapped files (RssAnon + RssFile)

The bar is own <= 1.15 stored. Mapped pages of a file are counted in "all" only: the system takes them back at will.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
SMALL = {"attention_head_dim": 64, "axes_dims_rope": [8, 28, 28], "num_attention_heads": 16, "num_layers": 6,
         "num_single_layers": 12}  # fmt: skip
#: case -> (file, format, where it is loaded: "images" or "streamed"), or a second start from the cache
CASES = {
    "bf16 folder": ("folder", "off", "images"),
    "bf16 folder, streamed": ("folder", "off", "streamed"),
    "fp8 from a folder": ("folder", "fp8", "images"),
    "int8 from a folder": ("folder", "int8", "images"),
    "nf4 from a folder": ("folder", "nf4", "images"),
    "int8 from shards": ("shards", "int8", "images"),
    "nf4 from shards, streamed": ("shards", "nf4", "streamed"),
    "int8 from a single file": ("single", "int8", "images"),
    "nf4 from a single file": ("single", "nf4", "images"),
    "scaled fp8, kept": ("scaled", "keep", "images"),
    "scaled fp8, kept, streamed": ("scaled", "keep", "streamed"),
    "int8 from scaled fp8": ("scaled", "int8", "images"),
    "int8 from the cache": ("cached", "int8", "images"),
    "int8 from the cache, streamed": ("cached", "int8", "streamed"),
}


def write(folder: Path) -> None:
    """Write the model as a folder, as shards, as a single file in the original names, and in scaled fp8."""
    import diffusers
    from safetensors.torch import save_file
    from tests.peers import tiny_models

    from inweave.bench.models import fill_random
    from inweave.targets.index import Component
    from inweave.targets.tables import TABLES
    from inweave.weights.source import FileSource, Stacked

    tiny = tiny_models.folder("flux1-dev")
    shutil.copytree(tiny, folder / "tiny")
    config = diffusers.FluxTransformer2DModel.load_config(tiny / "transformer")
    with torch.device("meta"):
        network = diffusers.FluxTransformer2DModel.from_config(dict(config) | SMALL).to(torch.bfloat16)
    network = network.to_empty(device="cpu")
    fill_random(network, 0)
    for name, size in (("folder", "10GB"), ("shards", "200MB")):
        shutil.copytree(tiny, folder / name, ignore=lambda at, _: ["transformer"] if Path(at) == tiny else [])
        network.save_pretrained(folder / name / "transformer", max_shard_size=size)
    del network
    plain = FileSource(next((folder / "folder" / "transformer").glob("*.safetensors")))
    shapes = {name: plain.spec(name).shape for name in plain.names()}
    original = Stacked(plain, Component("unet", TABLES["flux"], "diffusers", shapes))
    save_file({name: original.get(name).contiguous() for name in original.names()}, folder / "single.safetensors")
    scaled = {}
    for name in original.names():
        tensor = original.get(name).contiguous()
        if tensor.dim() == 2 and "_blocks." in name:
            scale = tensor.float().abs().amax() / 448
            scaled[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            scaled[name.removesuffix(".weight") + ".scale_weight"] = scale.view(1)
        else:
            scaled[name] = tensor
    save_file(scaled | {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, folder / "scaled.safetensors")


def stored_bytes(folder: Path, file: str) -> int:
    single = folder / f"{file}.safetensors"
    if single.exists():
        return single.stat().st_size
    name = "folder" if file == "cached" else file
    return sum(each.stat().st_size for each in (folder / name / "transformer").glob("*.safetensors"))


def load(folder: Path, file: str, format: Any, use: str) -> Any:
    """Load the model, and for `streamed` start to stream it."""
    from inweave.generate.loading import load_for_images
    from inweave.models.open import open_model
    from inweave.ops.quantized import fp8

    if format == "fp8":  # a CPU and narrow layers will do
        fp8.Fp8Linear.device_problems = lambda device: []  # type: ignore[assignment, method-assign]
        fp8.SMALLEST_SIDE = 64
    single = folder / f"{file}.safetensors"
    if single.exists():
        blueprint = open_model(folder / "folder", parts={"transformer": single})
    else:
        blueprint = open_model(folder / ("folder" if file == "cached" else file))
    model = load_for_images(
        blueprint, device="cpu", dtype="bf16", quantize=format, offload="blocks" if use == "streamed" else "off",
        cache_gb=4.0 if file == "cached" else 0,
    )  # fmt: skip
    if use == "streamed":
        with model.using("transformer"):
            pass
    return model


def memory() -> tuple[int, int]:
    """Return (anonymous bytes, all resident bytes but for those of libraries and files before)."""
    words = Path("/proc/self/status").read_text().split()
    own, mapped = (int(words[words.index(name) + 1]) << 10 for name in ("RssAnon:", "RssFile:"))
    return own, own + mapped


@contextmanager
def watched(peaks: list[int]) -> Iterator[None]:
    """Record the peaks of both figures above their start."""
    base, ends = memory(), threading.Event()

    def watch() -> None:
        while not ends.is_set():
            peaks[:] = (max(peak, now - start) for peak, now, start in zip(peaks, memory(), base, strict=True))
            time.sleep(0.005)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def measure(folder: Path, case: str) -> None:
    """Print the line of a case."""
    from inweave.models.offload import weight_bytes

    file, format, use = CASES[case]
    load(folder, "tiny", "off", use)
    peaks = [0, 0]
    with watched(peaks):
        model = load(folder, file, format, use)
    size = weight_bytes(model.denoiser)
    stored = stored_bytes(folder, file)
    print(
        f"| {case} | {stored / MIB:.0f} | {size / MIB:.0f} | {peaks[0] / MIB:.0f} ({peaks[0] / stored:.2f}) | "
        f"{peaks[1] / MIB:.0f} ({peaks[1] / stored:.2f}) |",
        flush=True,
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("cases", nargs="*", default=list(CASES))
    options.add_argument("--folder", type=Path, help="where the model is, or is written if it is not there")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        os.environ["XDG_CACHE_HOME"] = str(folder / "home")
        if not (folder / "scaled.safetensors").exists():
            in_child(lambda: write(folder))
        from inweave.models.model import load_model  # noqa: F401  once for all children

        print("| loaded | stored | held | own | all |\n|---|---|---|---|---|", flush=True)
        for case in chosen.cases:
            if CASES[case][0] == "cached" and not (folder / "home").exists():
                in_child(lambda: load(folder, "cached", "int8", "images"))
            in_child(lambda case=case: measure(folder, case))


def in_child(work: Callable[[], object]) -> None:
    """Call a function in a process of its own, which shares what is imported."""
    if (child := os.fork()) == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
