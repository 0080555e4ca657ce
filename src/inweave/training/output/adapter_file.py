"""What comes out: the adapter's file, with what made it in its metadata, read back and proved before it counts.

The file is written beside its place, opened again, every tensor is given its place on the base, and every number is looked
at. Only then it takes its name: a run whose file does not pass is not finished, and a good one before it is not lost.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialize

from inweave import __version__
from inweave.adapter import Adapter, Entry, Factors, Tensor
from inweave.errors import ConfigError, FormatError, InweaveError, TargetError
from inweave.exchange.convert import save
from inweave.exchange.hashes import hash_file
from inweave.exchange.load import load
from inweave.formats.files import open_container, write_file
from inweave.formats.finite import scan
from inweave.layers import ALGORITHMS
from inweave.ops.decode import decode, encode
from inweave.ops.device import DTYPES
from inweave.targets.index import ModelIndex
from inweave.targets.plan import Plan
from inweave.targets.resolve import resolve
from inweave.training.adapters.summary import Shape
from inweave.training.checkpoint.store import checkpoints
from inweave.training.config.fields import names_where
from inweave.training.config.schema import TrainConfig

_ROOM = "make room, or name another `output`, and go on from the last checkpoint with --resume auto"


def store(adapter: Adapter, path: Path, config: TrainConfig, index: ModelIndex, metadata: Mapping[str, str]) -> Path:
    """Write the adapter in the wanted dialect and precision, and prove that it can be used; only then it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cast = replace(recast(adapter, DTYPES[config.save_dtype]), metadata=dict(metadata))
    folder = config.dialect == "peft"
    target = path.with_suffix("") if folder else path
    beside = target.with_name(f".{target.name.removesuffix('.safetensors')}.new{'' if folder else '.safetensors'}")
    try:
        save(cast, beside, dialect=config.dialect, base=index)
        if not folder:
            _sign(beside)
        prove(beside, index, cast)
        target.mkdir(exist_ok=True) if folder else None
        for part in sorted(beside.iterdir()) if folder else (beside,):
            part.replace(target / part.name if folder else target)
    except OSError as error:
        raise FormatError(f"{target}: cannot be written: {error.strerror}; {_ROOM}") from None
    except FormatError as error:
        raise FormatError(f"{target}: cannot be written; {_ROOM} ({error})") from None
    finally:
        if folder:
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.unlink(missing_ok=True)
    return target


def written(path: Path) -> bool:
    """Whether there is an adapter of this name, as a file or as a folder."""
    return path.is_file() or (path.with_suffix("") / "adapter_model.safetensors").is_file()


def sweep(output: Path, name: str) -> None:
    """Remove what a process left beside its place that died while writing."""
    left = re.compile(rf"\.+{re.escape(name)}(-\d{{6,}}|-best)?\.(new|jsonl)\b.*")
    for path in output.iterdir() if output.is_dir() else ():
        if left.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def prove(path: Path, index: ModelIndex, meant: Adapter) -> None:
    """Raise unless the file holds all of ``meant``, each tensor has its place on the base, and all are finite."""
    found = load(path)
    try:
        wanted, there = (_changed(resolve(each, index)) for each in (meant, found))
    except TargetError as error:
        raise TargetError(f"{path}: what was written cannot be used: {error}") from None
    if bad := [key for key, tensor in found.tensors.items() if scan(tensor).nonfinite]:
        hint = (
            '; save_dtype = "bf16" or "fp32" holds larger numbers'
            if "F16" in {t.dtype for t in found.tensors.values()}
            else ""
        )
        raise TargetError(f"{path}: {len(bad)} tensors hold NaN or infinity, {bad[0]} the first{hint}")
    if lacking := sorted(wanted.keys() - there.keys()):
        shown = ".".join(str(part) for part in lacking[0][:2])
        raise TargetError(
            f"{path}: {len(lacking)} of the {len(wanted)} places that were trained are missing: {shown} ..."
        )
    for place, factors in wanted.items():
        if factors is not None and there[place] is not None and not _same(factors, there[place]):
            raise TargetError(f"{path}: {place[1]} was not written as it was trained")


def _changed(plan: Plan) -> dict[tuple[str, str, int], Factors | None]:
    """(component, tensor, row) for all rows that change; its factors beside the first row of what one of them makes."""
    found: dict[tuple[str, str, int], Factors | None] = {}
    for each in plan.placements:
        rows = each.rows()
        found |= {(each.component, each.tensor, row): None for row in rows[1:]}
        found[each.component, each.tensor, rows[0]] = each.factors if each.source is None else None
    return found


