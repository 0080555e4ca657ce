"""Pictures drawn during training: the configuration's prompts, from the same seeds every time, with the adapter as it is.

    sample_prompts   prompts, and files of them: an entry that ends in .txt, .toml or .json names a file
    .txt             a prompt a line; empty lines and lines that begin with # are skipped
    .toml            [prompt] with what all have in common, and a [[prompt.subset]] for each; kohya's names (KEYS)
    .json            a list of such tables, or of lines

A prompt is its text, then flags, as kohya's scripts read them, in any order and each at most once:

    a cat on a mat --n blurry, dark --w 512 --h 768 --d 42 --l 7.5 --s 28 --ss euler_a

    --n TEXT  negative prompt        --d SEED   0 or more              --s STEPS
    --w, --h  width and height       --l SCALE  of the guidance        --ss SAMPLER

A flag begins where two dashes with a space (or nothing) before them have a letter after them, and holds everything up to
the next one. So `well--lit` and `day -- night` are text, and `--ar 3:2` is an unknown flag: it is refused, not drawn.

What a line says of seed, steps and guidance goes before sample_seed, sample_steps and sample_guidance of the
configuration, and those before the model's own. All of it is checked before the first step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from inweave.checked import for_message
from inweave.errors import ConfigError
from inweave.generate.config import GenerateConfig
from inweave.generate.pipeline import Pipeline
from inweave.generate.prompt import parse
from inweave.models.families.base import Conditioning
from inweave.models.model import Model
from inweave.training.config.schema import TrainConfig
from inweave.training.config.toml import at_most, parse_toml, read_text_file
from inweave.training.output.log import Drawn

#: by what a line calls it, what it sets
FLAGS = {
    "n": "negative_prompt", "w": "width", "h": "height", "d": "seed", "l": "guidance", "s": "steps", "ss": "sampler",
}  # fmt: skip
#: the same in a table
KEYS = {
    "prompt": "prompt", "negative_prompt": "negative_prompt", "width": "width", "height": "height", "seed": "seed",
    "scale": "guidance", "sample_steps": "steps", "sample_sampler": "sampler",
}  # fmt: skip
FILES = (".txt", ".toml", ".json")
_FLAG = re.compile(r"(?:^|\s+)--(?=[A-Za-z])")

Said = dict[str, tuple[str, Any]]  # field of a request -> (what it was called, its value)


class Sampler:
    """Draws the configuration's prompts with the adapter as it is; what cannot be drawn is told when it is made.

    ``writes``: whether this process keeps the pictures; where the base is spread over several, all of them draw.
    """

    def __init__(self, model: Model, config: TrainConfig, *, writes: bool = True) -> None:
        placed = sample_requests(config)
        self._pipe = _Live(model, remembers=not config.train_text_encoders)
        self._requests = [request for _, request in placed]
        wrong: list[str] = []
        for place, request in placed:
            try:
                self._pipe.settle(request)
            except ConfigError as error:
                wrong += [f"{place}: {problem}" for problem in error.problems]
        if wrong:
            raise ConfigError(at_most(wrong))
        self._folder, self._name, self._writes = Path(config.output) / "samples", config.name, writes

    def encode(self) -> None:
        """Ask the text encoders now: where they do not learn they need not be there to draw."""
        for request in self._requests:
            self._pipe.encode(request)

    def __call__(self, step: int) -> list[Drawn]:
        # all of them before the first is written: who draws together must not stop where only one of them can fail
        drawn = [self._pipe(request) for request in self._requests]
        found = []
        for number, made in enumerate(drawn if self._writes else ()):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{self._name}-{step:06d}-{number}.png"
            made.save(path)
            found.append(Drawn(path, tuple(made.warnings)))
        return found


class _Live(Pipeline):
    """A pipeline over a model whose adapters are layers that learn: there is nothing to weave."""

    def __init__(self, model: Model, *, remembers: bool) -> None:
        super().__init__(model)
        # the texts never change, and what frozen encoders say of them does not either
        self._known: dict[str, Conditioning] | None = {} if remembers else None

    def encode(self, request: GenerateConfig) -> None:
        self._conditioning(self.settle(request))

    def _run(self, request: Any, watch: Any) -> Any:
        return super()._run(replace(request, loras=[]), watch)

    def _conditioning(self, request: Any) -> Conditioning:
        if self._known is None:
            return super()._conditioning(request)
        key = repr((request.config, request.size))
        if key not in self._known:
            self._known[key] = super()._conditioning(request)
        return self._known[key]


# from what was written to requests


def sample_requests(config: TrainConfig) -> list[tuple[str, GenerateConfig]]:
    """(where it was written, the request) of every prompt; all that is wrong comes back in one error."""
    if not config.sample_prompts:
        raise ConfigError("sample_every is set, but there are no sample_prompts")
    own: Said = {
        "seed": ("sample_seed", config.sample_seed),
        "steps": ("sample_steps", config.sample_steps),
        "guidance": ("sample_guidance", config.sample_guidance),
        "clip_skip": ("clip_skip", config.clip_skip),
    }
    found: list[tuple[str, GenerateConfig]] = []
    wrong: list[str] = []
    for number, entry in enumerate(config.sample_prompts, 1):
        try:
            prompts = list(_of_file(entry)) if entry.lower().endswith(FILES) else [(f"prompt {number}", entry)]
        except ConfigError as error:
            wrong += [f"sample_prompts: {problem}" for problem in error.problems]
            continue
        for place, written in prompts:
            try:
                said = read_line(written) if isinstance(written, str) else _read_table(written)
                found.append((f"sample_prompts: {place}", _request({**own, **said})))
            except ConfigError as error:
                wrong += [f"sample_prompts: {place}: {problem}" for problem in error.problems]
    if wrong:
        raise ConfigError(at_most(wrong))
    return found


def read_line(line: str) -> Said:
    """A prompt and its flags."""
    text, *pieces = _FLAG.split(line.strip())
    said: Said = {"prompt": ("prompt", text.strip())}
    wrong: list[str] = []
    for piece in pieces:
        name, _, value = piece.strip().partition(" ")
        field = FLAGS.get(name.lower())
        if field is None:
            known = ", ".join(f"--{flag} ({meant})" for flag, meant in FLAGS.items())
            wrong.append(f"--{name}: there is no such flag; known are {known}")
        elif field in said:
            wrong.append(f"--{name} ({field}): is given twice")
        else:
            _put(said, field, f"--{name} ({field})", value.strip(), wrong)
    if wrong:
        raise ConfigError(wrong)
    return said


def _read_table(table: Mapping[str, Any]) -> Said:
    """A prompt as kohya's .toml and .json files have it."""
    said: Said = {"prompt": ("prompt", "")}
    wrong: list[str] = []
    for name, value in table.items():
        if name in KEYS:
            _put(said, KEYS[name], name, value, wrong)
        else:
            wrong.append(f"{name}: there is no such key; known are {', '.join(KEYS)}")
    if wrong:
        raise ConfigError(wrong)
    return said


