"""Causal language models from a transformers folder: configuration and tokenizer as JSON, weights as safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from inweave.errors import FormatError
from inweave.formats.files import network_file


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries raise whatever a broken file leads them to
        raise _unreadable(folder, error) from None


def blank_language_model(folder: Path, dtype: torch.dtype) -> Any:
    """The model in a precision, without weights; nothing of its files but the configuration is read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if network_file(folder) is None:
        raise FormatError(f"{folder}: no .safetensors weights in this folder")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            network: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except Exception as error:  # as above
        raise _unreadable(folder, error) from None
    return network.eval().requires_grad_(False)


def _unreadable(folder: Path, error: Exception) -> FormatError:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return FormatError(f"{folder}: not a causal language model that can be read: {reason}")


def load_language_model(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder; no code in it is ever run, and a missing weight is an error."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if network_file(folder) is None:
        raise FormatError(f"{folder}: no .safetensors weights in this folder")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        tokenizer = load_tokenizer(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
        )
        model, report = loaded
    except FormatError:
        raise
    except Exception as error:  # as above
        raise _unreadable(folder, error) from None
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    if missing := sorted(report.get("missing_keys", ())):
        raise FormatError(f"{folder}: the weights lack {missing[0]!r} ({len(missing)} missing)")
    return model.to(device).eval().requires_grad_(False), tokenizer
