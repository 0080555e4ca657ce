"""Samplers and schedules by the names in A1111, Forge, ComfyUI, SwarmUI, InvokeAI, kohya and diffusers.

    name     = sampler [schedule]             "DPM++ 2M SDE Karras", "k_dpmpp_2m_ka", "dpmpp_2m_sde_gpu", "DDIM"
    sampler  = a name of `SAMPLER_NAMES`      upper and lower case, spaces, hyphens and underscores are alike; ++ is pp
    schedule = a name of `SCHEDULE_NAMES`     "Karras", "_ka", "_k", "Exponential", "SGM Uniform", ...

A name that stands for something inweave does not have is listed with the nearest sampler or schedule, and refused with
it: another sampler under the same name would be a silent difference.
"""

from __future__ import annotations

import re

from inweave.checked import did_you_mean, for_message
from inweave.models.samplers import NEEDS_SCIPY, SAMPLERS, SCHEDULES, TABLE

#: names of samplers in other programs, as `_key` writes them -> inweave's
SAMPLER_NAMES = {
    **{name: name for name in SAMPLERS},
    **{entry.class_name.lower(): name for name, entry in reversed(TABLE.items()) if not entry.options},
    "euler_a": "euler_ancestral", "eulera": "euler_ancestral", "euler_discrete": "euler",
    "dpmpp": "dpm_solver_multistep", "dpmpp_2m": "dpm_solver_multistep", "dpmsolverpp": "dpm_solver_multistep",
    "dpm_solverpp": "dpm_solver_multistep", "dpmsolver": "dpm_solver_multistep", "dpm_solver": "dpm_solver_multistep",
    "dpmpp_2m_sde_gpu": "dpmpp_2m_sde", "dpmpp_2m_sde_heun_gpu": "dpmpp_2m_sde_heun",
    "dpmpp_3m_sde_gpu": "dpmpp_3m_sde",
    "dpmpp_sde_gpu": "dpmpp_sde", "dpmpp_2s": "dpmpp_2s", "dpmsingle": "dpmpp_2s", "dpm_solver_singlestep": "dpmpp_2s",
    "dpm2": "dpm_2", "kdpm_2": "dpm_2", "kdpm2": "dpm_2",
    "dpm2_a": "dpm_2_ancestral", "dpm_2_a": "dpm_2_ancestral", "kdpm_2_a": "dpm_2_ancestral",
    "dpm2_ancestral": "dpm_2_ancestral",
    "kdpm_2_ancestral": "dpm_2_ancestral",
    "unipc": "uni_pc", "uni_pc_bh2": "uni_pc", "unipc_bh2": "uni_pc", "pndm": "plms", "kdpm2_a": "dpm_2_ancestral",
    "pndmscheduler": "plms", "dpmsolversinglestepscheduler": "dpmpp_2s", "flowmatcheulerdiscretescheduler": "euler",
    "ddimparallelscheduler": "ddim", "ddpmparallelscheduler": "ddpm", "lmsd": "lms", "lms_discrete": "lms",
    "euler_flowmatch": "euler", "deis_2m": "deis",
}  # fmt: skip
#: samplers that inweave does not have -> the nearest that it has
NEAREST_SAMPLERS = {
    "dpm_fast": "dpm_solver_multistep", "dpm_adaptive": "dpm_solver_multistep", "dpm_ad": "dpm_solver_multistep",
    "restart": "heun", "heunpp2": "heun", "heunpp_2": "heun", "heunpp": "heun", "exp_heun_2_x0": "heun",
    "exp_heun_2_x0_sde": "dpmpp_sde",
    "dpmpp_2s_a": "dpmpp_sde", "dpmpp_2s_ancestral": "dpmpp_sde", "dpmpp_3m": "dpm_solver_multistep",
    "ipndm": "deis", "ipndm_v": "deis", "res_multistep": "dpm_solver_multistep",
    "res_multistep_ancestral": "dpmpp_2m_sde",
    "gradient_estimation": "euler", "er_sde": "dpmpp_3m_sde", "seeds_2": "dpmpp_sde", "seeds_3": "dpmpp_sde",
    "sa_solver_pece": "sa_solver", "tcd": "lcm", "tcdscheduler": "lcm",
    "dpmpp_1s": "dpmpp_2s", "dpm_sde": "dpmpp_sde", "dpmsolversdescheduler": "dpmpp_sde",
    "dpmpp_4m_sde": "dpmpp_3m_sde",
    "dpmpp_2m_alt": "dpm_solver_multistep", "dpmpp_2m_edm": "dpm_solver_multistep",
    "dpmpp_cosine": "dpm_solver_multistep",
    "dpm2pp_2m": "dpm_solver_multistep", "cosinedpmsolvermultistepscheduler": "dpmpp_2m_sde", "ipndmscheduler": "deis",
    "deis_3m": "deis",
    "edmdpmsolvermultistepscheduler": "dpm_solver_multistep", "edmeulerscheduler": "euler", "euler_edm": "euler",
    "lms_edm": "lms",
    "euler_dy": "euler", "euler_smea": "euler", "euler_smea_dy": "euler", "euler_negative": "euler",
    "euler_dy_negative": "euler",
    "euler_negative_dy": "euler", "euler_max": "euler", "euler_a2": "euler_ancestral",
    "euler_a_substep": "euler_ancestral",
    "dpmpp_sde_substep": "dpmpp_sde", "nai_smea": "euler_ancestral", "ddim_v3": "ddim", "bdia_ddim": "ddim",
    "kohaku_lonyu_yog": "euler_ancestral",
    "tcd_euler_a": "lcm", "tdd": "lcm", "cmsi": "lcm", "vk_lcm": "lcm", "lcm_custom": "lcm", "lcm_custom_noise": "lcm",
    "lcm_flowmatch": "lcm",
    "flowmatchlcmscheduler": "lcm", "heun_flowmatch": "heun", "flowmatchheundiscretescheduler": "heun",
    "ufogen": "lcm", "perflow": "euler",
    "vdm_solver": "ddpm", "dc_solver": "uni_pc", "er_sde_solver": "dpmpp_3m_sde",
    "extended_reverse_time_sde": "dpmpp_3m_sde",
    "ode_bosh3": "heun", "ode_fehlberg2": "heun", "ode_adaptive_heun": "heun", "ode_dopri5": "heun",
    "ode_custom": "heun",
    "forge_flux_realistic": "euler", "forge_flux_realistic_slow": "heun", "edm_playground_v2_5": "dpm_solver_multistep",
    "res_2m": "dpm_solver_multistep", "res_3m": "dpm_solver_multistep", "res_2s": "dpmpp_2s", "res_3s": "dpmpp_2s",
    "res_2s_ode": "dpmpp_2s",
    "res_3s_ode": "dpmpp_2s", "rk_beta": "dpmpp_2s", "ralston_2s": "heun", "dpmpp_2s_a_cfg_pp": "dpmpp_sde",
    # CFG++ is another kind of guidance, whose sampler alone would give another image
    "euler_cfg_pp": "euler", "euler_ancestral_cfg_pp": "euler_ancestral", "euler_a_cfg_pp": "euler_ancestral",
    "ddim_cfg_pp": "ddim",
    "dpmpp_2s_ancestral_cfg_pp": "dpmpp_sde", "dpmpp_2m_cfg_pp": "dpm_solver_multistep",
    "dpmpp_sde_cfg_pp": "dpmpp_sde",
    "dpmpp_2m_sde_cfg_pp": "dpmpp_2m_sde", "dpmpp_3m_sde_cfg_pp": "dpmpp_3m_sde",
    "res_multistep_cfg_pp": "dpm_solver_multistep", "res_multistep_ancestral_cfg_pp": "dpmpp_2m_sde",
    "gradient_estimation_cfg_pp": "euler",
}  # fmt: skip
#: names of schedules in other programs -> inweave's; A1111's polyexponential has rho 1, which is the exponential one
SCHEDULE_NAMES = {
    **{name: name for name in SCHEDULES},
    "automatic": "simple", "normal": "simple", "uniform": "ddim_uniform", "ddim": "ddim_uniform",
    "polyexponential": "exponential",
    "trailing": "sgm_uniform", "leading": "ddim_uniform", "sgm": "sgm_uniform", "default": "simple",
    "discrete": "simple",
}  # fmt: skip
NEAREST_SCHEDULES = {
    "beta57": "beta", "beta_57": "beta", "beta_custom": "beta", "beta_1_1": "simple", "kl_optimal": "karras",
    "align_your_steps": "karras", "align_your_steps_11": "karras",
    "align_your_steps_32": "karras", "align_your_steps_gits": "karras", "ays": "karras", "ays_gits": "karras",
    "ays_11steps": "karras",
    "ays_32steps": "karras", "ays_sd1": "karras", "ays_sdxl": "karras", "gits": "karras", "laplace": "karras",
    "linear_quadratic": "simple", "turbo": "sgm_uniform", "bong_tangent": "simple", "linear": "simple",
    "cosine": "simple",
    "linspace": "simple", "quadratic": "simple", "polynomial": "karras", "constant": "simple", "sigmoid": "simple",
    "sigmoid_uniform": "simple",
    "loglinear": "exponential", "phi": "karras", "karras_dynamic": "karras", "cosine_exponential_blend": "exponential",
    "ays_sd15": "karras", "ays_svd": "karras", "align_your_steps_pp": "karras", "sdturbo": "sgm_uniform",
    "sd_turbo": "sgm_uniform",
    "lcm": "sgm_uniform", "tcd": "sgm_uniform", "ltxv": "simple", "ltxv_image": "simple", "flux2": "simple",
    "flow": "simple",
    "native": "simple", "optimal_steps": "karras", "power_shift": "simple", "edm_playground_v2_5": "karras",
}  # fmt: skip
#: how a name ends where it carries a schedule -> the schedule
_SUFFIXES = {"ka": "karras", "k": "karras", "exp": "exponential"} | {
    name: name for name in (*SCHEDULE_NAMES, *NEAREST_SCHEDULES) if name not in ("ddim", "default", "lcm", "tcd")
}


