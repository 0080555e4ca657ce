"""Noise falls at every step, for every pair of sampler and schedule on offer; all other pairs are refused."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import diffusers
import pytest
import torch

from inweave.errors import ConfigError, FormatError
from inweave.models import bundled, samplers
from inweave.models.sampler_names import (
    NEAREST_SAMPLERS,
    NEAREST_SCHEDULES,
    sampler_name,
    sampler_refusal,
    schedule_name,
    schedule_refusal,
)
from inweave.models.sd.ddim import DDIMScheduler

CPU = torch.device("cpu")


#: two of them need it, and are refused without it
SCIPY = importlib.util.find_spec("scipy") is not None
SCHEDULES = samplers.offered_schedules()
SPACINGS = ("simple", "sgm_uniform", "ddim_uniform")
LEVELS = tuple(name for name in SCHEDULES if name not in SPACINGS[1:])
#: every pair that is offered: {model predicts a flow: {sampler: schedules}}
OFFERED: dict[bool, dict[str, tuple[str, ...]]] = {
    False: {
        "euler": SCHEDULES,
        "euler_ancestral": SPACINGS,
        "ddim": SPACINGS,
        "ddpm": SPACINGS,
        "dpm_solver_multistep": SCHEDULES,
        "uni_pc": SCHEDULES,
        "heun": SCHEDULES,
        "dpm_2": SCHEDULES,
        "dpm_2_ancestral": SCHEDULES,
        "dpmpp_2s": LEVELS,
        "dpmpp_sde": LEVELS,
        "dpmpp_2m_sde": SCHEDULES,
        "dpmpp_2m_sde_heun": SCHEDULES,
        "dpmpp_3m_sde": SCHEDULES,
        "deis": SCHEDULES,
        "lcm": SPACINGS,
        "lms": SCHEDULES if SCIPY else (),
        "plms": SPACINGS,
        "sa_solver": SCHEDULES,
    },
    True: {
        "euler": LEVELS,
        "dpm_solver_multistep": ("simple",),
        "uni_pc": ("simple",),
        "dpmpp_2m_sde": ("simple",),
        "dpmpp_2m_sde_heun": ("simple",),
        "dpmpp_3m_sde": ("simple",),
    },
}
VARIANTS = {
    False: ("sd1.5", "sd2.1", "sdxl-turbo"),
    True: ("sd3-medium", "flux1-dev", "flux1-schnell", "z-image-turbo", "qwen-image"),
}


@pytest.mark.parametrize("flow", [False, True])
def test_pairs_that_are_not_offered_are_refused(flow: bool) -> None:
    accepted = {
        sampler: tuple(s for s in samplers.SCHEDULES if not samplers.problems(sampler, s, flow=flow))
        for sampler in samplers.SAMPLERS
    }
    offered = {sampler: schedules for sampler, schedules in OFFERED[flow].items() if schedules}
    assert {sampler: schedules for sampler, schedules in accepted.items() if schedules} == offered


@pytest.mark.sample(60)
@pytest.mark.parametrize(
    ("sampler", "schedule", "variant"),
    [
        (sampler, schedule, variant)
        for flow, table in OFFERED.items()
        for sampler, schedules in table.items()
        for schedule in schedules
        for variant in VARIANTS[flow]
    ],
)
def test_noise_only_falls(sampler: str, schedule: str, variant: str) -> None:
    flow = variant in VARIANTS[True]
    _, config = bundled.component_config(variant, "scheduler")
    scheduler = samplers.make_scheduler(config, sampler, schedule, flow=flow)
    times = samplers.set_steps(scheduler, 7, CPU, tokens=1024 if flow else None, even_sigmas=variant != "sd3-medium")
    assert len(times) == (13 if scheduler.order == 2 else 8 if sampler == "plms" else 7)
    whole = times[:: scheduler.order]  # between them, a sampler with noise of its own looks further ahead
    assert bool((whole[1:] < whole[:-1]).all() or (sampler == "plms" and (whole[1:] <= whole[:-1]).all()))
    if hasattr(scheduler, "sigmas"):
        levels = scheduler.sigmas.unique_consecutive()
        assert bool((levels[1:] < levels[:-1]).all() and levels.isfinite().all())
        assert not flow or (0.5 < levels[0] <= 1.0 and levels[-1] == 0.0)


def test_the_shift_of_a_flow_grows_with_the_image() -> None:
    _, config = bundled.component_config("flux1-dev", "scheduler")
    for sampler in samplers.FLOW_SAMPLERS:
        second = []
        for tokens in (256, 4096):
            scheduler = samplers.make_scheduler(config, sampler, "simple", flow=True)
            samplers.set_steps(scheduler, 4, CPU, tokens=tokens, even_sigmas=True)
            second.append(float(scheduler.sigmas[1]))
        assert second[0] < second[1] - 0.05, sampler


@pytest.mark.parametrize(
    ("alias", "expected"),
    [
        ("DPM++ 2M Karras", ("dpm_solver_multistep", "karras")),
        ("Euler a", ("euler_ancestral", None)),
        ("euler", ("euler", None)),
        ("UniPC", ("uni_pc", None)),
        ("nonsense", ("nonsense", None)),
        ("DPM++ 2M SDE Heun Exponential", ("dpmpp_2m_sde_heun", "exponential")),
        ("DPM++ 3M SDE Karras", ("dpmpp_3m_sde", "karras")),
        ("dpmpp_2m_sde_gpu", ("dpmpp_2m_sde", None)),
        ("k_dpmpp_2m_ka", ("dpm_solver_multistep", "karras")),
        ("k_dpm_2_a", ("dpm_2_ancestral", None)),
        ("DPM2 a Karras", ("dpm_2_ancestral", "karras")),
        ("dpmpp_2m_sde_k", ("dpmpp_2m_sde", "karras")),
        ("Euler SGM Uniform", ("euler", "sgm_uniform")),
        ("UniPCMultistepScheduler", ("uni_pc", None)),
        ("DPM++ 2M Polyexponential", ("dpm_solver_multistep", "exponential")),
        ("Euler Beta", ("euler", "beta")),
        ("LCM", ("lcm", None)),
        (" ddim ", ("ddim", None)),
    ],
)
def test_names_of_other_programs(alias: str, expected: tuple[str, str | None]) -> None:
    assert sampler_name(alias) == expected


def test_problems_name_what_would_work() -> None:
    assert "known are euler" in str(samplers.problems("nonsense", "simple", flow=False)[0])
    assert "use euler, dpm_solver_multistep, uni_pc" in str(samplers.problems("ddim", "simple", flow=True)[0])
    assert "it works with euler" in str(samplers.problems("dpm_solver_multistep", "karras", flow=True)[0])
    assert "unknown" in str(samplers.problems("euler", "nonsense", flow=False)[0])
    with pytest.raises(ConfigError, match="none of this name"):
        samplers.own_scheduler({"_class_name": "os.system"})


#: the names that menus, APIs and files of other programs use
NAMES = {
    "AUTOMATIC1111 1.10": """DPM++ 2M|DPM++ SDE|DPM++ 2M SDE|DPM++ 2M SDE Heun|DPM++ 2S a|DPM++ 3M SDE|Euler a|Euler|
