r"""Command lines of kohya's and diffusers' scripts, in a .sh, .bat or .ps1 file, or pasted.

    accelerate launch --num_cpu_threads_per_process 8 sdxl_train_network.py \
      --pretrained_model_name_or_path="$MODEL" \
      --network_args "algo=lokr" "factor=8" --xformers   # a comment

The variables, lists and conditions of such a file are read by `shell_script`. Options before the script belong to the
launcher. A name may be shortened as far as it stays the only one, as argparse allows. Of several training commands the
longest is read, the first where they are equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from inweave.errors import ConfigError
from inweave.training.config.schema import TrainConfig
from inweave.training.config.translate import names_in
from inweave.training.config.values import parse_scalar
from inweave.training.importers.diffusers.settings import is_diffusers_script
from inweave.training.importers.kohya.settings import KOHYA
from inweave.training.importers.shell_script import script_commands

#: key of the number of training commands in a text, if there are several
COMMANDS = "number of training commands"
_LISTS = frozenset({
    "network_args", "optimizer_args", "lr_scheduler_args", "base_weights", "base_weights_multiplier", "text_encoder_lr",
    "log_config", "metadata_tags",
})  # fmt: skip
_MUSUBI = re.compile(r"(?:^|[\\/])(?:qwen_image|zimage|flux_2)_train_network")
_SCRIPT = re.compile(r"\.py$|^[\w./\\-]*train_network$")


def is_command(text: str) -> bool:
    """Return whether a text holds a command line of a training script."""
    options = len(re.findall(r"(?:^|\s)--[A-Za-z][\w-]*", text))
    return options >= 2 and bool(re.search(r"\.py\b|accelerate\s+launch|^\s*--\w", text, re.MULTILINE))


def parse_command(text: str) -> dict[str, Any]:
    """Return the options of the training command in a text, and its ``script``."""
    commands = script_commands(text)
    if not commands:
        raise ConfigError("contains no command with options")
    training = [words for words in commands if any("train" in word and _SCRIPT.search(word) for word in words)]
    settings = _options_of(max(training or commands, key=len))
    return {**settings, **({COMMANDS: len(training)} if len(training) > 1 else {})}


def _options_of(words: list[str]) -> dict[str, Any]:
    scripts = [index for index, word in enumerate(words) if _SCRIPT.search(word)]
    script = next((words[index] for index in scripts), "")
    after = words[scripts[0] + 1 :] if scripts else words
    plain = is_diffusers_script(script)
    settings = parse_options(after, shortened=not plain)
    if (
        plain or _MUSUBI.search(script)
    ) and "mixed_precision" not in settings:  # theirs is the launcher's unless it is set
        launcher = parse_options(words[: scripts[0]], shortened=False)
        settings |= {name: value for name, value in launcher.items() if name == "mixed_precision"}
    return {**({"script": script} if script else {}), **settings}


def parse_options(words: Iterable[str], *, shortened: bool = True) -> dict[str, Any]:
    """Return the options in words: --name value, --name=value, --flag, and lists of values; the last one counts.

    ``shortened``: kohya's scripts, whose names may be shortened, and some of which take lists.
    """
    settings: dict[str, Any] = {}
    lists = _LISTS if shortened else frozenset()
    name = ""
    for word in words:
        if match := re.fullmatch(r"--([A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL):
            name = match[1].replace("-", "_")
            name = _whole_name(name) if shortened else name
            settings[name] = True if match[2] is None else _value(match[2], name in lists)
        elif name and word not in ("&&", ";", "|", "&"):
            before = settings[name]
            if name in lists:
                settings[name] = [*(before if isinstance(before, list) else []), word]
            elif before is True:
                settings[name] = _value(word)
            else:
                settings[name] = f"{before} {word}" if isinstance(before, str) and name.endswith("prompts") else before
        elif word in ("&&", ";", "|", "&"):
            break
    for each in lists & settings.keys():
        if settings[each] is True:
            settings[each] = []
        if each == "text_encoder_lr" and isinstance(settings[each], list):
            settings[each] = [parse_scalar(value) for value in settings[each]]
    return settings


def _value(text: str, listed: bool = False) -> Any:
    return [text] if listed else parse_scalar(text)


_NAMES = sorted(names_in(KOHYA))
_OWN = TrainConfig.model_fields


def _whole_name(name: str) -> str:
    """Return a shortened name in full."""
    matches = [each for each in _NAMES if each.startswith(name)]
    return matches[0] if len(matches) == 1 and name not in _OWN else name
