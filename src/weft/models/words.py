"""Causal language models from a transformers folder: configuration and tokenizer as JSON, weights as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weft.errors import FormatError
from weft.formats.files import network_file


def load_language_model(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder; no code in it is ever run, and a weight it lacks is not made up."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if network_file(folder) is None:
        raise FormatError(f"{folder}: no .safetensors weights in this folder")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
        )
        model, told = loaded
    except Exception as error:  # the libraries raise whatever a broken file leads them to
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise FormatError(f"{folder}: not a causal language model that can be read: {said}") from None
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    if missing := sorted(told.get("missing_keys", ())):
        raise FormatError(f"{folder}: the weights lack {missing[0]!r} ({len(missing)} missing)")
    return model.to(device).eval().requires_grad_(False), tokenizer
