"""Noise falls at every step, for every pair of sampler and schedule on offer; all other pairs are refused."""

from __future__ import annotations

import pytest
import torch

from inweave.errors import ConfigError
from inweave.models import bundled, samplers

CPU = torch.device("cpu")


SPACINGS = ("simple", "sgm_uniform", "ddim_uniform")
#: every pair that is offered: {model predicts a flow: {sampler: schedules}}
OFFERED: dict[bool, dict[str, tuple[str, ...]]] = {
    False: {
        "euler": samplers.SCHEDULES,
        "euler_ancestral": SPACINGS,
        "ddim": SPACINGS,
        "ddpm": SPACINGS,
        "dpm_solver_multistep": samplers.SCHEDULES,
        "uni_pc": samplers.SCHEDULES,
    },
    True: {
        "euler": ("simple", "karras", "exponential"),
        "dpm_solver_multistep": ("simple",),
        "uni_pc": ("simple",),
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
    assert {sampler: schedules for sampler, schedules in accepted.items() if schedules} == OFFERED[flow]


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
    assert len(times) == 7
    assert bool((times[1:] < times[:-1]).all())
    if hasattr(scheduler, "sigmas"):
        levels = scheduler.sigmas
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
    ],
)
def test_names_of_other_programs(alias: str, expected: tuple[str, str | None]) -> None:
    assert samplers.sampler_name(alias) == expected


def test_problems_name_what_would_work() -> None:
    assert "known are euler" in samplers.problems("nonsense", "simple", flow=False)[0]
    assert "use euler, dpm_solver_multistep, uni_pc" in samplers.problems("ddim", "simple", flow=True)[0]
    assert "it works with euler" in samplers.problems("dpm_solver_multistep", "karras", flow=True)[0]
    assert "unknown" in samplers.problems("euler", "nonsense", flow=False)[0]
    with pytest.raises(ConfigError, match="known are"):
        samplers.own_scheduler({"_class_name": "os.system"})


def test_the_schedules_of_a_sampler_are_those_that_its_scheduler_takes() -> None:
    for sampler in samplers.SAMPLERS:
        assert samplers.schedules_of(sampler) == tuple(
            schedule for schedule in samplers.SCHEDULES if samplers._supports(sampler, schedule, False)
        )
