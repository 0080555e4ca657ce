"""Samples: images generated during training with the current adapter, from the same prompts and seeds every time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inweave.errors import ConfigError
from inweave.files.writing import make_folder
from inweave.generate.conditioning import PromptConditioning
from inweave.generate.config import GenerateConfig
from inweave.generate.pipeline import Pipeline
from inweave.models.model import Model
from inweave.training.config.schema import TrainConfig
from inweave.training.config.toml import at_most
from inweave.training.output.sample_prompts import sample_requests


@dataclass(frozen=True, slots=True)
class SampleImage:
    """A sample on disk, and the warnings its viewer should see."""

    path: Path
    warnings: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return its line of the log."""
        text = {"text": "; ".join(self.warnings)} if self.warnings else {}
        return {"event": "sample", "path": str(self.path), **text}


class Sampler:
    """Generates the configuration's prompts; raises ConfigError when it is made if one cannot be generated.

    ``writes``: whether this process saves the images; if the base is sharded, all processes generate.
    """

    def __init__(self, model: Model, config: TrainConfig, *, writes: bool = True) -> None:
        labeled = sample_requests(config)
        self._pipeline = _TrainingPipeline(model, cache_text=not config.train_text_encoders)
        self._requests = [request for _, request in labeled]
        problems: list[str] = []
        for label, request in labeled:
            try:
                self._pipeline.prepare(request)
            except ConfigError as error:
                problems += [f"{label}: {problem}" for problem in error.problems]
        if problems:
            raise ConfigError(at_most(problems))
        self._folder, self._name, self._writes = Path(config.output) / "samples", config.name, writes
        # the adapter is not among the request's LoRAs: without this the image's settings would be those of the base
        self._training = {
            "name": config.name, "network": config.network, "rank": config.rank, "alpha": config.alpha,
        }  # fmt: skip

    def encode(self) -> None:
        """Encode the prompts now: frozen text encoders need not be on the device later."""
        for request in self._requests:
            self._pipeline.encode(request)

    def __call__(self, step: int) -> list[SampleImage]:
        # generate all before writing: processes that generate together must not stop if only one fails
        results = [self._pipeline(request) for request in self._requests]
        images = []
        for number, result in enumerate(results if self._writes else ()):
            make_folder(self._folder)
            path = self._folder / f"{self._name}-{step:06d}-{number}.png"
            for record in result.records:
                record["training"] = self._training | {"step": step}
            result.save(path)
            images.append(SampleImage(path, tuple(result.warnings)))
        return images


class _TrainingPipeline(Pipeline):
    """A pipeline over a model whose adapters are trainable layers: nothing is merged."""

    def __init__(self, model: Model, *, cache_text: bool) -> None:
        super().__init__(model, batch=1)  # processes that share a base make the same calls
        # the prompts never change, and neither do their encodings by frozen encoders
        self._cache: dict[str, PromptConditioning] | None = {} if cache_text else None

    def encode(self, request: GenerateConfig) -> None:
        prepared = self.prepare(request)
        assert prepared.config.steps is not None
        conditioning = self._conditioning(prepared)
        for step in range(prepared.config.steps):
            conditioning.at(step, prepared.config.steps)

    def _swap_in(self, loras: Any) -> None:
        pass  # the adapter is attached already

    def _conditioning(self, request: Any, added: Any = ()) -> PromptConditioning:
        if self._cache is None:
            return super()._conditioning(request)
        key = repr((request.config, request.size))
        if key not in self._cache:
            self._cache[key] = super()._conditioning(request)
        return self._cache[key]
