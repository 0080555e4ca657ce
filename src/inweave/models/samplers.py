"""Samplers and schedules by name, all of them diffusers' schedulers.

    sampler     euler  euler_ancestral  ddim  ddpm  dpm_solver_multistep (DPM++ 2M)  uni_pc  heun  dpm_2
                dpm_2_ancestral  dpmpp_2s  dpmpp_sde  dpmpp_2m_sde  dpmpp_2m_sde_heun  dpmpp_3m_sde  deis  lcm
                lms  plms  sa_solver
    schedule    simple        the spacing the model was trained to be sampled with
                karras        noise levels after Karras et al., rho 7
                exponential   evenly spaced logarithms of the noise level
                sgm_uniform   even, ending on the last trained step ("trailing")
                ddim_uniform  even, starting on the first ("leading")
                beta          dense at both ends, by a beta distribution of 0.6 and 0.6

lms and beta integrate and invert functions with scipy, which is not installed with inweave (the extra `samplers` has
it); without it they are refused with that reason.

Flow-matching models have their own Euler; the DPM++ multistep samplers, uni_pc and deis run on flow noise levels there.
The names other programs use are those of `inweave.models.sampler_names`.

A model whose last training step is pure noise (zero terminal SNR) needs betas that end there. A scheduler that cannot
rescale them itself is given the rescaled ones.

A flow may shift its noise levels by the size of the image (`use_dynamic_shifting`); sampling and training use the same

    mu(tokens) = base_shift + (max_shift - base_shift) (tokens - base_image_seq_len) / (max_image_seq_len -
    base_image_seq_len) s -> f s / (1 + (f - 1) s),  f = exp(mu)
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError, Problem
from inweave.models.lazy_imports import defer_imports

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCHEDULES = ("simple", "karras", "exponential", "sgm_uniform", "ddim_uniform", "beta")
MAX_TIMESTEPS = 100_000
NEEDS_SCIPY = "needs scipy, which is not installed; install it with: pip install scipy"


@dataclass(frozen=True, slots=True)
class SamplerEntry:
    """The scheduler of diffusers behind a sampler, and the label that front ends show and read."""

    class_name: str
    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    flow: bool = False  # whether it runs on the noise levels of a flow
    zero_snr: bool = True  # whether it can start from pure noise (zero terminal SNR)
    scipy: bool = False  # whether it needs that library


_SDE = {"algorithm_type": "sde-dpmsolver++"}
TABLE = {
    "euler": SamplerEntry("EulerDiscreteScheduler", "Euler", flow=True),
    "euler_ancestral": SamplerEntry("EulerAncestralDiscreteScheduler", "Euler a"),
    "ddim": SamplerEntry("DDIMScheduler", "DDIM"),
    "ddpm": SamplerEntry("DDPMScheduler", "DDPM"),
    "dpm_solver_multistep": SamplerEntry("DPMSolverMultistepScheduler", "DPM++ 2M", flow=True),
    "uni_pc": SamplerEntry("UniPCMultistepScheduler", "UniPC", flow=True),
    "heun": SamplerEntry("HeunDiscreteScheduler", "Heun"),
    "dpm_2": SamplerEntry("KDPM2DiscreteScheduler", "DPM2"),
    "dpm_2_ancestral": SamplerEntry("KDPM2AncestralDiscreteScheduler", "DPM2 a"),
    "dpmpp_2s": SamplerEntry("DPMSolverSinglestepScheduler", "DPM++ 2S", {"lower_order_final": True}),
    "dpmpp_sde": SamplerEntry("DPMSolverSinglestepScheduler", "DPM++ SDE", {**_SDE, "lower_order_final": True}),
    "dpmpp_2m_sde": SamplerEntry("DPMSolverMultistepScheduler", "DPM++ 2M SDE", _SDE, flow=True),
    "dpmpp_2m_sde_heun": SamplerEntry(
        "DPMSolverMultistepScheduler", "DPM++ 2M SDE Heun", {**_SDE, "solver_type": "heun"}, flow=True
    ),
    "dpmpp_3m_sde": SamplerEntry("DPMSolverMultistepScheduler", "DPM++ 3M SDE", {**_SDE, "solver_order": 3}, flow=True),
    "deis": SamplerEntry("DEISMultistepScheduler", "DEIS"),
    "lcm": SamplerEntry("LCMScheduler", "LCM"),
    "lms": SamplerEntry("LMSDiscreteScheduler", "LMS", scipy=True),
    "plms": SamplerEntry("PNDMScheduler", "PLMS", {"skip_prk_steps": True}, zero_snr=False),
    "sa_solver": SamplerEntry("SASolverScheduler", "SA Solver"),
}
#: schedules that diffusers' scheduler does not take: written down, so that a process without diffusers can refuse them
_MISSING_SCHEDULES = {
    **dict.fromkeys(("euler_ancestral", "ddim", "ddpm", "lcm", "plms"), ("karras", "exponential", "beta")),
    **dict.fromkeys(("dpmpp_2s", "dpmpp_sde"), ("sgm_uniform", "ddim_uniform")),
}
SAMPLERS = tuple(TABLE)
FLOW_SAMPLERS = tuple(name for name, entry in TABLE.items() if entry.flow)

#: the sampler of a model whose own configuration names this class; all others are sampled with Euler
_OWN = {
    TABLE[name].class_name: name
    for name in ("euler", "euler_ancestral", "ddim", "ddpm", "dpm_solver_multistep", "uni_pc", "lcm")
} | {"FlowMatchEulerDiscreteScheduler": "euler"}
_KNOWN_SCHEDULERS = (*_OWN, "PNDMScheduler", "LMSDiscreteScheduler", "HeunDiscreteScheduler")
_SCHEDULE_OPTIONS: dict[str, dict[str, Any]] = {
    "simple": {},
    "karras": {"use_karras_sigmas": True},
    "exponential": {"use_exponential_sigmas": True},
    "sgm_uniform": {"timestep_spacing": "trailing"},
    "ddim_uniform": {"timestep_spacing": "leading"},
    "beta": {"use_beta_sigmas": True},
}
SCIPY_SCHEDULES = ("beta",)


def own_sampler(config: Mapping[str, Any]) -> str:
    """Return the sampler named by a model's configuration, or Euler if that one is not offered."""
    return _OWN.get(str(config.get("_class_name")), "euler")


