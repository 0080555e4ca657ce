"""What a pipeline says about its denoiser, read off from recorded runs, and the proof of it.

    noise in x, sample        the order of latents in the denoiser, in the scheduler        (`layout`)
    answer in the prediction  the order and the sign of the output; half of its channels where it has a variance too
    t in the arguments        one of `TIMES`, times a number
    other arguments           what they depend on, and how rows are joined                  (`arguments`)
    sample in the decoder     shift and factor of latents are those of the autoencoder's configuration

Two texts, two sizes, two strengths of guidance and a batch of two are compared. The proof uses two other texts and a
third size: the derived call must be the pipeline's own, argument for argument, and the prediction too, bit for bit;
only the states of text encoders may differ by the rounding of a batch. Whatever is none of these is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from inweave.errors import FormatError
from inweave.models.derived.arguments import classify, leaves, mask_of, same
from inweave.models.derived.call import TIMES, Derivation, Time, unwrapped
from inweave.models.derived.layout import Layout, find, order_of
from inweave.models.derived.proof import TEXTS, prove, reference_size, unit_size
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
    unit = unit_size(space.scale)
    sizes = reference_size(space.scale), (unit, unit * 3), (unit * 2, unit * 2)  # of different areas
    strength, first = _plain(pipe, shapes, sizes[0])
    other = record(pipe, shapes, [TEXTS[1]], sizes[0], strength, calls=1)
    larger = record(pipe, shapes, [TEXTS[0]], sizes[1], strength, calls=1)
    both = record(pipe, shapes, TEXTS[:2], sizes[0], strength, calls=1)
    shape = space.shape(*sizes[0])[1:]
    values, then = leaves(first.calls[0]), leaves(first.calls[1])
    latents = _latents_argument(values, shape)
    time = _time(pipe, first, values, then, latents)
    x = values[latents]
    listed = isinstance(x, list)
    packed = torch.stack(x) if listed else x
    noise = _noise(shape)
    layout = _layout(noise, packed, shape, f"the argument {latents}")
    sample = _layout(noise, first.steps[0].sample, shape, "the sample of the scheduler")
    if kind == "flow" and not torch.equal(packed.flatten(), layout.pack(noise[None]).flatten().to(packed.dtype)):
        raise FormatError(f"the argument {latents} is scaled before the denoiser sees it; a flow's latents are not")
    output, sign, half = _output(first, sample, shape)
    _check_decoded(first, sample, space, shape)
    guided = _guided(pipe, shapes, sizes[0], strength)
    arguments = {}
    rest = [name for name in values if name not in (latents, time.name)]
    seen = [leaves(each.calls[0]) for each in (other, larger, both)]
    masks = []
    for name in rest:
        if missing := [each for each in seen if name not in each]:
            raise FormatError(f"the argument {name} is missing in {len(missing)} of 3 calls with other texts and sizes")
        with_guidance = (guided[name], strength, EMBEDDED) if guided is not None else None
        if values[name] is None and torch.is_tensor(seen[2][name]):
            masks.append(name)
            continue
        longer, larger_one, pair = (each[name] for each in seen)
        arguments[name] = classify(name, values[name], longer, larger_one, pair, with_guidance)
    texts = {n: (each, values[n], seen[0][n]) for n, each in arguments.items() if each.kind == "text"}
    arguments |= {name: mask_of(name, seen[2][name], texts) for name in masks}
    derivation = Derivation(
        _class(pipe), kind, latents, listed, layout, output, sign, half, time, arguments, first.calls[0], strength
    )  # fmt: skip
    prove(derivation, pipe, shapes, (sizes[0], sizes[2]), space, sample)
    return replace(derivation, patch=_patch(derivation, pipe, shapes, space.scale))


def prediction_of(scheduler: Any) -> Prediction:
    """Return what the denoiser of a scheduler predicts."""
    config, name = scheduler.config, type(scheduler).__name__
    declared = config.get("prediction_type")
    if name.startswith("FlowMatch") or config.get("use_flow_sigmas") or declared == "flow_prediction":
        return "flow"
    if declared in ("epsilon", "v_prediction") and "beta_schedule" in config and not name.startswith("EDM"):
        return "epsilon" if declared == "epsilon" else "v_prediction"
    raise FormatError(f"the scheduler {name} with the prediction {declared!r} is neither a flow nor a diffusion")


def _plain(pipe: Any, shapes: Shapes, size: tuple[int, int]) -> tuple[float, Recording]:
    """Return the strength of guidance at which the denoiser runs once per step on one row, and that run."""
    for strength in STRENGTHS:
        recording = record(pipe, shapes, TEXTS[:1], size, strength)
        if _is_plain(recording):
            return strength, recording
    raise FormatError(
        f"{len(recording.calls)} calls of the denoiser for {len(recording.steps)} steps without guidance; one call "
        "makes one prediction"
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
    index = order_of(noise, packed)
    c, h, w = shape
    layout = None if index is None else find(index, (c, h, w), tuple(packed.shape[1:]))
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


def _output(first: Recording, sample: Layout, shape: tuple[int, ...]) -> tuple[Layout, int, bool]:
    """Return (the layout of the output, its sign, whether the prediction is half of it)."""
    c, h, w = shape
    output, received = unwrapped(first.answers[0]), first.steps[0].prediction
    half = output.numel() == 2 * received.numel() and output.shape[1] == 2 * c
    output = output.chunk(2, 1)[0] if half else output
    if received.numel() != c * h * w:
        raise FormatError(f"the scheduler receives {tuple(received.shape)} for latents {shape}")
    prediction = sample.unpack(received, (c, h, w))[0]  # in the order of latents
    for sign in (1, -1):
        index = order_of(sign * prediction, output)
        if index is not None:
            layout = find(index, (c, h, w), tuple(output.shape[1:]))
            if layout is not None and torch.equal(sign * layout.unpack(output, (c, h, w))[0], prediction):
                return layout, sign, half
    raise FormatError(
        f"the prediction {tuple(received.shape)} that the scheduler receives is not the output {tuple(output.shape)} "
        "of the denoiser in another order, with either sign"
    )


def _check_decoded(first: Recording, sample: Layout, space: LatentSpace, shape: tuple[int, ...]) -> None:
    assert first.decoded is not None
    c, h, w = shape
    latents = sample.unpack(first.steps[-1].result, (c, h, w))
    expected = space.denormalize(latents)
    if expected.numel() != first.decoded.numel() or not torch.allclose(
        expected.flatten(), first.decoded.flatten(), rtol=1e-4, atol=1e-5
    ):
        raise FormatError(
            f"the latents {tuple(first.decoded.shape)} that are decoded are not those of the last step with the shift "
            "and the factor of the autoencoder's configuration"
        )


def _guided(pipe: Any, shapes: Shapes, size: tuple[int, int], strength: float) -> dict[str, Any] | None:
    """Return the arguments with another strength of guidance; None where that takes a second prediction."""
    recording = record(pipe, shapes, TEXTS[:1], size, EMBEDDED)
    return leaves(recording.calls[0]) if _is_plain(recording) else None


def _is_plain(recording: Recording) -> bool:
    """Return whether a run for one text made one prediction per step."""
    rows = {len(each) for each in leaves(recording.calls[0]).values() if _has_rows(each)}
    return len(recording.calls) == len(recording.steps) and 2 not in rows


def _has_rows(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and torch.is_tensor(value[0])
    return torch.is_tensor(value) and value.dim() > 2


def _patch(derivation: Derivation, pipe: Any, shapes: Shapes, scale: int) -> int:
    """Return what the sides of latents are multiples of: the least that the pipeline and the denoiser run."""
    least = unit_size(scale) // scale
    for patch in (1, 2, 4, 8, 16, 32):
        width, height = least + patch, least
        try:
            recording = record(pipe, shapes, TEXTS[:1], (width * scale, height * scale), derivation.strength, steps=1)
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
