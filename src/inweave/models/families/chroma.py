"""Chroma: FLUX.1's blocks without its modulation, guided by a negative prompt, with T5's states alone.

    hidden_states  (batch, rows * columns, channels * 4)     attention_mask  the text, one token of padding, the image
    timestep       t / 1000                                  txt_ids, img_ids as FLUX.1

Every text has 512 tokens. T5 sees those of the text; the denoiser sees one more, and no other padding: so the model was
trained. diffusers' pipeline hands the mask over as numbers, which are added to the attention instead of hiding
anything (its issue 13619), and its checkpointed single blocks get no mask; here it hides, always.

The modulation of all blocks comes from one small network (`distilled_guidance_layer`), by which single files are known.
Their noise levels are shifted by the size of the image, as those of FLUX.1 dev; a folder has a scheduler of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.errors import FormatError
from inweave.models.families.base import (
    IMAGE_PRESET,
    ConditioningRequest,
    ModelView,
    Network,
    Pieces,
    PromptTokens,
    Shape,
    Tensors,
    Variant,
    device_of,
)
from inweave.models.families.clip import T5_TOKENIZERS, ClipFamily
from inweave.models.families.conditioning import warnings_without_clip
from inweave.models.families.flux import Flux1, pack, patch_positions, unpack

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

ENCODER, MASK = "text_encoder", "text_encoder.mask"
STATES, STATES_MASK = "encoder_hidden_states", "encoder_hidden_states_mask"
LENGTH = 512  # tokens of every text


class Chroma(ClipFamily):
    name = "chroma"
    reads_clip_states = False
    networks = (
        Network("transformer", "ChromaTransformer2DModel"),
        Network("vae", "AutoencoderKL"),
        Network("text_encoder", "T5EncoderModel", "transformers"),
    )
    tokenizers = T5_TOKENIZERS
    frozen_encoders = (ENCODER,)
    variants = (
        Variant("chroma1-hd", "chroma", "lodestones/Chroma1-HD", 1024, 40, 3.0, "flow",
                aliases=("chroma", "chroma1", "chroma1-base", "chroma-hd")),
    )  # fmt: skip
    table = "flux"
    single_file = "Chroma (distilled_guidance_layer)"
    flow = True
    even_sigmas = True
    latent_patch = 2
    steps = 40
    guidance = 3.0
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "chroma": {**IMAGE_PRESET, "resolution": 1024, "timestep_sampling": "sigmoid"}
    }
    timesteps = "sigmoid"
    attention, feed_forward = Flux1.attention, Flux1.feed_forward
    pipeline = "ChromaPipeline"

    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        return class_name == "ChromaTransformer2DModel"

    def identify(self, tensors: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
        if not any(name.startswith("distilled_guidance_layer.") for name in tensors):
            return None
        if any(name.startswith("nerf_") for name in tensors):
            raise FormatError("Chroma with nerf tensors is Chroma Radiance, which makes pixels; known is Chroma1")
        return "chroma1-hd", ["double_blocks with distilled_guidance_layer: chroma1-hd"]

    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        return "chroma", "chroma"

    def complete(self, folder: str, network: nn.Module) -> None:
        """Compute the embedding of the modulation's places, which no file has."""
        if folder == "transformer":
            places: Any = network.time_text_embed
            network.time_text_embed = type(places)(places.time_proj.num_channels, places.mod_proj.shape[0])

    def t5_length(self, model: ModelView) -> int:
        return LENGTH

    def tokenize(
        self, model: ModelView, pieces: Pieces, chunks: int | None = None, limit: int | None = None
    ) -> PromptTokens:
        import torch

        from inweave.models.encode import t5_tokens

        tokens = t5_tokens(model.tokenizers["tokenizer"], pieces, LENGTH)
        mask = (torch.arange(LENGTH) < tokens.needed)[None]
        warnings: tuple[str, ...] = ()
        if tokens.needed > LENGTH:
            cut, total = tokens.needed - LENGTH, f"the prompt has {tokens.needed} T5 tokens"
            warnings = (f"{total}; T5 reads {LENGTH}, and the last {cut} were ignored",)
        return PromptTokens({ENCODER: tokens.ids, MASK: mask}, {ENCODER: tokens.weights}, 1, warnings)

    def encode(self, model: ModelView, ids: Tensors, clip_skip: int | None, weights: Tensors | None = None) -> Tensors:
        import torch

        states, mask = ids[ENCODER], ids[MASK]
        if not states.is_floating_point():
            states = self._states(model, states, mask, None if weights is None else weights[ENCODER])
        one_more = torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], 1)
        return {STATES: states, STATES_MASK: one_more.to(states.device)}

    def frozen_states(self, model: ModelView, ids: Tensors) -> Tensors:
        device = device_of(model.networks[ENCODER])
        return {ENCODER: self._states(model, ids[ENCODER].to(device), ids[MASK].to(device), None)}

    def example_ids(self, model: ModelView, chunks: int, device: torch.device) -> Tensors:
        import torch

        mask = torch.ones(1, LENGTH, dtype=torch.bool, device=device)
        return {**super().example_ids(model, chunks, device), MASK: mask}

    def prompt_warnings(self, model: ModelView, request: ConditioningRequest) -> list[str]:
        return warnings_without_clip(request, self.is_guided(model, request.guidance))

    def batch_inputs(
        self, model: ModelView, text: Tensors, sizes: Tensor, latents: tuple[int, ...], guidance: float
    ) -> Tensors:
        import torch

        inputs = super().batch_inputs(model, text, sizes, latents, guidance)
        hidden, mask = inputs[STATES], inputs.pop(STATES_MASK)
        rows, columns = latents[2] // 2, latents[3] // 2
        image = torch.ones(len(mask), rows * columns, dtype=torch.bool, device=mask.device)
        inputs["attention_mask"] = torch.cat([mask, image], 1)
        inputs["txt_ids"] = hidden.new_zeros(hidden.shape[1], 3)
        inputs["img_ids"] = patch_positions(rows, columns, hidden)
        return inputs

    def denoise(self, model: ModelView, latents: Tensor, t: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        step = t.expand(len(latents)).to(latents.dtype) / 1000
        with _masked_checkpoints(model.denoiser, inputs["attention_mask"]):
            prediction = model.denoiser(hidden_states=pack(latents), timestep=step, return_dict=False, **inputs)[0]
        return unpack(prediction, latents.shape)

    def _states(self, model: ModelView, ids: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
        from inweave.models.encode import encode_t5

        return encode_t5(model.networks[ENCODER], ids, weights, mask)


@contextmanager
def _masked_checkpoints(denoiser: Any, mask: Tensor) -> Iterator[None]:
    """Hand the mask to single blocks that are checkpointed, which diffusers leaves out: their last argument."""
    if not getattr(denoiser, "gradient_checkpointing", False):
        yield
        return
    single = set(denoiser.single_transformer_blocks)
    original = denoiser._gradient_checkpointing_func

    def with_mask(block: Any, *inputs: Any) -> Any:
        return original(block, *inputs, mask) if block in single else original(block, *inputs)

    denoiser._gradient_checkpointing_func = with_mask
    try:
        yield
    finally:
        denoiser._gradient_checkpointing_func = original


CHROMA = Chroma()