def _put(said: Said, field: str, called: str, value: Any, wrong: list[str]) -> None:
    """Take a value, written out or as a table has it, if it is of the right kind."""
    expected = "a whole number, 0 or more," if field in ("width", "height", "seed", "steps") else "a number, 0 or more,"
    if field in ("prompt", "negative_prompt", "sampler"):
        expected, fits = "some text", isinstance(value, str) and bool(value)
    elif isinstance(value, str):
        pattern = r"[0-9]{1,30}" if "whole" in expected else r"[0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30}"
        fits = re.fullmatch(pattern, value) is not None
        value = (int if "whole" in expected else float)(value) if fits else value
    else:
        fits = type(value) in ((int,) if "whole" in expected else (int, float)) and value >= 0
    if fits:
        said[field] = called, value
    else:
        wrong.append(f"{called}: {expected} is needed, got {for_message(value)}")


def _request(said: Said) -> GenerateConfig:
    """Problems name a field as it was called where it was set."""
    if parse(str(said["prompt"][1])).tags:
        raise ConfigError("<lora:...>: a sample shows the adapter that is trained, and no other; take the tag out")
    try:
        return GenerateConfig.of(**{field: value for field, (_, value) in said.items()})
    except ConfigError as error:
        parts = [problem.partition(":") for problem in error.problems]
        raise ConfigError([f"{said[f][0] if f in said else f}{colon}{told}" for f, colon, told in parts]) from None


def _of_file(name: str) -> Iterator[tuple[str, str | Mapping[str, Any]]]:
    """(where it stands, the line or table) of every prompt in a file."""
    if not Path(name).is_file():
        raise ConfigError(f"{name}: there is no such file; a prompt itself cannot end in {', '.join(FILES)}")
    text = read_text_file(name)
    if name.lower().endswith(".txt"):
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
        prompts: list[Any] = [(f"{name}:{number}", line) for number, line in lines if line and line[0] != "#"]
    else:
        listed = _of_toml(text, name) if name.lower().endswith(".toml") else _of_json(text, name)
        prompts = [(f"{name}: prompt {number}", each) for number, each in enumerate(listed, 1)]
    if not prompts:
        raise ConfigError(f"{name}: there is no prompt in it")
    yield from prompts


def _of_toml(text: str, name: str) -> list[Any]:
    common = parse_toml(text, name).get("prompt")
    subsets = common.get("subset") if isinstance(common, dict) else None
    if not isinstance(common, dict) or not isinstance(subsets, list) or not all(isinstance(s, dict) for s in subsets):
        raise ConfigError(f"{name}: a [prompt] table with a [[prompt.subset]] for each prompt is needed")
    shared = {key: value for key, value in common.items() if key != "subset"}
    return [{**shared, **subset} for subset in subsets]


def _of_json(text: str, name: str) -> list[Any]:
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: is no JSON: {error}") from None
    if not isinstance(listed, list) or not all(isinstance(each, dict | str) for each in listed):
        raise ConfigError(f"{name}: a list of prompts, each a table or a line, is needed")
    return listed
