"""A pipeline run with its denoiser, scheduler and autoencoder intercepted: what each of them received.

    prompt, size, seed ──► pipeline(...) ──► calls    arguments of every call of the denoiser, and the answer
                                             steps    prediction, time, sample and result of every scheduler step
                                             decoded  what the autoencoder was to decode; the run ends there

The denoiser is never computed. The same class on the meta device tells the shapes of its output, and random numbers of
these shapes answer. The pipeline's own code does everything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from inweave.errors import FormatError
from inweave.models.configuration import brief

SEED = 5
STEPS = 3
#: options that change the text, the size, the guidance or the calls of a request behind its back
OFF: Mapping[str, Any] = {
    "use_resolution_binning": False, "pag_scale": 0.0, "enable_prompt_rewrite": False, "use_pe": False,
    "prompt_upsampling": False, "use_kv_cache": False,
}  # fmt: skip
#: how pipelines name the strength of guidance; where one has several, the first of these is the user's
GUIDANCE = ("guidance_scale", "cfg_scale", "distilled_guidance_scale", "true_cfg_scale")


@dataclass(slots=True)
class Step:
    """One step of the scheduler."""

    prediction: Tensor
    t: Any
    sample: Tensor
    result: Tensor


@dataclass(slots=True)
class Recording:
    """What the networks of one run received."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    decoded: Tensor | None = None


class _EndOfRunError(Exception):
    """Raised where the rest of a run is not needed."""


def record(
    pipe: Any,
    shapes: Shapes,
    prompts: Sequence[str],
    size: tuple[int, int],
    guidance: float,
    *,
    steps: int = STEPS,
    calls: int | None = None,
) -> Recording:
    """Run a pipeline on ``prompts`` at ``size`` (width, height); with ``calls``, end after that many.

    Raises:
        FormatError: the pipeline cannot be run from a text and a size alone.
    """
    known = inspect.signature(pipe.__call__).parameters
    settings: dict[str, Any] = {"num_inference_steps": steps, "width": size[0], "height": size[1]}
    settings["prompt"] = list(prompts) if len(prompts) > 1 else prompts[0]
    settings["generator"] = torch.Generator().manual_seed(SEED)
    if missing := [name for name in settings if name not in known]:
        raise FormatError(f"{_name(pipe)}: a call of it has no {', '.join(missing)}")
    settings |= {name: value for name, value in OFF.items() if name in known}
    if "clean_caption" in known and find_spec("bs4") is None:
        settings["clean_caption"] = False  # as it would be anyway, with a warning for each call
    settings |= {name: guidance for name in known if name.endswith(GUIDANCE)}
    recording = Recording()
    denoiser = denoiser_of(pipe)
    signature = inspect.signature(type(denoiser).forward)

    def forward(*args: Any, **options: Any) -> Any:
        bound = signature.bind(denoiser, *args, **options).arguments
        entries = {name: value for name, value in bound.items() if name != "self"}
        entries |= entries.pop("kwargs", {})
        recording.calls.append(tree_map(_copied, entries))
        if len(recording.calls) == calls:
            raise _EndOfRunError
        recording.answers.append(answer(shapes, entries, len(recording.calls)))
        return recording.answers[-1]

    def decode(latents: Tensor, *args: Any, **options: Any) -> Any:
        recording.decoded = latents.clone()
        raise _EndOfRunError

    pipe.scheduler = scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    advance = scheduler.step

    def step(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **options: Any) -> Any:
        before = sample.clone()
        result = advance(model_output, timestep, sample, *args, **options)
        after = result[0] if isinstance(result, tuple) else result.prev_sample
        recording.steps.append(Step(model_output.clone(), timestep, before, after.clone()))
        return result

    scheduler.step = step
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad(), replaced(denoiser, "forward", forward), replaced(pipe.vae, "decode", decode):
        try:
            pipe(**settings)
        except _EndOfRunError:
            return recording
        except Exception as error:
            if isinstance(error, FormatError):
                raise
            if isinstance(error, NameError) and error.name and find_spec(error.name) is None:
                raise FormatError(
                    f"{_name(pipe)}: it needs the library {error.name}, which is not installed"
                ) from error
            raise FormatError(f"{_name(pipe)}: it does not run from a text and a size: {brief(error)}") from error
    raise FormatError(f"{_name(pipe)}: it ended without decoding an image with `vae`")


