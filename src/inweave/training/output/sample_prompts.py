"""The prompts of samples: from the configuration and its files to requests for images.

    sample_prompts   prompts, and files of them: an entry that ends in .txt, .toml or .json names a file
    .txt             one prompt per line; empty lines and lines that begin with # are skipped
    .toml            [prompt] with the shared settings, and one [[prompt.subset]] per prompt; kohya's names (KEYS)
    .json            a list of such tables, or of lines

A prompt is its text followed by flags, as kohya's scripts read them, in any order and each at most once:

    a cat on a mat --n blurry, dark --w 512 --h 768 --d 42 --l 7.5 --s 28 --ss euler_a

    --n TEXT  negative prompt        --d SEED   0 or more              --s STEPS
    --w, --h  width and height       --l SCALE  of the guidance        --ss SAMPLER
    --ci FILE  a reference image of an edit model; repeat it for more

The text may be empty: such a sample shows the effect of the adapter by itself.

A flag begins with two dashes, after a space or at the beginning, that are followed by a letter, and it extends to the
next flag. So `well--lit` and `day -- night` are text, and `--ar 3:2` is an unknown flag, which is an error.

The seed, steps and guidance of a line override sample_seed, sample_steps and sample_guidance of the configuration,
which override the model's defaults. Everything is checked before the first step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from inweave.checked import for_message
from inweave.errors import ConfigError
from inweave.files.paths import is_file
from inweave.generate.config import GenerateConfig
from inweave.generate.prompt import parse
from inweave.training.config.schema import TrainConfig
from inweave.training.config.toml import at_most, parse_json, parse_toml, read_text_file

#: flag of a line -> field of a request
FLAGS = {
    "n": "negative_prompt", "w": "width", "h": "height", "d": "seed", "l": "guidance", "s": "steps", "ss": "sampler",
    "ci": "references",
}  # fmt: skip
#: the same for the keys of a table
KEYS = {
    "prompt": "prompt", "negative_prompt": "negative_prompt", "width": "width", "height": "height", "seed": "seed",
    "control_image_path": "references", "scale": "guidance", "sample_steps": "steps", "sample_sampler": "sampler",
}  # fmt: skip
FILES = (".txt", ".toml", ".json")
_FLAG = re.compile(r"(?:^|\s+)--(?=[A-Za-z])")

Fields = dict[str, tuple[str, Any]]  # field of a request -> (the name the user wrote, its value)


def sample_requests(config: TrainConfig) -> list[tuple[str, GenerateConfig]]:
    """Return (its place, the request) for every prompt; all problems are raised in one error."""
    if not config.sample_prompts:
        name = "sample_every" if config.sample_every else "sample_every_epochs"
        raise ConfigError(f"{name} is set, but there are no sample_prompts")
    defaults: Fields = {
        "seed": ("sample_seed", config.sample_seed),
        "steps": ("sample_steps", config.sample_steps),
        "guidance": ("sample_guidance", config.sample_guidance),
        "clip_skip": ("clip_skip", config.clip_skip),
    }
    requests: list[tuple[str, GenerateConfig]] = []
    problems: list[str] = []
    for number, entry in enumerate(config.sample_prompts, 1):
        try:
            prompts = list(_file_prompts(entry)) if entry.lower().endswith(FILES) else [(f"prompt {number}", entry)]
        except ConfigError as error:
            problems += [f"sample_prompts: {problem}" for problem in error.problems]
            continue
        for place, written in prompts:
            try:
                fields = read_line(written) if isinstance(written, str) else _read_table(written)
                requests.append((f"sample_prompts: {place}", _request({**defaults, **fields})))
            except ConfigError as error:
                problems += [f"sample_prompts: {place}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(at_most(problems))
    return requests


def read_line(line: str) -> Fields:
    """Parse a prompt and its flags."""
    text, *pieces = _FLAG.split(line.strip())
    fields: Fields = {"prompt": ("prompt", text.strip())}
    problems: list[str] = []
    for piece in pieces:
        name, _, value = piece.strip().partition(" ")
        field = FLAGS.get(name.lower())
        if field is None:
            known = ", ".join(f"--{flag} ({target})" for flag, target in FLAGS.items())
            problems.append(f"--{name}: unknown flag; known flags are {known}")
        elif field in fields and field != "references":
            problems.append(f"--{name} ({field}): appears twice")
        else:
            _put(fields, field, f"--{name} ({field})", value.strip(), problems)
    if problems:
        raise ConfigError(problems)
    return fields


def _read_table(table: Mapping[str, Any]) -> Fields:
    """Parse a prompt of one of kohya's .toml and .json files."""
    fields: Fields = {"prompt": ("prompt", "")}
    problems: list[str] = []
    for name, value in table.items():
        if name in KEYS:
            _put(fields, KEYS[name], name, value, problems)
        else:
            problems.append(f"{name}: unknown key; known keys are {', '.join(KEYS)}")
    if problems:
        raise ConfigError(problems)
    return fields