LMS|Heun|
DPM2|DPM2 a|DPM fast|DPM adaptive|Restart|DDIM|DDIM CFG++|PLMS|UniPC|LCM""",
    "AUTOMATIC1111 1.8 and its aliases": """LMS Karras|DPM2 Karras|DPM2 a Karras|DPM++ 2S a Karras|DPM++ 2M Karras|
DPM++ SDE Karras|
DPM++ 2M SDE Exponential|DPM++ 2M SDE Heun Karras|DPM++ 3M SDE Exponential|k_euler|k_euler_a|k_lms|
k_heun|k_dpm_2|k_dpm_2_a|k_dpmpp_2s_a|k_dpmpp_2m|k_dpmpp_sde|k_dpmpp_2m_sde_ka|k_dpm_fast|k_dpm_ad|
k_lms_ka|k_dpmpp_2m_sde_exp|k_dpmpp_3m_sde_exp|k_dpmpp_2m_sde_heun_ka|Euler Trailing""",
    "Forge, reForge": """HeunPP2|IPNDM|IPNDM_V|DEIS|DDPM|DDPM Karras|Euler CFG++|Euler a CFG++|DPM++ 2M CFG++|
DPM++ SDE CFG++|
DPM++ 2S a CFG++|DPM++ 2M SDE CFG++|DPM++ 3M SDE CFG++|[Forge] Flux Realistic|
[Forge] Flux Realistic (Slow)|Euler SMEA|Euler SMEA Dy|Euler Dy|Euler Negative|Euler Dy Negative|
Euler Max|Kohaku LoNyu Yog|Gradient Estimation|Gradient Estimation CFG++|Res Multistep|
Res Multistep CFG++|Res Multistep Ancestral|ER SDE|SEEDS-2|SEEDS-3|SA-Solver|SA-Solver PECE|TCD|
TCD Euler a|DPM++ 4M SDE|DPM++ 2M alt|DPM++ 2M alt Karras|Extended Reverse-Time SDE|ODE (Bosh3)|
ODE (Fehlberg2)|ODE (Adaptive Heun)|ODE (Dopri5)|Euler a2|DPM++ 1S|LCM Custom|VK_LCM""",
    "ComfyUI 0.3, RES4LYF": """euler|euler_cfg_pp|euler_ancestral|euler_ancestral_cfg_pp|heun|heunpp2|exp_heun_2_x0|