class Shapes:
    """The shapes of a denoiser's output: its class on the meta device, run once for each shape of the arguments.

    A network that reads numbers cannot run there. One with a single layer of each kind and random weights does then.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self._known: dict[str, Any] = {}
        self._shallow: nn.Module | None = None

    def of(self, arguments: Mapping[str, Any]) -> Any:
        """Return the output for these arguments, its tensors on the meta device."""
        on_meta = tree_map(lambda each: each.to("meta") if torch.is_tensor(each) else each, arguments)
        key = repr(tree_map(lambda each: (each.shape, each.dtype) if torch.is_tensor(each) else each, arguments))
        if key not in self._known:
            try:
                self._known[key] = self._computed(arguments, on_meta)
            except Exception as error:
                raise FormatError(
                    f"{type(self.network).__name__}: the shape of its output cannot be computed without its weights: "
                    f"{brief(error)}"
                ) from error
        return self._known[key]

    def _computed(self, arguments: Mapping[str, Any], on_meta: Mapping[str, Any]) -> Any:
        forward = type(self.network).forward  # not the recorded one
        with torch.no_grad():
            if self._shallow is None:
                try:
                    with torch.device("meta"):
                        return forward(self.network, **on_meta)
                except Exception:  # it reads numbers, for example a mask
                    kind: Any = type(self.network)
                    self._shallow = kind.from_config(shallow(self.network.config)).eval()
            return tree_map(lambda each: each.to("meta") if torch.is_tensor(each) else each, self._shallow(**arguments))


def shallow(config: Any) -> dict[str, Any]:
    """Return a configuration with one layer of each kind, whose output has the same shape."""
    layers = ("layers", "blocks", "depth")
    return {
        name: 1 if type(value) is int and value > 1 and name.endswith(layers) else value
        for name, value in config.items()
    }


def answer(shapes: Shapes, arguments: Mapping[str, Any], seed: int) -> Any:
    """Return random numbers in the place of the denoiser's output for these arguments."""
    output = shapes.of(arguments)
    generator = torch.Generator().manual_seed(seed)

    def numbers(each: Any) -> Any:
        if not torch.is_tensor(each):
            return each
        return torch.randn(each.shape, generator=generator).to(each.dtype)

    return tree_map(numbers, output)


def guidance_option(known: Mapping[str, inspect.Parameter]) -> str | None:
    """Return the option of a pipeline's call that is the strength of guidance."""
    return next((name for name in GUIDANCE if name in known), None)


def denoiser_of(pipe: Any) -> Any:
    """Return the network that a pipeline denoises with."""
    return getattr(pipe, denoiser_folder(pipe))


def denoiser_folder(pipe: Any) -> str:
    """Return the name of the network that a pipeline denoises with."""
    return "transformer" if getattr(pipe, "transformer", None) is not None else "unet"


def tree_map(change: Callable[[Any], Any], value: Any) -> Any:
    """Change the leaves of nested lists, tuples and dictionaries (and with them outputs of diffusers)."""
    if isinstance(value, dict):
        changed = {name: tree_map(change, each) for name, each in value.items()}
        return type(value)(**changed) if type(value) is not dict else changed
    if isinstance(value, list | tuple):
        return type(value)(tree_map(change, each) for each in value)
    return change(value)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object inside the block that its class has."""
    vars(owner)[name] = value
    try:
        yield
    finally:
        del vars(owner)[name]


def _copied(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def _name(pipe: Any) -> str:
    return next((kind.__name__ for kind in type(pipe).__mro__ if kind.__module__.startswith("diffusers")), "pipeline")
