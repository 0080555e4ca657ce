"""Preparing a run on a causal language model, see `DiffusionSetup`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inweave.errors import ConfigError
from inweave.files.paths import exists, expand_home, is_file, is_folder
from inweave.models import embedded
from inweave.models.language_models import blank_language_model, load_language_model, load_tokenizer
from inweave.models.open import hub_folder, hub_id
from inweave.ops.tensors.device import DTYPES, choose_dtype
from inweave.ops.tensors.oom import oom_hint
from inweave.targets.index import ModelIndex, component_from_names
from inweave.training.adapters.targets import check_selection
from inweave.training.config.schema import TrainConfig, other_task_settings
from inweave.training.data.batches import epoch_length, total_steps
from inweave.training.data.texts import TextReport, read_texts
from inweave.training.distributed.fsdp import shard_base
from inweave.training.distributed.world import World
from inweave.training.execution.modes import mode_problems
from inweave.training.memory.estimate import LanguageModelSpec, Measurements
from inweave.training.memory.meta import Measured, measure_network
from inweave.training.output.samples import SampleImage
from inweave.training.tasks.base import PRECISIONS, OnProgress, no_validation
from inweave.training.tasks.language import LanguageTask, token_loss
from inweave.training.tasks.offload import stream_network
from inweave.weights.streaming.stream import listed_blocks


def language_model_folder(config: TrainConfig) -> Path | None:
    """Return the folder of a language model, local or in the Hub's cache; None if the model is not one."""
    folder = expand_home(config.model)
    if not exists(folder) and config.model != embedded.NAME:
        folder = hub_folder(hub_id(config.model), config.allow_download)
    return folder if is_language_model(folder) else None


def is_language_model(folder: Path) -> bool:
    """Return whether it is a folder with a transformers configuration and without model_index.json."""
    return is_folder(folder) and is_file(folder / "config.json") and not is_file(folder / "model_index.json")


class LanguageSetup:
    """The texts, the tokenizer and the model without weights; ``folder``: of the model, if its name is not the path."""

    def __init__(self, config: TrainConfig, device: torch.device, folder: Path | None = None) -> None:
        _check_settings(config)
        self.device, self._folder = device, folder or Path(config.model)
        if not isinstance(config.dataset, str):
            raise ConfigError(
                "dataset: tables are for images; a language model is trained on a .txt or .jsonl of texts"
            )
        self._texts = read_texts(Path(config.dataset))
        dtype = choose_dtype(config.precision if "precision" in config.model_fields_set else None, device)
        self.config = config.with_preset("llm").model_copy(update={"dialect": "peft", "precision": PRECISIONS[dtype]})
        self._network, self._tokenizer = blank_language_model(self._folder, dtype), load_tokenizer(self._folder)
        self._task = self._blank_task(self.config)

    @property
    def measurements(self) -> Measurements:
        """Those of an example of the greatest length."""
        longest = max(len(tokens) for tokens, _ in self._task.examples)

        def measure(config: TrainConfig, dtype: torch.dtype, checkpoint: Any) -> Measured:
            network = blank_language_model(self._folder, dtype)
            row = torch.empty(1, longest, dtype=torch.int64, device="meta")
            # the final attention mask: the library would read the values of any other, and the meta device has none
            mask = torch.empty(1, 1, longest, longest, dtype=torch.bool, device="meta")
            inputs = {"input_ids": row, "labels": row, "attention_mask": mask}
            return measure_network(network, config, checkpoint, lambda: token_loss(network, inputs))

        return Measurements(LanguageModelSpec(DTYPES[self.config.precision], measure), self.config)

    @property
    def example_count(self) -> int:
        """The number of texts, or of their parts."""
        return max(len(self._task.examples), 1)

    def validate(self, config: TrainConfig) -> None:
        check_selection(self._task.networks, config)

    def dialect(self, config: TrainConfig) -> tuple[str, str]:
        return config.dialect, ""

    def problems(self, config: TrainConfig) -> list[str]:
        missing = config.validation_split and not self._blank_task(config).held_out
        impossible = mode_problems(self._task.networks, config, self.device)
        return [*([no_validation(config)] if missing else []), *impossible]

    def report(self, config: TrainConfig, processes: int) -> tuple[TextReport, list[str]]:
        task = self._blank_task(config)
        counts = [flags for _, flags in task.examples]
        tokens, trained = sum(map(len, counts)), sum(map(sum, counts))
        held_out, batches = sum(map(len, task.held_out)), len(task.order)
        micro_batches = config.gradient_accumulation * processes
        epoch = epoch_length(batches, micro_batches, config.epoch_steps)
        total = total_steps(epoch, micro_batches, steps=config.steps, epochs=config.epochs)
        return TextReport(task.texts, len(counts), tokens, trained, held_out, batches, total, task.cuts), []

    def load(self, config: TrainConfig, world: World, *, staged: bool) -> LoadedLanguageModel:
        """Read the weights; ``staged``: to host memory, from where blocks are streamed."""
        where = torch.device("cpu") if config.shard or staged else self.device
        advice = 'set offload = "blocks", a smaller precision, or `shard` with several processes'
        with oom_hint(f"load {config.model}", advice):
            network, tokenizer = load_language_model(self._folder, where, DTYPES[config.precision])
        task = LanguageTask(network, tokenizer, self._texts, config, self.device)
        shapes = {name: tuple(value.shape) for name, value in network.state_dict().items()}
        index = ModelIndex({"model": component_from_names("model", shapes)}, source=config.model)
        return LoadedLanguageModel(task, network, index)

    def _blank_task(self, config: TrainConfig) -> LanguageTask:
        sized = config if config.batch_size else config.model_copy(update={"batch_size": 1})
        return LanguageTask(self._network, self._tokenizer, self._texts, sized, self.device)


@dataclass(frozen=True, slots=True)
class LoadedLanguageModel:
    """A language model, which has no caches or samples."""

    task: LanguageTask
    model: Any
    index: ModelIndex
    base_file: Path | None = None
    quantized: str = ""

    def fill_caches(self, world: World, on_progress: OnProgress | None) -> None:
        pass

    def shard(self, world: World) -> str:
        return shard_base(self.model, world, self.task.device)

    def fuse_blocks(self) -> None:
        """Do nothing: these blocks do little besides products and attention."""

    def stream_blocks(self, resident: int) -> str:
        self.task.stream, note = stream_network(self.model, listed_blocks(self.model), self.task.device, resident)
        return note

    def notes(self) -> list[str]:
        return [text] if (text := self.task.cuts.text()) else []

    def sampler(self) -> Callable[[int], list[SampleImage]] | None:
        return None


def _check_settings(config: TrainConfig) -> None:
    """Raise ConfigError if there are settings for images."""
    explicit, problems = config.model_fields_set, []
    if "dialect" in explicit and config.dialect != "peft":
        problems.append(
            f'dialect: a language model cannot be saved as "{config.dialect}"; leave it out, or set it to "peft"'
        )
    for name in ("sample_every", "sample_every_epochs"):
        if getattr(config, name):
            problems.append(f"{name}: samples are images, and a language model generates none; leave it out")
    if config.train_text_encoders:
        problems.append("train_text_encoders: a language model has none; leave it out")
    problems += [
        f"{name}: only applies to image models, and this is a language model; leave it out"
        for name in other_task_settings(config, "image")
    ]
    if problems:
        raise ConfigError(problems)