def sampler_name(text: str) -> tuple[str, str | None]:
    """Return (sampler, schedule if the name carries one) for any spelling in use; unknown names are unchanged."""
    name, suffix = _split(text)
    schedule = SCHEDULE_NAMES.get(suffix, suffix) if suffix is not None else None
    return SAMPLER_NAMES.get(name, text.strip()), schedule


def schedule_name(text: str) -> str:
    """Return the schedule for any spelling in use; unknown names are unchanged."""
    return SCHEDULE_NAMES.get(_key(text), text.strip())


def nearest_sampler(text: str) -> str | None:
    """Return the sampler to use in place of one that inweave lacks; None for an unknown name."""
    return NEAREST_SAMPLERS.get(_split(text)[0])


def nearest_schedule(text: str) -> str | None:
    """Return the schedule to use in place of one that inweave lacks; None for an unknown name."""
    return NEAREST_SCHEDULES.get(_key(text))


def sampler_refusal(text: str) -> str:
    """Return the message for an unknown sampler, with one to use instead."""
    if (near := nearest_sampler(text)) is not None:
        return f"{for_message(text)} has no equivalent here; the nearest is {near}"
    if _split(text)[0] in SAMPLER_NAMES:
        return f"{for_message(text)} {NEEDS_SCIPY}"
    guess = did_you_mean(_split(text)[0], [*SAMPLER_NAMES, *NEAREST_SAMPLERS])
    return f"{for_message(text)} is unknown{guess}; known are {', '.join(SAMPLERS)}"


