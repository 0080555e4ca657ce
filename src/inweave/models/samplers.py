"""Samplers and schedules by name, all of them diffusers' schedulers.

    sampler     euler  euler_ancestral  ddim  ddpm  dpm_solver_multistep  uni_pc
    schedule    simple        the spacing the model was trained to be sampled with
                karras        noise levels after Karras et al., rho 7
                exponential   evenly spaced logarithms of the noise level
                sgm_uniform   even, ending on the last trained step ("trailing")
                ddim_uniform  even, starting on the first ("leading")

Flow-matching models have their own Euler; dpm_solver_multistep and uni_pc run on flow noise levels there. The names
other programs use ("Euler a", "DPM++ 2M Karras") are understood.

A flow may shift its noise levels by the size of the image (`use_dynamic_shifting`); sampling and training use the same

    mu(tokens) = base_shift + (max_shift - base_shift) (tokens - base_image_seq_len) / (max_image_seq_len - base_image_seq_len)
    s -> f s / (1 + (f - 1) s),  f = exp(mu)
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError

if TYPE_CHECKING:
    import torch

SAMPLERS = ("euler", "euler_ancestral", "ddim", "ddpm", "dpm_solver_multistep", "uni_pc")
SCHEDULES = ("simple", "karras", "exponential", "sgm_uniform", "ddim_uniform")
MAX_TIMESTEPS = 100_000
FLOW_SAMPLERS = ("euler", "dpm_solver_multistep", "uni_pc")

#: those that take any list of noise levels
_SIGMA_SAMPLERS = ("euler", "dpm_solver_multistep", "uni_pc")

_CLASSES = {
    "euler": "EulerDiscreteScheduler",
    "euler_ancestral": "EulerAncestralDiscreteScheduler",
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "dpm_solver_multistep": "DPMSolverMultistepScheduler",
    "uni_pc": "UniPCMultistepScheduler",
}
_OWN = {name: sampler for sampler, name in _CLASSES.items()} | {"FlowMatchEulerDiscreteScheduler": "euler"}
_KNOWN_SCHEDULERS = (*_OWN, "PNDMScheduler", "LMSDiscreteScheduler", "LCMScheduler", "HeunDiscreteScheduler")
_ALIASES = {
    "euler a": "euler_ancestral", "euler_a": "euler_ancestral", "k_euler": "euler", "k_euler_a": "euler_ancestral",
    "dpm++": "dpm_solver_multistep", "dpmpp": "dpm_solver_multistep", "dpmpp_2m": "dpm_solver_multistep",
    "dpm++ 2m": "dpm_solver_multistep", "unipc": "uni_pc",
}  # fmt: skip
_SCHEDULE_ALIASES = {
    "automatic": "simple",
    "uniform": "ddim_uniform",
    "sgm uniform": "sgm_uniform",
    "ddim": "ddim_uniform",
    "normal": "simple",
}
_SCHEDULE_OPTIONS: dict[str, dict[str, Any]] = {
    "simple": {},
    "karras": {"use_karras_sigmas": True},
    "exponential": {"use_exponential_sigmas": True},
    "sgm_uniform": {"timestep_spacing": "trailing"},
    "ddim_uniform": {"timestep_spacing": "leading"},
}


def sampler_name(text: str) -> tuple[str, str | None]:
    """(sampler, schedule if the name carries one) of any spelling in use; unknown names come back as they are."""
    label = text.strip().lower()
    schedule = next((s for s in ("karras", "exponential") if label.endswith(f" {s}")), None)
    label = label.removesuffix(f" {schedule}") if schedule else label
    return _ALIASES.get(label, label), schedule


def schedule_name(text: str) -> str:
    """A schedule of any spelling in use; an unknown name comes back as it is."""
    label = text.strip().lower()
    return _SCHEDULE_ALIASES.get(label, label)


def schedules_of(sampler: str) -> tuple[str, ...]:
    """The schedules that a sampler has, for models that predict noise or velocity; flows have fewer."""
    return (
        SCHEDULES if sampler in _SIGMA_SAMPLERS else tuple(s for s in SCHEDULES if s not in ("karras", "exponential"))
    )


def own_sampler(config: Mapping[str, Any]) -> str:
    """The sampler a model's own configuration names, or Euler where it names one that is not offered."""
    return _OWN.get(str(config.get("_class_name")), "euler")


def own_scheduler(config: Mapping[str, Any]) -> Any:
    """The model's own scheduler, as configured."""
    return _class(_known_class(config)).from_config(dict(config))


