"""Detection of every known base's own files, and of the same files when their family is not listed at all."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from inweave.adapter import Adapter, Tensor
from inweave.formats.read import read
from inweave.targets import detect as detection
from inweave.targets.bases import KNOWN, Known, known_index
from inweave.targets.declared import family_of
from inweave.targets.detect import detect
from inweave.targets.fit import stacked_shape
from inweave.targets.forms import numbers_in
from inweave.targets.links import Naming
from tests.support import hollow, sized

#: files that no rule can tell apart: the same names, shapes and number of blocks of attention or feed-forward layers
TWINS = ({"pixart", "sana"}, {"ltx", "anima"})
_SELECTIONS = {
    "all": (r"", False), "attention": (r"attn|attention|qkv|to_[qkv]$|linear[12]", False),
    "feed-forward": (r"ff|mlp|feed_forward", False), "three blocks": (r"", True),
    "attention of three blocks": (r"attn|attention|qkv|to_[qkv]$|linear[12]", True),
}  # fmt: skip
DENOISERS = [known for known in KNOWN if known.parts[0].component == "unet"]
NAMINGS = ("diffusers", "original", "kohya")


def files(base: str, naming: str) -> Iterator[tuple[str, Adapter]]:
    """A LoRA on all linear layers of a base, on those of one kind, and on those of a few blocks."""
    denoiser = known_index(base).denoiser
    assert denoiser is not None
    side: Naming = "diffusers" if naming == "diffusers" else "original"
    spellings = denoiser.by_diffusers if side == "diffusers" else denoiser.by_original
    shapes = {
        module: stacked_shape(denoiser, spelling["weight"])
        for module, spelling in spellings.items()
        if "weight" in spelling and all(len(denoiser.parts[use.part]) == 2 for use in spelling["weight"])
    }
    root = "unet." if denoiser.table.name == "unet" else "transformer."
    for selection, (pattern, few) in _SELECTIONS.items():
        tensors: dict[str, Tensor] = {}
        for module, (out, into) in shapes.items():
            in_block = bool(numbers_in(module)) and re.search("block|layer", module) is not None
            if (not pattern and not few) or (
                in_block and re.search(pattern, module) and not (few and int(numbers_in(module)[0]) > 2)
            ):
                name = {"diffusers": f"{root}{module}", "original": f"diffusion_model.{module}"}.get(naming)
                up, down = ("lora_B", "lora_A") if name else ("lora_up", "lora_down")
                name = name or f"lora_unet_{module.replace('.', '_')}"
                tensors |= {f"{name}.{down}.weight": hollow((4, into)), f"{name}.{up}.weight": hollow((out, 4))}
        if tensors:
            yield selection, read(tensors)


def cases() -> Iterator[tuple[Known, str]]:
    for number, known in enumerate(DENOISERS):
        for naming in NAMINGS:
            own = known.parts[0].table == "own" or known.parts[0].table == "unet"
            if (naming == "diffusers" or not own) and number % sized(7, 1) == 0:
                yield known, naming


@pytest.mark.parametrize(("known", "naming"), [pytest.param(*each, id=f"{each[0].name}-{each[1]}") for each in cases()])
def test_a_base_is_a_proof_and_not_the_nearest(known: Known, naming: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = dict(files(known.name, naming))
    for selection, adapter in adapters.items():
        result = detect(adapter)
        assert result.base == known.name or known.name in result.equals, selection
    family = family_of(known.name)
    monkeypatch.setattr(detection, "KNOWN", tuple(each for each in KNOWN if family_of(each.name) != family))
    for selection, adapter in adapters.items():
        result = detect(adapter)
        assert not result.proven or {family, family_of(str(result.base))} in TWINS, (selection, result)


@pytest.mark.parametrize(("base", "others", "selection"), [
    ("flux2-klein-4b", (), "attention"), ("chroma1-hd", ("flux1-dev",), "attention of three blocks"),
    ("kolors", ("sdxl",), "attention"), ("wan2.1-t2v-1.3b", (), "attention"),
])  # fmt: skip
def test_a_tie_is_reported_as_a_tie(base: str, others: tuple[str, ...], selection: str) -> None:
    result = detect(dict(files(base, "diffusers"))[selection])
    assert {base, *others} <= {result.base, *result.rivals}
    assert result.confidence <= 0.7 if others else result.base == base
