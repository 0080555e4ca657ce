"""Renew the table of docs/pipelines.md: `python tools/pipelines_page.py`.

Every text-to-image pipeline of the installed diffusers: by hand, derived (from a tiny model with random weights, as
`tests/peers/tiny_pipelines.py` makes it), refused by its signatures or by the derivation, or not tried.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import diffusers

from inweave.errors import FormatError
from inweave.models.derived.classes import obstacle
from inweave.models.families import families, network_classes
from inweave.models.open import open_model

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pipelines.md"
BEGIN, END = "<!-- generated: pipelines -->\n", "<!-- end -->\n"
#: names of pipelines for another task than text to image
OTHERS = (
    "Img2Img",
    "Inpaint",
    "ControlNet",
    "Edit",
    "Video",
    "Audio",
    "Upscale",
    "Inverse",
    "Prior",
    "InstructPix2Pix",
)
#: why a pipeline has no tiny model
UNTRIED = {
    "BriaFibo2": "its prompts are JSON, not sentences",
    "Cosmos2TextToImage": "its safety checker needs cosmos_guardrail",
    "DreamLite": "its processor needs torchvision",
    "DreamLiteMobile": "its processor needs torchvision",
    "GlmImage": "its processor needs torchvision",
    "OmniGen": "its processor needs torchvision",
    "PRX": "it needs ftfy",
}


def pipelines() -> Iterator[Any]:
    """Yield the classes of diffusers' pipelines that make images from a prompt."""
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    for name in sorted(dir(diffusers)):
        if not name.endswith("Pipeline") or any(part in name for part in OTHERS):
            continue
        kind = getattr(diffusers, name)
        if isinstance(kind, type) and issubclass(kind, DiffusionPipeline) and ".deprecated" not in kind.__module__:
            reason = obstacle(kind)
            if "makes videos" not in reason and "in a call" not in reason:
                yield kind


def row(kind: Any) -> str:
    """Return the row of one pipeline."""
    from tests.peers import tiny_pipelines as tiny

    name = kind.__name__.removesuffix("Pipeline")
    own = {family.pipeline: family.name for family in families()}
    own |= {variant.pipeline: family.name for family in families() for variant in family.variants if variant.pipeline}
    if kind.__name__ in own:
        return f"| {name} | by hand | family `{own[kind.__name__]}` |"
    if reason := obstacle(kind):
        return f"| {name} | refused | {reason} |"
    if name in (*tiny.DERIVED, *tiny.REFUSED):
        return f"| {name} | {_derived(tiny.folder(name))} |"
    denoiser = _denoiser(kind)
    if denoiser in network_classes():
        return f"| {name} | by its networks | that of its {denoiser}; what else the pipeline does is left out |"
    return f"| {name} | not tried | {UNTRIED.get(name, 'no tiny model of it was made')} |"


def _derived(folder: Path) -> str:
    try:
        blueprint = open_model(folder)
    except FormatError as error:
        reason = str(error).splitlines()[0].removeprefix(f"{folder}: ")
        return f"refused | {reason.removeprefix(f'{folder.name}Pipeline: ')}"
    derivation = blueprint.family.derivation  # type: ignore[attr-defined]
    return f"derived | {derivation.prediction}; time {derivation.time}; latents `{derivation.layout}`"


def _denoiser(kind: Any) -> str:
    hints = get_type_hints(kind.__init__)
    return next((hints[part].__name__ for part in ("transformer", "unet") if hasattr(hints.get(part), "__name__")), "")


def main() -> None:
    """Write the table into the page."""
    table = ["| pipeline | family | how, or why not |", "|---|---|---|", *(row(kind) for kind in pipelines())]
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    after = rest.split(END, 1)[1]
    PAGE.write_text(before + BEGIN + "\n".join(table) + "\n" + END + after, "utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