def _same(one: Factors, other: Factors | None) -> bool:
    """Whether both are the same numbers; factors that a dialect joins with others are another kind or shape."""
    if other is None or type(one) is not type(other) or one.shape() != other.shape():
        return True
    mine, theirs = one.tensors(), other.tensors()
    if mine.keys() != theirs.keys() or any(mine[role].numel != theirs[role].numel for role in mine):
        return True
    alike = math.isclose(one.scale, other.scale, rel_tol=2**-10)  # an alpha may be stored in half precision
    return alike and all(bytes(mine[role].data) == bytes(theirs[role].data) for role in mine)


def _sign(path: Path) -> None:
    """Add kohya's two hashes: of the data, and of a window of the file as it would be with the ss_* metadata alone."""
    container, raw = open_container(path), path.read_bytes()
    kept = {name: value for name, value in container.metadata.items() if name.startswith("ss_")}
    theirs = serialize({name: decode(tensor) for name, tensor in container.tensors.items()}, kept)
    signed = {
        "sshs_model_hash": hashlib.sha256(raw[8 + int.from_bytes(raw[:8], "little") :]).hexdigest(),
        "sshs_legacy_hash": hashlib.sha256(theirs[0x100000:0x110000]).hexdigest()[:8],
    }
    write_file(path, container.tensors, {**container.metadata, **signed})


def recast(adapter: Adapter, dtype: torch.dtype) -> Adapter:
    """The same adapter in another precision; alphas and other single numbers stay as they are."""
    made: dict[int, Tensor] = {}

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype not in ("F32", "F64", "BF16", "F16") or len(tensor.shape) == 0:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = encode(decode(tensor).to(dtype))
        return made[id(tensor)]

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return cast(value)
        if hasattr(value, "__dataclass_fields__"):
            return replace(value, **{f.name: changed(getattr(value, f.name)) for f in fields(value) if f.init})
        return value

    entries: tuple[Entry, ...] = tuple(replace(entry, factors=changed(entry.factors)) for entry in adapter.entries)
    return replace(adapter, entries=entries, tensors={name: cast(tensor) for name, tensor in adapter.tensors.items()})


def refuse_existing(config: TrainConfig, resume: str | None = None) -> None:
    """Nothing of an earlier run is written over; one that goes on has nothing to fear."""
    wanted, output = resume or config.resume, Path(config.output)
    states, file = output / f"{config.name}-state", output / f"{config.name}.safetensors"
    own = wanted not in ("auto", "never") and states.resolve() in (
        Path(wanted).resolve(),
        *Path(wanted).resolve().parents,
    )
    if own or (wanted == "auto" and checkpoints(states)):
        return
    way = "or give this run another name (--name) or output"
    if checkpoints(states):
        raise ConfigError(
            f'{states}: there are checkpoints of an earlier run; go on with them, resume = "auto" (--resume auto), {way}'
        )
    if written(file):
        raise ConfigError(f"{file}: there is an adapter already, and no checkpoint to go on from; move it, {way}")


def refusals(config: TrainConfig, held_out: bool) -> list[str]:
    """What would end a run before its first step, beside what reading model and data finds."""
    found = [] if held_out or not config.validation_split else [no_validation(config)]
    try:
        refuse_existing(config)
    except InweaveError as error:
        found.append(str(error))
    try:
        _ = load(config.start_from) if config.start_from else None
    except InweaveError as error:
        found.append(f"start_from: {error}")
    return found


def no_validation(config: TrainConfig) -> str:
    return f"validation_split: a share of {config.validation_split:g} of the dataset is not one example; raise it"


def base_hashes(path: Path) -> dict[str, str]:
    """kohya's names for the hashes of a base that is one file."""
    found = hash_file(path)
    return {"ss_sd_model_hash": found.autov1, "ss_new_sd_model_hash": found.sha256}


def _public(config: TrainConfig) -> TrainConfig:
    """What lies on this machine by its last name alone: folders are nobody's business, and say who trained it."""

    def last(value: str) -> str:
        return Path(value).name if Path(value).exists() or Path(value).is_absolute() else value

    paths: dict[str, Any] = {
        name: last(value) for name in ("model", "dataset", "start_from") if (value := getattr(config, name))
    }
    if config.parts:
        paths["parts"] = {part: last(value) for part, value in config.parts.items()}
    if config.sample_prompts:
        paths["sample_prompts"] = tuple(map(last, config.sample_prompts))
    return config.model_copy(update={name: value for name, value in paths.items() if name in config.model_fields_set})


