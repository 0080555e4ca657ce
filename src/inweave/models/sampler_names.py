"""Samplers and schedules by the names in A1111, Forge, ComfyUI, SwarmUI, InvokeAI, kohya and diffusers.

    name     = sampler [schedule]             "DPM++ 2M SDE Karras", "k_dpmpp_2m_ka", "dpmpp_2m_sde_gpu", "DDIM"
    sampler  = a name of `SAMPLER_NAMES`      upper and lower case, spaces, hyphens and underscores are alike; ++ is pp
    schedule = a name of `SCHEDULE_NAMES`     "Karras", "_ka", "_k", "Exponential", "SGM Uniform", ...

Samplers and schedules that inweave lacks are refused with the name of the nearest one: using that one unasked would be
a silent difference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from inweave.checked import did_you_mean, for_message
from inweave.models.samplers import NEEDS_SCIPY, SAMPLERS, SCHEDULES, TABLE


def _by_name(groups: Mapping[str, str]) -> dict[str, str]:
    return {name: ours for ours, names in groups.items() for name in names.split()}


#: names of samplers in other programs, as `_key` writes them -> inweave's
SAMPLER_NAMES = {
    **{name: name for name in SAMPLERS},
    **{entry.class_name.lower(): name for name, entry in reversed(TABLE.items()) if not entry.options},
    **_by_name({
        "euler": "euler_discrete flowmatcheulerdiscretescheduler euler_flowmatch",
        "euler_ancestral": "euler_a eulera",
        "dpm_solver_multistep": "dpmpp dpmpp_2m dpmsolverpp dpm_solverpp dpmsolver dpm_solver",
        "dpmpp_2m_sde": "dpmpp_2m_sde_gpu",
        "dpmpp_2m_sde_heun": "dpmpp_2m_sde_heun_gpu",
        "dpmpp_3m_sde": "dpmpp_3m_sde_gpu",
        "dpmpp_sde": "dpmpp_sde_gpu",
        "dpmpp_2s": "dpmsingle dpm_solver_singlestep dpmsolversinglestepscheduler",
        "dpm_2": "dpm2 kdpm_2 kdpm2",
        "dpm_2_ancestral": "dpm2_a dpm_2_a kdpm_2_a dpm2_ancestral kdpm_2_ancestral kdpm2_a",
        "uni_pc": "unipc uni_pc_bh2 unipc_bh2",
        "plms": "pndm pndmscheduler",
        "ddim": "ddimparallelscheduler",
        "ddpm": "ddpmparallelscheduler",
        "lms": "lmsd lms_discrete",
        "deis": "deis_2m",
    }),
}  # fmt: skip
#: samplers that inweave does not have -> the nearest that it has. CFG++ is another kind of guidance, whose sampler
#: alone would give another image
NEAREST_SAMPLERS = _by_name({
    "dpm_solver_multistep": "dpm_fast dpm_adaptive dpm_ad dpmpp_3m res_multistep dpmpp_2m_alt dpmpp_2m_edm dpmpp_cosine"
        " dpm2pp_2m edmdpmsolvermultistepscheduler edm_playground_v2_5 res_2m res_3m dpmpp_2m_cfg_pp"
        " res_multistep_cfg_pp",
    "heun": "restart heunpp2 heunpp_2 heunpp exp_heun_2_x0 heun_flowmatch flowmatchheundiscretescheduler ode_bosh3"
        " ode_fehlberg2 ode_adaptive_heun ode_dopri5 ode_custom forge_flux_realistic_slow ralston_2s",
    "dpmpp_sde": "exp_heun_2_x0_sde dpmpp_2s_a dpmpp_2s_ancestral seeds_2 seeds_3 dpm_sde dpmsolversdescheduler"
        " dpmpp_sde_substep dpmpp_2s_a_cfg_pp dpmpp_2s_ancestral_cfg_pp dpmpp_sde_cfg_pp",
    "deis": "ipndm ipndm_v ipndmscheduler deis_3m",
    "dpmpp_2m_sde": "res_multistep_ancestral cosinedpmsolvermultistepscheduler dpmpp_2m_sde_cfg_pp"
        " res_multistep_ancestral_cfg_pp",
    "euler": "gradient_estimation edmeulerscheduler euler_edm euler_dy euler_smea euler_smea_dy euler_negative"
        " euler_dy_negative euler_negative_dy euler_max perflow forge_flux_realistic euler_cfg_pp"
        " gradient_estimation_cfg_pp",
    "dpmpp_3m_sde": "er_sde dpmpp_4m_sde er_sde_solver extended_reverse_time_sde dpmpp_3m_sde_cfg_pp",
    "sa_solver": "sa_solver_pece",
    "lcm": "tcd tcdscheduler tcd_euler_a tdd cmsi vk_lcm lcm_custom lcm_custom_noise lcm_flowmatch"
        " flowmatchlcmscheduler ufogen",
    "dpmpp_2s": "dpmpp_1s res_2s res_3s res_2s_ode res_3s_ode rk_beta",
    "lms": "lms_edm",
    "euler_ancestral": "euler_a2 euler_a_substep nai_smea kohaku_lonyu_yog euler_ancestral_cfg_pp euler_a_cfg_pp",
    "ddim": "ddim_v3 bdia_ddim ddim_cfg_pp",
    "ddpm": "vdm_solver",
    "uni_pc": "dc_solver",
})  # fmt: skip
#: names of schedules in other programs -> inweave's; A1111's polyexponential has rho 1, which is the exponential one
SCHEDULE_NAMES = {name: name for name in SCHEDULES} | _by_name({
    "simple": "automatic normal default discrete",
    "ddim_uniform": "uniform ddim leading",
    "exponential": "polyexponential",
    "sgm_uniform": "trailing sgm",
})  # fmt: skip
NEAREST_SCHEDULES = _by_name({
    "beta": "beta57 beta_57 beta_custom",
    "simple": "beta_1_1 linear_quadratic bong_tangent linear cosine linspace quadratic constant sigmoid sigmoid_uniform"
        " ltxv ltxv_image flux2 flow native power_shift",
    "karras": "kl_optimal align_your_steps align_your_steps_11 align_your_steps_32 align_your_steps_gits"
        " align_your_steps_pp ays ays_gits ays_11steps ays_32steps ays_sd1 ays_sd15 ays_sdxl ays_svd gits laplace"
        " polynomial phi karras_dynamic optimal_steps edm_playground_v2_5",
    "sgm_uniform": "turbo sdturbo sd_turbo lcm tcd",
    "exponential": "loglinear cosine_exponential_blend",
})  # fmt: skip
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
    guess = did_you_mean(_split(text)[0], [*SAMPLER_NAMES, *NEAREST_SAMPLERS])
    return _refusal(text, nearest_sampler(text), _split(text)[0] in SAMPLER_NAMES, guess, SAMPLERS)


def schedule_refusal(text: str) -> str:
    """Return the message for an unknown schedule, with one to use instead."""
    guess = did_you_mean(_key(text), SCHEDULE_NAMES)
    return _refusal(text, nearest_schedule(text), _key(text) in SCHEDULE_NAMES, guess, SCHEDULES)


def _refusal(text: str, near: str | None, known: bool, guess: str, names: tuple[str, ...]) -> str:
    if near is not None:
        return f"{for_message(text)} has no equivalent here; the nearest is {near}"
    return f"{for_message(text)} " + (NEEDS_SCIPY if known else f"is unknown{guess}; known are {', '.join(names)}")


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
