"""Images of a model, full-size with random weights or the embedded one: the time from a request to its images.

first       the first image after loading
image       one image
batch       several images of one request                   peer: num_images_per_prompt
mixed       requests with a LoRA each, ranks 4 to 128, on the attention of the denoiser, in one batch:
            times the same batch without LoRAs, and times faster than one request after the other, with swaps
clients     requests with a LoRA each and other numbers of steps, which join a running batch as others leave it:
            images per second, and times those of one request after the other

peers       diffusers' pipeline of the same folder, size and steps: eager; compiled, the denoiser by torch.compile with
            CUDA graphs ("reduce-overhead"). Both sides decode, and make images of the same number of denoiser rows
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from inweave.bench.models import write_lora
from inweave.bench.report import BenchRow
from inweave.bench.step import fresh_memory
from inweave.bench.timing import Work, quantiles, synchronize, wall_seconds
from inweave.bench.train_command import roomy_folder, write_model
from inweave.generate.config import GenerateConfig, LoraChoice
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.generate.result import Result
from inweave.generate.running import Member
from inweave.models import embedded
from inweave.models.acceleration import Graph
from inweave.models.model import Quantize
from inweave.models.peer import library_pipeline

RANKS = (4, 8, 16, 32, 48, 64, 96, 128)
PROMPT = "a red apple on a wooden table"


@dataclass(frozen=True, slots=True)
class GenerateCase:
    """What is generated; ``batch``: images of one request; ``loras``: requests with a LoRA each, 0 for none.

    ``clients``: requests that join a running batch, 0 for none; ``graph``: see `inweave.pipeline`.
    """

    model: str
    size: int
    steps: int
    batch: int = 4
    loras: int = 8
    quantize: Quantize = "off"
    clients: int = 0
    graph: Graph = "off"

    @property
    def name(self) -> str:
        parts = [self.model, f"{self.size} pixels", f"{self.steps} steps"]
        parts += [f"{self.quantize} denoiser"] if self.quantize != "off" else []
        return ", ".join([*parts, *(["recorded"] if self.graph != "off" else [])])


class GenerateBench:
    """A pipeline over a folder with random weights, and its LoRAs."""

    def __init__(self, case: GenerateCase, folder: Path, device: torch.device, dtype: torch.dtype, runs: int) -> None:
        self.case, self.device, self.dtype, self.runs = case, device, dtype, runs
        self.where = write_model(case.model, folder / "model", device, dtype)
        self.pipe: Pipeline = pipeline(self.where, device=device, dtype=dtype, quantize=case.quantize, graph=case.graph)
        self.files = [
            write_lora(folder / f"lora{number}.safetensors", self.pipe.model, RANKS[number % len(RANKS)], number)
            for number in range(case.loras or min(case.clients, len(RANKS)))
        ]
        self._seeds = itertools.count()

    def request(self, *loras: Path) -> GenerateConfig:
        """Return a request with another seed than those before."""
        case = self.case
        choices = tuple(LoraChoice(path=str(path), strength=0.8) for path in loras)
        return GenerateConfig(
            prompt=PROMPT, seed=next(self._seeds), steps=case.steps, width=case.size, height=case.size, loras=choices
        )

    def seconds(self, work: Work, runs: int | None = None) -> tuple[float, float, float]:
        """Return the median of a call, and its 10 % and 90 % quantiles."""
        return quantiles(wall_seconds(work, self.device, runs=runs or self.runs, warmup=1))

    def first(self) -> float:
        """Return the seconds of the first image."""
        synchronize(self.device)
        started = time.perf_counter()
        self.pipe(self.request())
        synchronize(self.device)
        return time.perf_counter() - started

    def image(self) -> tuple[float, float, float]:
        return self.seconds(lambda: self.pipe(self.request()))

    def images(self) -> tuple[float, float, float]:
        count = self.case.batch
        return self.seconds(lambda: self.pipe(self.request().model_copy(update={"count": count}), batch=count))

    def mixed(self) -> tuple[BenchRow, list[str]]:
        """Measure requests with a LoRA each, together, against the same batch without and against single ones."""
        count, results = self.case.loras, list[Result]()

        def together() -> None:
            results[:] = self.pipe([self.request(file) for file in self.files], batch=count)

        def one_by_one() -> None:
            for file in self.files:
                self.pipe(self.request(file), batch=1)

        base, _, _ = self.seconds(lambda: self.pipe([self.request() for _ in self.files], batch=count))
        median, low, high = self.seconds(together)
        single, _, _ = self.seconds(one_by_one, min(self.runs, 2))
        details = {
            "10 %": low, "90 %": high, "without LoRAs": base, "times without": median / base, "one by one": single,
            "times faster": single / median,
        }  # fmt: skip
        reasons = dict.fromkeys(each.merge_reason for each in results if each.merge_reason)
        notes = [f"{self.case.name}: {reason}" for reason in reasons]
        ranks = sorted(RANKS[number % len(RANKS)] for number in range(count))
        name = f"{self.case.name}: {count} requests, a LoRA each, ranks {ranks[0]} to {ranks[-1]}"
        return BenchRow(name, "s", median, {}, None, details), notes

    def joined(self) -> tuple[BenchRow, list[str]]:
        """Measure requests that join a running batch at any step, against one after the other."""
        count, case = self.case.clients, self.case
        requests = [
            self.request(self.files[number % len(self.files)]).model_copy(update={"steps": case.steps + number % 4})
            for number in range(count)
        ]

        def together() -> list[Member]:
            batch, waiting, ended = self.pipe.running_batch(), deque(requests), list[Member]()
            while waiting or batch.members:
                while waiting and not batch.join(Member(self.pipe.prepare(waiting[0]))):
                    waiting.popleft()
                ended += batch.step()
            return ended

        def one_by_one() -> None:
            for request in requests[: max(1, count // 4)]:
                self.pipe(request, batch=1)

        together()
        synchronize(self.device)
        started = time.perf_counter()
        ended = together()
        synchronize(self.device)
        seconds = time.perf_counter() - started
        single = self.seconds(one_by_one, 1)[0] / max(1, count // 4)
        failed = [each.error for each in ended if each.error is not None]
        notes = [f"{case.name}: {error}" for error in failed[:3]]
        notes += dict.fromkeys(f"{case.name}: {text}" for each in ended if (text := each.result.merge_reason))
        details = {
            "images per second": (count - len(failed)) / seconds, "one by one": 1 / single,
            "times faster": single * count / seconds, "images of the largest batch": max(each.most for each in ended),
        }  # fmt: skip
        return BenchRow(f"{case.name}: {count} clients, a LoRA each", "s", seconds, {}, None, details), notes


def measure_generate(
    case: GenerateCase,
    device: torch.device,
    dtype: torch.dtype,
    *,
    runs: int = 5,
    peers: Sequence[str] = ("eager",),
    progress: Callable[[str], None] | None = None,
) -> tuple[list[BenchRow], list[str]]:
    """Return rows in seconds, and notes; ``peers``: eager, compiled."""
    report = progress or (lambda text: None)
    notes = list[str]()
    with tempfile.TemporaryDirectory(prefix="inweave-bench-", dir=roomy_folder()) as temporary:
        folder = Path(temporary)
        with fresh_memory(device):
            report(f"{case.name}: a model with random weights")
            bench = GenerateBench(case, folder, device, dtype, runs)
            report(f"{case.name}: inweave")
            first, one, several = bench.first(), bench.image(), bench.images()
            row, remarks = bench.mixed() if case.loras > 1 else (None, [])
            notes += remarks
            clients, remarks = bench.joined() if case.clients else (None, [])
            notes += remarks
            where = bench.where
            del bench
        figures: dict[str, tuple[float, float]] = {}
        for kind in peers if case.model != embedded.NAME else ():
            report(f"{case.name}: diffusers, {kind}")
            try:
                with fresh_memory(device):
                    one_image, images, start = peer_seconds(where, case, device, dtype, kind, runs)
                figures[f"diffusers, {kind}"] = one_image, images
                notes.append(f"{case.name}: diffusers, {kind}: {start:.3g} s for the first image after loading")
            except Exception as error:  # a failing peer is a result too, and inweave is measured already
                notes.append(f"diffusers, {kind}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        if peers and case.model == embedded.NAME:
            notes.append(f"{embedded.NAME}: diffusers does not read its tokenizer, so there is nothing to compare with")
    rows = [
        BenchRow(f"{case.name}: first image", "s", first),
        _row(f"{case.name}: an image", one, {name: pair[0] for name, pair in figures.items()}),
        _row(f"{case.name}: {case.batch} images", several, {name: pair[1] for name, pair in figures.items()}),
    ]
    return [*rows, *(each for each in (row, clients) if each is not None)], notes


def _row(name: str, seconds: tuple[float, float, float], peers: dict[str, float]) -> BenchRow:
    median, low, high = seconds
    return BenchRow(name, "s", median, peers, None, {"10 %": low, "90 %": high})


def peer_seconds(
    where: str, case: GenerateCase, device: torch.device, dtype: torch.dtype, kind: str, runs: int
) -> tuple[float, float, float]:
    """Return the seconds of an image, of a batch, and of the first image with diffusers; ``kind``: eager, compiled."""
    pipe = library_pipeline(where, device, dtype, compiled=kind == "compiled")
    settings = {"num_inference_steps": case.steps, "width": case.size, "height": case.size}

    def generate(count: int) -> None:
        pipe(PROMPT, num_images_per_prompt=count, **settings)

    started = time.perf_counter()
    generate(1)
    synchronize(device)
    start = time.perf_counter() - started
    one = quantiles(wall_seconds(lambda: generate(1), device, runs=runs, warmup=1))[0]
    several = quantiles(wall_seconds(lambda: generate(case.batch), device, runs=min(runs, 3), warmup=1))[0]
    return one, several, start