def _put(fields: Fields, field: str, label: str, value: Any, problems: list[str]) -> None:
    """Store a value, from text or from a table, if it is of the right kind."""
    expected = (
        "a whole number of 0 or more" if field in ("width", "height", "seed", "steps") else "a number of 0 or more"
    )
    if field == "references":
        value = value if isinstance(value, list) else [value]
        expected, fits = "an image file, or a list of them", all(isinstance(each, str) and each for each in value)
        value = (*fields.get(field, (label, ()))[1], *value)
    elif field in ("prompt", "negative_prompt", "sampler"):
        expected, fits = "text", isinstance(value, str) and (bool(value) or field == "prompt")
    elif isinstance(value, str):
        pattern = r"[0-9]{1,30}" if "whole" in expected else r"[0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30}"
        fits = re.fullmatch(pattern, value) is not None
        value = (int if "whole" in expected else float)(value) if fits else value
    else:
        fits = type(value) in ((int,) if "whole" in expected else (int, float)) and value >= 0
    if fits:
        fields[field] = label, value
    else:
        problems.append(f"{label}: expected {expected}, got {for_message(value)}")


def _request(fields: Fields) -> GenerateConfig:
    """Build a request; problems name a field as the user wrote it."""
    if parse(str(fields["prompt"][1])).tags:
        raise ConfigError("<lora:...>: a sample shows the adapter being trained and no other; remove the tag")
    try:
        return GenerateConfig(**{field: value for field, (_, value) in fields.items()})
    except ConfigError as error:
        raise error.renamed({field: label for field, (label, _) in fields.items()}) from None


def _file_prompts(name: str) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    """Yield (its place, the line or table) for every prompt in a file."""
    if not is_file(name):
        raise ConfigError(f"{name}: no such file; a prompt itself cannot end in {', '.join(FILES)}")
    text = read_text_file(name)
    if name.lower().endswith(".txt"):
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
        prompts: list[Any] = [(f"{name}:{number}", line) for number, line in lines if line and line[0] != "#"]
    else:
        listed = _toml_prompts(text, name) if name.lower().endswith(".toml") else _json_prompts(text, name)
        prompts = [(f"{name}: prompt {number}", each) for number, each in enumerate(listed, 1)]
    if not prompts:
        raise ConfigError(f"{name}: contains no prompt")
    yield from prompts


def _toml_prompts(text: str, name: str) -> list[Any]:
    common = parse_toml(text, name).get("prompt")
    subsets = common.get("subset") if isinstance(common, dict) else None
    if not isinstance(common, dict) or not isinstance(subsets, list) or not all(isinstance(s, dict) for s in subsets):
        raise ConfigError(f"{name}: expected a [prompt] table with one [[prompt.subset]] per prompt")
    shared = {key: value for key, value in common.items() if key != "subset"}
    return [{**shared, **subset} for subset in subsets]


def _json_prompts(text: str, name: str) -> list[Any]:
    listed = parse_json(text, name)
    if not isinstance(listed, list) or not all(isinstance(each, dict | str) for each in listed):
        raise ConfigError(f"{name}: expected a list of prompts, each a table or a line")
    return listed
