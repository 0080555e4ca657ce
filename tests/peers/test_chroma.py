"""Chroma against diffusers' pipelines, whose mask is made to hide padding.

They hand it over as numbers, which are added to the attention (diffusers' issue 13619).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")

import torch  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from inweave.errors import FormatError  # noqa: E402
from inweave.generate.pipeline import Pipeline  # noqa: E402
from inweave.models.derived.call import joined, size_values, text_values  # noqa: E402
from inweave.models.derived.derive import derive  # noqa: E402
from inweave.models.derived.recording import Shapes, denoiser_of, record  # noqa: E402
from inweave.models.identify import identify  # noqa: E402
from inweave.models.model import file_index, load_model  # noqa: E402
from inweave.targets import bases  # noqa: E402
from inweave.targets.index import component_from_names  # noqa: E402
from inweave.training.loop import Run  # noqa: E402
from tests.peers import tiny_models as tiny  # noqa: E402
from tests.peers.test_families import PROMPT, SEED, SIDE, assert_other, assert_same, hole, picture  # noqa: E402
from tests.unit.training.image_sets import fresh_model, make_set, sample_inputs, task_on  # noqa: E402

CHROMA, STEPS, RATE = "chroma1-hd", 3, 1e-3


@pytest.fixture(autouse=True)
def quick_tokenizers() -> Iterator[None]:
    with tiny.quick_tokenizers():
        yield


@cache
def ours() -> Pipeline:
    return Pipeline(load_model(tiny.folder(CHROMA)))


@pytest.fixture
def theirs() -> Iterator[Any]:
    pipe = tiny.pipeline(CHROMA)
    pipe.set_progress_bar_config(disable=True)

    def hidden(module: Any, args: Any, options: dict[str, Any]) -> Any:
        return args, options | {"attention_mask": options["attention_mask"].bool()}

    hook = pipe.transformer.register_forward_pre_hook(hidden, with_kwargs=True)
    yield pipe
    hook.remove()


def made(**more: Any) -> Image.Image:
    options: dict[str, Any] = {"steps": STEPS, "guidance": 4.0, "seed": SEED, "width": SIDE, "height": SIDE}
    return ours()(PROMPT, negative_prompt="blurry, dark", **options | more).images[0]


def expected(pipe: Any, **more: Any) -> Image.Image:
    image: Image.Image = pipe(
        prompt=PROMPT, negative_prompt="blurry, dark", num_inference_steps=STEPS, guidance_scale=4.0, height=SIDE,
        width=SIDE, generator=torch.Generator().manual_seed(SEED), **more,
    ).images[0]  # fmt: skip
    return image


def test_text_to_image_and_a_lora(theirs: Any, tmp_path: Path) -> None:
    plain = made()
    assert_same(plain, expected(theirs))
    file = tiny.lora(tmp_path / "style.safetensors", CHROMA, dialect="diffusers")
    theirs.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="style")
    try:
        theirs.set_adapters(["style"], [0.7])
        with_lora = expected(theirs)
    finally:
        theirs.unload_lora_weights()
    assert_same(made(loras=[f"{file}:0.7"]), with_lora)
    assert_other(with_lora, plain)


@pytest.mark.parametrize("task", [pytest.param("Img2Img", marks=pytest.mark.full), "Inpaint"])
def test_image_to_image_and_inpainting(task: str, theirs: Any) -> None:
    pipe = getattr(diffusers, f"Chroma{task}Pipeline")(**theirs.components)
    pipe.set_progress_bar_config(disable=True)
    masks = {"mask_image": hole()} if task == "Inpaint" else {}
    pipe.transformer.register_to_config(guidance_embeds=False)  # which its pipeline for inpainting reads
    mine: dict[str, Any] = {"mask": hole(), "keep_unmasked": False} if task == "Inpaint" else {}
    image = made(init=picture(), strength=0.7, **mine)
    assert_same(image, expected(pipe, image=picture(), strength=0.7, **masks))


def test_the_derived_call_is_that_of_the_family(theirs: Any) -> None:
    size = (128, 64)
    pipe = type(theirs)(**theirs.components)  # its scheduler is replaced
    denoiser = denoiser_of(pipe)
    with torch.device("meta"):
        network = type(denoiser).from_config(denoiser.config)
    derivation, model = derive(pipe, network), ours().model
    family: Any = model.family
    text = family.encode(model, family.token_ids(model, "a red apple"), None)
    latents = torch.randn(model.latent_space.shape(*size), generator=torch.Generator().manual_seed(1))
    sizes, t = torch.tensor([[size[1], size[0], 0, 0, size[1], size[0]]], dtype=torch.float32), torch.tensor(400)
    with torch.no_grad():
        actual = family.denoise(model, latents, t, family.batch_inputs(model, text, sizes, latents.shape, 1.0))
        recording = record(pipe, Shapes(network), ["a red apple"], size, derivation.strength, calls=1)
        values = joined(derivation, [text_values(derivation, recording)], 1.0)
        prediction = derivation.call(denoiser, latents, t, values, size_values(derivation, recording))
    assert torch.equal(prediction, actual)


def test_padding_is_hidden_but_for_one_token() -> None:
    model = ours().model
    family: Any = model.family
    text = family.encode(model, family.token_ids(model, "a red apple"), None)
    count = int(text["encoder_hidden_states_mask"].sum())
    assert count == len(model.tokenizers["tokenizer"]("a red apple").input_ids) + 1
    latents = torch.randn(model.latent_space.shape(64, 64), generator=torch.Generator().manual_seed(1))

    def predicted(states: torch.Tensor) -> torch.Tensor:
        changed = text | {"encoder_hidden_states": states}
        inputs = family.batch_inputs(model, changed, torch.zeros(1, 6), latents.shape, 1.0)
        with torch.no_grad():
            result: torch.Tensor = family.denoise(model, latents, torch.tensor(400), inputs)
        return result

    states = text["encoder_hidden_states"]
    others = [states.clone() for _ in range(2)]
    others[0][:, count:] += 1.0
    others[1][:, count - 1 :] += 1.0
    plain = predicted(states)
    assert torch.equal(predicted(others[0]), plain) and not torch.allclose(predicted(others[1]), plain, atol=1e-4)


def trained(tmp_path: Path, start: Path, checkpointing: str) -> tuple[Path, list[float], dict[str, torch.Tensor]]:
    model = fresh_model(CHROMA)
    task = task_on(
        make_set(tmp_path / "set"), model=model, steps=STEPS, learning_rate=RATE, weight_decay=0.0, max_grad_norm=0,
        start_from=str(start), dialect="diffusers", gradient_checkpointing=checkpointing,
        output=str(tmp_path / checkpointing),
    )  # fmt: skip
    task.prepare()
    same = sample_inputs(task)
    task.sample_batch = lambda batch, generators: same  # type: ignore[method-assign]
    report = Run(task, model, file_index(model), task.config).train()
    return report.path, report.losses, same


def test_three_steps_are_those_of_a_loop_over_diffusers_transformer(theirs: Any, tmp_path: Path) -> None:
    """With gradient checkpointing too, in which diffusers leaves the mask of single blocks out."""
    both = load_file(tiny.lora(tmp_path / "both.safetensors", CHROMA, dialect="diffusers"))
    start = tmp_path / "start.safetensors"
    save_file({key: value for key, value in both.items() if key.startswith("transformer.")}, start)
    path, losses, inputs = trained(tmp_path, start, "off")
    _, recomputed, _ = trained(tmp_path, start, "full")
    theirs.load_lora_weights(str(tmp_path), weight_name=start.name, adapter_name="style")
    try:
        weights = {name: weight for name, weight in theirs.transformer.named_parameters() if "lora_" in name}
        for weight in weights.values():
            weight.requires_grad_(True)
        optimizer = torch.optim.AdamW(weights.values(), lr=RATE, weight_decay=0.0)
        latents, noise, times = inputs["latents"], inputs["noise"], inputs["times"]
        level, (batch, _, height, width) = times.view(-1, 1, 1, 1), latents.shape
        pack = lambda value: theirs._pack_latents(value, batch, *value.shape[1:])  # noqa: E731
        own, target = pack((1 - level) * latents + level * noise), pack(noise - latents)
        mask = inputs["text.encoder_hidden_states_mask"]
        options = {
            "hidden_states": own, "timestep": times, "encoder_hidden_states": inputs["text.encoder_hidden_states"],
            "img_ids": theirs._prepare_latent_image_ids(batch, height // 2, width // 2, "cpu", torch.float32),
            "txt_ids": torch.zeros(512, 3),
            "attention_mask": torch.cat([mask, torch.ones(batch, own.shape[1], dtype=torch.bool)], 1),
        }  # fmt: skip
        plain = []
        for _ in range(STEPS):
            prediction = theirs.transformer(**options, return_dict=False)[0]
            loss = torch.nn.functional.mse_loss(prediction, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            plain.append(float(loss.detach()))
        assert losses == pytest.approx(plain, rel=2e-4) and recomputed == pytest.approx(plain, rel=2e-4)
        written = load_file(path)
        for name, weight in weights.items():
            key = f"transformer.{name.replace('.style.', '.')}"
            assert torch.allclose(written[key], weight, atol=RATE / 20, rtol=1e-3), key
    finally:
        theirs.unload_lora_weights()


def test_a_single_file_is_known_and_makes_the_same_image(tmp_path: Path) -> None:
    denoiser = bases.known_index("chroma1-hd", "original").components["unet"]
    assert identify(denoiser.tensors, {}).variant.name == CHROMA
    with pytest.raises(FormatError, match="Chroma Radiance"):
        identify({**denoiser.tensors, f"{denoiser.prefix}nerf_blocks.0.weight": (1,)}, {})
    folder = tiny.folder(CHROMA)
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    original: dict[str, torch.Tensor] = {}
    for link in component_from_names("unet", shapes).table.links(shapes, "diffusers"):
        rows = [original[link.original]] if link.original in original else []
        original[link.original] = torch.cat([*rows, weights[link.part]])
    assert any("double_blocks" in name for name in original) and not any("to_q" in name for name in original)
    save_file(original, tmp_path / "chroma.safetensors")
    parts = {
        "vae": folder / "vae" / "diffusion_pytorch_model.safetensors",
        "text_encoder": folder / "text_encoder" / "model.safetensors",
    }
    model = load_model(tmp_path / "chroma.safetensors", config=folder, parts=parts)
    options: dict[str, Any] = {"steps": STEPS, "guidance": 4.0, "seed": SEED, "width": SIDE, "height": SIDE}
    image = Pipeline(model)(PROMPT, negative_prompt="blurry, dark", **options).images[0]
    assert image.tobytes() == made().tobytes()
