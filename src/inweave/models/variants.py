"""The diffusion models inweave can build from a single file, and how each is used unless told otherwise.

A variant is finer than a base of `inweave.targets.bases`: SDXL and SDXL Turbo have the same tensors, SD 2.1 and
SD 2.1-base too, yet they want another schedule, size or number of steps.

    size        pixels a side        steps     of the denoiser        guidance   0 means none is used
    prediction  what the denoiser answers: the noise, its velocity, or a flow's direction
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inweave.targets.bases import find

Family = Literal["sd", "sdxl", "sd3", "flux"]
Prediction = Literal["epsilon", "v_prediction", "flow"]


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    family: Family
    repo: str  # where its diffusers folder is published
    size: int
    steps: int
    guidance: float
    prediction: Prediction = "epsilon"
    inpaint: bool = False
    zero_terminal_snr: bool = False  # trained on a schedule whose last step is pure noise
    base: str = ""  # the base whose tensors it has, where that has another name
    aliases: tuple[str, ...] = ()  # those `inweave.targets.bases` does not know, or knows as the base's

    @property
    def tensors(self) -> str:
        """The base of `inweave.targets.bases` that lists this variant's tensors."""
        return self.base or self.name


_STABILITY = "stabilityai/stable-diffusion"

VARIANTS: tuple[Variant, ...] = (
    Variant("sd1.5", "sd", "runwayml/stable-diffusion-v1-5", 512, 20, 7.5),
    Variant("sd1.5-inpaint", "sd", "stable-diffusion-v1-5/stable-diffusion-inpainting", 512, 20, 7.5, inpaint=True),
    Variant("sd2.1", "sd", f"{_STABILITY}-2-1", 768, 20, 7.5, "v_prediction"),
    Variant("sd2.1-base", "sd", f"{_STABILITY}-2-1-base", 512, 20, 7.5, base="sd2.1",
            aliases=("sd21-base", "v2-1-base")),
    Variant("sd2-inpaint", "sd", f"{_STABILITY}-2-inpainting", 512, 20, 7.5, inpaint=True),
    Variant("sdxl", "sdxl", f"{_STABILITY}-xl-base-1.0", 1024, 20, 7.5),
    Variant("sdxl-turbo", "sdxl", "stabilityai/sdxl-turbo", 512, 4, 0.0, base="sdxl", aliases=("turbo", "sd-xl-turbo")),
    Variant("sdxl-inpaint", "sdxl", "diffusers/stable-diffusion-xl-1.0-inpainting-0.1", 1024, 20, 7.5, inpaint=True),
    Variant("sd3-medium", "sd3", f"{_STABILITY}-3-medium-diffusers", 1024, 28, 4.5, "flow"),
    Variant("sd3.5-medium", "sd3", f"{_STABILITY}-3.5-medium", 1024, 28, 4.5, "flow"),
    Variant("sd3.5-large", "sd3", f"{_STABILITY}-3.5-large", 1024, 28, 4.5, "flow"),
    Variant("sd3.5-large-turbo", "sd3", f"{_STABILITY}-3.5-large-turbo", 1024, 4, 0.0, "flow", base="sd3.5-large",
            aliases=("sd3.5-turbo", "sd35-large-turbo")),
    Variant("flux1-dev", "flux", "black-forest-labs/FLUX.1-dev", 1024, 28, 3.5, "flow"),
    Variant("flux1-schnell", "flux", "black-forest-labs/FLUX.1-schnell", 1024, 4, 0.0, "flow", aliases=("schnell",)),
)  # fmt: skip

_BY_NAME = {
    spelt.lower(): variant
    for variant in reversed(VARIANTS)
    for spelt in (variant.name, variant.repo, variant.repo.rpartition("/")[2], *variant.aliases)
}


def find_variant(text: str) -> Variant | None:
    """A variant by its name, the name of its repository, an alias, or any name of the base it has the tensors of."""
    spelt = text.strip().lower()
    plain = spelt.replace("_", "-").replace(" ", "-")
    found = _BY_NAME.get(spelt) or _BY_NAME.get(plain) or _BY_NAME.get(plain.rpartition("/")[2])
    if found is not None:
        return found
    known = find(text)
    return _BY_NAME.get(known.name) if known is not None else None