exp_heun_2_x0_sde|
dpm_2|dpm_2_ancestral|lms|dpm_fast|dpm_adaptive|dpmpp_2s_ancestral|dpmpp_2s_ancestral_cfg_pp|dpmpp_sde|
dpmpp_sde_gpu|dpmpp_2m|dpmpp_2m_cfg_pp|dpmpp_2m_sde|dpmpp_2m_sde_gpu|dpmpp_2m_sde_heun|
dpmpp_2m_sde_heun_gpu|dpmpp_3m_sde|dpmpp_3m_sde_gpu|ddpm|lcm|ipndm|ipndm_v|deis|res_multistep|
res_multistep_cfg_pp|res_multistep_ancestral|res_multistep_ancestral_cfg_pp|gradient_estimation|
gradient_estimation_cfg_pp|er_sde|seeds_2|seeds_3|sa_solver|sa_solver_pece|ddim|uni_pc|uni_pc_bh2|
lcm_custom_noise|res_2s|res_2m|res_3s|res_2s_ode|rk_beta|deis_2m|deis_3m|ralston_2s|euler_smea_dy|
restart""",
    "InvokeAI 5": """ddim|ddpm|deis|deis_k|lms|lms_k|pndm|heun|heun_k|euler|euler_k|euler_a|kdpm_2|kdpm_2_k|kdpm_2_a|
kdpm_2_a_k|dpmpp_2s|dpmpp_2s_k|dpmpp_2m|dpmpp_2m_k|dpmpp_2m_sde|dpmpp_2m_sde_k|dpmpp_3m|dpmpp_3m_k|
dpmpp_sde|dpmpp_sde_k|unipc|unipc_k|lcm|tcd|plms|k_euler""",
    "SwarmUI": """Euler|Euler Ancestral|Heun|Heun++ 2|DPM 2|DPM 2 Ancestral|LMS|DPM Fast|DPM Adaptive|
DPM++ 2S Ancestral|DPM++ SDE|DPM++ SDE, GPU Seeded|DPM++ 2M|DPM++ 2M SDE|DPM++ 2M SDE, GPU Seeded|
DPM++ 3M SDE|DPM++ 3M SDE, GPU Seeded|DDPM|LCM|UniPC|UniPC BH2|RES Multistep|DEIS|iPNDM|iPNDM-V|ER-
SDE-Solver|Seeds 2|DDIM|Euler CFG++|Euler Ancestral CFG++""",
    "kohya": """ddim|pndm|lms|euler|euler_a|heun|dpm_2|dpm_2_a|dpmsolver|dpmsolver++|dpmsingle|k_lms|k_euler|
