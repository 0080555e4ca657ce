"""Writing files: whole or not at all, through no link, and a full disk is one line."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from inweave.errors import ConfigError, FormatError
from inweave.files import writing
from inweave.files.writing import make_folder, new_folder, open_append, try_to_write, write_atomic, write_text


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_new_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert write_atomic(path, [b"one", memoryview(b"two")]) == path
    assert path.read_bytes() == b"onetwo"
    write_text(path, "grün")
    assert path.read_bytes() == "grün".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_mode_is_that_of_the_umask_or_of_the_old_file(umask: int, tmp_path: Path) -> None:
    old = os.umask(umask)
    try:
        path = write_text(tmp_path / "x", "1")
        assert mode(path) == 0o666 & ~umask
        path.chmod(0o600)
        write_text(path, "2")
        assert mode(path) == 0o600
    finally:
        os.umask(old)


def test_a_link_at_the_target_is_replaced_and_never_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name, target in (("to a file", victim), ("dangling", tmp_path / "nothing"), ("loop", tmp_path / "loop")):
        link = tmp_path / name
        link.symlink_to(target)
        write_text(link, "new")
        assert link.read_text() == "new" and not link.is_symlink()
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


def test_a_planted_temporary_name_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one that was guessed: the name must be new."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(writing.secrets, "token_hex", lambda size: "00" * size)  # type: ignore[attr-defined]
    (tmp_path / f".x.{'00' * 8}.part").symlink_to(victim)
    with pytest.raises(FormatError, match="x: cannot be written: File exists"):
        write_text(tmp_path / "x", "new")
    with pytest.raises(FormatError, match="x: cannot be written: File exists"), new_folder(tmp_path / "x"):
        pass
    assert victim.read_text() == "precious"


def test_temporary_names_cannot_be_guessed(tmp_path: Path) -> None:
    """Random digits may be those of the process's number once, but not every time."""
    names = set()
    for _ in range(20):
        with new_folder(tmp_path / "x") as hidden:
            names.add(hidden.name)
            assert hidden.parent == tmp_path and hidden.name.startswith(".x.")
        assert not hidden.exists()
    assert len(names) == 20 and not all(str(os.getpid()) in name for name in names)


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "日" * 85, "\udcff" * 255])
def test_the_longest_names_can_be_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [os.fsencode(each.name) for each in tmp_path.iterdir()] == [os.fsencode(name)]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("x" * 256, "File name too long"), ("é" * 128, "File name too long"), ("missing/x", "No such file"),
        ("file/x", "(?i)not a directory|no such file"), ("folder", "a directory"), ("pipe", "a named pipe"),
        ("a\0b", "null character"), ("a\0b/c", "null character"), ("\ud800", "surrogate"),
        ("/", "not the name of a file"),
        ("/dev/null", "a device"), ("/dev/full", "a device"), ("loop/x", "symbolic link"),
        ("x" * 5000 + "/y", "too long"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_one_line_and_leaves_nothing(name: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=word) as caught:
        write_atomic(tmp_path / name, [b"x"], error=ConfigError)
    assert str(caught.value).isprintable()
    if name != "missing/x":  # a folder that will be made
        with pytest.raises(ConfigError, match=f"{word}|not a folder") as caught:
            try_to_write(tmp_path / name, error=ConfigError)
        assert str(caught.value).isprintable()
    assert sorted(tmp_path.iterdir()) == before
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    "name", ["/proc/x", "/proc/new/folder/x", "/sys/x", "x/" * 2500 + "x", "new/" + "x" * 256 + "/x"]
)
def test_a_trial_finds_what_permissions_do_not_tell(name: str, tmp_path: Path) -> None:
    """Root may write anywhere, by its permissions; and a folder that is missing may have no possible name."""
    with pytest.raises(ConfigError, match=r"cannot be written|too long"):
        try_to_write(tmp_path / name, error=ConfigError)
    assert not list(tmp_path.iterdir())


def test_a_trial_leaves_files_and_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for name in ("mine", "new", "folder/folder/new", "x" * 255):
        try_to_write(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"] and (tmp_path / "mine").read_text() == "mine"


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="surrogate"):
        write_text(tmp_path / "x", "a\ud800")
    assert list(tmp_path.iterdir()) == []


_LIMITED = """
import os, resource, sys
from pathlib import Path
from inweave.errors import FormatError
from inweave.files.writing import open_append, write_atomic
if os.geteuid() == 0:
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for path, chunks in ((Path(sys.argv[1]), [bytes(64_000)] * 4), (Path(sys.argv[2]), [b"x"])):
    try:
        write_atomic(path, chunks)
    except FormatError as error:
        print(error)
"""


def test_a_full_disk_and_a_folder_without_permission(tmp_path: Path) -> None:
    """The system stops the writer at 100 kB, as it would on a full disk; root writes everywhere, so it becomes
    nobody.
    """
    full, closed = tmp_path / "full", tmp_path / "closed"
    full.mkdir(mode=0o777)
    full.chmod(0o777)
    closed.mkdir(mode=0o555)
    for folder in (tmp_path, *tmp_path.parents):
        if os.geteuid() == 0 and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o111)
    (full / "x").write_text("old")
    result = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(full / "x"), str(closed / "x")], capture_output=True, text=True, timeout=60
    )
    assert result.stderr == ""
    first, second = result.stdout.splitlines()
    assert first == f"{full / 'x'}: cannot be written: File too large"
    assert second == f"{closed / 'x'}: cannot be written: Permission denied"
    assert (full / "x").read_text() == "old"
    assert [path.name for path in tmp_path.rglob("*")].count("x") == 1
    assert not list(tmp_path.rglob("*.part"))


def test_logs_grow_in_place_and_through_no_link(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for _ in range(2):
        with open_append(path) as file:
            file.write("a\n")
    assert path.read_text() == "a\na\n"
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", ".", "missing/x", "/dev/full", "x" * 300, "a\0b"):
        with pytest.raises(FormatError, match="cannot be written"):
            open_append(tmp_path / name)
    assert path.read_text() == "a\na\n"


def test_folders_are_made_or_refused(tmp_path: Path) -> None:
    assert make_folder(tmp_path / "a" / "b").is_dir()
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("file", "file/x", "dangling", "x" * 300, "a\0b", "\ud800"):
        with pytest.raises(ConfigError):
            make_folder(tmp_path / name, error=ConfigError)


def test_a_new_folder_survives_under_another_name(tmp_path: Path) -> None:
    with new_folder(tmp_path / "x") as hidden:
        (hidden / "file").write_text("1")
        hidden.rename(tmp_path / "x")
    assert [path.name for path in tmp_path.rglob("*")] == ["x", "file"]
    with pytest.raises(RuntimeError), new_folder(tmp_path / "y") as hidden:
        (hidden / "file").write_text("1")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_folders_inside_each_other_have_an_end(tmp_path: Path) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own; torch's compiler raises it for the whole process
    try:
        with pytest.raises(FormatError, match="cannot be made"):
            make_folder(tmp_path / "/".join("a" * 1900))
    finally:
        sys.setrecursionlimit(limit)
    assert list(tmp_path.iterdir()) == []
