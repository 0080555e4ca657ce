"""Files that list the images of a folder with their captions.

    metadata.jsonl   {"file_name": "a.png", "text": "..."} per line; "image_path" and "caption" are the same as these
    metadata.csv     a line of column names, then one line per image: file_name,text
    meta.json        kohya's: {"a": {"caption": "...", "tags": "b, c"}}, by paths or by names without extension

    {"file_name": "a.png", "control": ["b/a.png"]}     the references of an image; see `references`

An image is in the folder, or below it. A path from another machine is that of the image of its name in the folder. Of
kohya's two texts, the tags follow the caption.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from inweave.checked import for_message
from inweave.errors import ConfigError, FormatError
from inweave.files.documents import parse_json
from inweave.files.paths import exists, is_file
from inweave.files.reading import read_foreign_text
from inweave.training.config.toml import SURROGATE
from inweave.training.data.captions import MAX_CAPTIONS, caption_lines, foreign_text
from inweave.training.data.references import columns

#: names of files that list a folder's images, of which the first is read
LISTS = ("metadata.jsonl", "metadata.csv")
LISTED = (".jsonl", ".csv", ".json")
MAX_METADATA, MAX_LINE = 2**28, 2**20  # bytes of a file, and characters in a line of it
_NAMES, _TEXTS = ("file_name", "image_path"), ("text", "caption")


def is_listing(file: Path) -> bool:
    """Return whether a file of a folder lists its images with captions; a .csv may be about something else."""
    if file.name != "metadata.csv":
        return file.name in LISTS
    try:
        columns = _rows_of_csv(foreign_text(file, MAX_METADATA)[0]).fieldnames or ()
    except (FormatError, csv.Error):
        return False
    header = {column.strip() for column in columns}
    return not header.isdisjoint(_NAMES) and not header.isdisjoint(_TEXTS)


def is_list(file: Path) -> bool:
    """Return whether a JSON file holds a list, such as one of folders."""
    return is_file(file) and read_foreign_text(file, MAX_METADATA)[0].lstrip()[:1] == "["


def read_metadata(
    file: Path,
    encodings: dict[Path, str] | None = None,
    folder: Path | None = None,
    references: dict[str, tuple[str, ...]] | None = None,
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Return ({file name: its captions}, problems by line) of the images in a folder, by default the file's own.

    ``encodings`` receives the encoding of the file, ``references`` those that rows list.
    """
    folder = folder or file.parent
    rows: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    allowed = _roots(folder)
    text, encoding = foreign_text(file, MAX_METADATA)
    if encodings is not None:
        encodings[file] = encoding
    parse = {".json": _of_kohya, ".csv": _of_csv}.get(file.suffix.lower(), _of_lines)
    for where, row in parse(text, folder, problems):
        name = next((row[key] for key in _NAMES if row.get(key)), None)
        if not isinstance(name, str) or not Path(name).name or "\0" in name:
            problems.append(f'{where} names no image, expected {{"file_name": "a.png", "text": "..."}}')
            continue
        name = _moved(name, folder)
        if not _is_inside(folder / name, allowed):
            problems.append(f"{where}: {for_message(name)} is outside of the folder; move the image into it")
            continue
        value = next((row[key] for key in _TEXTS if row.get(key) is not None), None)
        texts = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(text, str) for text in texts):
            problems.append(f"{where}: the caption of {name} is {for_message(value)}, expected text or a list of texts")
        elif SURROGATE.search("".join((name, *texts))):
            problems.append(f"{where} has half of a surrogate pair, which is not text; write the whole character")
        elif len(texts) > MAX_CAPTIONS:
            problems.append(f"{where}: {name} has {len(texts)} captions; at most {MAX_CAPTIONS} are read")
        elif name in rows:
            problems.append(f"{where}: {name} was listed before; put all its captions into one list")
        else:
            rows[name] = tuple(text for each in texts for text in caption_lines(each))
            try:
                listed = tuple(_moved(each, folder) for each in columns(row))
            except FormatError as error:
                problems.append(f"{where}: {error}")
                continue
            problems += [
                f"{where}: {for_message(each)} is outside of the folder; move the image into it"
                for each in listed
                if not _is_inside(folder / each, allowed)
            ]
            if references is not None and listed:
                references[name] = listed
    return rows, problems


def _of_lines(text: str, folder: Path, problems: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > MAX_LINE:
            problems.append(f"line {number} has {len(line)} characters; at most {MAX_LINE} are read")
        elif line.strip():
            try:
                row = parse_json(line, f"line {number}")
            except FormatError as error:
                problems.append(str(error))
                continue
            yield f"line {number}", row if isinstance(row, Mapping) else {}


def _rows_of_csv(text: str) -> csv.DictReader[str]:
    return csv.DictReader(io.StringIO(text), skipinitialspace=True)


def _of_csv(text: str, folder: Path, problems: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = _rows_of_csv(text)
    try:
        for row in reader:
            yield f"line {reader.line_num}", {str(key).strip(): value for key, value in row.items()}
    except csv.Error as error:
        problems.append(f"line {reader.line_num}: {error}")


def _of_kohya(text: str, folder: Path, problems: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    table = parse_json(text, "the file")
    if not isinstance(table, Mapping) or not all(isinstance(row, Mapping) for row in table.values()):
        raise FormatError(f'expected {{"a.png": {{"caption": "..."}}}}, got {for_message(table)}')
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.suffix] if table else []
    names = {path.with_suffix("").as_posix(): path.as_posix() for path in files if path.suffix.lower() in _PIXELS}
    for key, row in table.items():
        name = _moved(key, folder)
        words = [each for each in (row.get("caption"), row.get("tags")) if each]
        joined = ", ".join(words) if all(isinstance(each, str) for each in words) else words
        yield for_message(key), {"file_name": names.get(name, name), "text": joined}


#: formats that kohya's scripts read
_PIXELS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".jxl", ".avif")


def _moved(name: str, folder: Path) -> str:
    """Return the name of an image in the folder for an absolute path to somewhere else."""
    windows = PureWindowsPath(name)
    if Path(name).is_absolute() and Path(name).is_relative_to(folder.resolve()):
        return Path(name).relative_to(folder.resolve()).as_posix()
    elsewhere = windows.is_absolute() or (Path(name).is_absolute() and not exists(Path(name)))
    return windows.name if elsewhere else name


def refuse_parquet(file: Path) -> ConfigError:
    """Return the error for metadata in Parquet."""
    command = "pandas.read_parquet('metadata.parquet').to_json('metadata.jsonl', orient='records', lines=True)"
    return ConfigError(f"dataset {file}: Parquet files are not read; write a metadata.jsonl: {command}")


def _roots(folder: Path) -> tuple[Path, ...]:
    """Return where images of a folder may be: in it, or in the blobs of the Hub's cache that it links to."""
    root = folder.resolve()
    blobs = (parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")
    return (root, *blobs)


def _is_inside(path: Path, roots: tuple[Path, ...]) -> bool:
    """Return whether a path, with its links resolved, is in one of these folders."""
    try:
        return any(path.resolve().is_relative_to(root) for root in roots)
    except (OSError, RuntimeError, ValueError):  # a circle of links, or a name that no file can have
        return False
