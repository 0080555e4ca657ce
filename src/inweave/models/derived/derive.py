"""What a pipeline says about its denoiser, read off from recorded runs, and the proof of it.

    noise in x, sample        the order of latents in the denoiser, in the scheduler        (`layout`)
    answer in the prediction  the order and the sign of the output, or of its first or last entries along an axis
    t in the arguments        one of `TIMES`, times a number
    other arguments           what they depend on, and how rows are joined                  (`arguments`)
    sample in the decoder     shift and factor of latents are those of the autoencoder's configuration

Two texts, two sizes, two strengths of guidance and a batch of two are compared. The proof uses two other texts and a
third size: the derived call must be the pipeline's own, argument for argument, and the prediction too, bit for bit;
only the states of text encoders may differ by the rounding of a batch. Whatever is none of these is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from inweave.errors import FormatError
from inweave.models.derived.arguments import classify, leaves, same, with_masks
from inweave.models.derived.call import TIMES, Cut, Derivation, Time, unwrapped
from inweave.models.derived.layout import Layout, find, layouts, order_of
from inweave.models.derived.proof import TEXTS, Size, made_size, probe_sizes, prove, settled_size, unit_size
from inweave.models.derived.recording import SEED, Recording, Shapes, denoiser_of, record
from inweave.models.families.declared import Prediction
from inweave.models.vae import LatentSpace, latent_space

STRENGTHS = (1.0, 0.0)  # of guidance: the first at which a step is one call has none
EMBEDDED = 2.5  # another strength, for denoisers that take it as an argument


def derive(pipe: Any, network: nn.Module) -> Derivation:
    """Return how a pipeline calls its denoiser, proved; ``network``: the denoiser's class on the meta device.

    Raises:
        FormatError: what about the pipeline is neither a permutation, an affine map nor a constant.
    """
    kind, shapes = prediction_of(pipe.scheduler), Shapes(network)
    space = latent_space(pipe.vae)
    sizes = probe_sizes(space.scale)
    shape = space.shape(*sizes[0])[1:]
    strength, first = _plain(pipe, shapes, sizes[0], _noise(shape))
    chooses = made_size(first, space) != sizes[0]
    if chooses:
        sizes = _settled(pipe, shapes, strength, space)
        shape = space.shape(*sizes[0])[1:]
        strength, first = _plain(pipe, shapes, sizes[0], _noise(shape))
    other = record(pipe, shapes, [TEXTS[1]], sizes[0], strength, calls=1)
    larger = record(pipe, shapes, [TEXTS[0]], sizes[1], strength, calls=1)
    both = record(pipe, shapes, TEXTS[:2], sizes[0], strength, calls=1)
    values, then = leaves(first.calls[0]), leaves(first.calls[1], first.calls[0])
    latents = _latents_argument(values, shape)
    time = _time(pipe, first, values, then, latents)
    x = values[latents]
    listed = isinstance(x, list)
    packed = torch.stack(x) if listed else x
    sample, noise, shifts = _sample(first, _noise(shape), space, shape)
    layout = _layout(noise, packed, shape, f"the argument {latents}")
    if kind == "flow" and not torch.equal(packed.flatten(), layout.pack(noise[None]).flatten().to(packed.dtype)):
        raise FormatError(f"the argument {latents} is scaled before the denoiser sees it; a flow's latents are not")
    output, sign, cut = _output(first, sample, shape)
    guided = _guided(pipe, shapes, sizes[0], _noise(shape), first.calls[0])
    arguments = {}
    rest = [name for name in values if name not in (latents, time.name)]
    seen = [leaves(each.calls[0], first.calls[0]) for each in (other, larger, both)]
    for name in rest:
        if missing := [each for each in seen if name not in each]:
            raise FormatError(f"the argument {name} is missing in {len(missing)} of 3 calls with other texts and sizes")
    more = [leaves(each.calls[0], first.calls[0]) for each in _more(pipe, shapes, sizes[0], strength, values, rest)]
    masks = with_masks([values, *seen, *more, *([] if guided is None else [guided])])
    for name in rest:
        with_guidance = (guided[name], strength, EMBEDDED) if guided is not None else None
        longer, larger_one, pair = (each[name] for each in seen)
        arguments[name] = classify(name, values[name], longer, larger_one, pair, with_guidance)
        if name in masks:
            arguments[name] = replace(arguments[name], rows="masked", of=masks[name], dtype=pair.dtype)
    derivation = Derivation(
        _class(pipe), kind, latents, listed, layout, output, sign, cut, time, arguments, first.calls[0], strength,
        sizes[0], chooses, shifts,
    )  # fmt: skip
    prove(derivation, pipe, shapes, (sizes[0], sizes[2]), space, sample)
    patch = _common(sizes, space) if chooses else _patch(derivation, pipe, shapes, space.scale)
    return replace(derivation, patch=patch)


def _settled(pipe: Any, shapes: Shapes, strength: float, space: LatentSpace) -> tuple[Size, Size, Size]:
    """Return three sizes that a pipeline makes where it is asked for them, which chooses all others by itself."""
    wide, tall, square = (settled_size(pipe, shapes, size, strength, space) for size in probe_sizes(space.scale))
    if len({wide, tall, square}) < 3:
        raise FormatError(f"it makes images of {wide[0]}x{wide[1]} where other shapes are asked for")
    return wide, tall, square


def _common(sizes: tuple[Size, ...], space: LatentSpace) -> int:
    """Return the largest power of two by which the sides of all latents can be divided."""
    whole = gcd(*(side // space.scale for size in sizes for side in size))
    return min(whole & -whole, 32)


def _more(
    pipe: Any, shapes: Shapes, size: tuple[int, int], strength: float, values: Mapping[str, Any], names: list[str]
) -> list[Recording]:
    """Return runs on further texts where an argument may be a mask, which a text without padding may lack."""
    flat = [value for name in names if torch.is_tensor(value := values[name]) and value.dim() == 2]
    if not any(((value == 0) | (value == 1)).all() for value in flat):
        return []
    return [record(pipe, shapes, [text], size, strength, calls=1) for text in TEXTS[2:]]


def prediction_of(scheduler: Any) -> Prediction:
    """Return what the denoiser of a scheduler predicts."""
    config, name = scheduler.config, type(scheduler).__name__
    declared = config.get("prediction_type")
    if name.startswith("FlowMatch") or config.get("use_flow_sigmas") or declared == "flow_prediction":
        return "flow"
    if declared in ("epsilon", "v_prediction") and "beta_schedule" in config and not name.startswith("EDM"):
        return "epsilon" if declared == "epsilon" else "v_prediction"
    raise FormatError(f"the scheduler {name} with the prediction {declared!r} is neither a flow nor a diffusion")


def _plain(pipe: Any, shapes: Shapes, size: tuple[int, int], noise: Tensor) -> tuple[float, Recording]:
    """Return the strength of guidance at which the denoiser runs once per step on one row, and that run."""
    for strength in STRENGTHS:
        recording = record(pipe, shapes, TEXTS[:1], size, strength)
        if _is_plain(recording, noise):
            return strength, recording
    rows = f", each on {_rows(recording, noise)} rows for one text" if _rows(recording, noise) > 1 else ""
    raise FormatError(
        f"{len(recording.calls)} calls of the denoiser for {len(recording.steps)} steps{rows} where guidance is off; "
        "one call on one row should make one prediction"
    )


def _noise(shape: tuple[int, ...], rows: int = 1) -> Tensor:
    """Return the noise that a pipeline draws for latents of this shape."""
    noise = torch.randn((rows, *shape), generator=torch.Generator().manual_seed(SEED))
    return noise if rows > 1 else noise[0]


def _latents_argument(values: Mapping[str, Any], shape: tuple[int, ...]) -> str:
    noise = _noise(shape)
    for name, value in values.items():
        tensor = value[0][None] if isinstance(value, list) and value and torch.is_tensor(value[0]) else value
        if torch.is_tensor(tensor) and tensor.dim() > 2 and order_of(noise, tensor) is not None:
            return name
    shapes = {name: tuple(value.shape) for name, value in values.items() if torch.is_tensor(value)}
    raise FormatError(f"no argument is the noise of latents {tuple(shape)} in another order; they are {shapes}")


def _layout(noise: Tensor, packed: Tensor, shape: tuple[int, ...], what: str) -> Layout:
    layout = find(noise, packed)
    if layout is None:
        raise FormatError(f"{what} {tuple(packed.shape)} does not rearrange the axes of latents {shape}")
    return layout


def _time(pipe: Any, first: Recording, values: dict[str, Any], then: dict[str, Any], latents: str) -> Time:
    moving = [name for name in values if name != latents and not same(values[name], then[name])]
    if len(moving) != 1:
        raise FormatError(
            f"the arguments {', '.join(moving) or '(none)'} change from step to step; one should, the time"
        )
    (name,) = moving
    value = values[name]
    if not torch.is_tensor(value) or value.numel() != 1:
        raise FormatError(f"the argument {name} changes from step to step; expected a single number")
    count = int(pipe.scheduler.config.get("num_train_timesteps", 1000))
    _check_levels(pipe.scheduler, first)
    config = denoiser_of(pipe).config
    numbers = {float(each) for each in config.values() if type(each) in (int, float) and each > 0}
    for factor in (1.0, 1000.0, *sorted(numbers - {1.0, 1000.0})):
        for rule in TIMES:
            time = Time(name, rule, factor, count, value.dtype, value.dim() > 0)
            pairs = zip(first.calls, first.steps, strict=True)
            if all(same(time(torch.as_tensor(step.t), 1), leaves(call)[name]) for call, step in pairs):
                return time
    raise FormatError(
        f"the argument {name} is {[leaves(c)[name].item() for c in first.calls]} at the times "
        f"{[float(s.t) for s in first.steps]}; known are {', '.join(TIMES)} with n = {count}, times a number"
    )


def _check_levels(scheduler: Any, first: Recording) -> None:
    """Raise FormatError for a flow whose noise levels are not its times, from noise to image."""
    if prediction_of(scheduler) != "flow":
        return
    count = int(scheduler.config.get("num_train_timesteps", 1000))
    times = [float(step.t) for step in first.steps]
    levels = [float(level) for level in scheduler.sigmas[: len(times)]]
    if sorted(times, reverse=True) != times or len(set(times)) != len(times):
        raise FormatError(f"the times {times} of the scheduler do not fall from noise to image")
    if any(abs(level - t / count) > 1 / count for level, t in zip(levels, times, strict=True)):
        raise FormatError(f"the noise levels {levels} of the scheduler are not its times {times} / {count}")


def _output(first: Recording, sample: Layout, shape: tuple[int, ...]) -> tuple[Layout, int, Cut | None]:
    """Return (the layout of the output, its sign, the part of it that is the prediction)."""
    c, h, w = shape
    output, received = unwrapped(first.answers[0]), first.steps[0].prediction
    if received.numel() != c * h * w:
        raise FormatError(f"the scheduler receives {tuple(received.shape)} for latents {shape}")
    prediction = sample.unpack(received, (c, h, w))[0]  # in the order of latents
    for cut, part in _parts(output, received.numel()):
        for sign in (1, -1):
            layout = find(sign * prediction, part)
            if layout is not None and torch.equal(sign * layout.unpack(part, (c, h, w))[0], prediction):
                return layout, sign, cut
    raise FormatError(
        f"the prediction {tuple(received.shape)} that the scheduler receives is not the output {tuple(output.shape)} "
        "of the denoiser in another order, or a part of it, with either sign"
    )


def _parts(output: Tensor, count: int) -> Iterator[tuple[Cut | None, Tensor]]:
    """Yield the parts of an output that have ``count`` numbers."""
    if output.numel() == count:
        yield None, output
    for axis in range(1, output.dim()):
        length, rest = divmod(count * output.shape[axis], output.numel())
        if not rest and 0 < length < output.shape[axis]:
            for last in (False, True):
                cut = Cut(axis, last)
                yield cut, cut(output, length)


def _sample(
    first: Recording, noise: Tensor, space: LatentSpace, shape: tuple[int, int, int]
) -> tuple[Layout, Tensor, bool]:
    """Return (the layout of the scheduler's sample, the noise as latents, whether decoding shifts latents).

    A pipeline draws its noise as latents and then rearranges them, or as the scheduler gets them; decoding tells.
    """
    before, after = first.steps[0].sample, first.steps[-1].result
    by_noise = _layout(noise, before, shape, "the sample of the scheduler")
    shifts = _is_shifted(first, by_noise.unpack(after, shape), space)
    if shifts is not None:
        return by_noise, noise, shifts
    if before.numel() == noise.numel():
        for layout in layouts(shape, tuple(before.shape[1:])):
            shifts = _is_shifted(first, layout.unpack(after, shape), space)
            if shifts is not None:
                return layout, layout.unpack(noise.reshape(before.shape), shape)[0], shifts
    assert first.decoded is not None
    raise FormatError(
        f"the latents {tuple(first.decoded.shape)} that are decoded are not those of the last step with the shift and "
        "the factor of the autoencoder's configuration"
    )


def _is_shifted(first: Recording, latents: Tensor, space: LatentSpace) -> bool | None:
    """Return whether decoding shifts latents as the configuration says; some pipelines only scale. None: neither."""
    assert first.decoded is not None
    decoded = first.decoded.flatten()
    for shifted, own in ((True, space), (False, replace(space, shift=(0.0,)))):
        expected = own.denormalize(latents).flatten()
        if expected.numel() == decoded.numel() and torch.allclose(expected, decoded, rtol=1e-4, atol=1e-5):
            return shifted
    return None


def _guided(pipe: Any, shapes: Shapes, size: tuple[int, int], noise: Tensor, like: Any) -> dict[str, Any] | None:
    """Return the arguments with another strength of guidance; None where that takes a second prediction."""
    recording = record(pipe, shapes, TEXTS[:1], size, EMBEDDED)
    return leaves(recording.calls[0], like) if _is_plain(recording, noise) else None


def _is_plain(recording: Recording, noise: Tensor) -> bool:
    """Return whether a run for one text made one prediction per step."""
    return len(recording.calls) == len(recording.steps) and _rows(recording, noise) < 2


def _rows(recording: Recording, noise: Tensor) -> int:
    """Return how many rows the latents of a run for one text have in the first call; 0: they are not found."""
    values = [value for name, value in recording.calls[0].items() if isinstance(value, list) or torch.is_tensor(value)]
    for value in [*values, *leaves(recording.calls[0]).values()]:
        rows: Any = value if isinstance(value, list) or (torch.is_tensor(value) and value.dim() > 2) else []
        if len(rows) and torch.is_tensor(rows[0]) and order_of(noise, rows[0]) is not None:
            return len(rows)
    return 0


def _patch(derivation: Derivation, pipe: Any, shapes: Shapes, scale: int) -> int:
    """Return what the sides of latents are multiples of: the least that the pipeline and the denoiser run."""
    least = unit_size(scale) // scale
    for patch in (1, 2, 4, 8, 16, 32):
        width, height = least + patch, least
        try:
            recording = record(pipe, shapes, TEXTS[:1], (width * scale, height * scale), derivation.strength, steps=2)
            x = leaves(recording.calls[0])[derivation.latents]
            count = len(x) * x[0].numel() if derivation.listed else x.numel()
            channels = recording.steps[0].sample.numel() // (width * height)
            derivation.layout.unpack(torch.stack(x) if derivation.listed else x, (channels, height, width))
            if count == channels * width * height:
                return patch
        except (FormatError, RuntimeError):
            continue
    raise FormatError(f"the pipeline runs at no size that is {least + 1} to {least + 32} latents wide")


def _class(pipe: Any) -> str:
    return next(kind.__name__ for kind in type(pipe).__mro__ if kind.__module__.startswith("diffusers"))