def own_scheduler(config: Mapping[str, Any]) -> Any:
    """Return the model's own scheduler, as configured."""
    name = str(config.get("_class_name"))
    if not name.isidentifier() or not _is_scheduler(_library_class(name)):
        raise ConfigError(f"a scheduler of class {for_message(name)}; the installed diffusers has none of this name")
    return _from_config(_library_class(_installed(name)), config)


def _installed(name: str) -> str:
    """Return the class itself, or without scipy for LMS Euler's: it has the same settings and noise levels."""
    return "EulerDiscreteScheduler" if name == "LMSDiscreteScheduler" and not _has_scipy() else name


def checked_scheduler(label: str, document: Mapping[str, Any], *, flow: bool) -> dict[str, Any]:
    """Return the settings of a scheduler file, after a trial of two steps; ``label`` names the file in errors."""
    import torch

    from inweave.models.configuration import diffusers_config, library_errors

    own = _known_class(document)
    settings: dict[str, Any] = {"_class_name": own}
    first = own if own != "LMSDiscreteScheduler" else "EulerDiscreteScheduler"
    for name in (first, *_KNOWN_SCHEDULERS):  # the first that declares a setting says what type it has
        rest = {key: value for key, value in document.items() if key not in settings and not key.startswith("_")}
        if not rest:
            break
        settings |= diffusers_config(label, _class(name), rest)
    _ensure_length(label, settings)
    with library_errors(f"{label}: no scheduler can be made of these settings"):
        _from_config(_class(_installed(own)), settings)
        scheduler = make_scheduler(settings, own_sampler(settings), "simple", flow=flow)
        latents = torch.linspace(-1, 1, 16).view(1, 1, 4, 4)
        for time in set_steps(scheduler, 2, torch.device("cpu"), tokens=16 if flow else None):
            latents = scheduler.step(scaled_input(scheduler, latents, time), time, latents, return_dict=False)[0]
    if not bool(torch.isfinite(latents).all()):
        raise FormatError(f"{label}: a scheduler of these settings gives numbers that are not finite")
    return settings


