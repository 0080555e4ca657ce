"""Requests to the bundled model: seeds, stacks, input images, progress, cancellation, errors before work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from inweave.errors import CancelledError, ConfigError, InweaveError
from inweave.generate.axes import Axis
from inweave.generate.config import GenerateConfig, LoraChoice
from inweave.generate.denoise import Progress
from inweave.generate.pipeline import Pipeline, pipeline
from inweave.generate.sweep import compare, sweep
from inweave.models import embedded
from inweave.models.samplers import SAMPLERS, offered_samplers, offered_schedules, problems
from tests.support import sized

SMALL: dict[str, Any] = {"width": 64, "height": 64}
QUICK: dict[str, Any] = {"steps": 3, "seed": 7, **SMALL}
SD15 = Path(__file__).parents[2] / "data" / "files" / "catundchat_sd15_pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    yield pipeline("inweave/emoji", device="cpu")


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image, dtype=np.int16)


def bits(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in pipe.model.denoiser.state_dict().items()}


def test_the_same_seed_gives_the_same_bits_after_other_work_and_swaps(pipe: Pipeline) -> None:
    first = pipe("cat face", loras=["pixel:0.8"], **QUICK).images[0]
    pipe("rocket", loras=["ink:1", "pixel:-0.3"], steps=2, seed=1, **SMALL)
    pipe("pizza", steps=2, seed=2, **SMALL)
    again = pipe("cat face", loras=["pixel:0.8"], **QUICK).images[0]
    other = pipe("cat face", loras=["pixel:0.8"], **QUICK | {"seed": 8}).images[0]
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_images_of_a_batch_are_those_of_their_seeds(pipe: Pipeline) -> None:
    several = pipe("cat face", steps=2, seed=3, count=3, batch=1, **SMALL)
    assert [record["config"]["seed"] for record in several.records] == [3, 4, 5]
    assert several.images[2].tobytes() == pipe("cat face", steps=2, seed=5, **SMALL).images[0].tobytes()


@pytest.mark.parametrize("strength", ["1e30", "-1e30", "1e38"])
def test_a_strength_that_no_weight_can_hold_is_an_error_that_names_lora_and_tensor(
    pipe: Pipeline, strength: str
) -> None:
    before = bits(pipe)
    with pytest.raises(InweaveError, match=r"pixel.*\.weight.*overflow"):
        pipe("cat face", loras=[f"pixel:{strength}"], **QUICK)
    assert all(torch.equal(value, before[name]) for name, value in bits(pipe).items())
    with pytest.raises(InweaveError, match=r"pixel.*\.weight.*overflow"):
        pipeline("inweave/emoji", loras=[f"pixel:{strength}"], device="cpu")


def test_loras_of_a_request_are_woven_for_it_only(pipe: Pipeline) -> None:
    before = bits(pipe)
    plain = pipe("cat face", **QUICK).images[0]
    styled = pipe("cat face", loras=["pixel:1"], **QUICK)
    zero = pipe("cat face", loras=["pixel:0"], **QUICK).images[0]
    tagged = pipe("cat face <lora:pixel:1>", **QUICK)
    assert np.abs(pixels(plain) - pixels(styled.images[0])).mean() > 2
    assert zero.tobytes() == plain.tobytes()
    assert tagged.images[0].tobytes() == styled.images[0].tobytes()
    assert styled.loras[0].modules > 10 and tagged.loras[0].in_prompt
    pipe.swap([])
    assert all(torch.equal(value, before[name]) for name, value in bits(pipe).items())


def test_the_pipelines_own_stack_stays_below_every_request() -> None:
    with_pixel = pipeline("inweave/emoji", loras=["pixel:0.6"], device="cpu")
    plain = pipeline("inweave/emoji", device="cpu")
    expected = plain("cat face", loras=["pixel:0.6", "ink:0.4"], **QUICK).images[0]
    assert with_pixel("cat face", loras=["ink:0.4"], **QUICK).images[0].tobytes() == expected.tobytes()
    with_pixel.swap([])
    assert with_pixel("cat face", **QUICK).images[0].tobytes() == plain("cat face", **QUICK).images[0].tobytes()


def test_a_lora_by_path_by_name_and_by_hash_is_the_same(pipe: Pipeline) -> None:
    from inweave.exchange.hashes import hash_file

    path = embedded.loras()["pixel"]
    hashes = hash_file(path)
    choices: list[dict[str, Any]] = [
        {"path": str(path)},
        {"name": "pixel"},
        {"hash": hashes.autov2},
        {"hash": hashes.autov3},
        {"hash": hashes.sha256},
    ]
    images = {pipe("rocket", loras=[choice], steps=1, seed=1, **SMALL).images[0].tobytes() for choice in choices}
    assert len(images) == 1


def test_strength_zero_returns_the_image_and_one_ignores_it(pipe: Pipeline) -> None:
    start = pipe("red apple", seed=7, steps=12).images[0]
    unchanged = pipe("pizza", init=start, strength=0.0, steps=3, seed=7).images[0]
    assert np.abs(pixels(unchanged) - pixels(start)).mean() < 6
    near = pipe("green apple", init=start, strength=0.3, guidance=1, steps=12, seed=1).images[0]
    far = pipe("pizza", init=start, strength=1.0, steps=12, seed=1).images[0]
    distances = [np.abs(pixels(image) - pixels(start)).mean() for image in (unchanged, near, far)]
    assert distances == sorted(distances)


def test_an_image_of_any_size_comes_back_in_that_size(pipe: Pipeline) -> None:
    start = pipe("red apple", seed=7, steps=4).images[0].resize((333, 211))
    assert pipe("red apple", init=start, strength=0.5, **QUICK).images[0].size == (333, 211)


def test_inpainting_changes_the_mask_and_nothing_else(pipe: Pipeline) -> None:
    start = pipe("red apple", seed=7, steps=8).images[0].resize((150, 130))
    mask = Image.new("L", (150, 130), 0)
    ImageDraw.Draw(mask).ellipse((40, 30, 110, 100), fill=255)
    hole = np.asarray(mask) > 0
    painted = pixels(pipe("pizza", init=start, mask=mask, strength=1.0, feather=4, **QUICK).images[0])
    assert (painted[~hole] == pixels(start)[~hole]).all()
    assert np.abs(painted - pixels(start))[hole].mean() > 5
    loose = pixels(pipe("pizza", init=start, mask=mask, strength=1.0, keep_unmasked=False, **QUICK).images[0])
    assert not (loose[~hole] == pixels(start)[~hole]).all()


def test_progress_and_preview(pipe: Pipeline) -> None:
    reports: list[Progress] = []
    pipe("cat face", progress=reports.append, preview_every=2, steps=4, seed=1, count=2, batch=1, **SMALL)
    assert [(at.image, at.step, at.total) for at in reports] == [(p, s, 4) for p in (0, 1) for s in (1, 2, 3, 4)]
    assert [at.preview is not None for at in reports[:4]] == [False, True, False, False]
    assert reports[3].eta == 0 and reports[0].eta > 0


def test_out_of_memory_while_decoding_falls_back_to_tiles_and_is_reported(pipe: Pipeline) -> None:
    side = sized(256, 512)
    options: dict[str, Any] = {"steps": 2, "seed": 3, "width": side, "height": side}
    whole = pipe("cat face", **options)
    scale, sizes = pipe.model.latent_scale, list[int]()

    def short(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        sizes.append(inputs[0].shape[-1])
        if sizes[-1] * scale > 160:  # as much as this decoder's memory is good for
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = pipe.model.vae.decoder.register_forward_pre_hook(short)
    try:
        tiles = pipe("cat face", **options)
        halves = [size // scale for size in (512, 256, 128) if size <= side]
        assert sizes[: len(halves)] == halves
        assert tiles.warnings == [
            f"{side}x{side} is much larger than the 128x128 this model was trained on; subjects may repeat",
            "not enough memory to decode the image at once; it was decoded in tiles of 128 pixels",
        ]
        assert whole.warnings == tiles.warnings[:1]
        assert np.abs(pixels(tiles.images[0]) - pixels(whole.images[0])).mean() < 12, "seams, not another image"
        with pytest.raises(torch.OutOfMemoryError):
            scale = 1000
            pipe("cat face", **options)
    finally:
        hook.remove()
    assert pipe("cat face", **options).images[0].tobytes() == whole.images[0].tobytes(), "and whole again afterwards"


def test_cancellation_stops_between_steps_and_leaves_the_pipeline_usable(pipe: Pipeline) -> None:
    steps: list[int] = []
    with pytest.raises(CancelledError):
        pipe(
            "cat face",
            progress=lambda at: steps.append(at.step),
            cancelled=lambda: len(steps) == 2,
            steps=9,
            seed=1,
            **SMALL,
        )
    assert steps == [1, 2]
    assert pipe("cat face", steps=1, seed=1, **SMALL).images


@pytest.mark.sample(24)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("schedule", offered_schedules())
def test_every_sampler_runs_on_every_schedule_it_has(pipe: Pipeline, sampler: str, schedule: str) -> None:
    if sampler == "plms":  # from pure noise, where this model starts, its extrapolation damages the image
        with pytest.raises(ConfigError, match="'plms' cannot start from pure noise") as caught:
            pipe("cat face", sampler=sampler, schedule=schedule, steps=2, seed=1)
        assert str(caught.value).endswith("; use " + ", ".join(name for name in offered_samplers() if name != "plms"))
        return
    wrong = problems(sampler, schedule, flow=False, zero_snr=pipe.model.zero_snr)
    if wrong:
        with pytest.raises(ConfigError, match=f"{schedule}|scipy"):
            pipe("cat face", sampler=sampler, schedule=schedule, steps=2, seed=1)
        return
    image = pipe("cat face", sampler=sampler, schedule=schedule, steps=5, seed=1, **SMALL).images[0]
    assert np.isfinite(pixels(image)).all() and pixels(image).std() > 5


def test_a_lora_for_another_base_is_refused_before_work_with_both_named(pipe: Pipeline) -> None:
    with pytest.raises(ConfigError, match=r"made for sd1\.5.*inweave/emoji"):
        pipe("cat face", loras=[str(SD15)], steps=150)


def test_every_problem_of_a_request_is_reported_at_once(pipe: Pipeline) -> None:
    with pytest.raises(ConfigError) as caught:
        pipe("cat face", loras=[str(SD15)], sampler="ddim", schedule="karras", init="/gone.png", steps=3)
    problems = str(caught.value)
    assert "sd1.5" in problems and "karras" in problems and "gone.png" in problems
    with pytest.raises(ConfigError, match="no image to repaint"):
        pipe("cat face", mask=Image.new("L", (8, 8)), steps=3)


def test_weights_and_long_prompts_change_the_image(pipe: Pipeline) -> None:
    plain = pipe("red apple on a blue background", **QUICK).images[0]
    stressed = pipe("red apple on a (blue:1.8) background", **QUICK).images[0]
    long = pipe("red apple on a blue background, " + ", ".join(["fruit, sweet, fresh, red"] * 12), **QUICK).images[0]
    assert len({image.tobytes() for image in (plain, stressed, long)}) == 3


def test_sweeps_and_comparisons(pipe: Pipeline) -> None:
    config = GenerateConfig(prompt="cat face", loras=["pixel:0.8", "ink:0.5"], steps=2, seed=4, **SMALL)  # type: ignore[arg-type]
    cells = sweep(pipe, config, [Axis.parse("strength=0,1"), Axis.parse("seed=4,5")], batch=1)
    assert [len(row) for row in cells.results] == [2, 2]
    plain = pipe("cat face", steps=2, seed=4, **SMALL).images[0].tobytes()
    assert cells.results[0][0].images[0].tobytes() == plain
    assert cells.results[0][1].images[0].tobytes() == pipe(config).images[0].tobytes()
    pair = compare(pipe, config, batch=1)
    assert list(pair.sheet.columns) == ["no LoRA", "pixel 0.8", "ink 0.5", "all"]
    assert pair.results[0][0].images[0].tobytes() == plain
    assert pair.results[0][3].images[0].tobytes() == pipe(config).images[0].tobytes()
    for wrong in ("strength", "size=1,2", "seed=1,x"):
        with pytest.raises(ConfigError, match="grid"):
            Axis.parse(wrong)


def test_sweeps_and_comparisons_of_tags_in_the_prompt(pipe: Pipeline) -> None:
    settings = {"steps": 1, "seed": 4, **SMALL}
    plain, half = (pipe("cat face", loras=loras, **settings).images[0].tobytes() for loras in ([], ["pixel:0.4"]))
    config = GenerateConfig(prompt="cat face <lora:pixel:0.8>", **settings)
    cells = sweep(pipe, config, [Axis.parse("strength=0,0.5")], batch=1).results[0]
    assert [cell.images[0].tobytes() for cell in cells] == [plain, half]
    mixed = GenerateConfig(prompt="cat <lora:pixel:0.2:0.8> <lyco:ink>", **settings)
    assert Axis.parse("strength=-0.5").apply(mixed, -0.5).tagged_loras() == (
        LoraChoice(name="pixel", te=-0.1, unet=-0.4), LoraChoice(name="ink", te=-0.5, unet=-0.5),
    )  # fmt: skip
    pair = compare(pipe, config, batch=1)
    assert list(pair.sheet.columns) == ["no LoRA", "pixel 0.8"]
    assert pair.results[0][0].images[0].tobytes() == plain != pair.results[0][1].images[0].tobytes()
    assert pair.record["config"]["prompt"] == config.prompt
    with pytest.raises(ConfigError, match="needs a LoRA"):
        sweep(pipe, GenerateConfig(prompt="cat face"), [Axis.parse("strength=0,1")])


def test_names_are_looked_up_in_folders_and_doubt_is_an_error(pipe: Pipeline, tmp_path: Path) -> None:
    shipped = embedded.loras()["ink"].read_bytes()
    (tmp_path / "sub").mkdir()
    (tmp_path / "mine.safetensors").write_bytes(shipped)
    pipeline = Pipeline(pipe.model, lora_folders=[tmp_path])
    assert (
        pipeline("cat face", loras=["mine:0.5"], steps=1, seed=1, **SMALL).loras[0].path
        == tmp_path / "mine.safetensors"
    )
    (tmp_path / "sub" / "mine.safetensors").write_bytes(shipped)
    with pytest.raises(ConfigError, match="several files"):
        pipeline("cat face", loras=["mine:0.5"], steps=1)
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        pipeline("cat face", loras=["min"], steps=1)