k_euler_a|k_dpm_2|k_dpm_2_a""",
    "NovelAI": """k_euler_ancestral|k_dpmpp_2s_ancestral|k_dpmpp_2m_sde|ddim_v3|k_dpm_fast|nai_smea|k_dpm_adaptive""",
    "Draw Things": """DPM++ 2M Karras|Euler A|PLMS|DPM++ SDE Karras|Euler A Substep|DPM++ SDE Substep|Euler A Trailing|
DPM++ SDE Trailing|DPM++ 2M AYS|Euler A AYS|DPM++ 2M Trailing|DDIM Trailing""",
    "SD.Next": """UniPC|DEIS|DPM++|DPM++ 1S|DPM SDE|DPM++ 2M EDM|Euler EDM|Euler SGM|Euler FlowMatch|CMSI|PNDM|IPNDM|
VDM Solver|SA Solver|BDIA DDIM|TDD|TCD|DPM++ Cosine|LMSD|KDPM2|KDPM2 a|LMS EDM|DC Solver|DPM2++ 2M|
LCM FlowMatch|Heun FlowMatch|UFOGen|PeRFlow""",
    "diffusers": """DDIMScheduler|DDPMScheduler|DEISMultistepScheduler|DPMSolverMultistepScheduler|
DPMSolverSDEScheduler|
DPMSolverSinglestepScheduler|EulerAncestralDiscreteScheduler|EulerDiscreteScheduler|
FlowMatchEulerDiscreteScheduler|FlowMatchHeunDiscreteScheduler|HeunDiscreteScheduler|IPNDMScheduler|
KDPM2AncestralDiscreteScheduler|KDPM2DiscreteScheduler|LCMScheduler|LMSDiscreteScheduler|PNDMScheduler|
SASolverScheduler|TCDScheduler|UniPCMultistepScheduler|EDMEulerScheduler|EDMDPMSolverMultistepScheduler|
CosineDPMSolverMultistepScheduler|DDIMParallelScheduler|DDPMParallelScheduler|FlowMatchLCMScheduler""",
}
SCHEDULE_SUFFIXES = ("", "Karras", "Exponential", "Polyexponential", "SGM Uniform", "Simple", "Normal", "DDIM Uniform")


def test_every_sampler_of_other_programs_is_known_or_refused_with_the_nearest() -> None:
    for name in (name for names in NAMES.values() for name in names.replace("\n", "").split("|")):
        for suffix in SCHEDULE_SUFFIXES if sampler_name(name)[1] is None else ("",):
            label = f"{name} {suffix}".strip()
            sampler, schedule = sampler_name(label)
            if sampler in samplers.SAMPLERS:
                assert schedule in (None, *samplers.SCHEDULES) or "nearest is" in schedule_refusal(schedule), label
                assert not suffix or schedule is not None, label
                spellings = (label.upper(), label.lower(), label.replace(" ", "_"), f"  {label} ")
                assert {sampler_name(each) for each in spellings} == {(sampler, schedule)}, label
            else:
                refusal = sampler_refusal(label)
                assert repr(label) in refusal and "nearest is" in refusal, label
    assert not {*NEAREST_SAMPLERS.values()} - {*samplers.SAMPLERS}


@pytest.mark.skipif(SCIPY, reason="it is installed")
def test_what_needs_scipy_is_refused_with_that_reason() -> None:
    assert "scipy" in str(samplers.problems("lms", "simple", flow=False)[0])
    assert "scipy" in str(samplers.problems("euler", "beta", flow=True)[0])
    assert "scipy" in sampler_refusal("LMS Karras") and "scipy" in schedule_refusal("Beta")


def test_every_schedule_of_other_programs_is_known_or_has_a_nearest() -> None:
    theirs = """Automatic|Uniform|Karras|Exponential|Polyexponential|SGM Uniform|KL Optimal|Align Your Steps|Simple|
