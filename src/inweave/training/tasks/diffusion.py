"""Pictures and captions as a task: latents and text, encoded once, noised anew at every step.

    example ──resize, crop, flip──► picture ──VAE──► mean and spread of its latents     cached by content and settings
    caption ──shuffle, drop────────► variants ──text encoders──► conditioning           cached by tokens and model

A step draws from each mean and spread, so the autoencoder's own randomness is kept. Where text encoders are trained,
captions travel as token numbers and are encoded inside the step; T5 is never trained, its answers stay cached.

What a table of the dataset's file says of its pictures counts; where it says nothing, the run's word does. The loss is
masked for all pictures (`masked_loss`) or for those of a table with `alpha_mask`; where it is for any, the others, and
those without a mask, have one that is open everywhere.

What a step does not need may leave the device (`inweave.training.tasks.offload`): `prepare(staged=True)` has one encoder
there at a time and the denoiser last, since adapters come afterwards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.models.blueprint import COMPONENTS, ENCODERS
from inweave.models.families import Conditioning, predict
from inweave.models.model import Model
from inweave.models.teaching import T5, batched, encoded, t5_states, text_inputs, token_inputs
from inweave.training.config.schema import TrainConfig
from inweave.training.data.batches import arrange
from inweave.training.data.buckets import BucketRules, Placement
from inweave.training.data.cache import TensorCache, encoder_digests
from inweave.training.data.caption_lengths import long_caption_warnings, max_chunks, run_captions
from inweave.training.data.captions import choose_caption, tag_frequency
from inweave.training.data.images import RANDOM_CROPS, crop_box, load_image, mask_key, uses_mask
from inweave.training.data.types import (
    Dataset,
    Example,
    fingerprint_fields,
    printable_path,
    subset_defaults,
    with_defaults,
)
from inweave.training.memory.oom import needing
from inweave.training.tasks.base import Tensors, generator_for
from inweave.training.tasks.objective import Objective, judged, make_objective
from inweave.training.tasks.offload import Offloader

_ENCODERS_TOO_LARGE = "set `vram`, so that encoders take turns on the device"


class DiffusionTask:
    """See `inweave.training.tasks.base.Task`."""

    def __init__(self, model: Model, dataset: Dataset, config: TrainConfig, cache: TensorCache) -> None:
        self.model, self.config, self.cache = model, config, cache
        self.examples = dataset.examples
        self.device, self.dtype = model.device, model.dtype
        self.trains_text = config.train_text_encoders
        self.networks: Mapping[str, nn.Module] = trained_networks(model, config)
        self.objective: Objective = make_objective(
            model, config.objective, model.device, timesteps=config.timestep_sampling, shift=config.timestep_shift,
            logit_mean=config.logit_mean, logit_std=config.logit_std, min_snr_gamma=config.min_snr_gamma,
            noise_offset=config.noise_offset,
        )  # fmt: skip
        self.rules = bucket_rules(config, model)
        self.places, whole = arrange(dataset, self.rules, batch_size=config.batch_size, seed=config.seed)
        out = held_out(self.examples, self.places, config)
        self.held_out = _batches(sorted(out), self.places, config.batch_size)
        repeats = tuple(0 if number in out else count for number, count in enumerate(whole.repeats))
        self.order = replace(whole, repeats=repeats, _epochs={})
        _check(model, config, self.examples, self.places, repeats)
        self._defaults = subset_defaults(config)
        self._settings = [with_defaults(example.subset, self._defaults) for example in self.examples]
        self._masked = [uses_mask(config, example) for example in self.examples]
        self._masks = [mask_key(e) if masked else "" for e, masked in zip(self.examples, self._masked, strict=True)]
        self.captions = run_captions(config, dataset)
        self.chunks = max_chunks(model, self.captions)
        self._numbers: dict[str, Tensors] = {}
        self._identity = encoder_digests(model)
        self.offloader = Offloader(model.networks, model.device)

    # data

    def prepare(self, tick: Any = None, *, staged: bool = False, beside: Callable[[], None] | None = None) -> None:
        """Fill the caches before the first step, so that no step waits for an encoder.

        ``beside``: what else the text encoders are asked while they are there.
        """
        placed = [number for number, place in enumerate(self.places) if place is not None]
        jobs = [(number, flip, crop) for number in placed for flip, crop in self._forms(number)]
        jobs = jobs if self.config.cache_latents else []
        texts = sorted({"", *(text for found in self.captions for text in found)}) if self._keeps_text else []
        total = len(jobs) + len(texts)
        if staged and jobs:
            self.offloader.keep_only({"vae"})
        for number, (example, flip, crop) in enumerate(jobs):
            self._latents(example, flip, crop)
            if tick is not None:
                tick("encoding pictures", number + 1, total)
        if staged and (texts or beside):
            self.offloader.keep_only({T5[self.model.family]} if self.trains_text else set(ENCODERS))
        if beside is not None:
            beside()
        for number, text in enumerate(texts):
            self._text(text)
            if tick is not None:
                tick("encoding captions", len(jobs) + number + 1, total)
        if staged:
            self.offloader.keep_only(self.needed)

    def draw(self, batch: tuple[int, ...], generator: torch.Generator) -> Tensors:
        """Latents, noise, times and text of a batch, on the host."""
        latents, masks, texts, facts, weights = [], [], [], [], []
        for number in batch:
            example = self.examples[number]
            shown, dropped, picked = torch.rand(3, generator=generator).tolist()
            forms = self._forms(number)
            spread = self._latents(number, *forms[min(int(shown * len(forms)), len(forms) - 1)])
            eps = torch.randn(spread["mean"].shape, generator=generator)
            latents.append(spread["mean"] + spread["std"] * eps)
            masks.append(spread["mask"])
            dropout = self._settings[number].caption_dropout or 0.0
            texts.append(choose_caption(self.captions[number], dropout, dropped, picked))
            facts.append(spread["facts"])
            weights.append(self.config.prior_loss_weight if example.regularization else 1.0)
        shape = (len(batch), *latents[0].shape)
        tokens = shape[2] * shape[3] // 4
        found: Tensors = {
            "latents": torch.stack(latents),
            "noise": self.objective.draw_noise(shape, generator),
            "times": self.objective.draw_times(len(batch), tokens, generator),
            "facts": torch.stack(facts),
            "weights": torch.tensor(weights),
        }
        if any(self._masked):
            found["mask"] = torch.stack(masks)
        told = [self._text(text) for text in texts]
        return found | {f"text.{name}": torch.cat([each[name] for each in told]) for name in told[0]}

    def loss(self, inputs: Tensors) -> torch.Tensor:
        """What the denoiser answers, against what it should."""
        dtype = self.model.dtype
        latents, noise, times = inputs["latents"], inputs["noise"], inputs["times"]
        noisy, target = self.objective.noised(latents, noise, times)
        text = {name.removeprefix("text."): value for name, value in inputs.items() if name.startswith("text.")}
        if self.trains_text:
            text = encoded(self.model, text, self.config.clip_skip)
        told = batched(self.model, text, inputs["facts"], latents.shape, self.config.guidance)
        answer = predict(
            self.model, noisy.to(dtype), self.objective.asked_time(times), Conditioning(told, 0.0, guided=False)
        )
        weights = self.objective.weights(times)
        weights = inputs["weights"] if weights is None else weights * inputs["weights"]
        return judged(answer, target, weights, inputs.get("mask"))

    # what is cached

    def _forms(self, number: int) -> list[tuple[bool, int]]:
        """(mirrored, place of the crop) in all the ways an example is shown, each as often as the others."""
        settings, place = self._settings[number], self._place(number)
        flips = (False, True) if settings.flip else (False,)
        crops = (
            range(1, RANDOM_CROPS + 1)
            if settings.random_crop and place.resized != (place.bucket.width, place.bucket.height)
            else (0,)
        )
        return [(flip, crop) for crop in crops for flip in flips]

    def _place(self, number: int) -> Placement:
        place = self.places[number]
        assert place is not None, self.examples[number].path  # those without a place are in no batch
        return place

    def _latents(self, number: int, flip: bool, crop: int) -> Tensors:
        example, place = self.examples[number], self._place(number)
        cut = left, top, width, height = crop_box(place, crop, example.sha256)
        facts = {
            "picture": example.sha256, "mask": self._masks[number], "resized": place.resized, "crop": cut, "flip": flip,
            "vae": self._identity["vae"],
        }  # fmt: skip

        def make() -> Tensors:
            picture, mask = load_image(example, place, cut, flip=flip, masked=self._masked[number])
            with needing(f"encode {example.path} at {width}x{height}", "lower `resolution`"):
                spread = self._encoded(picture)
            small = torch.nn.functional.interpolate(mask[None, None], size=spread[0].shape[-2:], mode="area")[0]
            seen = place.resized[0] - left - width if flip else left  # counted in the picture as it is shown
            size = torch.tensor([example.size[1], example.size[0], top, seen, height, width], dtype=torch.float32)
            return {"mean": spread[0], "std": spread[1], "mask": small, "facts": size}

        return self.cache.get(facts, make) if self.config.cache_latents else make()

    @torch.no_grad()
    def _encoded(self, picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        vae = self.model.vae
        spread = vae.encode(picture[None].to(vae.device, vae.dtype)).latent_dist
        shift, scale = getattr(vae.config, "shift_factor", None) or 0.0, vae.config.scaling_factor
        found = ((spread.mean - shift) * scale)[0], (spread.std * scale)[0]
        return found[0].float().cpu(), found[1].float().cpu()

    @property
    def _keeps_text(self) -> bool:
        """Whether some answer about a text stays the same for the whole run and is kept."""
        return T5.get(self.model.family) in self.model.networks if self.trains_text else self.config.cache_text

    def _text(self, text: str) -> Tensors:
        """What the step is given of a text: conditioning, or token numbers where encoders learn."""
        if text not in self._numbers:
            self._numbers[text] = token_inputs(self.model, text, self.chunks)
        numbers = self._numbers[text]
        facts: dict[str, Any] = {
            "tokens": {n: ids.tolist() for n, ids in numbers.items()},
            "encoders": self._identity["text"],
        }
        if self.trains_text:
            with needing("encode a caption with T5", _ENCODERS_TOO_LARGE):
                known = (
                    self.cache.get(facts | {"t5": True}, lambda: t5_states(self.model, numbers))
                    if self._keeps_text
                    else {}
                )
            return numbers | known
        skip = self.config.clip_skip

        def make() -> Tensors:
            return {name: value.cpu() for name, value in text_inputs(self.model, numbers, skip).items()}

        with needing("encode a caption", _ENCODERS_TOO_LARGE):
            return self.cache.get(facts | {"clip_skip": skip}, make) if self._keeps_text else make()

    # what is on the device

    @property
    def needed(self) -> set[str]:
        """The networks a step works with, by their folders."""
        trained = {folder for folder, network in self.model.networks.items() if network in self.networks.values()}
        encoders = {folder for folder in ENCODERS if folder in self.model.networks}
        if self.trains_text:
            encoders -= {T5.get(self.model.family, "")}
        elif self._keeps_text:
            encoders = set()
        vae = set() if self.config.cache_latents else {"vae"}
        return trained | encoders | vae | {self.model.blueprint.denoiser.folder}

    def offload_unused(self) -> None:
        """Move what no step needs to the host; `prepare` must have filled the caches."""
        self.offloader.keep_only(self.needed)

    def on_device(self, *more: str) -> AbstractContextManager[None]:
        """These are on the device too inside the block, and what a step needs alone after it."""
        return self.offloader.also(self.needed, *more)

    # what the run says of itself

    def notes(self) -> list[str]:
        """What of the data makes the run slower than it need be, a line each."""
        return long_caption_warnings(self.model, self.examples, self.captions, self.chunks)

    def fingerprint(self) -> str:
        told = [
            [
                e.sha256,
                e.captions,
                e.repeats,
                e.regularization,
                fingerprint_fields(e.subset, self._defaults),
                mask,
                [str(p.bucket), p.crop] if p else None,
            ]
            for e, p, mask in zip(self.examples, self.places, self._masks, strict=True)
        ]
        return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()

    def metadata(self) -> dict[str, str]:
        used: dict[str, int] = {}
        for place in filter(None, self.places):
            used[str(place.bucket)] = used.get(str(place.bucket), 0) + 1
        counted = list(zip(self.order.repeats, self.examples, strict=True))  # 0 of what is held out
        return {
            "ss_tag_frequency": json.dumps(tag_frequency(self.examples), ensure_ascii=False),
            "ss_num_train_images": str(sum(n for n, e in counted if not e.regularization)),
            "ss_num_reg_images": str(sum(n for n, e in counted if e.regularization)),
            "ss_resolution": f"({self.rules.size[0]}, {self.rules.size[1]})",
            "ss_bucket_info": json.dumps({"buckets": used}),
        }


def trained_networks(model: Model, config: TrainConfig) -> dict[str, nn.Module]:
    """The networks that take adapters, by the component names adapters use; T5 takes none."""
    if model.inpaints:
        raise ConfigError(
            f"{model.name}: an inpainting model sees a mask and a masked picture beside the latents, which training does not "
            "make; train on the model it was made from (an adapter of that one fits this one too)"
        )
    found = {
        component: model.networks[folder]
        for folder, component in COMPONENTS.items()
        if folder in model.networks and folder != T5.get(model.family)
        and (config.train_denoiser if component == "unet" else config.train_text_encoders)
    }  # fmt: skip
    if not found:
        raise ConfigError("nothing to train: train_denoiser and train_text_encoders are both off")
    return found


def bucket_rules(config: TrainConfig, model: Model) -> BucketRules:
    """Buckets for a model; their step is a multiple of what its latents need, and never above the resolution."""
    side = config.resolution or model.size
    step = max(model.patch, min(config.bucket_step, side) // model.patch * model.patch)
    return BucketRules(side, step, min(config.min_bucket, side), config.max_bucket, config.upscale, config.buckets)


def _check(
    model: Model,
    config: TrainConfig,
    examples: Sequence[Example],
    places: Sequence[Placement | None],
    repeats: Sequence[int],
) -> None:
    """What would only show later, or never."""
    problems = []
    if not sum(repeats):
        problems.append("the dataset has no picture that can be trained on; `inweave train --check` says why")
    uneven = {str(p.bucket) for p in places if p and (p.bucket.width % model.patch or p.bucket.height % model.patch)}
    if uneven:
        problems.append(
            f"buckets of {', '.join(sorted(uneven))}: {model.name} takes sides that are multiples of {model.patch}; "
            "change bucket_reso_steps or resolution in the dataset's file"
        )
    problems += check_masks(config, examples)
    if problems:
        raise ConfigError(problems)


def check_masks(config: TrainConfig, examples: Sequence[Example]) -> list[str]:
    """What is wrong with them."""
    used = [example for example in examples if example.mask is not None and uses_mask(config, example)]
    if config.masked_loss and not used:
        return [
            "masked_loss: no picture has a mask; put name-masklabel.png beside name.png, or set alpha_mask in the dataset's "
            "file"
        ]
    if used and all(example.mask_is_black for example in used):
        return [
            f"masked_loss: {len(used)} pictures have a mask, and all of them are black, so nothing is learnt from these "
            f"pictures, the first being {printable_path(used[0].path)}; make white what is to be learnt, or switch masked_loss (or "
            "alpha_mask in the dataset's file) off"
        ]
    return []


def held_out(examples: Sequence[Example], places: Sequence[Placement | None], config: TrainConfig) -> set[int]:
    """Examples never trained on: a share of the pictures, chosen by the seed, never regularisation."""
    subject = [n for n, example in enumerate(examples) if not example.regularization and places[n] is not None]
    count = min(round(len(subject) * config.validation_split), len(subject) - 1) if config.validation_split else 0
    shuffled = torch.randperm(len(subject), generator=generator_for(config.seed, -1)).tolist()
    return {subject[i] for i in shuffled[: max(count, 0)]}


def _batches(numbers: Sequence[int], places: Sequence[Placement | None], size: int) -> list[tuple[int, ...]]:
    """Those of one bucket together."""
    by_bucket: dict[object, list[int]] = {}
    for number in numbers:
        if (place := places[number]) is not None:
            by_bucket.setdefault(place.bucket, []).append(number)
    return [tuple(row[i : i + size]) for row in by_bucket.values() for i in range(0, len(row), size)]
