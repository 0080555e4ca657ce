"""The runner: a request in, events out. It knows models and LoRA files, but no queues, processes or HTTP.

`requests` runs several requests together, with the models of a runner.

    runner = Runner(RunnerSettings(device="cuda:0"))
    result = runner.run(RunRequest(...), emit=print, cancelled=lambda: False)

The result of a request never depends on the requests before it: every request has its own stack of LoRAs, merged and
removed exactly. Models stay loaded within ``memory_bytes``; the one that was idle longest makes room for the next.
"""

from __future__ import annotations

import io
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image

from inweave.errors import ConfigError, FormatError, MemoryBudgetError
from inweave.generate.config import GenerateConfig, LoraChoice
from inweave.generate.denoise import Progress
from inweave.generate.find import LoraFinder
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.generate.record import png_text
from inweave.generate.result import Result
from inweave.models.embedded import NAME as EMBEDDED
from inweave.models.families.references import MOST_REFERENCES
from inweave.ops.tensors.device import allocator_bytes, choose_device
from inweave.serve.engine.contract import Cancelled, DeviceMemory, Emit, Residency, RunnerSettings, RunRequest
from inweave.serve.engine.sheet_job import make_sheet
from inweave.serve.jobs.job import Event


class LoraTable(LoraFinder):
    """A finder that knows the files of one request and opens nothing else."""

    def __init__(self, files: Mapping[str, str]) -> None:
        super().__init__()
        self._files = {reference: Path(path) for reference, path in files.items()}

    def files(self) -> list[Path]:
        return list(self._files.values())

    def find(self, choice: LoraChoice) -> Path:
        if choice.label not in self._files:
            raise ConfigError(f"LoRA {choice.label}: not in the library")
        return self._files[choice.label]


class Runner:
    """Runs one request at a time."""

    def __init__(self, settings: RunnerSettings) -> None:
        self.settings = settings
        self._models: OrderedDict[str, Pipeline] = OrderedDict()
        self._sizes: dict[str, int] = {}  # of every model that was loaded so far
        self._adapters: dict[str, set[str]] = {}  # model -> the adapters that its requests used

    @cached_property
    def device(self) -> str | None:
        """The device of the runner; None if this machine does not have it, which loading a model reports."""
        try:
            return str(choose_device(self.settings.device))
        except ConfigError:
            return None

    @property
    def residency(self) -> Residency:
        """The models and adapters in memory."""
        for model in [*self._adapters]:
            if (pipe := self._models.get(model)) is None:
                del self._adapters[model]
            else:
                self._adapters[model] = set(filter(pipe.model.holds, self._adapters[model]))
        return Residency(tuple(self._models), tuple(sorted(set().union(*self._adapters.values()))))

    @property
    def memory(self) -> DeviceMemory | None:
        """The memory of the device; None for a CPU, whose process is measured from outside."""
        usage = allocator_bytes(self.device) if self.device is not None else None
        return None if usage is None else DeviceMemory(*usage)

    def run(self, request: RunRequest, emit: Emit, cancelled: Cancelled) -> dict[str, Any]:
        """Run a request and return its result; raise CancelledError, or the reason why it failed."""
        if request.kind == "train":
            from inweave.serve.engine.training_job import run_training

            self._models.clear()  # training plans with all of the free memory
            return run_training(request, emit, cancelled, self.settings)
        return self._generate(request, emit, cancelled)

    def load(self, model: str, emit: Emit | None = None) -> Pipeline:
        """Return a model, loaded now or before; again, if its files were written to under it."""
        pipe = self._models.get(model)
        if pipe is not None:
            try:
                pipe.model.check_files(*pipe.model.networks)
            except FormatError:
                pipe = None
                del self._models[model]
        if pipe is None:
            if emit is not None:
                emit(Event("loading", {"model": model}))
            self._make_room(self._sizes.get(model) or 2 * stored_bytes(model))
            pipe = pipeline(
                model, device=self.settings.device, dtype=self.settings.dtype, parts=self.settings.parts.get(model),
                quantize=self.settings.quantize, offload=self.settings.offload,  # type: ignore[arg-type]
                quantized_cache_gb=self.settings.quantized_cache_gb, batch=self.settings.batch,
                graph=self.settings.graph, lora_cache_gb=self.settings.lora_cache_gb,
            )  # fmt: skip
            self._sizes[model] = model_bytes(pipe)
            self._refuse_too_large(model)
            self._make_room(self._sizes[model])
            self._models[model] = pipe
        self._models.move_to_end(model)
        return pipe

    def _make_room(self, size: int) -> None:
        """Drop the models that were idle longest until ``size`` more bytes fit; without a budget, keep one model."""
        budget = self.settings.memory_bytes or 0
        while self._models and sum(self._sizes[name] for name in self._models) + size > budget:
            self._models.popitem(last=False)

    def _refuse_too_large(self, model: str) -> None:
        """Raise MemoryBudgetError if the weights alone exceed the budget; copies of the originals may not be needed."""
        budget, weights = self.settings.memory_bytes, self._sizes[model] // 2
        if budget is not None and weights > budget:
            raise MemoryBudgetError(
                f"the model has {weights / 2**30:.2g} GB of weights, and loaded models may take {budget / 2**30:.2g} GB"
            )

    def open(self, request: RunRequest, emit: Emit, name: str | None = None) -> Pipeline:
        """Return the model of a request, or another one that it names; the request's adapters will be in memory."""
        where = request.model if name is None else request.models[name]
        pipe = self.load(where, lambda event: emit(Event(event.type, {"model": name or request.name})))
        pipe.upscalers.add({label: Path(path) for label, path in request.upscalers.items()})
        if name is None:
            self._adapters.setdefault(request.model, set()).update(request.loras.values())
        return pipe

    def loaded(self, model: str) -> Pipeline | None:
        """Return a model if it is in memory."""
        return self._models.get(model)

    def _generate(self, request: RunRequest, emit: Emit, cancelled: Cancelled) -> dict[str, Any]:
        pipe, started, report = self.open(request, emit), time.perf_counter(), progress_events(emit)
        config = GenerateConfig(**request.config)
        init, mask = (decode_png(request.inputs.get(name)) for name in ("init", "mask"))
        lora_modules, table = pipe.model.lora_modules, LoraTable(request.loras)
        if request.sheet is not None:
            del pipe  # another model may take its memory

            def load(name: str | None) -> Pipeline:
                return self.open(request, emit, name)

            result = make_sheet(
                request.sheet, config, load, init=init, mask=mask, finder=table, progress=report, cancelled=cancelled
            )
        else:
            result = pipe(
                config,
                init=init,
                mask=mask,
                references=reference_images(request.inputs),
                progress=report,
                preview_every=request.preview_every,
                preview_first=request.preview_first,
                cancelled=cancelled,
                on_mismatch=request.on_mismatch,
                finder=table,
            )
        return finish_result(result, emit, lora_modules, time.perf_counter() - started)


