"""A tokenizer of Mistral's kind of a few hundred tokens, made on the spot, and small numbers for its language model."""

from __future__ import annotations

from functools import cache
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, pre_tokenizers

from tests.peers.tiny_qwen import MERGES, VOCABULARY, WIDTH

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "<pad>")
CHAT = (
    "{{ bos_token }}{% for message in messages %}{% set system = message['role'] == 'system' %}"
    "{{ '[SYSTEM_PROMPT]' if system else '[INST]' }}{% for block in message['content'] %}{{ block['text'] }}"
    "{% endfor %}{{ '[/SYSTEM_PROMPT]' if system else '[/INST]' }}{% endfor %}"
)
MISTRAL = {
    "text_config": {
        "hidden_size": WIDTH, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "num_hidden_layers": 31, "vocab_size": VOCABULARY, "model_type": "mistral",
    },
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "head_dim": 8,
        "model_type": "pixtral", "image_size": 28, "patch_size": 14,
    },
}  # fmt: skip


@cache
def tokenizer() -> Any:
    """All bytes, a few merges, the marks of a chat, and padding on the left."""
    vocabulary = {
        letter: number for number, letter in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    library: Any = transformers
    made: Any = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, list(MERGES), unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return library.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        padding_side="left", chat_template=CHAT,
    )  # fmt: skip
