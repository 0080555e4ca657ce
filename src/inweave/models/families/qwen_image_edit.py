"""Qwen-Image-Edit 2509 and 2511: Qwen-Image with reference images, which the language model sees too.

    hidden_states  patches of the image, then those of the references     img_shapes  (1, rows, columns) of each
    the chat       a number: <|vision_start|> a mark for every four patches that are seen <|vision_end|> ... the prompt

A reference is encoded with an area of 1024x1024, and seen with one of 384x384. Seen patches have places in three
dimensions, which transformers computes only if it gets the kinds of the tokens; diffusers' pipeline leaves these out,
so that its images differ with transformers 5.

2511 modulates the patches of references as at time 0 (`zero_cond_t`), 2509 as those of the image; the tensors have the
same names. The version of August 2025 has another chat, without a number before each image, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from inweave.models.families.base import IMAGE_PRESET, ModelView, Network, Pieces, Shape, Tensors, Variant
from inweave.models.families.chat import ENCODER, UNIT
from inweave.models.families.qwen_image import MARK_2511, QwenImage
from inweave.models.families.references import MOST_REFERENCES, ReferenceFit, Size, of_area

if TYPE_CHECKING:
    from torch import Tensor

PIXELS, GRID = "text_encoder.pixels", "text_encoder.grid"  # patches of the images that are seen, and their numbers
_LANCZOS = 1  # PIL's number of it
_STEP = 32  # pixels: sides of references are multiples of it
_MARK = "<|image_pad|>"


class QwenImageEdit(QwenImage):
    name = "qwen-image-edit"
    networks = (
        Network("transformer", "QwenImageTransformer2DModel"),
        Network("vae", "AutoencoderKLQwenImage"),
        Network("text_encoder", "Qwen2_5_VLForConditionalGeneration", "transformers", text_model="Qwen2_5_VLModel"),
    )
    variants: ClassVar[tuple[Variant, ...]] = tuple(
        Variant(f"qwen-image-edit-{version}", "qwen-image-edit", f"Qwen/Qwen-Image-Edit-{version}", 1024, 40, 4.0,
                "flow", base="qwen-image", aliases=aliases)
        for version, aliases in (("2509", ("qwen-image-edit-plus",)), ("2511", ()))
    )  # fmt: skip
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "qwen-image-edit": {**IMAGE_PRESET, "resolution": 1024, "timestep_sampling": "shift"}
    }
    steps = 40
    references = MOST_REFERENCES
    needs_reference = True
    sees_references = True
    seen_area: ClassVar[int] = 384 * 384  # pixels of a reference as the language model sees it
    relatives: ClassVar[Mapping[str, str]] = {}
    pipeline = "QwenImageEditPlusPipeline"
    template = (
        "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
        "background), then explain how the user's text instruction should alter or modify the image. Generate a new "
        "image that meets the user's requirements while maintaining consistency with the original input where "
        "appropriate.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    )
    dropped = 64
    limit = 1024 + MOST_REFERENCES * 256  # tokens of the prompt, and of what is seen
    long_text = (512 + MOST_REFERENCES * 256) // UNIT

    def recognizes(self, class_name: str, config: Mapping[str, Any]) -> bool:
        return self.is_known(class_name, config)

    def identify(self, tensors: Mapping[str, Shape]) -> tuple[str, list[str]] | None:
        """Know 2511 by its mark; 2509 has the tensors of Qwen-Image, so its files are chosen by `--variant`."""
        return ("qwen-image-edit-2511", [f"{MARK_2511}: Qwen-Image-Edit-2511"]) if MARK_2511 in tensors else None

    def file_labels(self, variant: Variant | None, prediction: str) -> tuple[str, str]:
        return "qwen_image_edit", "Qwen-Image-Edit-Plus"

    def seen_text(self, model: ModelView, pieces: Pieces, sizes: Sequence[Size]) -> Pieces:
        from inweave.models.encode import BREAK

        vision = model.networks[ENCODER].config.vision_config
        side = vision.patch_size * vision.spatial_merge_size
        marks = ""
        for number, size in enumerate(sizes, 1):
            width, height = (max(round(pixels / side), 1) for pixels in of_area(size, self.seen_area, _STEP))
            marks += f"Picture {number}: <|vision_start|>{_MARK * (width * height)}<|vision_end|>"
        words = [(_without_marks(piece), weight) for piece, weight in pieces if piece != BREAK]
        (first, weight), *others = words or [(self.empty_text, 1.0)]
        return [(marks + first, weight), *others]

    def seen_images(self, model: ModelView, images: Sequence[Any]) -> Tensors:
        if not images:
            return {}
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        vision = model.networks[ENCODER].config.vision_config
        process = Qwen2VLImageProcessorPil(
            patch_size=vision.patch_size, merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
        )  # fmt: skip
        resized = [each.resize(of_area(each.size, self.seen_area, _STEP), _LANCZOS) for each in images]
        patches = process(resized, return_tensors="pt")
        return {PIXELS: patches["pixel_values"], GRID: patches["image_grid_thw"]}

    def reference_fit(self, model: ModelView, size: Size, area: int | None = None) -> ReferenceFit:
        fitted = of_area(size, area or self.reference_area, _STEP)
        return ReferenceFit(fitted, fitted)

    def reference_problem(self, size: Size) -> str:
        if max(size) > 50 * min(size):
            return f"it is {size[0]}x{size[1]}; a reference is up to 50 times as long as wide"
        return ""

    def edit_size(self, model: ModelView, references: Sequence[Size]) -> Size:
        return super().edit_size(model, references[-1:])

    def _states(self, model: ModelView, ids: Tensors) -> Tensor:
        encoder: Any = model.networks[ENCODER]
        row = ids[ENCODER]
        seen = {}
        if PIXELS in ids:
            marks = (row == encoder.config.image_token_id).int()
            seen = {"pixel_values": ids[PIXELS], "image_grid_thw": ids[GRID], "mm_token_type_ids": marks}
        hidden = encoder(input_ids=row, output_hidden_states=True, use_cache=False, **seen).hidden_states
        states: Tensor = hidden[-self.layer][:, self.dropped :]
        return states


def _without_marks(text: str) -> str:
    """Return a text that no part of can be taken for a seen image."""
    while _MARK in text:
        text = text.replace(_MARK, "")
    return text


QWEN_IMAGE_EDIT = QwenImageEdit()