def described(
    config: TrainConfig,
    shape: Shape,
    model: Any,
    steps: tuple[int, int, float],
    started: float,
    data: Mapping[str, str],
) -> dict[str, str]:
    """The metadata other programs look for, and our own configuration; ``steps``: done, of all, of an epoch."""
    step, total, epoch = steps
    prediction = getattr(model, "prediction", "")
    family = getattr(model, "family", None)
    version, architecture = family.file_labels(model.blueprint.variant, prediction) if family else ("llm", "llm")
    found = {
        "ss_output_name": config.name,
        "ss_base_model_version": version,
        "ss_sd_model_name": str(getattr(model, "name", config.model)),
        "ss_v2": str(version == "sd_v2"),
        **_network(shape),
        "ss_steps": str(step),
        "ss_epoch": str(math.ceil(step / epoch)),
        "ss_num_epochs": str(math.ceil(total / epoch)),
        "ss_max_train_steps": str(total),
        "ss_lr_warmup_steps": str(config.warmup_steps(total)),
        "ss_max_grad_norm": f"{config.max_grad_norm:g}",
        "ss_batch_size_per_device": str(config.batch_size),
        "ss_gradient_accumulation_steps": str(config.gradient_accumulation),
        "ss_learning_rate": f"{config.learning_rate:g}",
        "ss_unet_lr": f"{config.learning_rate:g}" if config.train_denoiser else "None",
        "ss_text_encoder_lr": f"{config.text_encoder_learning_rate or config.learning_rate:g}" if config.train_text_encoders else "None",
        "ss_optimizer": config.optimizer,
        "ss_lr_scheduler": config.lr_scheduler,
        "ss_mixed_precision": config.precision if config.precision in ("bf16", "fp16") else "no",
        "ss_seed": str(config.seed),
        "ss_caption_dropout_rate": f"{config.caption_dropout:g}",
        "ss_min_snr_gamma": str(config.min_snr_gamma),
        "ss_noise_offset": f"{config.noise_offset:g}",
        "ss_prior_loss_weight": f"{config.prior_loss_weight:g}",
        "ss_enable_bucket": str(config.buckets),
        "ss_clip_skip": str(config.clip_skip),
        "ss_training_started_at": f"{started:.3f}",
        "ss_training_finished_at": f"{time.time():.3f}",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{architecture}/lora",
        "modelspec.implementation": "diffusers" if family else "transformers",
        "modelspec.title": config.name,
        "modelspec.date": datetime.fromtimestamp(started, UTC).strftime("%Y-%m-%dT%H:%M:%S"),
        "inweave.version": __version__,
        "inweave.config": _public(config).to_toml(without=names_where(private=True)),
    }  # fmt: skip
    if config.trigger:
        found["modelspec.trigger_phrase"] = config.trigger
    if sides := re.findall(r"\d+", data.get("ss_resolution", "")):
        found["modelspec.resolution"] = "x".join(sides)
    if prediction in ("epsilon", "v_prediction"):
        found["modelspec.prediction_type"] = "v" if prediction == "v_prediction" else "epsilon"
    return found | dict(data)


def _network(shape: Shape) -> dict[str, str]:
    """As kohya's scripts and LyCORIS' say it: DoRA, LoHa and LoKr are LyCORIS'."""
    theirs = {"lora", "locon"}.isdisjoint(shape.kinds)
    said = {
        "algo": shape.network if set(shape.kinds) <= ALGORITHMS.keys() - {"lora"} else "lora",
        "dora_wd": str("dora" in shape.kinds),
        "rs_lora": str(True in shape.rslora),
    }
    if shape.wide_ranks:
        said |= {"conv_dim": str(shape.usual("wide_ranks")), "conv_alpha": f"{shape.usual('wide_alphas'):g}"}
    rank, alpha = shape.usual("ranks"), shape.usual("alphas")
    if not shape.ranks:
        rank, alpha = shape.usual("wide_ranks"), shape.usual("wide_alphas")
    return {
        "ss_network_module": "lycoris.kohya" if theirs else "networks.lora",
        "ss_network_dim": str(rank),
        "ss_network_alpha": f"{alpha:g}" if alpha is not None else "None",
        "ss_network_args": json.dumps(said),
    }
