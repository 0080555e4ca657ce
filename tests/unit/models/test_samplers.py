"""Every sampler and schedule on offer lays out noise that only falls; what cannot work is refused beforehand."""

from __future__ import annotations

import pytest
import torch

from inweave.errors import ConfigError
from inweave.models import bundled, samplers

CPU = torch.device("cpu")


@pytest.mark.parametrize("variant", ["sd1.5", "sd2.1", "sdxl-turbo", "sd3-medium", "flux1-dev", "flux1-schnell"])
@pytest.mark.parametrize("schedule", samplers.SCHEDULES)
@pytest.mark.parametrize("sampler", samplers.SAMPLERS)
def test_what_is_offered_works(sampler: str, schedule: str, variant: str) -> None:
    flow = variant.startswith(("sd3", "flux"))
    _, config = bundled.component_config(variant, "scheduler")
    wrong = samplers.problems(sampler, schedule, flow=flow)
    if wrong:
        assert sampler not in samplers.FLOW_SAMPLERS or schedule != "simple"
        return
    made = samplers.make_scheduler(config, sampler, schedule, flow=flow)
    times = samplers.set_steps(made, 7, CPU, tokens=1024 if flow else None, even=variant.startswith("flux"))
    assert len(times) == 7
    assert bool((times[1:] < times[:-1]).all())
    if hasattr(made, "sigmas"):
        levels = made.sigmas
        assert bool((levels[1:] < levels[:-1]).all() and levels.isfinite().all())
        assert not flow or (0.5 < levels[0] <= 1.0 and levels[-1] == 0.0)


def test_a_flow_s_shift_grows_with_the_picture() -> None:
    _, config = bundled.component_config("flux1-dev", "scheduler")
    for sampler in samplers.FLOW_SAMPLERS:
        second = []
        for tokens in (256, 4096):
            made = samplers.make_scheduler(config, sampler, "simple", flow=True)
            samplers.set_steps(made, 4, CPU, tokens=tokens, even=True)
            second.append(float(made.sigmas[1]))
        assert second[0] < second[1] - 0.05, sampler


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("DPM++ 2M Karras", ("dpm_solver_multistep", "karras")),
        ("Euler a", ("euler_ancestral", None)),
        ("euler", ("euler", None)),
        ("UniPC", ("uni_pc", None)),
        ("nonsense", ("nonsense", None)),
    ],
)
def test_names_of_other_programs(said: str, meant: tuple[str, str | None]) -> None:
    assert samplers.sampler_name(said) == meant


def test_problems_name_what_would_work() -> None:
    assert "known are euler" in samplers.problems("nonsense", "simple", flow=False)[0]
    assert "euler, dpm_solver_multistep, uni_pc do" in samplers.problems("ddim", "simple", flow=True)[0]
    assert "it works with euler" in samplers.problems("dpm_solver_multistep", "karras", flow=True)[0]
    assert "unknown" in samplers.problems("euler", "nonsense", flow=False)[0]
    with pytest.raises(ConfigError, match="known are"):
        samplers.own_scheduler({"_class_name": "os.system"})
