"""Options that several commands share: one spelling, one help text each."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from inweave.files.paths import is_file
from inweave.formats.dialects import WRITTEN, written_dialects

if TYPE_CHECKING:
    from inweave.formats.alphas import Alphas


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic")


def dialect_name(value: str) -> str:
    """Return the name of a dialect that can be written, of inweave or of another package; fail if there is none."""
    if value not in WRITTEN and value not in (known := written_dialects()):
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, known))}.")
    return value


class Dtype(StrEnum):
    """Dtypes of a result; ``keep`` leaves every tensor in the dtype it has."""

    keep = "keep"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


_DIALECTS = f"The dialect to write: {', '.join(WRITTEN)}."
To = Annotated[str, typer.Option("--to", metavar="DIALECT", help=_DIALECTS, parser=dialect_name)]
ToOrKeep = Annotated[
    str | None,
    typer.Option("--to", metavar="DIALECT", help=_DIALECTS, parser=dialect_name, show_default="that of the first file"),
]
_KOHYA = "kohya, or diffusers where its names are not known"
ToOrKohya = Annotated[
    str | None, typer.Option("--to", metavar="DIALECT", help=_DIALECTS, parser=dialect_name, show_default=_KOHYA)
]
JSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
JSONList = Annotated[bool, typer.Option("--json", help="Print JSON: an object for one file, a list for several.")]
Seed = Annotated[
    int | None,
    typer.Option("--seed", "-s", help="Random seed; the same seed gives the same result.", show_default="random"),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
AdapterFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="An adapter file or a PEFT directory, or the name or hash of a LoRA.")
]
AdapterName = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        help="Which adapter to read if the keys hold several PEFT adapter names.",
        show_default="the only one",
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option(
        "--alpha",
        help="The alpha of modules that have none, as in a PEFT file without adapter_config.json.",
        show_default="none",
    ),
]
RankAlpha = Annotated[
    list[str] | None,
    typer.Option(
        "--rank-alpha",
        metavar="RANK|PATTERN=ALPHA",
        help="Their alpha by rank (16=8) or by module name as in PEFT's alpha_pattern (q_proj=4). Repeat for more.",
    ),
]
BaseName = Annotated[
    str | None,
    typer.Option(
        "--base",
        "-b",
        help="The base model, if it cannot be detected: sd1.5, sdxl, a checkpoint, a folder.",
        show_default="detected",
    ),
]
AdapterOut = Annotated[
    Path, typer.Option("--out", "-o", help="The file to write, NAME.safetensors; for peft, a directory.")
]
Energy = Annotated[
    float | None,
    typer.Option(
        "--energy",
        help="Use the lowest rank that keeps this share (0 to 1) of each module's squared norm.",
        show_default="none",
    ),
]


def supplied_alphas(alpha: float | None, by_key: Sequence[str] | None) -> Alphas | None:
    """Parse --alpha and --rank-alpha into the `alpha` of `load`."""
    from inweave.errors import ConfigError

    alphas: dict[str, float] = {}
    for text in by_key or ():
        key, equals, number = text.rpartition("=")
        try:
            value = float(number) if equals and key else None
        except ValueError:
            value = None
        if value is None:
            raise ConfigError(f"--rank-alpha {text}: write RANK=ALPHA or PATTERN=ALPHA, such as 16=8 or q_proj=4")
        alphas[key] = value
    if not alphas:
        return alpha
    return alphas if alpha is None else {**alphas, "*": alpha}


class OptionalValues(TyperCommand):
    """A command where `--resume` and `--cluster` without a value mean `--resume auto` and `--cluster auto`.

    The word after it is its value, unless that is another option or a .toml file, which is the configuration.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for option in ("--resume", "--cluster"):
            args = with_default_value(args, option, "auto")
        return super().parse_args(ctx, args)


class ReferenceImages(TyperCommand):
    """A command where `--reference` takes all images that follow it: `--reference a.png b.png`.

    A word after the first one is an image if it is a file with the suffix of one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_repeated_option(args, "--reference"))


def with_repeated_option(arguments: Sequence[str], option: str) -> list[str]:
    """Insert ``option`` before every image that follows its value."""
    result: list[str] = []
    inside = False  # among the values of the option, of which the first follows it in any case
    for number, word in enumerate(arguments):
        if word == "--":
            return [*result, *arguments[number:]]
        if inside and arguments[number - 1] != option:
            inside = word.lower().endswith(IMAGE_SUFFIXES) and is_file(word)
            result += [option] if inside else []
        inside = inside or word == option or word.startswith(f"{option}=")
        result.append(word)
    return result


def with_default_value(arguments: Sequence[str], option: str, default: str) -> list[str]:
    """Insert ``default`` after every ``option`` that has no value."""
    result: list[str] = []
    for number, word in enumerate(arguments):
        if word == "--":
            return [*result, *arguments[number:]]
        result.append(word)
        if word == option:
            following = arguments[number + 1] if number + 1 < len(arguments) else "--"
            if following.startswith("-") or following.endswith(".toml"):
                result.append(default)
    return result