def pipeline_scheduler(label: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a scheduler file of any class of diffusers, for a pipeline that samples with its own."""
    from inweave.models.configuration import diffusers_config, library_errors

    name = str(document.get("_class_name"))
    kind = type(own_scheduler({"_class_name": name}))
    settings = {"_class_name": name} | diffusers_config(label, kind, document)
    _ensure_length(label, settings)
    with library_errors(f"{label}: no scheduler can be made of these settings"):
        own_scheduler(settings)
    return settings


def _ensure_length(label: str, settings: Mapping[str, Any]) -> None:
    if not 1 <= settings.get("num_train_timesteps", 1000) <= MAX_TIMESTEPS:
        raise FormatError(f"{label}: num_train_timesteps should be 1 to {MAX_TIMESTEPS:,}")


def scaled_input(scheduler: Any, latents: torch.Tensor, time: Any) -> torch.Tensor:
    """Return the latents as the denoiser gets them; schedulers of flows have no such scale."""
    return scheduler.scale_model_input(latents, time) if hasattr(scheduler, "scale_model_input") else latents


def _known_class(config: Mapping[str, Any]) -> str:
    name = config.get("_class_name")
    if name not in _KNOWN_SCHEDULERS:
        raise ConfigError(f"a scheduler of class {for_message(name)}; known are {', '.join(_KNOWN_SCHEDULERS)}")
    return str(name)


def schedules_of(sampler: str) -> tuple[str, ...]:
    """Return the schedules of a sampler, for models that predict noise or velocity; flows have fewer."""
    missing = _MISSING_SCHEDULES.get(sampler, ())
    return tuple(schedule for schedule in offered_schedules() if schedule not in missing)


def ensure_schedule(sampler: str, schedule: str) -> None:
    """Raise ConfigError for a schedule that a sampler does not have with any model."""
    if schedule in SCHEDULES and schedule not in schedules_of(sampler):
        offered = ", ".join(schedules_of(sampler))
        raise ConfigError(Problem("schedule", f"{sampler} has no {schedule} schedule; it has {offered}"))


def offered_samplers() -> tuple[str, ...]:
    """Return the samplers whose libraries are installed."""
    return tuple(name for name, entry in TABLE.items() if not entry.scipy or _has_scipy())


def offered_schedules() -> tuple[str, ...]:
    """Return the schedules whose libraries are installed."""
    return tuple(name for name in SCHEDULES if name not in SCIPY_SCHEDULES or _has_scipy())


def _has_scipy() -> bool:
    return importlib.util.find_spec("scipy") is not None


def problems(sampler: str, schedule: str, *, flow: bool, zero_snr: bool = False) -> list[Problem]:
    """Return the problems of a choice for a model of this kind; ``zero_snr``: its last training step is pure noise."""
    wrong: list[Problem] = []

    def refuse(field: str, text: str) -> None:
        wrong.append(Problem(field, text))

    offered = [name for name in (FLOW_SAMPLERS if flow else SAMPLERS) if name in offered_samplers()]
    if sampler not in SAMPLERS:
        refuse("sampler", f"{sampler!r} is unknown; known are {', '.join(offered)}")
    elif sampler not in offered_samplers():
        refuse("sampler", f"{sampler!r} {NEEDS_SCIPY}")
    elif sampler not in offered:
        refuse("sampler", f"{sampler!r} does not work for flow-matching models; use {', '.join(offered)}")
    elif zero_snr and not TABLE[sampler].zero_snr:
        able = [name for name in offered if TABLE[name].zero_snr]
        refuse("sampler", f"{sampler!r} cannot start from pure noise, as this model does; use {', '.join(able)}")
    if schedule not in SCHEDULES:
        refuse("schedule", f"{schedule!r} is unknown; known are {', '.join(offered_schedules())}")
    elif schedule not in offered_schedules():
        refuse("schedule", f"{schedule!r} {NEEDS_SCIPY}")
    if not wrong and not _supports(sampler, schedule, flow):
        able = [name for name in offered if _supports(name, schedule, flow)]
        refuse("schedule", f"{sampler} has no {schedule} schedule; it works with {', '.join(able) or 'none'}")
    return wrong


def make_scheduler(config: Mapping[str, Any], sampler: str, schedule: str, *, flow: bool) -> Any:
    """Return a new scheduler; every image needs its own, because it carries state."""
    kind = _class(_class_name(sampler, flow))
    known = inspect.signature(kind.__init__).parameters
    options = {**TABLE[sampler].options, **_SCHEDULE_OPTIONS[schedule]}
    if flow and sampler != "euler":
        options |= {
            "use_flow_sigmas": True,
            "prediction_type": "flow_prediction",
            "flow_shift": config.get("shift", 1.0),
        }
    if config.get("rescale_betas_zero_snr") and "rescale_betas_zero_snr" not in known:
        options["trained_betas"] = _rescaled_betas(config)
        kind = _from_pure_noise(kind) if sampler == "heun" else kind
    return _from_config(kind, _declared(config, known), **options)


def _declared(config: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a class declares, out of those written for another scheduler class."""
    return {name: value for name, value in config.items() if name in known or name.startswith("_")}


def _from_pure_noise(heun: Any) -> Any:
    """Heun whose first step is Euler's: from a noise level of thousands, the mean of two slopes leads anywhere."""

    class HeunFromPureNoise(heun):  # type: ignore[misc]
        def step(self, model_output: Any, timestep: Any, sample: Any, return_dict: bool = True) -> Any:
            if self.step_index == 1 and not self.state_in_first_order:
                self.dt = self.prev_derivative = self.sample = None
                self._step_index += 1
                return (sample,)
            return super().step(model_output, timestep, sample, return_dict=return_dict)

    return HeunFromPureNoise


def _rescaled_betas(config: Mapping[str, Any]) -> list[float]:
    """Return betas with zero terminal SNR; the last alpha is 2^-24, as in diffusers, since schedulers divide by it."""
    import torch

    alphas = _from_config(_class("DDPMScheduler"), config).alphas_cumprod.double()
    alphas[-1] = 2**-24
    ratios = torch.cat([alphas[:1], alphas[1:] / alphas[:-1]])
    return [float(beta) for beta in 1 - ratios]


def set_steps(
    scheduler: Any,
    steps: int,
    device: torch.device,
    *,
    tokens: int | None = None,
    even_sigmas: bool = False,
    mu: float | None = None,
) -> Tensor:
    """Return the timesteps of a run. ``tokens``: of the image, for a flow whose shift depends on it.

    ``mu``: that shift, of a family that has a formula of its own.
    ``even_sigmas``: evenly spaced noise levels for a flow's own Euler, instead of those between the first and the last
    trained timestep.
    """
    options: dict[str, Any] = {}
    if tokens is not None and scheduler.config.get("use_dynamic_shifting"):
        options["mu"] = DynamicShift.of(scheduler.config).mu(tokens) if mu is None else mu
    if scheduler.__class__.__name__ == "LCMScheduler":  # its steps are some of those it was distilled with
        options["original_inference_steps"] = max(steps, scheduler.config.original_inference_steps)
    if even_sigmas and scheduler.__class__.__name__ == "FlowMatchEulerDiscreteScheduler":
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device, **options)
    else:
        scheduler.set_timesteps(steps, device=device, **options)
    timesteps: Tensor = scheduler.timesteps
    return timesteps


