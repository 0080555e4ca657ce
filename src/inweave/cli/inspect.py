"""`inweave inspect`: what is in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inweave.cli.output import OK, PROBLEMS, UNREADABLE, print_facts, print_json, printable, reporting_errors

if TYPE_CHECKING:
    from inweave.exchange.inspect import Facts


def inspect(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE|DIR...", help="Adapter files, PEFT directories, or folders of files.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object for one file, a list for several.")
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="List every tensor.")] = False,
    name: Annotated[
        str | None, typer.Option("--adapter", help="Which adapter, where keys carry several names.")
    ] = None,
) -> None:
    """Say what adapter files are: dialect, algorithm, ranks, base model, trigger words, training, hashes."""
    from inweave.errors import InweaveError
    from inweave.exchange.inspect import inspect as look

    with reporting_errors(as_json):
        found = [place for path in paths for place in _adapters(path)]
        if len(found) == 1:
            facts = look(found[0], keys=keys, name=name)
            print_json(facts.as_dict()) if as_json else _show(facts)
            raise typer.Exit(PROBLEMS if facts.adapter.problems else OK)
    rows: list[dict[str, object]] = []
    code = OK
    for place in found:
        try:
            facts = look(place, keys=keys, name=name)
        except InweaveError as error:
            code = UNREADABLE
            rows.append({"path": str(place), "error": str(error)})
            if not as_json:
                typer.echo(printable(f"error: {error}"), err=True)
            continue
        code = max(code, PROBLEMS if facts.adapter.problems else OK)
        rows.append(facts.as_dict())
        if not as_json:
            _show(facts)
    if as_json:
        print_json(rows)
    raise typer.Exit(code)


def _adapters(path: Path) -> list[Path]:
    """A folder that is not itself an adapter stands for the adapters in it."""
    if not path.is_dir() or (path / "adapter_config.json").exists():
        return [path]
    inside = sorted(p for p in path.iterdir() if p.suffix == ".safetensors" or (p / "adapter_config.json").is_file())
    return inside if len(inside) > 1 else [path]


def _show(facts: Facts) -> None:
    data = facts.as_dict()
    base = data["base"]
    assert isinstance(base, dict)
    rows = [
        ("dialect", ", ".join(data["dialects"]) or "none"),  # type: ignore[arg-type]
        ("algorithm", _counted(data["kinds"])),
        ("modules", f"{data['modules']} ({_counted(data['components'])})"),
        ("tensors", f"{data['tensors']} ({_counted(data['dtypes'])}), {facts.bytes:,} bytes"),
        ("rank", _counted(data["ranks"]) or "none"),
        ("alpha", _counted(data["alphas"])),
        ("scale", _counted(data["scales"])),
        (
            "base",
            f"{base['detected'] or 'unknown'} (confidence {base['confidence']:.2f}; {'; '.join(base['evidence'])})",
        ),
    ]
    for source in data["triggers"]:  # type: ignore[attr-defined]
        rows.append(("trigger", f"{', '.join(source['words'][:8])}  [{source['source']}]"))
    for name, value in data["training"].items():  # type: ignore[attr-defined]
        rows.append((name, str(value)[:100]))
    if carried := data["carried"]:
        rows.append(("carried", ", ".join(carried)))  # type: ignore[arg-type]
    for name, value in (data["hashes"] or {}).items():  # type: ignore[attr-defined]
        if value and name not in ("path", "claimed"):
            rows.append((name, value))
    print_facts(facts.path, rows)
    for problem in facts.adapter.problems[:10]:
        typer.secho(printable(f"  {problem.fault}: {problem.keys[0]}: {problem.reason}"), fg="red")
    if len(facts.adapter.problems) > 10:
        typer.secho(f"  and {len(facts.adapter.problems) - 10} more problems", fg="red")
    for warning in facts.adapter.warnings:
        typer.secho(printable(f"  warning: {warning}"), fg="yellow")
    for row in data.get("keys", ()):  # type: ignore[attr-defined]
        typer.echo(printable(f"  {row['dtype']:<8} {row['shape']!s:<24} {row['key']}"))


def _counted(counts: object) -> str:
    assert isinstance(counts, dict)
    shown = list(counts.items())[:6]
    more = f", and {len(counts) - 6} more" if len(counts) > 6 else ""
    return ", ".join(name if len(counts) == 1 else f"{name} x {count}" for name, count in shown) + more