def progress_events(emit: Emit) -> Callable[[Progress], None]:
    """Return what reports the progress of a job as events."""

    def report(at: Progress) -> None:
        data = {
            "step": at.done, "total": at.work, "percent": round(100 * at.done / at.work, 2),
            "eta": round(at.eta, 3),
            "index": at.image, "count": at.images,
        }  # fmt: skip
        if at.preview is None:
            emit(Event("progress", data))
        else:
            emit(Event("preview", data, encode_png(at.preview)))

    return report


def finish_result(result: Result, emit: Emit, model_modules: int, seconds: float) -> dict[str, Any]:
    """Emit the images of a job and return its result; ``model_modules``: that an adapter could change."""
    for number, image in enumerate(result.images):
        record = result.records[number]
        data = {"index": number, "seed": record["config"]["seed"], "width": image.width, "height": image.height}
        emit(Event("image", data, encode_png(image, record)))
    return _summary(result, model_modules, seconds)


def _summary(result: Result, model_modules: int, seconds: float) -> dict[str, Any]:
    changed = sum(lora.modules for lora in result.loras) or 1
    return {
        "images": [
            {"index": number, "seed": record["config"]["seed"], "settings": record["config"], "width": image.width,
             "height": image.height, **({"grid": record["grid"]["axes"]} if "grid" in record else {})}
            for number, (record, image) in enumerate(zip(result.records, result.images, strict=True))
        ],
        "loras": [
            {**lora.as_dict(), "strength": lora.unet if lora.unet == lora.te else None,
             "modules_in_file": lora.file_modules, "modules_in_model": model_modules,
             "apply_seconds": round(lora.plan_seconds + result.swap_seconds * lora.modules / changed, 6)}
            for lora in result.loras
        ],
        "batches": result.batches,
        "added_loras": result.added,
        "merge_reason": result.merge_reason,
        "warnings": result.warnings,
        "model": result.records[0]["model"] if result.records else {"name": EMBEDDED},
        "seconds": round(seconds, 4),
    }  # fmt: skip


def encode_png(image: Image.Image, record: Mapping[str, Any] | None = None) -> bytes:
    """Return an image as PNG, with the settings that made it."""
    content = io.BytesIO()
    image.save(content, format="PNG", pnginfo=png_text(record) if record is not None else None)
    return content.getvalue()


def reference_images(inputs: Mapping[str, bytes]) -> list[Image.Image]:
    """Return the reference images of a job in order."""
    names = (f"reference-{number}" for number in range(1, MOST_REFERENCES + 1))
    return [image for name in names if (image := decode_png(inputs.get(name))) is not None]


def decode_png(content: bytes | None) -> Image.Image | None:
    """Return an image that the sandbox has encoded as PNG."""
    if content is None:
        return None
    image = Image.open(io.BytesIO(content), formats=("PNG",))
    image.load()
    return image


def stored_bytes(model: str) -> int:
    """Return the size of a model's files, an estimate before it is loaded; 0 if they are not on this disk."""
    path = Path(model).expanduser()
    files = [path] if path.is_file() else path.rglob("*.safetensors") if path.is_dir() else []
    return sum(file.stat().st_size for file in files)


def model_bytes(pipe: Pipeline) -> int:
    """Return the memory of a loaded model: its weights, and the originals for removing LoRAs exactly."""
    weights = sum(
        tensor.numel() * tensor.element_size()
        for network in pipe.model.networks.values()
        for tensor in (*network.parameters(), *network.buffers())
    )
    return 2 * weights