Normal|DDIM|Beta|Turbo|Align Your Steps GITS|Align Your Steps 11|Align Your Steps 32|DDIM Uniform|
beta57|linear_quadratic|ltxv|ltxv-image|flux2|edm_playground_v2.5|lcm|tcd|native|bong_tangent|
Cosine|Sigmoid|Loglinear|Phi|Laplace|Karras Dynamic|Cosine-exponential Blend|Sigmoid Uniform|simple|
AYS SDXL|AYS SD15|AYS SVD|Beta Custom|optimal_steps|linspace|leading|trailing|discrete|default|
beta_1_1|sdturbo|SD Turbo|power_shift|kl_optimal|constant|gits|Beta 57|Flux2|flow|linear|Quadratic|
polynomial|align_your_steps_++"""
    for name in theirs.replace("\n", "").split("|"):
        known = schedule_name(name)
        assert known in samplers.SCHEDULES or "nearest is" in schedule_refusal(name), name
    assert not {*NEAREST_SCHEDULES.values()} - {*samplers.SCHEDULES}


DEVIATION = 0.5


@pytest.mark.parametrize("variant", ["sd1.5", "zero-snr"])
#: without lcm: it asks for the image itself in every step, which only a distilled model answers
@pytest.mark.parametrize("sampler", [name for name in samplers.offered_samplers() if name != "lcm"])
def test_every_sampler_reaches_the_data(sampler: str, variant: str) -> None:
    # samplers of first order with noise in every step are this far away after 60 steps, and approach it as 1 / steps
    assert sampled_deviation(sampler, variant, 60) == pytest.approx(DEVIATION, rel=0.16)


def test_heun_starts_from_pure_noise_with_few_steps() -> None:
    assert sampled_deviation("heun", "zero-snr", 6) == pytest.approx(DEVIATION, rel=0.5)


def sampled_deviation(sampler: str, variant: str, steps: int) -> float:
    """Data with a normal distribution has an exact denoiser; from noise, every sampler must end at its deviation."""
    _, config = bundled.component_config("sd1.5", "scheduler")
    if variant == "zero-snr":
        if samplers.problems(sampler, "simple", flow=False, zero_snr=True):
            pytest.skip("refused for such models")
        config |= {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    alphas = samplers.training_alphas(config)
    alphas[-1] = max(float(alphas[-1]), 2**-24)
    scheduler = samplers.make_scheduler(config, sampler, "simple", flow=False)
    generator = torch.Generator().manual_seed(0)
    times = samplers.set_steps(scheduler, steps, CPU)
    latents = torch.randn(1, 4, 24, 24, generator=generator) * scheduler.init_noise_sigma
    options = {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}
    for time in times:
        rows = scheduler.scale_model_input(latents, time)
        below = min(int(time), len(alphas) - 1)
        above = min(below + 1, len(alphas) - 1)
        alpha = torch.lerp(alphas[below], alphas[above], float(time) - int(time))
        variance = alpha * DEVIATION**2 + 1 - alpha
        noise, image = rows * (1 - alpha).sqrt() / variance, rows * alpha.sqrt() * DEVIATION**2 / variance
        velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * image
        prediction = noise if variant == "sd1.5" else velocity
        latents = scheduler.step(prediction, time, latents, return_dict=False, **options)[0]
    return float(latents.std())


def test_more_steps_than_lcm_was_distilled_with() -> None:
    _, config = bundled.component_config("sd1.5", "scheduler")
    scheduler = samplers.make_scheduler(config, "lcm", "simple", flow=False)
    for steps in (4, 50, 120, 150):
        assert len(samplers.set_steps(scheduler, steps, CPU)) == steps


def test_the_schedules_of_a_sampler_are_those_that_its_scheduler_takes() -> None:
    for sampler in samplers.offered_samplers():
        assert samplers.schedules_of(sampler) == tuple(
            schedule for schedule in SCHEDULES if samplers._supports(sampler, schedule, False)
        )


def test_a_model_that_names_lms_is_read_without_scipy() -> None:
    settings = {"_class_name": "LMSDiscreteScheduler", "num_train_timesteps": 1000, "beta_schedule": "scaled_linear"}
    assert samplers.checked_scheduler("x", settings, flow=False)["beta_schedule"] == "scaled_linear"


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "LMSDiscreteScheduler"])
def test_the_trial_of_a_scheduler_leaves_no_warning_of_the_library(name: str) -> None:
    """Its steps are those of a generation, input scale included."""
    import logging

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    log = logging.getLogger("diffusers")
    log.addHandler(handler)
    try:
        samplers.checked_scheduler("x", {"_class_name": name, "num_train_timesteps": 1000}, flow=False)
    finally:
        log.removeHandler(handler)
    assert not [record.getMessage() for record in records]


_DDIM_SETTINGS = [
    {},
    {"beta_schedule": "scaled_linear", "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1},
    {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"},
    {"prediction_type": "sample", "timestep_spacing": "linspace", "clip_sample_range": 2.0},
    {"beta_schedule": "squaredcos_cap_v2", "thresholding": True, "sample_max_value": 1.5},
    {"trained_betas": [0.01 * (number + 1) for number in range(60)], "num_train_timesteps": 60},
]


@pytest.mark.parametrize("settings", _DDIM_SETTINGS, ids=lambda each: "-".join(each) or "defaults")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ddim_gives_the_bits_of_diffusers(settings: dict[str, Any], dtype: torch.dtype) -> None:
    config = {"_class_name": "DDIMScheduler", **settings}
    theirs, ours = (
        diffusers.DDIMScheduler.from_config(dict(config)),
        samplers.make_scheduler(config, "ddim", "simple", flow=False),
    )
    assert not isinstance(ours, diffusers.SchedulerMixin)
    assert torch.equal(ours.alphas_cumprod, theirs.alphas_cumprod) and torch.equal(ours.timesteps, theirs.timesteps)
    assert (ours.order, ours.init_noise_sigma) == (theirs.order, theirs.init_noise_sigma)
    assert {**ours.config}.items() >= {**settings}.items()
    noise = torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    for steps in (1, 2, 7, 20, 50):
        for scheduler in (theirs, ours):
            scheduler.set_timesteps(steps, device="cpu")
        assert torch.equal(ours.timesteps, theirs.timesteps)
        rows = [torch.randn(2, 4, 6, 5, generator=torch.Generator().manual_seed(0)).to(dtype) * 3] * 2
        for time in ours.timesteps:
            prediction = (rows[0] * 0.5 + noise).to(dtype)
            rows = [
                scheduler.step(prediction, time, row, return_dict=False)[0]
                for scheduler, row in zip((theirs, ours), rows, strict=True)
            ]
            assert torch.equal(*rows) and rows[1].dtype == dtype
        for times in (theirs.timesteps[:1], theirs.timesteps[-1:].repeat(2)):
            assert torch.equal(ours.add_noise(rows[0], noise, times), theirs.add_noise(rows[0], noise, times))


def test_ddim_declares_the_settings_of_diffusers() -> None:
    ours, theirs = (
        {name: (each.annotation, each.default) for name, each in inspect.signature(kind.__init__).parameters.items()}
        for kind in (DDIMScheduler, diffusers.DDIMScheduler)
    )
    del ours["self"], theirs["self"]
    assert ours == theirs


def test_ddim_refuses_what_diffusers_refuses() -> None:
    config = {"_class_name": "DDIMScheduler", "num_train_timesteps": 10}
    with pytest.raises(ValueError, match="10"):
        samplers.make_scheduler(config, "ddim", "simple", flow=False).set_timesteps(11)
    for wrong in ({"beta_schedule": "other"}, {"prediction_type": "other"}, {"timestep_spacing": "other"}):
        with pytest.raises(FormatError, match="other"):
            samplers.checked_scheduler("x", config | wrong, flow=False)
