"""`inweave inspect`: the contents of a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inweave.cli.adapters import LoraDir, locate
from inweave.cli.console import (
    OK,
    PROBLEMS,
    UNREADABLE,
    print_facts,
    print_json,
    print_lines,
    reporting_errors,
)
from inweave.cli.model_folder import described_model
from inweave.cli.options import AdapterName, Alpha, JSONList, RankAlpha, supplied_alphas
from inweave.cli.progress import LATE, display
from inweave.errors import amount
from inweave.files.paths import exists, is_file, is_folder

if TYPE_CHECKING:
    from inweave.exchange.inspect import Facts


def inspect(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE|DIR...",
            help="Adapter files, PEFT directories, names or hashes of LoRAs, or folders, searched recursively.",
        ),
    ],
    keys: Annotated[bool, typer.Option("--keys", help="List every tensor.")] = False,
    name: AdapterName = None,
    alpha: Alpha = None,
    rank_alpha: RankAlpha = None,
    lora_dir: LoraDir = None,
    as_json: JSONList = False,
) -> None:
    """Describe adapter files: dialect, algorithm, ranks, base model, trigger words, tags, training settings, hashes.

    Example: inweave inspect loras/
    """
    from inweave.errors import InweaveError
    from inweave.exchange.inspect import inspect as inspect_file

    with reporting_errors(as_json), display(as_json, delay=LATE) as progress:
        progress.start("reading files")
        alphas = supplied_alphas(alpha, rank_alpha)
        if len(paths) == 1 and is_file(paths[0] / "model_index.json"):
            about = described_model(paths[0], as_json)
            progress.stop()
            print_json(about) if as_json else print_lines([f"{about['model']}: {about['family']}", *about["evidence"]])
            raise typer.Exit(OK)
        files = [file for path in paths for file in _adapter_files(locate(path, lora_dir))]
        if len(files) == 1:
            facts = inspect_file(files[0], keys=keys, name=name, alpha=alphas)
            progress.stop()
            print_json(facts.as_dict()) if as_json else _print(facts)
            raise typer.Exit(PROBLEMS if facts.adapter.problems else OK)
        rows: list[dict[str, object]] = []
        code = OK
        for number, file in enumerate(files):
            progress.update("reading files", number, len(files))
            try:
                facts = inspect_file(file, keys=keys, name=name, alpha=alphas)
            except InweaveError as error:
                code = UNREADABLE
                rows.append({"path": str(file), "error": str(error)})
                if not as_json:
                    progress.line(f"error: {error}")
                continue
            code = max(code, PROBLEMS if facts.adapter.problems else OK)
            rows.append(facts.as_dict())
            if not as_json:
                _print(facts)
    if as_json:
        print_json(rows)
    raise typer.Exit(code)


def _adapter_files(path: Path) -> list[Path]:
    """List the adapters in a folder, or the folder if it is an adapter itself."""
    if not is_folder(path) or exists(path / "adapter_config.json"):
        return [path]
    inside: list[Path] = []
    for folder, folders, names in os.walk(path):
        here = Path(folder)
        inside += [here / name for name in names if name.endswith(".safetensors")]
        inside += [here / name for name in folders if is_file(here / name / "adapter_config.json")]
        folders[:] = [name for name in folders if not name.startswith(".") and here / name not in inside]
    only_one = len(inside) == 1 and inside[0].parent == path
    return sorted(inside) if inside and not only_one else [path]


def _print(facts: Facts) -> None:
    data: dict[str, Any] = facts.as_dict()
    base = data["base"]
    detected = f"{base['detected'] or 'unknown'} (confidence {base['confidence']:.2f}; {'; '.join(base['evidence'])})"
    rows = [
        ("dialect", ", ".join(data["dialects"]) or "none"),
        ("algorithm", _counts(data["kinds"])),
        ("modules", f"{data['modules']} ({_counts(data['components'])})"),
        ("tensors", f"{data['tensors']} ({_counts(data['dtypes'])}), {facts.bytes:,} bytes"),
        ("rank", _counts(data["ranks"]) or "none"),
        ("alpha", _counts(data["alphas"]) + (" (alpha = rank is assumed)" if facts.adapter.assumed_alphas else "")),
        ("scale", _counts(data["scales"])),
        ("base", detected),
    ]
    rows += [
        ("trigger", f"{', '.join(row['words'][:8])}  [{row['source']}]")
        for row in data["triggers"]
        if row["source"] != "ss_tag_frequency"
    ]
    if tags := list(data["tags"].items()):
        more = f", and {len(tags) - 12} more" if len(tags) > 12 else ""
        rows.append(("tags", ", ".join(f"{tag} ({count})" for tag, count in tags[:12]) + more))
    rows += [("dataset", _dataset_row(row)) for row in data["dataset"][:12]]
    rows += [(name, str(value)[:100]) for name, value in data["training"].items()]
    if carried := data["carried"]:
        rows.append(("carried", ", ".join(carried)))
    hashes = data["hashes"] or {}
    rows += [(name, value) for name, value in hashes.items() if value and name not in ("path", "claimed")]
    print_facts(facts.path, rows)
    problems = [f"{problem.fault}: {problem.keys[0]}: {problem.reason}" for problem in facts.adapter.problems]
    print_lines(problems, "red", limit=10)
    print_lines((f"warning: {warning}" for warning in data["warnings"]), "yellow")
    print_lines(f"{row['dtype']:<8} {row['shape']!s:<24} {row['key']}" for row in data.get("keys", ()))


def _dataset_row(row: dict[str, Any]) -> str:
    """Format `10_dog: 15 images x 10 repeats`, without unknown parts."""
    images = amount(row["images"], "image") if row["images"] is not None else ""
    repeats = amount(row["repeats"], "repeat") if row["repeats"] is not None else ""
    return f"{row['folder']}: {' x '.join(part for part in (images, repeats) if part) or 'images'}"


def _counts(counts: dict[str, int]) -> str:
    """Format `lora x 12, loha x 3`; without the count if there is only one name."""
    items = list(counts.items())[:6]
    more = f", and {len(counts) - 6} more" if len(counts) > 6 else ""
    return ", ".join(name if len(counts) == 1 else f"{name} x {count}" for name, count in items) + more
