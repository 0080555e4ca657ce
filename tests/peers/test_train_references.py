"""Training edit models: three steps equal a plain loop over the call that diffusers' own pipeline makes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")

import torch  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from inweave.models.model import file_index  # noqa: E402
from inweave.training.loop import Run  # noqa: E402
from tests.peers import tiny_models as tiny  # noqa: E402
from tests.peers import tiny_qwen  # noqa: E402
from tests.unit.training.image_sets import color_image, fresh_model, make_set, sample_inputs, task_on  # noqa: E402

KONTEXT, DEV, KLEIN_BASE = "flux1-kontext-dev", "flux2-dev", "flux2-klein-base-4b"
EDIT_2509, EDIT_2511 = "qwen-image-edit-2509", "qwen-image-edit-2511"
CAPTIONS = {"a": "a red apple, table, still life", "b": "a blue boat, sea, sail, sky"}
STEPS, RATE = 3, 1e-3
#: sizes of the references in each folder
FOLDERS = {"before": (101, 75), "second": (64, 96)}


def edit_set(folder: Path, count: int) -> Path:
    """Two images, and ``count`` references of each in folders of their own; returns the dataset file."""
    make_set(folder, CAPTIONS)
    for number, (name, size) in enumerate(list(FOLDERS.items())[:count]):
        (folder / name).mkdir()
        for image, stem in enumerate(CAPTIONS):
            color_image(10 * number + image + 5, *size).save(folder / name / f"{stem}.png")
    names = ", ".join(f'"{name}/"' for name in list(FOLDERS)[:count])
    file = folder / "set.toml"
    file.write_text(f'[[datasets]]\n[[datasets.subsets]]\nimage_dir = "."\ncontrol = [{names}]\n')
    return file


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with tiny_qwen.small_references():
        yield


def pipeline_calls(pipe: Any, variant: str, folder: Path, count: int) -> list[dict[str, Any]]:
    """The arguments of the denoiser in the pipeline's first step, for each caption with its references."""
    calls: list[dict[str, Any]] = []
    hook = pipe.transformer.register_forward_pre_hook(lambda *call: calls.append(dict(call[2])), with_kwargs=True)
    try:
        for stem, caption in CAPTIONS.items():
            images = [Image.open(folder / name / f"{stem}.png") for name in list(FOLDERS)[:count]]
            more: dict[str, Any] = {} if variant in (EDIT_2509, EDIT_2511) else {"guidance_scale": 1.0}
            more |= {"max_area": 64 * 64} if variant == KONTEXT else {}
            pipe(prompt=caption, image=images, num_inference_steps=1, width=64, height=64, output_type="latent", **more)
    finally:
        hook.remove()
    return calls


def plain_loop(
    variant: str, start: Path, folder: Path, count: int, inputs: dict[str, torch.Tensor]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(the losses, the trained weights) of AdamW on PEFT's layers in the pipeline's transformer."""
    pipe = tiny.pipeline(variant)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(str(start.parent), weight_name=start.name, adapter_name="style")
    try:
        calls = pipeline_calls(pipe, variant, folder, count)
        trained = {name: weight for name, weight in pipe.transformer.named_parameters() if "lora_" in name}
        for weight in trained.values():
            weight.requires_grad_(True)
        optimizer = torch.optim.AdamW(trained.values(), lr=RATE, weight_decay=0.0)

        def pack(latents: torch.Tensor) -> torch.Tensor:
            if variant in (KONTEXT, EDIT_2509, EDIT_2511):
                return pipe._pack_latents(latents, len(latents), *latents.shape[1:])
            return pipe._pack_latents(latents)

        latents, noise, times = inputs["latents"], inputs["noise"], inputs["times"]
        level = times.view(-1, 1, 1, 1)
        own, target = pack((1 - level) * latents + level * noise), pack(noise - latents)
        tokens = own.shape[1]
        losses = []
        for _ in range(STEPS):
            rows = []
            for number, call in enumerate(calls):
                seen = torch.cat([own[number : number + 1], call["hidden_states"][:, tokens:]], 1)
                arguments = call | {"hidden_states": seen, "timestep": times[number : number + 1], "return_dict": False}
                rows.append(pipe.transformer(**arguments)[0][:, :tokens])
            loss = torch.nn.functional.mse_loss(torch.cat(rows), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses, {name: weight.detach().clone() for name, weight in trained.items()}
    finally:
        pipe.unload_lora_weights()


# Kontext encodes a reference of a megapixel
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("variant", "count"),
    [
        pytest.param(KONTEXT, 1, marks=pytest.mark.full), (DEV, 1), (KLEIN_BASE, 2), (EDIT_2511, 2),
        pytest.param(EDIT_2509, 1, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_three_steps_are_those_of_a_loop_over_the_pipelines_call(variant: str, count: int, tmp_path: Path) -> None:
    start = tmp_path / "start.safetensors"
    both = load_file(tiny.lora(tmp_path / "both.safetensors", variant, dialect="diffusers"))
    save_file({key: value for key, value in both.items() if key.startswith("transformer.")}, start)
    data, model = edit_set(tmp_path / "set", count), fresh_model(variant)
    targets: dict[str, Any] = {} if variant == KONTEXT else {"targets": "attention-mlp"}
    area = 128 if variant in (EDIT_2509, EDIT_2511) else 1024
    task = task_on(
        data, model=model, **targets, steps=STEPS, learning_rate=RATE, weight_decay=0.0, max_grad_norm=0,
        start_from=str(start), dialect="diffusers", guidance=1.0, timestep_sampling="shift", reference_resolution=area,
        output=str(tmp_path / "out"),
    )  # fmt: skip
    task.prepare()
    same = sample_inputs(task)
    assert sum(name.startswith("text.reference.") for name in same) == count
    task.sample_batch = lambda batch, generators: same  # type: ignore[method-assign]
    report = Run(task, model, file_index(model), task.config).train()
    losses, weights = plain_loop(variant, start, tmp_path / "set", count, same)
    assert report.losses == pytest.approx(losses, rel=2e-4)
    assert len({round(loss, 5) for loss in losses}) == STEPS
    written = load_file(report.path)
    before = load_file(start)
    for name, weight in weights.items():
        key = f"transformer.{name.replace('.style.', '.')}"
        assert torch.allclose(written[key], weight, atol=RATE / 20, rtol=1e-3), key
        last_queries = "transformer_blocks.1.attn.add_q_proj"  # of the text, which nothing reads after the last block
        unused = variant in (EDIT_2509, EDIT_2511) and last_queries in key
        assert torch.equal(written[key], before[key]) is (unused or torch.equal(weight, before[key])), key


def test_references_change_what_is_learned(tmp_path: Path) -> None:
    """Without them the loss of the same batch is another one."""
    task = task_on(edit_set(tmp_path / "set", 1), model=fresh_model(KLEIN_BASE), steps=1)
    task.prepare()
    inputs = sample_inputs(task)
    without = {name: value for name, value in inputs.items() if "reference" not in name}
    mirrored = inputs | {"text.reference.0": inputs["text.reference.0"].flip(-1)}
    with torch.no_grad():
        losses = [float(task.loss(each)) for each in (inputs, without, mirrored)]
    assert len({round(loss, 6) for loss in losses}) == 3
