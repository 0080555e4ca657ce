"""A1111's hires fix as `upscale` of an image request.

    enable_hr, hr_scale 2 | hr_resize_x, hr_resize_y (0: by the other side; both: cropped), hr_upscaler "Latent",
    denoising_strength 0.75, hr_second_pass_steps (0: as many as the first pass makes), hr_sampler_name, hr_scheduler,
    firstphase_width, firstphase_height: the older form, in which width and height are those of the result

A1111 makes `hr_second_pass_steps` steps whatever the strength is; image to image makes a share of its steps. So steps =
made / strength.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inweave.errors import ConfigError, Problem
from inweave.generate.enlarge import steps_for
from inweave.serve.api.a1111.fields import label_of, number, switch, whole_number

#: values that mean the same as in the first pass
_SAME = ("", "Use same sampler", "Use same scheduler", "Use same checkpoint")


def second_pass(body: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that hires fix adds to those of an image request, or changes."""
    if not switch(body, "enable_hr", False):
        return {}
    if (checkpoint := label_of(body, "hr_checkpoint_name")) not in _SAME:
        raise ConfigError(Problem("hr_checkpoint_name", f"{checkpoint[:80]!r}: both passes have one checkpoint here"))
    for name, same in (("hr_prompt", "prompt"), ("hr_negative_prompt", "negative_prompt")):
        if label_of(body, name) not in ("", fields.get(same, "")):
            raise ConfigError(Problem(name, "both passes have the same prompt here; leave it out"))
    upscale: dict[str, Any] = {"upscaler": label_of(body, "hr_upscaler") or "Latent"}
    more: dict[str, Any] = {}
    first = [whole_number(body, name) or 0 for name in ("firstphase_width", "firstphase_height")]
    sides = [whole_number(body, name) or 0 for name in ("hr_resize_x", "hr_resize_y")]
    if any(first):
        sides = [fields.get("width") or 512, fields.get("height") or 512]
        more = {name: side for name, side in zip(("width", "height"), first, strict=True) if side}
    if any(sides):
        upscale |= {name: side for name, side in zip(("width", "height"), sides, strict=True) if side}
    else:
        scale = number(body, "hr_scale")
        upscale["scale"] = 2.0 if scale is None else scale
    strength = number(body, "denoising_strength")
    upscale["strength"] = 0.75 if strength is None else strength
    made = whole_number(body, "hr_second_pass_steps") or whole_number(body, "steps")
    if made and 0 < upscale["strength"] <= 1:
        upscale["steps"] = steps_for(made, upscale["strength"])
    for theirs, ours in (("hr_sampler_name", "sampler"), ("hr_scheduler", "schedule")):
        if (label := label_of(body, theirs)) not in _SAME:
            upscale[ours] = label
    return {**more, "upscale": upscale}
