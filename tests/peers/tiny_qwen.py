"""A Qwen tokenizer of a few hundred tokens, made on the spot: all bytes, a few merges, and the marks of a chat."""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers
from tokenizers import pre_tokenizers

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
        additional_special_tokens=["<|im_start|>"], chat_template=CHAT,
    )  # fmt: skip
