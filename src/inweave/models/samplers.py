"""Samplers and schedules by name, all of them diffusers' schedulers.

    sampler     euler  euler_ancestral  ddim  ddpm  dpm_solver_multistep  uni_pc
    schedule    simple        the spacing the model was trained to be sampled with
                karras        noise levels after Karras et al., rho 7
                exponential   evenly spaced logarithms of the noise level
                sgm_uniform   even, ending on the last trained step ("trailing")
                ddim_uniform  even, starting on the first ("leading")

Flow-matching models have their own Euler; dpm_solver_multistep and uni_pc run on flow noise levels there. The names
other programs use ("Euler a", "DPM++ 2M Karras") are understood.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from inweave.errors import ConfigError

if TYPE_CHECKING:
    import torch

SAMPLERS = ("euler", "euler_ancestral", "ddim", "ddpm", "dpm_solver_multistep", "uni_pc")
SCHEDULES = ("simple", "karras", "exponential", "sgm_uniform", "ddim_uniform")
FLOW_SAMPLERS = ("euler", "dpm_solver_multistep", "uni_pc")

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
    spelt = text.strip().lower()
    schedule = next((s for s in ("karras", "exponential") if spelt.endswith(f" {s}")), None)
    spelt = spelt.removesuffix(f" {schedule}") if schedule else spelt
    return _ALIASES.get(spelt, spelt), schedule


def schedule_name(text: str) -> str:
    spelt = text.strip().lower()
    return _SCHEDULE_ALIASES.get(spelt, spelt)


def own_sampler(config: Mapping[str, Any]) -> str:
    """The sampler a model's own configuration names, or Euler where it names one that is not offered."""
    return _OWN.get(str(config.get("_class_name")), "euler")


def own_scheduler(config: Mapping[str, Any]) -> Any:
    """The model's own scheduler, as configured."""
    name = str(config.get("_class_name"))
    if name not in _KNOWN_SCHEDULERS:
        raise ConfigError(f"a scheduler of class {name!r}; known are {', '.join(_KNOWN_SCHEDULERS)}")
    return _class(name).from_config(dict(config))


def problems(sampler: str, schedule: str, *, flow: bool) -> list[str]:
    """What is wrong with a choice, for a model of this kind."""
    found = []
    offered = FLOW_SAMPLERS if flow else SAMPLERS
    if sampler not in SAMPLERS:
        found.append(f"sampler: {sampler!r} is unknown; known are {', '.join(offered)}")
    elif sampler not in offered:
        found.append(f"sampler: {sampler!r} does not work for flow-matching models; {', '.join(offered)} do")
    if schedule not in SCHEDULES:
        found.append(f"schedule: {schedule!r} is unknown; known are {', '.join(SCHEDULES)}")
    if not found:
        able = [name for name in offered if _has(name, schedule, flow)]
        if sampler not in able:
            found.append(f"schedule: {sampler} has no {schedule} schedule; it works with {', '.join(able) or 'none'}")
    return found


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
    scheduler: Any, steps: int, device: torch.device, *, tokens: int | None = None, even: bool = False
) -> torch.Tensor:
    """Lay out the steps. ``tokens``: of the picture, for a flow whose shift depends on it; ``even``: Flux was sampled
    at evenly spaced noise levels, other flows at those between the first and the last trained step.
    """
    options: dict[str, Any] = {}
    if tokens is not None and scheduler.config.get("use_dynamic_shifting"):
        options["mu"] = _shift(tokens, scheduler.config)
    if even and scheduler.__class__.__name__ == "FlowMatchEulerDiscreteScheduler":
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device, **options)
    else:
        scheduler.set_timesteps(steps, device=device, **options)
    found: torch.Tensor = scheduler.timesteps
    return found


def _shift(tokens: int, config: Mapping[str, Any]) -> float:
    """A straight line through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift)."""
    x0, x1 = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    y0, y1 = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    return float(y0 + (y1 - y0) * (tokens - x0) / (x1 - x0))


def _class_name(sampler: str, flow: bool) -> str:
    return "FlowMatchEulerDiscreteScheduler" if flow and sampler == "euler" else _CLASSES[sampler]


def _has(sampler: str, schedule: str, flow: bool) -> bool:
    """Whether a schedule means anything to a sampler; flow noise levels leave the multistep samplers no choice."""
    if flow and sampler != "euler":
        return schedule == "simple"
    known = inspect.signature(_class(_class_name(sampler, flow)).__init__).parameters
    return _SCHEDULE_OPTIONS[schedule].keys() <= known.keys()


def _class(name: str) -> Any:
    import diffusers

    return getattr(diffusers, name)