def checked_scheduler(label: str, document: Mapping[str, Any], *, flow: bool) -> dict[str, Any]:
    """The settings of a file that schedulers take, after two steps with them; ``label`` names the file in errors."""
    import torch

    from inweave.models.configuration import diffusers_config, library_errors

    own = _known_class(document)
    settings: dict[str, Any] = {"_class_name": own}
    for name in (own, *_KNOWN_SCHEDULERS):  # the first that declares a setting says what type it has
        rest = {key: value for key, value in document.items() if key not in settings}
        settings |= diffusers_config(label, _class(name), rest)
    if not 1 <= settings.get("num_train_timesteps", 1000) <= MAX_TIMESTEPS:
        raise FormatError(f"{label}: num_train_timesteps should be 1 to {MAX_TIMESTEPS:,}")
    with library_errors(f"{label}: no scheduler can be made of these settings"):
        own_scheduler(settings)
        scheduler = make_scheduler(settings, own_sampler(settings), "simple", flow=flow)
        latents = torch.linspace(-1, 1, 16).view(1, 1, 4, 4)
        for time in set_steps(scheduler, 2, torch.device("cpu"), tokens=16 if flow else None):
            latents = scheduler.step(latents, time, latents, return_dict=False)[0]
    if not bool(torch.isfinite(latents).all()):
        raise FormatError(f"{label}: a scheduler of these settings gives numbers that are not finite")
    return settings


def _known_class(config: Mapping[str, Any]) -> str:
    name = config.get("_class_name")
    if name not in _KNOWN_SCHEDULERS:
        raise ConfigError(f"a scheduler of class {for_message(name)}; known are {', '.join(_KNOWN_SCHEDULERS)}")
    return str(name)


def problems(sampler: str, schedule: str, *, flow: bool) -> list[str]:
    """What is wrong with a choice, for a model of this kind."""
    wrong = []
    offered = FLOW_SAMPLERS if flow else SAMPLERS
    if sampler not in SAMPLERS:
        wrong.append(f"sampler: {sampler!r} is unknown; known are {', '.join(offered)}")
    elif sampler not in offered:
        wrong.append(f"sampler: {sampler!r} does not work for flow-matching models; use {', '.join(offered)}")
    if schedule not in SCHEDULES:
        wrong.append(f"schedule: {schedule!r} is unknown; known are {', '.join(SCHEDULES)}")
    if not wrong:
        able = [name for name in offered if _supports(name, schedule, flow)]
        if sampler not in able:
            wrong.append(f"schedule: {sampler} has no {schedule} schedule; it works with {', '.join(able) or 'none'}")
    return wrong


def make_scheduler(config: Mapping[str, Any], sampler: str, schedule: str, *, flow: bool) -> Any:
    """A fresh scheduler; one is made for every image, because it carries state."""
    options = dict(_SCHEDULE_OPTIONS[schedule])
    if flow and sampler != "euler":
        options |= {
            "use_flow_sigmas": True,
            "prediction_type": "flow_prediction",
            "flow_shift": config.get("shift", 1.0),
        }
    return _class(_class_name(sampler, flow)).from_config(dict(config), **options)


def set_steps(
    scheduler: Any, steps: int, device: torch.device, *, tokens: int | None = None, even_sigmas: bool = False
) -> torch.Tensor:
    """The timesteps of a run. ``tokens``: of the image, for a flow whose shift depends on it.

    ``even_sigmas``: evenly spaced noise levels for a flow's own Euler, instead of those between the first and the last
    trained timestep.
    """
    options: dict[str, Any] = {}
    if tokens is not None and scheduler.config.get("use_dynamic_shifting"):
        options["mu"] = DynamicShift.of(scheduler.config).mu(tokens)
    if even_sigmas and scheduler.__class__.__name__ == "FlowMatchEulerDiscreteScheduler":
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device, **options)
    else:
        scheduler.set_timesteps(steps, device=device, **options)
    timesteps: torch.Tensor = scheduler.timesteps
    return timesteps


@dataclass(frozen=True, slots=True)
class DynamicShift:
    """The shift of a flow that depends on the size of the image: mu is a straight line through two (tokens, mu)."""

    tokens: tuple[int, int] = (256, 4096)
    shifts: tuple[float, float] = (0.5, 1.15)

    @staticmethod
    def of(config: Mapping[str, Any]) -> DynamicShift:
        """From the configuration of a scheduler."""
        return DynamicShift(
            (config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)),
            (config.get("base_shift", 0.5), config.get("max_shift", 1.15)),
        )

    def mu(self, tokens: int) -> float:
        (x0, x1), (y0, y1) = self.tokens, self.shifts
        return float(y0 + (y1 - y0) * (tokens - x0) / (x1 - x0))


def training_alphas(config: Mapping[str, Any]) -> torch.Tensor:
    """How much of the image is left at each timestep of training. Samplers change the last one; DDPM keeps it."""
    alphas: torch.Tensor = _class("DDPMScheduler").from_config(dict(config)).alphas_cumprod
    return alphas


def _class_name(sampler: str, flow: bool) -> str:
    return "FlowMatchEulerDiscreteScheduler" if flow and sampler == "euler" else _CLASSES[sampler]


def _supports(sampler: str, schedule: str, flow: bool) -> bool:
    """Whether a schedule means anything to a sampler; flow noise levels leave the multistep samplers no choice."""
    if flow and sampler != "euler":
        return schedule == "simple"
    known = inspect.signature(_class(_class_name(sampler, flow)).__init__).parameters
    return _SCHEDULE_OPTIONS[schedule].keys() <= known.keys()


def _class(name: str) -> Any:
    import diffusers

    return getattr(diffusers, name)
