"""`--from`: an image's settings, its LoRAs and its model, matched with the files of this machine by hash before name.

Everything that differs from the image's own is one warning: a repetition that is not one says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError
from inweave.exchange.hashes import autov1
from inweave.files.paths import is_file, is_folder
from inweave.formats.files import network_file, shard_files
from inweave.generate.config import GenerateConfig, LoraChoice
from inweave.generate.find import LoraFinder, has_hash, hashes_of, is_hash
from inweave.generate.infotext import not_reproduced
from inweave.generate.source import ImageSettings
from inweave.models import embedded
from inweave.models.blueprint import Blueprint
from inweave.models.model import Model
from inweave.models.open import HUB_ID
from inweave.models.samplers import offered_samplers, offered_schedules, own_sampler, problems
from inweave.models.variants import find_variant

#: the schedule that every sampler has
PLAIN_SCHEDULE = "simple"


def model_of(settings: ImageSettings) -> str | None:
    """Return the model named by an image of inweave, unless that is a path; None if the image names none."""
    name = settings.model.get("name")
    if "family" not in settings.model or name is None:  # another program's: its names are those of its own files
        return None
    if name == embedded.NAME or (
        isinstance(name, str) and HUB_ID.fullmatch(name) and not is_file(name) and not is_folder(name)
    ):
        return str(name)
    raise ConfigError(f"the image was made with the model {for_message(name)}; give that model with --model")


def lora_warnings(config: GenerateConfig, finder: LoraFinder) -> list[str]:
    """Return a warning for each LoRA that was found by its name although the image records another hash."""
    return [
        warning
        for choice in dict.fromkeys((*config.loras, *config.tagged_loras()))
        if choice.name is not None and (warning := _lora_warning(choice, finder)) is not None
    ]


def _lora_warning(choice: LoraChoice, finder: LoraFinder) -> str | None:
    digits = finder.hashes.get(choice.name or "")
    if digits is None or finder.with_hash(digits) is not None:
        return None
    path = finder.find(choice)
    if not is_hash(digits):
        return f"LoRA {choice.name}: {for_message(digits)} in the image is not a hash; {path} is used for its name"
    return f"LoRA {choice.name}: no file here has the image's hash {digits}; {path} is used because of its name"


def model_warnings(settings: ImageSettings, blueprint: Blueprint) -> list[str]:
    """Return a warning if the loaded model is not the image's."""
    name, digits = settings.model.get("name"), settings.model.get("hash")
    name = name if isinstance(name, str) else None
    if isinstance(digits, str) and is_hash(digits):
        if _model_has(blueprint, digits):
            return []
        label = f"{name} (hash {digits})" if name else f"hash {digits}"
        return [f"Model {label:.200} is not reproduced: {blueprint.name} is used, and its hash is another"]
    if name is None or name.lower() in _names(blueprint):
        return []
    return [f"Model {for_message(name)} is not reproduced: {blueprint.name} is used; give the model with --model"]


def with_possible_sampler(
    config: GenerateConfig, settings: ImageSettings, options: Collection[str], model: Model
) -> tuple[GenerateConfig, list[str]]:
    """Return the image's sampler and schedule as far as the loaded model has them, and warnings about the rest.

    Those among ``options`` were given by the user: they stay, and are an error where the model does not have them.
    """
    warnings: list[str] = []
    own = own_sampler(model.blueprint.scheduler)
    repeats_sampler = "sampler" in settings.config and "sampler" not in options
    repeats_schedule = "schedule" not in options and (repeats_sampler or "schedule" in settings.config)
    if (
        repeats_sampler
        and config.sampler
        and problems(config.sampler, PLAIN_SCHEDULE, flow=model.flow, zero_snr=model.zero_snr)
    ):
        reason = (
            "it needs scipy" if config.sampler not in offered_samplers() else f"{model.blueprint.name} cannot use it"
        )
        hint = f"{reason}, so {own} is used; choose one with --sampler"
        warnings.append(not_reproduced("Sampler", settings.config["sampler"], hint))
        config = config.model_copy(update={"sampler": None}, check=False)
    sampler = config.sampler or own
    if repeats_schedule and problems(sampler, config.schedule, flow=model.flow, zero_snr=model.zero_snr):
        reason = "it needs scipy" if config.schedule not in offered_schedules() else f"{sampler} does not have it"
        hint = f"{reason}, so {PLAIN_SCHEDULE} is used; choose another --sampler or --schedule"
        warnings.append(not_reproduced("Schedule type", config.schedule, hint))
        config = config.model_copy(update={"schedule": PLAIN_SCHEDULE}, check=False)
    return config, warnings


def input_warnings(settings: ImageSettings, options: Iterable[str]) -> list[str]:
    """Return a warning for each input image that is missing from ``options``."""
    return [
        f"{name}: the image was made from another image, which only you can name; give it with --{name}"
        for name in settings.inputs
        if name not in options
    ]


def model_hash(blueprint: Blueprint) -> str | None:
    """Return the AutoV1 hash of the denoiser's file, which reads a few bytes of it."""
    file = _model_file(blueprint)
    return autov1(file) if file is not None else None


def _model_has(blueprint: Blueprint, digits: str) -> bool:
    file = _model_file(blueprint)
    if file is None:
        return False
    if len(digits) == 8:
        return autov1(file) == digits.lower()
    try:
        return has_hash(hashes_of(file), digits)
    except FormatError:
        return False


def _model_file(blueprint: Blueprint) -> Path | None:
    if is_file(blueprint.path):
        return blueprint.path
    file = network_file(blueprint.path / blueprint.denoiser.folder)
    return shard_files(file)[0] if file is not None and file.suffix == ".json" else file


def _names(blueprint: Blueprint) -> set[str]:
    names = {blueprint.name, blueprint.path.stem, blueprint.path.name}
    if (variant := blueprint.variant or find_variant(blueprint.name)) is not None:
        names |= {variant.name, variant.repo, *variant.aliases}
    return {name.lower() for name in names}
