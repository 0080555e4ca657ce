"""Facts about an adapter file, without a model: dialects, algorithms, ranks, base, trigger words, training settings."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from inweave.adapter import Adapter
from inweave.arguments import expect
from inweave.errors import FormatError
from inweave.exchange.hashes import hash_file
from inweave.exchange.load import load
from inweave.files.documents import parse_json
from inweave.files.paths import is_file
from inweave.formats.alphas import Alphas
from inweave.formats.config import json_object
from inweave.targets.detect import detect

MAX_TAGS = 500
#: metadata key -> the name it is reported under
SETTINGS = {
    "ss_output_name": "name", "modelspec.title": "title", "modelspec.author": "author", "modelspec.license": "license",
    "modelspec.date": "date", "modelspec.architecture": "architecture", "ss_base_model_version": "base_version",
    "ss_sd_model_name": "base_name", "ss_sd_model_hash": "base_hash", "ss_network_module": "network_module",
    "ss_network_dim": "network_dim", "ss_network_alpha": "network_alpha", "ss_network_args": "network_args",
    "ss_resolution": "resolution", "ss_clip_skip": "clip_skip", "ss_num_train_images": "train_images",
    "ss_epoch": "epoch", "ss_steps": "steps", "ss_learning_rate": "learning_rate", "ss_unet_lr": "unet_lr",
    "ss_text_encoder_lr": "text_encoder_lr",
    "ss_optimizer": "optimizer", "ss_lr_scheduler": "lr_scheduler", "ss_seed": "seed", "ss_training_comment": "comment",
    "ss_training_started_at": "started_at", "ss_training_finished_at": "finished_at", "ss_max_train_steps": "max_steps",
    "ss_num_epochs": "epochs", "ss_batch_size_per_device": "batch_size", "ss_total_batch_size": "total_batch_size",
    "ss_gradient_accumulation_steps": "gradient_accumulation", "ss_num_reg_images": "reg_images",
    "ss_noise_offset": "noise_offset",
    "ss_min_snr_gamma": "min_snr_gamma", "ss_caption_dropout_rate": "caption_dropout", "ss_keep_tokens": "keep_tokens",
    "ss_shuffle_caption": "shuffle_caption", "ss_mixed_precision": "mixed_precision", "ot_branch": "onetrainer_branch",
    "ot_revision": "onetrainer_revision", "software": "software",
}  # fmt: skip


#: seconds since 1970, reported as dates
_TIMES = ("ss_training_started_at", "ss_training_finished_at")


@dataclass(frozen=True, slots=True, repr=False)
class Facts:
    """Everything `inweave inspect` knows about one file; ``as_dict`` is its documented JSON."""

    path: str
    bytes: int
    adapter: Adapter
    document: dict[str, object]

    def __repr__(self) -> str:
        return f"<Facts: {self.path}: {self.adapter!r}>"

    def as_dict(self) -> dict[str, object]:
        """Return the documented JSON of `inweave inspect`."""
        return self.document


def inspect(
    path: str | os.PathLike[str], *, keys: bool = False, name: str | None = None, alpha: Alphas | None = None
) -> Facts:
    """Describe an adapter file or PEFT directory: dialect, algorithms, ranks, base model, trigger words, hashes.

    Args:
        path: the file or directory.
        keys: also list every tensor.
        name: the adapter to describe if the keys carry several PEFT adapter names.
        alpha: for modules without an alpha, as in `load`.

    Returns:
        The facts: `inweave.inspect("style.safetensors").as_dict()["base"]`.

    Raises:
        FormatError: the file cannot be read.
        ConfigError: ``alpha`` is invalid, or no module needs it.
    """
    expect("keys", keys, bool)
    adapter = load(path, name=name, alpha=alpha)
    location = Path(path)
    files = [location] if is_file(location) else sorted(location.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    detection = detect(adapter)
    hashes = hash_file(files[0]).as_dict() if len(files) == 1 and files[0].suffix != ".json" else None
    document: dict[str, object] = {
        "path": str(path),
        "bytes": size,
        "tensors": len(adapter.tensors),
        "dialects": list(adapter.dialects),
        "algorithms": list(adapter.algorithms),
        "ranks": _counts(str(e.factors.rank) for e in adapter if e.factors.rank is not None),
        "alphas": _counts(
            "none" if e.factors.alpha is None else f"{e.factors.alpha:g}" for e in adapter if e.param == "weight"
        ),
        **({"assumed_alphas": len(adapter.assumed_alphas)} if adapter.assumed_alphas else {}),
        "scales": _counts(f"{e.factors.scale:.6g}" for e in adapter if e.param == "weight"),
        "dtypes": _counts(t.dtype for t in adapter.tensors.values()),
        "components": _counts(e.ref.component or "model" for e in adapter if e.param == "weight"),
        "modules": len({e.ref for e in adapter}),
        "kinds": _counts(e.factors.algorithm for e in adapter),
        "base": detection.as_dict(),
        "triggers": trigger_words(adapter.metadata),
        "tags": dict(tag_counts(adapter.metadata).most_common(MAX_TAGS)),
        "dataset": dataset_folders(adapter.metadata),
        "training": training_settings(adapter.metadata),
        "carried": list(adapter.carried),
        "problems": [{"fault": p.fault, "keys": list(p.keys), "reason": p.reason} for p in adapter.problems],
        "warnings": [*adapter.warnings, *detection.warnings],
        "hashes": hashes,
    }
    if keys:
        document["keys"] = [
            {"key": name, "dtype": tensor.dtype, "shape": list(tensor.shape)}
            for name, tensor in adapter.tensors.items()
        ]
    return Facts(str(path), size, adapter, document)


def trigger_words(metadata: Mapping[str, str]) -> list[dict[str, object]]:
    """Return the trigger words of an adapter by source, the most trustworthy source first."""
    sources: list[dict[str, object]] = []
    for source in ("modelspec.trigger_phrase", "trigger_word", "trigger_phrase", "instance_prompt"):
        if words := metadata.get(source, "").strip():
            sources.append({"source": source, "words": [word.strip() for word in words.split(",") if word.strip()]})
    classes = _dataset_classes(metadata)
    if classes:
        sources.append({"source": "ss_dataset_dirs", "words": classes})
    if tags := tag_counts(metadata):
        common = [tag for tag, _ in sorted(tags.items(), key=lambda item: (-item[1], item[0]))[:20]]
        sources.append({"source": "ss_tag_frequency", "words": common})
    return sources


def tag_counts(metadata: Mapping[str, str]) -> Counter[str]:
    """Return how often each tag appears in the captions of all folders together."""
    tags: Counter[str] = Counter()
    for folder in json_object(metadata.get("ss_tag_frequency")).values():
        for tag, count in folder.items() if isinstance(folder, dict) else ():
            if isinstance(count, int) and not isinstance(count, bool):
                tags[tag.strip()] += count
    return tags


def dataset_folders(metadata: Mapping[str, str]) -> list[dict[str, object]]:
    """Return the training folders that the trainer recorded: name, images, repeats."""
    rows: list[dict[str, object]] = []
    for name, about in json_object(metadata.get("ss_dataset_dirs")).items():
        if isinstance(about, dict):
            rows.append({"folder": name, "images": about.get("img_count"), "repeats": about.get("n_repeats")})
    if rows:
        return rows
    datasets: object = None
    with suppress(FormatError):
        datasets = parse_json(metadata.get("ss_datasets", "null"), "ss_datasets")
    for dataset in datasets if isinstance(datasets, list) else ():
        subsets = dataset.get("subsets") if isinstance(dataset, dict) else None
        for subset in subsets if isinstance(subsets, list) else ():
            if isinstance(subset, dict):
                rows.append(
                    {
                        "folder": subset.get("image_dir"),
                        "images": subset.get("img_count"),
                        "repeats": subset.get("num_repeats"),
                    }
                )
    return rows[:MAX_TAGS]


def _date(text: str) -> str:
    """Return seconds since 1970 as a date, and any other text unchanged."""
    try:
        return datetime.fromtimestamp(float(text), UTC).isoformat(" ", "seconds").replace("+00:00", " UTC")
    except (ValueError, OverflowError, OSError):
        return text


def _dataset_classes(metadata: Mapping[str, str]) -> list[str]:
    """Return the text that follows the repeat count in the names of kohya's `10_name class` folders."""
    words: list[str] = []
    for folder in json_object(metadata.get("ss_dataset_dirs")):
        repeats, _, name = folder.partition("_")
        if repeats.isdigit() and name and name not in words:
            words.append(name)
    return words


def training_settings(metadata: Mapping[str, str]) -> dict[str, object]:
    """Return the settings that a trainer recorded; JSON texts are decoded."""
    settings: dict[str, object] = {}
    for key, name in SETTINGS.items():
        value = metadata.get(key)
        if key == "ss_clip_skip" and value == "None":
            value = "1"  # kohya writes None if no layer is skipped
        if value is None or value in ("", "None"):
            continue
        decoded: object = _date(value) if key in _TIMES else value
        if value[:1] in "{[":
            with suppress(FormatError):  # a text that is not JSON, or cannot be written as JSON again, stays a text
                decoded = parse_json(value, key)
        settings[name] = decoded
    return settings


def _counts(values: object) -> dict[str, int]:
    counted = Counter(values)  # type: ignore[call-overload]
    return dict(sorted(counted.items(), key=lambda item: (-item[1], str(item[0]))))
