"""SimpleTuner's config.env: the flags of its script as variables of a shell. Nothing is run.

export MODEL_FAMILY='flux'            model_family = flux; most names are those of the flags in capitals
export MAX_NUM_STEPS=1000             max_train_steps = 1000; some are names of their own
TRAINER_EXTRA_ARGS="--lora_rank=16"   flags; TRAINER_EXTRA_ARGS+=" --b" appends to them

A value in quotes, and one with a backslash at the end of a line, goes on in the next; others end at ; or a comment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any, Final

from inweave.errors import ConfigError
from inweave.training.config.values import names, parse_scalar, words

#: names that are not those of the flags
_RENAMED: Final = {
    "RESUME_CHECKPOINT": "resume_from_checkpoint", "DATALOADER_CONFIG": "data_backend_config", "TRAINING_SEED": "seed",
    "USE_XFORMERS": "enable_xformers_memory_efficient_attention", "MINIMUM_RESOLUTION": "minimum_image_size",
    "PUSH_CHECKPOINTS": "push_checkpoints_to_hub", "MAX_NUM_STEPS": "max_train_steps", "NUM_EPOCHS": "num_train_epochs",
    "CHECKPOINTING_LIMIT": "checkpoints_total_limit", "HUB_MODEL_NAME": "hub_model_id", "LR_SCHEDULE": "lr_scheduler",
    "MODEL_NAME": "pretrained_model_name_or_path", "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing",
    "TRAINING_NUM_PROCESSES": "num_processes",
}  # fmt: skip
#: variables of the launcher and of the files' examples, and TRAINER_EXTRA_ARGS, which is read apart
_OTHERS: Final = names("""
    TRAINER_EXTRA_ARGS TRAINING_NUM_MACHINES TRAINER_DYNAMO_BACKEND TRAINING_DYNAMO_BACKEND ACCELERATE_EXTRA_ARGS
    DISABLE_UPDATES SIMPLETUNER_LOG_LEVEL TOKENIZERS_PARALLELISM
""")
_NAME: Final = r"[ \t]*(?:export[ \t]+)?([A-Z][A-Z0-9_]*)(\+?)="
_FIRST, _FOLLOWING = re.compile(f"^{_NAME}", re.MULTILINE), re.compile(f"(?:;|&&){_NAME}")
#: up to the end of the line, a comment or another command; quotes and backslashes keep these
_VALUE = re.compile(r"""(?:'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^'"\\;&#\n]|(?<!\s)#)*""", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}|\$([A-Z][A-Z0-9_]*)")
_MARK = re.compile(r"^[ \t]*(?:export[ \t]+)?(?:MODEL_FAMILY|MODEL_TYPE|DATALOADER_CONFIG)=", re.MULTILINE)


def is_env(text: str) -> bool:
    """Return whether a text sets SimpleTuner's variables, and runs nothing."""
    return bool(_MARK.search(text)) and not re.search(r"\.py\b|accelerate\s+launch", text)


def parse_env(text: str, where: str) -> dict[str, Any]:
    """Return the flags that a text sets; ``where`` names it in errors."""
    variables: dict[str, str] = {}
    for name, appended, value in _assignments(text.replace("\r\n", "\n"), where):
        known = _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ""), value)
        variables[name] = f"{variables.get(name, '')} {known}" if appended else known
    settings = {
        _RENAMED.get(name, name.lower()): parse_scalar(value.strip())
        for name, value in variables.items()
        if name not in _OTHERS
    }
    last = ""
    for word in words(variables.get("TRAINER_EXTRA_ARGS", "")):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            last = flag.removeprefix("--").replace("-", "_")
            settings[last] = parse_scalar(value) if equals else True
        elif last:
            settings[last] = parse_scalar(word)
    return settings


def _assignments(text: str, where: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, "+" if it appends, value) of a text, in order."""
    match = _FIRST.search(text)
    while match is not None:
        end = match.end() + len(value := _VALUE.match(text, match.end())[0])  # type: ignore[index]  # which always matches
        if text[end : end + 1] in ("'", '"', "\\"):
            line = text.count("\n", 0, match.end()) + 1
            raise ConfigError(f"{where}: line {line}: the value of {match[1]} has a quote that is not closed; close it")
        yield match[1], match[2], " ".join(shlex.split(value.replace("\\\n", "")))
        match = _FOLLOWING.match(text, end) or _FIRST.search(text, end)
