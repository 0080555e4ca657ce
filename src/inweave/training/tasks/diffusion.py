"""Images and captions as a task: latents and text conditioning, encoded once, with new noise at every step.

    example ──resize, crop, flip──► image ──VAE──► mean and std of its latents     cached by content and settings
    caption ──shuffle, drop──────► variants ──text encoders──► conditioning        cached by tokens and model

A step samples latents from each mean and standard deviation, so the autoencoder's own randomness is kept. If text
encoders are trained, a batch contains token ids, which are encoded inside the step; the states of frozen encoders (T5)
are still cached.

A setting in a table of the dataset's file overrides the run's for the images of that table. The loss is masked for all
images (`masked_loss`) or for those of a table with `alpha_mask`; if it is masked for any, all images without a mask
have one that is open everywhere.

Networks that a step does not need may leave the device (`inweave.models.offload`): `prepare(staged=True)` has
one encoder there at a time and the denoiser last, since adapters come afterwards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.layers import disabled
from inweave.models import vae
from inweave.models.families.base import ENCODERS, Tensors, on_encoders
from inweave.models.families.references import ReferenceFit, pop_references, reference_tensors
from inweave.models.model import Model
from inweave.models.offload import Offloader
from inweave.ops.tensors.oom import oom_hint
from inweave.training.adapters.targets import trained_networks
from inweave.training.config.schema import TrainConfig
from inweave.training.data import caption_lengths
from inweave.training.data.batches import arrange
from inweave.training.data.buckets import BucketFit
from inweave.training.data.cache import TensorCache
from inweave.training.data.captions import choose_caption, tag_frequency
from inweave.training.data.digests import encoder_digests, network_digests
from inweave.training.data.images import RANDOM_CROPS, crop_box, load_image, load_reference, mask_key, uses_mask
from inweave.training.data.references import ReferenceImage
from inweave.training.data.types import Dataset, fingerprint_fields, subset_defaults, with_defaults
from inweave.training.tasks.diffusion_data import batch_problems, batches_of, bucket_rules, held_out
from inweave.training.tasks.objective import OPTIONS, Objective, make_objective
from inweave.training.tasks.references import (
    batch_shapes,
    reference_fits,
    reference_problems,
    seen_caption,
    seen_captions,
    seen_images,
)
from inweave.weights.streaming.stream import BlockStream

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
            weighting=config.timestep_weighting,
            **{name: getattr(config, name) for name in OPTIONS},
        )  # fmt: skip
        self.rules = bucket_rules(config, model)
        self._seen = model.family.sees_references
        self.captions = seen_captions(model, caption_lengths.run_captions(config, dataset), self.examples)
        empty = [[seen_caption(model, "", example)] for example in self.examples] if self._seen else []
        measured = [*self.captions, *empty]
        self._caption_lengths = caption_lengths.measured_captions(model, measured, config.max_token_length)
        self._chunks = self._caption_lengths.chunks
        self._lengths = caption_lengths.example_lengths(self.captions, self._chunks)
        self.chunks = max(self._lengths, default=1)
        self.batch_lengths = caption_lengths.batch_lengths(model, self._lengths)
        if problems := reference_problems(model, config, self.examples):
            raise ConfigError(problems)
        self.reference_fits = reference_fits(model, config, self.examples)
        self.batch_shapes = batch_shapes(model, config, self.examples)
        self.places, order = arrange(
            dataset,
            self.rules,
            batch_size=config.batch_size,
            seed=config.seed,
            lengths=self.batch_lengths,
            whole=config.drop_incomplete,
            shapes=self.batch_shapes,
        )
        out = held_out(self.examples, self.places, config)
        self.held_out = batches_of(sorted(out), self.places, self.batch_lengths, config.batch_size, self.batch_shapes)
        self.order = order.without(out)
        if problems := batch_problems(model, config, self.examples, self.places, self.order.repeats):
            raise ConfigError(problems)
        self._defaults = subset_defaults(config)
        self._settings = [with_defaults(example.subset, self._defaults) for example in self.examples]
        self._masked = [uses_mask(config, example) for example in self.examples]
        self._masks = [mask_key(e) if masked else "" for e, masked in zip(self.examples, self._masked, strict=True)]
        self._token_ids: dict[tuple[str, int], Tensors] = {}
        self.stream: BlockStream | None = None  # of the denoiser's blocks
        encoders = [folder for folder in ("vae", *ENCODERS) if folder in model.networks]
        self.digests = {folder: network_digests(model.networks[folder]) for folder in encoders}
        self.sampled_digest: str | None = None
        self._identity = encoder_digests(model, self.digests)
        self.offloader = self._offloader()

    # data

    def prepare(
        self, on_progress: Any = None, *, staged: bool = False, with_encoders: Callable[[], None] | None = None
    ) -> None:
        """Fill the caches before the first step, so that no step waits for an encoder.

        ``with_encoders``: called while the text encoders are on the device.
        """
        in_buckets = [number for number, place in enumerate(self.places) if place is not None]
        jobs = [(number, flip, crop) for number in in_buckets for flip, crop in self._views(number)]
        jobs = jobs if self.config.cache_latents else []
        texts = sorted(self._encoded_texts()) if self._caches_text else []
        total = len(jobs) + len(texts)
        if staged and jobs:
            self.offloader.keep_only({"vae"})
        for number, (example, flip, crop) in enumerate(jobs):
            self._latents(example, flip, crop)
            self._references(example, flip)
            if on_progress is not None:
                on_progress("encoding images", number + 1, total)
        if staged and (texts or with_encoders):
            self.offloader.keep_only(set(self.model.family.frozen_encoders if self.trains_text else ENCODERS))
        if with_encoders is not None:
            with_encoders()
        for number, (text, size, seen, flip) in enumerate(texts):
            self._text(text, size, seen, flip)
            if on_progress is not None:
                on_progress("encoding captions", len(jobs) + number + 1, total)
        if staged:
            self.offloader.keep_only(self.needed)

    def sample_batch(self, batch: tuple[int, ...], generators: Sequence[torch.Generator]) -> Tensors:
        """Return latents, noise, times and text of a batch, on the host."""
        latents, noises, times, masks, texts, sizes, weights = [], [], [], [], [], [], []
        perturbations: list[torch.Tensor] = []
        references: list[list[torch.Tensor]] = []
        for number, generator in zip(batch, generators, strict=True):
            example = self.examples[number]
            view, drop, pick = torch.rand(3, generator=generator).tolist()
            views = self._views(number)
            flip, crop = views[min(int(view * len(views)), len(views) - 1)]
            encoded = self._latents(number, flip, crop)
            references.append(self._references(number, flip))
            shape = (1, *encoded["mean"].shape)
            eps = torch.randn(encoded["mean"].shape, generator=generator)
            latents.append(encoded["mean"] + encoded["std"] * eps)
            noises.append(self.objective.draw_noise(shape, generator, latents[-1]))
            times.append(self.objective.draw_times(1, self.model.family.image_tokens(shape), generator))
            if self.objective.input_perturbation:
                perturbations.append(self.objective.draw_perturbation(shape, generator))
            masks.append(encoded["mask"])
            dropout = self._settings[number].caption_dropout or 0.0
            caption = choose_caption(self.captions[number], dropout, drop, pick)
            caption = caption if caption or not self._seen else seen_caption(self.model, "", example)
            texts.append((caption, number if self._seen else -1, flip and self._seen))
            sizes.append(encoded["sizes"])
            weights.append(self.config.prior_loss_weight if example.regularization else 1.0)
        inputs: Tensors = {
            "latents": torch.stack(latents), "noise": torch.cat(noises), "times": torch.cat(times),
            "sizes": torch.stack(sizes), "weights": torch.tensor(weights),
        }  # fmt: skip
        if perturbations:
            inputs["perturbation"] = torch.cat(perturbations)
        if any(self._masked):
            inputs["mask"] = torch.stack(masks)
        prior = torch.tensor([self.examples[number].regularization for number in batch])
        if self.config.prior_prediction and prior.any():
            inputs["prior"] = prior
        longest = max(self._lengths[number] for number in batch)
        rows = [self._text(text, longest, seen, mirrored) for text, seen, mirrored in texts]
        text = self.model.family.join_text(rows) | reference_tensors(
            [torch.stack(each) for each in zip(*references, strict=True)]
        )
        return inputs | {f"text.{name}": value for name, value in text.items()}

    def loss(self, inputs: Tensors) -> torch.Tensor:
        """Return the loss of the denoiser's prediction against the objective's target, or the base's prediction."""
        latents, noise, times = inputs["latents"], inputs["noise"], inputs["times"]
        noisy, target = self.objective.noised(latents, noise, times)
        if "perturbation" in inputs:
            noisy, _ = self.objective.noised(latents, noise + inputs["perturbation"], times)
        if "prior" in inputs:
            with torch.no_grad(), disabled(self.networks):
                base = self._predict(inputs, noisy)
            target = torch.where(inputs["prior"].view(-1, *[1] * (target.dim() - 1)), base.to(target.dtype), target)
        prediction = self._predict(inputs, noisy)
        weights = self.objective.weights(times)
        weights = inputs["weights"] if weights is None else weights * inputs["weights"]
        return self.objective.loss_of(prediction, target, times, weights, inputs.get("mask"))

    def _predict(self, inputs: Tensors, noisy: torch.Tensor) -> torch.Tensor:
        model, family = self.model, self.model.family
        text = {name.removeprefix("text."): value for name, value in inputs.items() if name.startswith("text.")}
        if self.trains_text:
            references = reference_tensors(pop_references(text))
            text = family.encode(model, text, self.config.clip_skip) | references
        conditioning = family.batch_inputs(model, text, inputs["sizes"], noisy.shape, self.config.guidance)
        return family.denoise(model, noisy.to(model.dtype), self.objective.timestep(inputs["times"]), conditioning)

    # the caches

    def _views(self, number: int) -> list[tuple[bool, int]]:
        """Return (mirrored, position of the crop) of all views of an example, which are equally likely."""
        settings, place = self._settings[number], self._place(number)
        flips = (False, True) if settings.flip else (False,)
        larger = place.resized != (place.bucket.width, place.bucket.height)
        crops = range(1, RANDOM_CROPS + 1) if settings.random_crop and larger else (0,)
        return [(flip, crop) for crop in crops for flip in flips]

    def _place(self, number: int) -> BucketFit:
        place = self.places[number]
        assert place is not None, self.examples[number].path  # examples without a bucket are in no batch
        return place

    def _latents(self, number: int, flip: bool, crop: int) -> Tensors:
        example, place = self.examples[number], self._place(number)
        cut = left, top, width, height = crop_box(place, crop, example.sha256)
        key = {
            "image": example.sha256, "mask": self._masks[number], "resized": place.resized, "crop": cut, "flip": flip,
            "vae": self._identity["vae"],
        }  # fmt: skip

        def make() -> Tensors:
            image, mask = load_image(example, place, cut, flip=flip, masked=self._masked[number])
            with oom_hint(f"encode {example.path} at {width}x{height}", "lower `resolution`"), torch.no_grad():
                mean, std = (each[0].float().cpu() for each in vae.encode_distribution(self.model.vae, image[None]))
            small = torch.nn.functional.interpolate(mask[None, None], size=mean.shape[-2:], mode="area")[0]
            offset = place.resized[0] - left - width if flip else left  # in the image as the model sees it
            sizes = torch.tensor([example.size[1], example.size[0], top, offset, height, width], dtype=torch.float32)
            return {"mean": mean, "std": std, "mask": small, "sizes": sizes}

        return self.cache.get(key, make) if self.config.cache_latents else make()

    def _references(self, number: int, flip: bool) -> list[torch.Tensor]:
        """Return the latents of the references of an example, mirrored with it."""
        return [
            self._reference(reference, fit, flip)["mean"]
            for reference, fit in zip(self.examples[number].references, self.reference_fits[number], strict=True)
        ]

    def _reference(self, reference: ReferenceImage, fit: ReferenceFit, flip: bool) -> Tensors:
        key = {
            "reference": reference.sha256, "resized": fit.resized, "crop": fit.crop, "flip": flip,
            "vae": self._identity["vae"],
        }  # fmt: skip

        def make() -> Tensors:
            image = load_reference(reference.path, fit, flip=flip)
            hint = oom_hint(f"encode {reference.path}", "lower `reference_resolution`")
            with hint, torch.no_grad():
                return {"mean": vae.encode(self.model.vae, image[None], None)[0].float().cpu()}

        return self.cache.get(key, make) if self.config.cache_latents else make()

    @property
    def _caches_text(self) -> bool:
        """Whether some encoding of a text stays the same for the whole run and is cached."""
        return bool(self.model.family.frozen_folders(self.model)) if self.trains_text else self.config.cache_text

    def _encoded_texts(self) -> set[tuple[str, int, int, bool]]:
        """Return every text of the run with the chunks it is padded to: those of the longest caption of its image.

        With it the example whose references the encoder sees, and whether they are mirrored; -1: none.
        """
        if self._seen:
            return {
                (text, 1, number, flip)
                for number, place in enumerate(self.places)
                if place is not None
                for text in (seen_caption(self.model, "", self.examples[number]), *self.captions[number])
                for flip, _ in self._views(number)
            }
        if self.model.family.masks_padding:
            return {(text, 1, -1, False) for text in self._chunks}
        rows = zip(self._lengths, self.captions, strict=True)
        return {(text, size, -1, False) for size, texts in rows for text in ("", *texts)}

    def _text(self, text: str, chunks: int = 1, seen: int = -1, flip: bool = False) -> Tensors:
        """Return the inputs from a text, in ``chunks`` or more: conditioning, or token ids if encoders are trained.

        ``seen``: the example whose references the encoder sees, mirrored with ``flip``.
        """
        model, family, skip = self.model, self.model.family, self.config.clip_skip
        own = self._chunks[text]
        size = own if family.masks_padding else max(own, chunks)
        if (text, size) not in self._token_ids:
            self._token_ids[text, size] = family.token_ids(model, text, size, self.config.max_token_length)
        ids = self._token_ids[text, size]
        key: dict[str, Any] = {
            "tokens": {name: value.tolist() for name, value in ids.items()},
            "encoders": self._identity["text"],
        }
        references = self.examples[seen].references if seen >= 0 else ()
        if references:
            key["seen"] = [[each.sha256 for each in references], flip]

        def images() -> Tensors:
            return seen_images(model, self.examples[seen], flip=flip) if references else {}

        @torch.no_grad()
        def frozen_states() -> Tensors:
            return family.frozen_states(model, ids | images())

        @torch.no_grad()
        def conditioning() -> Tensors:
            encoded = family.encode(model, on_encoders(model, ids | images()), skip)
            return {name: value.cpu() for name, value in encoded.items()}

        with oom_hint("encode a caption", _ENCODERS_TOO_LARGE):
            if self.trains_text:
                return ids | (self.cache.get(key | {"frozen": True}, frozen_states) if self._caches_text else {})
            encoded = self.cache.get(key | {"clip_skip": skip}, conditioning) if self._caches_text else conditioning()
            return family.pad_text(encoded, max(own, chunks))

    # the device

    @property
    def needed(self) -> set[str]:
        """The folders of the networks of a step."""
        trained = {folder for folder, network in self.model.networks.items() if network in self.networks.values()}
        encoders = {folder for folder in ENCODERS if folder in self.model.networks}
        if self.trains_text:
            encoders -= set(self.model.family.frozen_encoders)
        elif self._caches_text:
            encoders = set()
        vae = set() if self.config.cache_latents else {"vae"}
        return trained | encoders | vae | {self.model.blueprint.denoiser.folder}

    def _offloader(self) -> Offloader:
        networks, device, family = self.model.networks, self.device, self.model.family
        if self.config.offload != "blocks":
            return Offloader(networks, device)
        encoders = {folder for folder in ENCODERS if folder in networks} - self.needed
        blocks = {folder: family.blocks(networks[folder]) for folder in encoders}
        return Offloader(networks, device, blocks, left=[self.model.blueprint.denoiser.folder])

    def offload_unused(self) -> None:
        """Move networks that no step needs to the host; `prepare` must have filled the caches."""
        self.offloader.keep_only(self.needed)

    def on_device(self, *more: str) -> AbstractContextManager[None]:
        """Move these to the device too inside the block, and leave the networks of a step alone there after it."""
        return self.offloader.also(self.needed, *more)

    # reports about the data

    def notes(self) -> list[str]:
        """Return notes on captions that are truncated or make the run slow."""
        limit = self.config.max_token_length
        known = self._caption_lengths
        return caption_lengths.long_caption_warnings(self.model, self.examples, self.captions, known, limit)

    def new_notes(self) -> list[str]:
        return self.cache.new_notes()

    def fingerprint(self) -> str:
        entries = []
        for e, place, mask in zip(self.examples, self.places, self._masks, strict=True):
            fit = [str(place.bucket), place.crop] if place else None
            fields = fingerprint_fields(e.subset, self._defaults)
            entries.append([e.sha256, e.captions, e.repeats, e.regularization, fields, mask, fit])
            if e.references:
                entries[-1].append([each.sha256 for each in e.references])
        return hashlib.sha256(json.dumps(entries, default=str).encode()).hexdigest()

    def metadata(self) -> dict[str, str]:
        used: dict[str, int] = {}
        for place in filter(None, self.places):
            used[str(place.bucket)] = used.get(str(place.bucket), 0) + 1
        counted = list(zip(self.order.repeats, self.examples, strict=True))  # 0 for validation examples
        return {
            "ss_tag_frequency": json.dumps(tag_frequency(self.examples), ensure_ascii=False),
            "ss_num_train_images": str(sum(n for n, e in counted if not e.regularization)),
            "ss_num_reg_images": str(sum(n for n, e in counted if e.regularization)),
            "ss_resolution": f"({self.rules.size[0]}, {self.rules.size[1]})",
            "ss_bucket_info": json.dumps({"buckets": used}),
        }
