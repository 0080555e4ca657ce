"""A Qwen tokenizer of a few hundred tokens, made on the spot: all bytes, a few merges, and the marks of a chat."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import transformers
from tokenizers import pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

MERGES = (("t", "h"), ("th", "e"), ("a", "n"), ("o", "n"), ("Ġ", "a"), ("r", "e"), ("p", "l"))
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
WIDTH = 24  #: of the states
VOCABULARY = 300  #: of the text encoders, a little more than the tokenizer knows

#: small numbers for the language models; heads of 8 in both
QWEN3 = {
    "hidden_size": WIDTH, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_hidden_layers": 3, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
QWEN2_5 = {
    "hidden_size": WIDTH, "intermediate_size": 32, "num_attention_heads": 3, "num_key_value_heads": 1,
    "num_hidden_layers": 3, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None,
    "rope_scaling": {"mrope_section": [2, 1, 1], "type": "mrope"},
    "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH},
}  # fmt: skip


@cache
def tokenizer() -> Any:
    """Both models have the same."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    library: Any = transformers
    return library.Qwen2Tokenizer(
        vocab=vocabulary, merges=list(MERGES), unk_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
        chat_template=CHAT,
    )  # fmt: skip


def image_token() -> int:
    """The number of the mark of an image's patches."""
    return int(tokenizer().convert_tokens_to_ids("<|image_pad|>"))


def pass_kinds(pipe: Any) -> None:
    """Hand the text encoder of Qwen-Image-Edit's pipeline the kinds of its tokens, which the pipeline leaves out.

    Without them transformers 5 has no places in three dimensions for the patches of an image (diffusers' issue 14194).
    """

    def with_kinds(module: Any, args: Any, options: dict[str, Any]) -> Any:
        return args, options | {"mm_token_type_ids": (options["input_ids"] == image_token()).int()}

    pipe.text_encoder.register_forward_pre_hook(with_kinds, with_kwargs=True)


@contextmanager
def small_references() -> Iterator[None]:
    """Take references of 128x128 pixels, and see 96x96 of them, on both sides; full size costs minutes on a CPU."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as theirs

    from inweave.models.families.qwen_image_edit import QwenImageEdit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "VAE_IMAGE_SIZE", 128 * 128)
        patch.setattr(theirs, "CONDITION_IMAGE_SIZE", 96 * 96)
        patch.setattr(QwenImageEdit, "reference_area", 128 * 128)
        patch.setattr(QwenImageEdit, "seen_area", 96 * 96)
        yield


class Processor:
    """What transformers' processor of this model does, which cannot be made without torchvision."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()
        self.image_processor = Qwen2VLImageProcessorPil()

    def __call__(self, text: list[str], images: list[Any], **options: Any) -> Any:
        patches = self.image_processor(images, return_tensors="pt")
        counts = iter([int(grid.prod()) // self.image_processor.merge_size**2 for grid in patches["image_grid_thw"]])
        whole = [re.sub(r"<\|image_pad\|>", lambda mark: mark[0] * next(counts), each) for each in text]
        return transformers.BatchFeature({**self.tokenizer(whole, **options), **patches})