@dataclass(frozen=True, slots=True)
class DynamicShift:
    """The shift of a flow that depends on the size of the image: mu is a straight line through two (tokens, mu)."""

    tokens: tuple[int, int] = (256, 4096)
    shifts: tuple[float, float] = (0.5, 1.15)

    @staticmethod
    def of(config: Mapping[str, Any]) -> DynamicShift:
        """Read the configuration of a scheduler."""
        return DynamicShift(
            (config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)),
            (config.get("base_shift", 0.5), config.get("max_shift", 1.15)),
        )

    def mu(self, tokens: int) -> float:
        (x0, x1), (y0, y1) = self.tokens, self.shifts
        return float(y0 + (y1 - y0) * (tokens - x0) / (x1 - x0))


def training_alphas(config: Mapping[str, Any]) -> Tensor:
    """Return the share of the image at each training timestep. Samplers change the last one; DDPM keeps it."""
    shifted = "snr_shift_scale" in config  # by a scheduler of CogVideoX or CogView 3, whose alphas nothing else has
    scheduler = own_scheduler(config) if shifted else _from_config(_class("DDPMScheduler"), config)
    alphas: Tensor = scheduler.alphas_cumprod
    return alphas


def _class_name(sampler: str, flow: bool) -> str:
    return "FlowMatchEulerDiscreteScheduler" if flow and sampler == "euler" else TABLE[sampler].class_name


def _supports(sampler: str, schedule: str, flow: bool) -> bool:
    """Return whether a sampler supports a schedule; with flow noise levels the multistep samplers support one."""
    if flow and sampler != "euler":
        return schedule == "simple"
    known = inspect.signature(_class(_class_name(sampler, flow)).__init__).parameters
    return _SCHEDULE_OPTIONS[schedule].keys() <= known.keys()


def _class(name: str) -> Any:
    """Return a scheduler class: DDIM's is inweave's own, which computes the same and imports nothing."""
    if name == "DDIMScheduler":
        from inweave.models.sd.ddim import DDIMScheduler

        return DDIMScheduler
    return _library_class(name)


def _library_class(name: str) -> Any:
    import diffusers

    with defer_imports():
        return getattr(diffusers, name, None)


def _is_scheduler(kind: Any) -> bool:
    import diffusers

    return isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)


def _from_config(kind: Any, config: Mapping[str, Any], **options: Any) -> Any:
    with defer_imports():  # it imports every scheduler that takes the same settings
        return kind.from_config(dict(config), **options)
