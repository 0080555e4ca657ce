"""Files as trainers name them, for one base of every family in each naming: recognized, and placed completely."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest

from inweave.formats.read import read
from inweave.targets.bases import KNOWN, known_index
from inweave.targets.detect import detect
from inweave.targets.index import Component
from inweave.targets.resolve import resolve
from inweave.targets.tables import SPELLINGS
from tests.support import hollow, sized

Shapes = Mapping[str, tuple[int, ...]]
RANK = 8

#: bases whose tensors differ in shape from every other's; one or more of every family
BASES = (
    "anima", "auraflow-0.3", "chroma1-hd", "cogvideox-2b", "flux1-dev", "flux2-klein-4b", "flux2-klein-9b", "framepack",
    "hidream-i1", "hunyuanimage-2.1", "hunyuanvideo", "hunyuanvideo-1.5", "kandinsky5-pro-video", "krea2",
    "longcat-image", "ltx-2", "ltx-video-13b", "ltx-video-2b", "lumina2", "mochi-1-preview", "omnigen2",
    "ovis-image-7b", "pixart-sigma-1024", "qwen-image", "sana-1.5-4.8b", "sana-0.6b", "stable-cascade-prior-1b",
    "wan2.1-i2v-14b", "wan2.1-vace-1.3b", "wan2.1-vace-14b", "wan2.2-ti2v-5b", "z-image-turbo", "minimax-h3",
    "ideogram4", "flux3", "sana-video-2b",
)  # fmt: skip


def pair(name: str, shape: tuple[int, ...], down: str, up: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{down}.weight": (RANK, shape[1]), f"{name}.{up}.weight": (shape[0], RANK)}


def peft(prefix: str, suffix: str = "") -> Callable[[Shapes], Shapes]:
    """`prefix` + dotted module + lora_A/lora_B: diffusers, ai-toolkit, SimpleTuner, finetrainers, fal, DiffSynth."""

    def names(tensors: Shapes) -> Shapes:
        rows = (pair(prefix + m, s, f"lora_A{suffix}", f"lora_B{suffix}") for m, s in linear(tensors).items())
        return {name: shape for row in rows for name, shape in row.items()}

    return names


def kohya(prefix: str, *, flat: bool = True) -> Callable[[Shapes], Shapes]:
    """`prefix` + module + lora_down/lora_up and alpha: sd-scripts, musubi-tuner, OneTrainer, LyCORIS."""

    def names(tensors: Shapes) -> Shapes:
        made: dict[str, tuple[int, ...]] = {}
        for module, shape in linear(tensors).items():
            name = prefix + (module.replace(".", "_") if flat else module)
            made |= pair(name, shape, "lora_down", "lora_up") | {f"{name}.alpha": ()}
        return made

    return names


def distilled(tensors: Shapes) -> Shapes:
    """LoRA, and differences for every tensor that is not a matrix: LightX2V's and Kijai's distilled models."""
    made = dict(kohya("diffusion_model.", flat=False)(tensors))
    for name, shape in tensors.items():
        module, _, param = name.rpartition(".")
        if param == "bias":
            made[f"diffusion_model.{module}.diff_b"] = shape
        elif param in ("weight", "scale") and len(shape) == 1:
            made[f"diffusion_model.{module}.diff"] = shape
    return made


TRAINERS: dict[str, Callable[[Shapes], Shapes]] = {
    "kohya": kohya("lora_unet_"),
    "diffusers": peft("transformer."),
    "ai-toolkit": peft("diffusion_model."),
    "distilled": distilled,
    "onetrainer": kohya("lora_transformer_"),
    "onetrainer dotted": kohya("transformer.", flat=False),
    "peft": peft("base_model.model."),
    "diffsynth": peft("pipe.dit.", ".default"),
    "bare": peft("", ".default"),
    "lycoris": kohya("lycoris_"),
}


def linear(tensors: Shapes) -> dict[str, tuple[int, ...]]:
    """The matrices of all blocks."""
    return {n.removesuffix(".weight"): s for n, s in tensors.items() if n.endswith(".weight") and len(s) == 2}


def ends(tensors: Shapes) -> Shapes:
    """Return the names in the first and the last block of each stack, which show how deep the model is."""
    last: dict[str, int] = {}
    numbered = {name: m for name in tensors if (m := re.match(r"(\D*?(?:blocks|layers|refiner))\.(\d+)\.", name))}
    for match in numbered.values():
        last[match[1]] = max(last.get(match[1], 0), int(match[2]))
    return {name: tensors[name] for name, m in numbered.items() if int(m[2]) in (0, 1, last[m[1]])}


def namings(base: str) -> dict[str, Component]:
    component = known_index(base, "original").components["unet"]
    spellings = [component, *(component.spelled_by(name) for name in SPELLINGS.get(component.table.name, ()))]
    spelled = {each.table.name: each for each in spellings}
    return spelled if component.table.name == "own" else {"diffusers": known_index(base).components["unet"]} | spelled


CASES = [
    (base, naming, trainer)
    for number, (base, naming) in enumerate((base, naming) for base in BASES for naming in namings(base))
    for trainer in [*TRAINERS, *TRAINERS][number % len(TRAINERS) :][: sized(2, len(TRAINERS))]
]


@pytest.mark.parametrize(("base", "naming", "trainer"), CASES)
def test_a_trainers_file_names_its_base_and_places_on_it_whole(base: str, naming: str, trainer: str) -> None:
    component = namings(base)[naming]
    tensors = ends({name.removeprefix(component.prefix): shape for name, shape in component.tensors.items()})
    adapter = read({key: hollow(shape, "BF16") for key, shape in TRAINERS[trainer](tensors).items()})
    report = resolve(adapter, known_index(base)).report  # strict: raises on anything left over
    assert report.placed == len(adapter.tensors)
    detection = detect(adapter)
    assert detection.base == base or detection.fits_as_well(base)


def test_every_family_has_a_base_here() -> None:
    tables = {known.parts[0].table for known in KNOWN if known.parts[0].component == "unet"} - {"unet", "sd3", "own"}
    assert tables == {known.parts[0].table for known in KNOWN if known.name in BASES} - {"own"}


@pytest.mark.parametrize(
    "names",
    [
        "text_encoder.model.layers.{}.self_attn.{}",
        "text_encoder.model.language_model.layers.{}.self_attn.{}",
        "text_encoders.qwen25_7b.transformer.model.layers.{}.self_attn.{}",
    ],
)
def test_a_language_model_trained_beside_qwen_image_has_its_place(names: str) -> None:
    tensors = dict(peft("transformer.")(ends(known_index("qwen-image").components["unet"].tensors)))
    for layer in range(28):
        for leaf, rows in (("q_proj", 3584), ("k_proj", 512), ("v_proj", 512), ("o_proj", 3584)):
            tensors |= pair(names.format(layer, leaf), (rows, 3584), "lora_A", "lora_B")
    adapter = read({key: hollow(shape, "BF16") for key, shape in tensors.items()})
    report = resolve(adapter, known_index("qwen-image")).report
    assert report.placed == len(tensors)
    assert report.components["te1"]["modules"] == 112
    detection = detect(adapter)
    assert (detection.base, detection.confidence) == ("qwen-image", 1.0)
