"""Families that were written by hand, and what is derived from the pipelines of their models: the same prediction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from inweave.models.derived.call import joined, size_values, text_values
from inweave.models.derived.derive import derive
from inweave.models.derived.recording import Shapes, denoiser_of, record
from inweave.models.model import load_model
from tests.peers import tiny_models as tiny

SIZE = (128, 64)
pytestmark = pytest.mark.usefixtures("quick_tokenizers")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "variant",
    [
        "flux1-dev", "flux2-klein-base-4b", "qwen-image",
        *(pytest.param(v, marks=pytest.mark.full) for v in ("sd1.5", "sdxl", "z-image")),
    ],
)  # fmt: skip
def test_the_derived_call_is_that_of_the_family(variant: str) -> None:
    published = tiny.pipeline(variant)
    flags = {name: value for name, value in published.config.items() if isinstance(value, bool)}
    pipe = type(published)(**published.components, **flags)  # its scheduler is replaced
    denoiser = denoiser_of(pipe)
    with torch.device("meta"):
        network = type(denoiser).from_config(denoiser.config)
    derivation = derive(pipe, network)
    model = load_model(tiny.folder(variant), device="cpu")
    family: Any = model.family
    assert (derivation.prediction == "flow") == family.flow
    text = family.encode(model, family.token_ids(model, "a red apple"), None)
    latents = torch.randn(model.latent_space.shape(*SIZE), generator=torch.Generator().manual_seed(1))
    t = torch.tensor(400)
    sizes = torch.tensor([[SIZE[1], SIZE[0], 0, 0, SIZE[1], SIZE[0]]], dtype=torch.float32)
    with torch.no_grad():
        expected = family.denoise(model, latents, t, family.batch_inputs(model, text, sizes, latents.shape, 1.0))
        recording = record(pipe, Shapes(network), ["a red apple"], SIZE, derivation.strength, calls=1)
        values = joined(derivation, [text_values(derivation, recording)], 1.0)
        prediction = derivation.call(denoiser, latents, t, values, size_values(derivation, recording))
    if variant == "z-image":  # its pipeline encodes a text with padding, which rounds otherwise
        torch.testing.assert_close(prediction, expected, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(prediction, expected)
