r"""Command lines of kohya's and diffusers' scripts, as people keep them: in a .sh, .bat or .ps1 file, or pasted.

    accelerate launch --num_cpu_threads_per_process 8 sdxl_train_network.py \
      --pretrained_model_name_or_path="$MODEL" \
      --network_args "algo=lokr" "factor=8" --xformers   # a comment

A line goes on after a backslash (bash), a caret (cmd) or a backtick (PowerShell). Variables that the file sets are put
in: NAME=value, export NAME=value, set NAME=value, $name = "value"; nothing is run. Options before the script belong to
the launcher. A name may be shortened as far as it stays the only one, as argparse allows.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from inweave.errors import ConfigError
from inweave.training.config.importers.diffusers import is_diffusers_script
from inweave.training.config.importers.kohya import KOHYA
from inweave.training.config.importers.translate import known_names
from inweave.training.config.importers.values import parse_scalar

_LISTS = frozenset({
    "network_args", "optimizer_args", "lr_scheduler_args", "base_weights", "base_weights_multiplier", "text_encoder_lr",
    "log_config", "metadata_tags",
})  # fmt: skip
_CONTINUED = re.compile(r"[ \t]*[\\^`][ \t]*\r?\n")
_ASSIGNMENT = re.compile(
    r"""^\s*(?:export\s+|set\s+|local\s+|declare\s+|readonly\s+|\$(?:env:)?)?"?([A-Za-z_]\w*)\s*=\s*(?!=)(.*?)\s*$"""
)
_COMMENT = re.compile(r"^[ \t]*(?:#|::|rem\b|@?echo\b)[^\n]*\n?", re.IGNORECASE | re.MULTILINE)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}|\$(?:env:)?([A-Za-z_]\w*)|%([A-Za-z_]\w*)%")
_SCRIPT = re.compile(r"\.py$|^[\w./\\-]*train_network$")


def is_command(text: str) -> bool:
    """Whether a text holds a command line of a training script."""
    options = len(re.findall(r"(?:^|\s)--[A-Za-z][\w-]*", text))
    return options >= 2 and bool(re.search(r"\.py\b|accelerate\s+launch|^\s*--\w", text, re.MULTILINE))


def parse_command(text: str) -> dict[str, Any]:
    """The options of the training command in a text, and its ``script``."""
    joined = _CONTINUED.sub(" ", _COMMENT.sub("", text))
    variables: dict[str, str] = {}
    commands: list[list[str]] = []
    for line in joined.splitlines():
        assignment = _ASSIGNMENT.match(line)
        if assignment and not re.search(r"\s--[A-Za-z]", line):
            variables[assignment[1]] = _replaced(_assigned(assignment[2]), variables)
            continue
        if re.search(r"(?:^|\s)--[A-Za-z]", line):
            commands.append(_words(_replaced(line, variables)))
    ranked = sorted(commands, key=lambda words: (any("train" in w and _SCRIPT.search(w) for w in words), len(words)))
    if not ranked:
        raise ConfigError("contains no command with options")
    return _options_of(ranked[-1])


def _options_of(words: list[str]) -> dict[str, Any]:
    scripts = [index for index, word in enumerate(words) if _SCRIPT.search(word)]
    script = next((words[index] for index in scripts), "")
    after = words[scripts[0] + 1 :] if scripts else words
    plain = is_diffusers_script(script)
    settings = parse_options(after, shortened=not plain)
    if plain and "mixed_precision" not in settings:  # theirs is the launcher's unless it is set
        launcher = parse_options(words[: scripts[0]], shortened=False)
        settings |= {name: value for name, value in launcher.items() if name == "mixed_precision"}
    return {**({"script": script} if script else {}), **settings}


def parse_options(words: Iterable[str], *, shortened: bool = True) -> dict[str, Any]:
    """--name value, --name=value, --flag, and lists of values; the last of several counts.

    ``shortened``: whether names of kohya's scripts may be shortened.
    """
    settings: dict[str, Any] = {}
    name = ""
    for word in words:
        if match := re.fullmatch(r"--([A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL):
            name = match[1].replace("-", "_")
            name = _whole_name(name) if shortened else name
            settings[name] = True if match[2] is None else _value(name, match[2])
        elif name and word not in ("&&", ";", "|", "&"):
            before = settings[name]
            if name in _LISTS:
                settings[name] = [*(before if isinstance(before, list) else []), word]
            elif before is True:
                settings[name] = _value(name, word)
            else:
                settings[name] = f"{before} {word}" if isinstance(before, str) and name.endswith("prompts") else before
        elif word in ("&&", ";", "|", "&"):
            break
    for each in _LISTS & settings.keys():
        if settings[each] is True:
            settings[each] = []
        if each == "text_encoder_lr" and isinstance(settings[each], list):
            settings[each] = [parse_scalar(value) for value in settings[each]]
    return settings


def _value(name: str, text: str) -> Any:
    return [text] if name in _LISTS else parse_scalar(text)


_NAMES = sorted({*known_names(KOHYA), *(each for each in KOHYA.missing if "*" not in each),
                 *(each for each in KOHYA.refused if "*" not in each)})  # fmt: skip


def _whole_name(name: str) -> str:
    """A shortened name as a whole."""
    matches = [each for each in _NAMES if each.startswith(name)]
    return matches[0] if len(matches) == 1 else name


def _assigned(text: str) -> str:
    """The value of an assignment: what is between quotes, or the text up to a comment."""
    text = text.strip()
    if text[:1] in ("'", '"') and text.find(text[0], 1) > 0:
        return text[1 : text.index(text[0], 1)]
    return re.split(r"\s#", text)[0].strip().rstrip('"')


def _replaced(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3] or match[4]
        return variables.get(name, match[2] if match[2] is not None else match[0])

    return _VARIABLE.sub(value, text)


def _words(line: str) -> list[str]:
    windows = bool(re.search(r"[A-Za-z]:\\", line))
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
        lexer.whitespace_split = True
        lexer.commenters = "#"
        if windows:
            lexer.escape = ""
        return list(lexer)
    except ValueError:
        return line.replace('"', "").split()
