"""Requests with different LoRAs in one batch: every image is the one of its request alone, for every family.

Bound: that of batches (`test_batches`), since a product that is added to an output and not to the weight is rounded
elsewhere, by as little as a sum taken in another order.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from inweave.errors import RequestError
from inweave.generate.config import GenerateConfig
from inweave.generate.result import Result
from tests.peers import tiny_models as tiny
from tests.peers.test_families import (
    FLOWS,
    PROMPT,
    assert_other,
    assert_same,
    hole,
    ours,
    picture,
    requests,
    theirs,
)

RANKS = (4, 128, 33)
VARIANTS = (
    "sd1.5", "sd2.1", "sdxl", "sdxl-turbo", "sd3-medium", "flux1-dev", "flux1-schnell", "flux2-klein-base-4b",
    "z-image", "z-image-turbo", "qwen-image",
)  # fmt: skip


@cache
def _folder(base: Path) -> Path:
    folder = base / "mixed-loras"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def loras(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three files for the variant of the test, with ranks from 4 to 128."""
    variant = request.node.callspec.params["variant"] if hasattr(request.node, "callspec") else "sd1.5"
    folder = _folder(tmp_path_factory.getbasetemp())
    dialect = "diffusers" if variant.startswith(FLOWS) else "kohya"
    files = [folder / f"{variant}-{rank}.safetensors" for rank in RANKS]
    for number, (path, rank) in enumerate(zip(files, RANKS, strict=True)):
        if not path.exists():
            tiny.lora(path, variant, dialect=dialect, seed=number, rank=rank)
    return [str(path) for path in files]


def configs(variant: str, loras: list[str]) -> list[GenerateConfig]:
    """Requests with one LoRA, another, two at strengths of their own, and none; guidances and prompts differ."""
    mine = requests(variant)[0]
    one, wide, ragged = loras
    stacks: list[list[str]] = [[f"{one}:0.7"], [f"{wide}:0.02"], [f"{ragged}:0.05", f"{one}:-0.3"], []]
    guidance = mine["guidance"]
    return [
        GenerateConfig(
            **mine | {"prompt": PROMPT if number % 2 else "a pear", "seed": 7 + number, "loras": stack,
                      "guidance": guidance + 0.5 * number if guidance else guidance}
        )
        for number, stack in enumerate(stacks)
    ]  # fmt: skip


def compare(variant: str, each: list[GenerateConfig], **options: Any) -> list[Result]:
    pipe = ours(variant)
    single = [pipe(config, batch=1, **options) for config in each]
    together = pipe(each, batch=len(each), **options)
    for mine, other in zip(together, single, strict=True):
        assert_same(mine.images[0], other.images[0])
        assert mine.records == other.records
    assert not pipe.model.weaver.woven or pipe.loras  # type: ignore[union-attr]
    return together


@pytest.mark.sample(5)
@pytest.mark.parametrize("variant", VARIANTS)
def test_stacks_of_their_own(variant: str, loras: list[str]) -> None:
    each = configs(variant, loras)
    together = compare(variant, each)
    assert [result.batches for result in together] == [[4]] * 4
    assert [len(result.added) for result in together] == [1, 1, 2, 0] and not any(r.merge_reason for r in together)
    plain = ours(variant)([config.model_copy(update={"loras": ()}) for config in each])
    for mine, other in zip(together[:3], plain[:3], strict=True):
        assert_other(mine.images[0], other.images[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", ["sd1.5", "sdxl", "flux1-dev"])
def test_input_images(variant: str, loras: list[str]) -> None:
    more = {"strength": 0.6, "steps": 4, "keep_unmasked": False}
    each = [config.model_copy(update=more) for config in configs(variant, loras)]
    together = compare(variant, each, init=picture(), mask=hole())
    assert [result.batches for result in together] == [[4]] * 4


@pytest.mark.parametrize("variant", ["sd1.5", "sd3-medium"])
def test_prompts_that_change_or_are_composed(variant: str, loras: list[str]) -> None:
    prompts = ["[a cat:a green pear on a table:0.4]", "a cat AND a dog :0.6", "[cat|dog]", PROMPT]
    each = [
        config.model_copy(update={"steps": 4, "prompt": prompt})
        for prompt, config in zip(prompts, configs(variant, loras), strict=True)
    ]
    assert [result.batches for result in compare(variant, each)] == [[4]] * 4


@pytest.mark.parametrize("variant", ["sd1.5", "sdxl"])
def test_text_encoders_alone(variant: str, loras: list[str]) -> None:
    stacks: list[Any] = [[{"path": path, "te": 0.5, "unet": 0.0}] for path in (loras[0], loras[2])]
    each = [
        config.model_copy(update={"loras": GenerateConfig(prompt="", loras=stack).loras, "prompt": PROMPT, "seed": 7})
        for config, stack in zip(configs(variant, loras), stacks, strict=False)
    ]
    together = compare(variant, each)
    assert [len(result.added) for result in together] == [1, 1]
    assert together[0].images[0].tobytes() != together[1].images[0].tobytes()


@pytest.mark.parametrize("variant", ["sd1.5", "flux1-dev"])
def test_the_images_of_diffusers_and_peft(variant: str, loras: list[str]) -> None:
    """Each request of a mixed batch against diffusers' pipeline with the same adapters."""
    each = [
        GenerateConfig(**requests(variant)[0] | {"prompt": PROMPT, "loras": [f"{path}:{strength}"]})
        for path, strength in ((loras[0], 0.7), (loras[2], 0.05))
    ]
    mine = ours(variant)(each, batch=2)
    assert [result.batches for result in mine] == [[2]] * 2 and all(result.added for result in mine)
    for number, path in enumerate((loras[0], loras[2])):
        pipe = theirs(variant)
        try:
            pipe.load_lora_weights(str(Path(path).parent), weight_name=Path(path).name, adapter_name="style")
            pipe.set_adapters(["style"], [(0.7, 0.05)[number]])
            expected = pipe(PROMPT, **requests(variant)[1]).images[0]
        finally:
            pipe.unload_lora_weights()
        assert_same(mine[number].images[0], expected)


def test_a_value_that_is_not_finite_stays_in_its_image(loras: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A strength at which one image overflows leaves the bits of the others."""
    each = configs("sd1.5", loras)
    good = ours("sd1.5")(each, batch=4)
    each[1] = each[1].model_copy(update={"loras": GenerateConfig(prompt="", loras=[f"{loras[1]}:1e30"]).loras})
    broken = ours("sd1.5")(each, batch=4)
    assert isinstance(broken[1].error, RequestError) and broken[1].images == []
    for number in (0, 2, 3):
        assert broken[number].images[0].tobytes() == good[number].images[0].tobytes()