def schedule_refusal(text: str) -> str:
    """Return the message for an unknown schedule, with one to use instead."""
    if (near := nearest_schedule(text)) is not None:
        return f"{for_message(text)} has no equivalent here; the nearest is {near}"
    if _key(text) in SCHEDULE_NAMES:
        return f"{for_message(text)} {NEEDS_SCIPY}"
    return f"{for_message(text)} is unknown{did_you_mean(_key(text), SCHEDULE_NAMES)}; known are {', '.join(SCHEDULES)}"


def _split(text: str) -> tuple[str, str | None]:
    """Return the key of a sampler and the key of the schedule at the end of its name."""
    key = _key(text)
    for name in (key, key.removeprefix("k_")):
        if name in SAMPLER_NAMES or name in NEAREST_SAMPLERS:
            return name, None
        for suffix in sorted(_SUFFIXES, key=len, reverse=True):
            head = name.removesuffix(f"_{suffix}")
            if head != name and (head in SAMPLER_NAMES or head in NEAREST_SAMPLERS):
                return head, _SUFFIXES[suffix]
    return key, None


def _key(text: str) -> str:
    """Return one spelling for all variants: lower case, words joined by underscores, ++ as pp."""
    lowered = re.sub(r"(?<=cfg)\s*_?(?:\+\+|pp)", "_pp", text[:100].lower())
    return re.sub(r"[^a-z0-9]+", "_", lowered.replace("++", "pp")).strip("_").replace("gpu_seeded", "gpu")
