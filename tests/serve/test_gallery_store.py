"""The gallery on disk, in SQLite and in PostgreSQL: nothing is lost, nothing of others is touched."""

from __future__ import annotations

import dataclasses
import io
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from inweave.errors import ConfigError, ConflictError, MissingError
from inweave.serve.jobs.errors import StorageError
from inweave.serve.jobs.postgresql import PostgresDatabase
from inweave.serve.service import Service
from inweave.serve.settings import ServeSettings
from inweave.serve.storage import gallery
from inweave.serve.storage.gallery import GalleryStore
from inweave.serve.storage.gallery_rows import GalleryImage, GalleryQuery, ImageFacts

Open = Callable[..., GalleryStore]
DAY = 24 * 3600.0


class Clock:
    """A clock that tests advance."""

    now = 1_790_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgresql"])
def open_gallery(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Open:
    """Return how the gallery of a folder is opened, in either database."""
    address = request.getfixturevalue("address") if request.param == "postgresql" else None

    def opened(folder: str = "images", **options: Any) -> GalleryStore:
        database = None if address is None else PostgresDatabase(address)
        options = {"clock": clock, "database": database, "data": tmp_path} | options
        return GalleryStore(tmp_path / folder, tmp_path / "thumbnails", **options)

    return opened


def png(color: str = "red", side: int = 8) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (side, side), color).save(content, format="PNG")
    return content.getvalue()


def facts(prompt: str = "a red apple", **fields: Any) -> ImageFacts:
    options: dict[str, Any] = {"format": "PNG", "width": 8, "height": 8, "prompt": prompt, "seed": "7"}
    return ImageFacts(**options | fields)


def add(
    store: GalleryStore, job: str = "job-1", place: int = 0, account: str = "", content: bytes = b"", **fields: Any
) -> GalleryImage:
    known = facts(**fields)
    return store.add(job, account, place, content or png(), known, {"seed": 7, "prompt": known.prompt})


def ids(store: GalleryStore, account: str = "", **query: Any) -> list[str]:
    return [image.id for image in store.rows.images(account, GalleryQuery(**query))]


def files(store: GalleryStore) -> list[str]:
    paths = (path.relative_to(store.folder).as_posix() for path in store.folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != gallery.MARKER)


def adopt_all(store: GalleryStore) -> list[str]:
    changes = store.changes()
    for account, path, _ in changes.files:
        store.adopt(account, path, store.read(path), facts(path))
    return [path for _, path, _ in changes.files]


def test_images_are_ordinary_files_and_stay_over_a_restart(open_gallery: Open) -> None:
    store = open_gallery(names="[model_name]/[seed]-[prompt_words]")
    one = store.add("job-1", "", 0, png(), facts(), {"seed": 7, "prompt": "a red apple", "model": "base"})
    two = store.add("job-1", "", 1, png("blue"), facts(), {"seed": 7, "prompt": "a red apple", "model": "base"})
    assert files(store) == ["base/7-a-red-apple-2.png", "base/7-a-red-apple.png"]
    assert (store.folder / one.path).read_bytes() == png() == store.read(one.path)
    store.close()
    store = open_gallery()
    assert ids(store) == [two.id, one.id] and store.changes() == gallery.Changes()
    assert store.rows.image("", one.id) == store.rows.images("", GalleryQuery())[1]


def test_a_second_attempt_of_a_job_replaces_the_image_of_the_first(open_gallery: Open) -> None:
    store = open_gallery()
    first = add(store)
    again = add(store, content=png("blue"))
    assert again.id == first.id and files(store) == [first.path] and store.read(first.path) == png("blue")
    store.trash(again)
    add(store)
    assert ids(store) == [] and ids(store, trashed=True) == [first.id]  # the user had deleted it


def test_a_list_is_paged_without_gaps_or_repetitions(open_gallery: Open, clock: Clock) -> None:
    store = open_gallery()
    expected: list[str] = []
    for number in range(25):
        clock.now += number % 3  # several of one moment
        expected.insert(0, add(store, f"job-{number}").id)
    listed, cursor = list[str](), ""
    while len(listed) < 25:
        page = store.rows.images("", GalleryQuery(limit=7, cursor=cursor))
        listed += [image.id for image in page]
        cursor = page[-1].cursor
        if len(listed) == 7:
            add(store, "later")  # does not move the rest
    assert listed == expected
    assert store.rows.count("", GalleryQuery(cursor=cursor)) == 26


@pytest.mark.parametrize("cursor", ["x", "1", "1:x", "nan:1", "1e999:", ":", "1:1:1"])
def test_cursors_that_no_answer_had_are_refused(tmp_path: Path, cursor: str) -> None:
    store = GalleryStore(tmp_path / "images", tmp_path / "thumbnails")
    with pytest.raises(ConfigError, match="cursor"):
        store.rows.images("", GalleryQuery(cursor=cursor))


def test_searches_combine_words_models_loras_and_stars(open_gallery: Open) -> None:
    store = open_gallery()
    apple = add(store, "job-1", prompt="A red Apple, 100% ripe", model="base", loras=("pixel", "line-art")).id
    pear = add(store, "job-2", prompt="a green pear", negative="apple", model="other", loras=("pixel art",)).id
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"text": "apple"}, [pear, apple]), ({"text": "APPLE red"}, [apple]), ({"text": "100%"}, [apple]),
        ({"text": "10_%"}, []), ({"text": "pixel"}, [pear, apple]), ({"lora": "pixel"}, [apple]),
        ({"lora": "pixel art"}, [pear]), ({"model": "other"}, [pear]), ({"model": "oth"}, []),
        ({"text": "pear", "model": "base"}, []), ({"job": "job-1"}, [apple]), ({"text": "!"}, []),
        ({"text": "' OR 1=1 --"}, []), ({"starred": True}, []),
    ]  # fmt: skip
    for query, expected in cases:
        assert ids(store, **query) == expected, query
        assert store.rows.count("", GalleryQuery(**query)) == len(expected)
    assert store.rows.star("", [apple, "nosuch"], True) == 1 and ids(store, starred=True) == [apple]
    facets = store.rows.facets("")
    assert facets["images"] == 2 and facets["starred"] == 1 and facets["bytes"] == 2 * len(png())
    assert {(each["name"], each["images"]) for each in facets["loras"]} == {
        ("pixel", 1), ("line-art", 1), ("pixel art", 1)
    }  # fmt: skip
    assert store.rows.star("", [apple], False) == 1 and ids(store, starred=True) == []


def test_accounts_never_meet(open_gallery: Open) -> None:
    store = open_gallery()
    own, other = add(store, "job-1", account="alice"), add(store, "job-2", account="bob")
    assert own.path.startswith("@alice/") and other.path.startswith("@bob/")
    assert ids(store, "alice") == [own.id] and ids(store, "") == []
    with pytest.raises(MissingError):
        store.rows.image("alice", other.id)
    assert store.owned("alice", [own.id, other.id]) == [store.rows.image("alice", own.id)]
    assert store.rows.star("alice", [own.id, other.id], True) == 1
    album = store.rows.albums.create("alice", "best")
    assert store.rows.albums.put("alice", album, [own.id, other.id], True) == 1
    assert store.rows.albums.list("bob") == [] and store.rows.facets("bob")["starred"] == 0
    for change in (
        lambda: store.rows.albums.put("bob", album, [other.id], True),
        lambda: store.rows.albums.rename("bob", album, "x"),
        lambda: store.rows.albums.remove("bob", album),
    ):
        with pytest.raises(MissingError):
            change()
    (store.folder / "@alice" / "copied.png").write_bytes(png("green"))
    assert adopt_all(store) == ["@alice/copied.png"] and len(ids(store, "alice")) == 2 and len(ids(store, "bob")) == 1
    same, new = store.import_image("bob", "mine.png", png("green"), facts())
    assert new and same.account == "bob"  # although alice has the same bytes


def test_deleted_images_return_with_their_stars_and_albums(open_gallery: Open, clock: Clock) -> None:
    store = open_gallery()
    image = add(store)
    store.rows.star("", [image.id], True)
    album = store.rows.albums.create("", "best")
    store.rows.albums.put("", album, [image.id], True)
    store.trash(image)
    assert ids(store) == [] == ids(store, album=album) and ids(store, trashed=True) == [image.id]
    assert files(store) == [f".trash/{image.id}/{image.path}"]
    assert store.changes() == gallery.Changes() and store.rows.albums.list("")[0]["images"] == 0
    (store.folder / image.path).write_bytes(png("blue"))  # its name is taken meanwhile
    back = store.restore(store.rows.image("", image.id))
    assert back.path == image.path.replace(".png", "-2.png") and files(store) == sorted([image.path, back.path])
    row = store.rows.image("", image.id)
    assert row.starred and row.albums == (album,) and store.read(row.path) == png()
    store.trash(row)
    clock.now += gallery.TRASH_SECONDS + 1
    assert [each.id for each in store.beyond_limits()] == [image.id]
    store.purge(store.rows.image("", image.id))
    assert ids(store, trashed=True) == [] and files(store) == [image.path]


def test_albums_have_names_covers_and_no_twins(open_gallery: Open) -> None:
    store = open_gallery()
    albums, image = store.rows.albums, add(store)
    second, first = albums.create("", "second"), albums.create("", "First")
    with pytest.raises(ConflictError, match="second"):
        albums.create("", "second")
    with pytest.raises(ConflictError):
        albums.rename("", first, "second")
    albums.rename("", second, "third")
    assert albums.put("", second, [image.id], True) == albums.put("", second, [image.id], True) == 1
    assert [(each["name"], each["images"], each["cover"]) for each in albums.list("")] == [
        ("First", 0, None), ("third", 1, image.id),
    ]  # fmt: skip
    assert ids(store, album=second) == [image.id] and albums.images() == {image.id}
    albums.put("", second, [image.id], False)
    assert ids(store, album=second) == []
    albums.remove("", second)
    assert len(albums.list("")) == 1 and ids(store) == [image.id]


# other programs


def test_files_of_other_programs_are_noticed(open_gallery: Open, clock: Clock) -> None:
    store = open_gallery()
    edited, image = add(store, "job-0"), add(store, "job-1", content=png("blue"))
    store.rows.star("", [image.id], True)
    (store.folder / "deep" / "er").mkdir(parents=True)
    (store.folder / "deep" / "er" / "new.PNG").write_bytes(png("green"))
    (store.folder / ".hidden.png").write_bytes(png())
    (store.folder / "notes.txt").write_bytes(b"text")
    (store.folder / "link.png").symlink_to(store.folder / edited.path)
    assert adopt_all(store) == ["deep/er/new.PNG"] and len(ids(store)) == 3 and adopt_all(store) == []
    # one that is gone is not listed, and keeps its star for when it returns
    content = (store.folder / image.path).read_bytes()
    (store.folder / image.path).unlink()
    assert store.changes().missing == 1 and image.id not in ids(store)
    with pytest.raises(MissingError):
        store.rows.image("", image.id)
    (store.folder / "moved.png").write_bytes(content)
    assert adopt_all(store) == ["moved.png"]
    assert store.rows.image("", image.id).path == "moved.png" and store.rows.image("", image.id).starred
    # one that was edited is read again
    (store.folder / edited.path).write_bytes(png("yellow", 9))
    assert adopt_all(store) == [edited.path] and store.rows.image("", edited.id).facts.prompt == edited.path


def test_a_file_that_returns_under_its_name_is_the_same_image(open_gallery: Open) -> None:
    store = open_gallery()
    image = add(store)
    away = store.folder.parent / "away.png"
    (store.folder / image.path).rename(away)
    store.changes()
    away.rename(store.folder / image.path)
    assert store.changes().returned == 1 and ids(store) == [image.id]


def test_files_that_are_not_images_are_read_once(open_gallery: Open) -> None:
    store = open_gallery()
    bad = store.folder / "bad.png"
    bad.write_bytes(b"not an image")
    [(_, path, stamp)] = store.changes().files
    store.skip(path, stamp)
    assert store.changes().files == []
    bad.write_bytes(png())
    assert [path for _, path, _ in store.changes().files] == ["bad.png"]


def test_without_its_disk_the_gallery_changes_nothing(open_gallery: Open, tmp_path: Path) -> None:
    store = open_gallery()
    image = add(store)
    (tmp_path / "images").rename(tmp_path / "unplugged")
    (tmp_path / "images").mkdir()  # the mount point
    for call in (store.changes, store.beyond_limits, lambda: add(store, "job-2"), lambda: store.purge(image)):
        with pytest.raises(StorageError, match="mounted"):
            call()
    (tmp_path / "images").rmdir()
    (tmp_path / "unplugged").rename(tmp_path / "images")
    assert store.changes() == gallery.Changes() and ids(store) == [image.id]


def test_another_folder_is_another_gallery(open_gallery: Open) -> None:
    store = open_gallery()
    image = add(store)
    store.close()
    other = open_gallery("elsewhere")
    assert ids(other) == [] and other.changes() == gallery.Changes()
    other.close()
    assert ids(open_gallery()) == [image.id]


# retention


def test_nothing_is_ever_deleted_without_limits(open_gallery: Open, clock: Clock) -> None:
    store = open_gallery()
    add(store)
    clock.now += 1000 * DAY
    assert store.beyond_limits() == []


def test_limits_spare_stars_albums_and_files_of_other_programs(open_gallery: Open, clock: Clock) -> None:
    store = open_gallery(keep_seconds=10 * DAY)
    plain, starred, sorted_ = add(store, "job-1"), add(store, "job-2"), add(store, "job-3")
    store.import_image("", "trip.png", png("green"), facts(), created=0.0)
    (store.folder / "family.png").write_bytes(png("blue"))
    adopt_all(store)
    store.rows.star("", [starred.id], True)
    store.rows.albums.put("", store.rows.albums.create("", "best"), [sorted_.id], True)
    clock.now += 9 * DAY
    assert store.beyond_limits() == []
    clock.now += 2 * DAY
    assert [image.id for image in store.beyond_limits()] == [plain.id]


def test_a_limit_of_bytes_deletes_the_oldest(open_gallery: Open, clock: Clock) -> None:
    store = open_gallery(keep_bytes=2 * len(png()))
    images = []
    for number in range(4):
        clock.now += 1
        images.append(add(store, f"job-{number}").id)
    store.rows.star("", images[:1], True)
    assert [image.id for image in store.beyond_limits()] == images[1:3]
    with pytest.raises(ConflictError, match="--picture-gb"):
        store.import_image("", "one more.png", png("green"), facts())
    assert store.import_image("", "the same.png", png(), facts())[1] is False


# imports and thumbnails


def test_imported_files_keep_their_bytes_and_are_stored_once(open_gallery: Open, clock: Clock) -> None:
    store = open_gallery()
    image, new = store.import_image("", "C:\\trip\\../.day 1/a:b.jpeg", png("green"), facts(format="JPEG"), 1e9)
    assert new and image.path == "imported/C_/trip/day 1/a_b.jpg" and image.created == 1e9
    assert store.import_image("", "again.png", png("green"), facts()) == (store.rows.image("", image.id), False)
    assert (store.folder / image.path).stat().st_mtime == 1e9 and store.changes() == gallery.Changes()
    future, _ = store.import_image("", "", png("blue"), facts(), clock.now + DAY)
    assert future.created == clock.now and future.path == "imported/image.png"


def test_a_thumbnail_belongs_to_one_version_of_its_image(open_gallery: Open) -> None:
    store = open_gallery()
    image = add(store)
    store.put_thumbnail(image, b"small")
    newer = dataclasses.replace(image, modified=image.modified + 1)
    assert store.thumbnail(image).read_bytes() == b"small" and not store.thumbnail(newer).exists()
    store.put_thumbnail(newer, b"smaller")
    assert not store.thumbnail(image).exists()
    store.purge(newer)
    assert not [path for path in store.thumbnails.rglob("*") if path.is_file()]


# kills

_KILLED = """
import os, signal, sys
from pathlib import Path
from inweave.serve.service import Service
from inweave.serve.settings import ServeSettings
from inweave.serve.storage import gallery
from tests.serve.test_gallery_store import add

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

folder, moment = Path(sys.argv[1]), sys.argv[2]
store = gallery.GalleryStore(folder / "images", folder / "thumbnails", data=folder)
if moment == "before the file":
    gallery.write_atomic = die
    add(store)
elif moment == "after the file":
    store._completed = die
    add(store)
elif moment == "trashed":
    image = add(store)
    store.rows.move = die
    store.trash(image)
elif moment == "restored":
    image = add(store)
    store.trash(image)
    store.rows.move, trashed = die, store.rows.image("", image.id)
    store.restore(trashed)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("moment", ["before the file", "after the file", "trashed", "restored"])
def test_a_kill_between_file_and_row_loses_nothing(tmp_path: Path, moment: str) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), moment], cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    store = GalleryStore(tmp_path / "images", tmp_path / "thumbnails", data=tmp_path)
    assert adopt_all(store) == []  # no file without its row
    expected = {"before the file": (0, 0), "after the file": (1, 0), "trashed": (0, 1), "restored": (1, 0)}[moment]
    assert (len(ids(store)), len(ids(store, trashed=True))) == expected
    for image in store.rows.images("", GalleryQuery()):
        assert image.job == "job-1" and image.facts.prompt == "a red apple" and store.read(image.path) == png()
    if moment == "trashed":
        store.restore(store.rows.images("", GalleryQuery(trashed=True))[0])
    elif moment.endswith("file"):
        add(store)  # the job is run again
    assert len(ids(store)) == 1 and len(files(store)) == 1


def test_workers_of_one_queue_need_one_folder(address: str, tmp_path: Path) -> None:
    def opened(data: str, pictures: str) -> Service:
        shared: dict[str, Any] = {"store": address, "blobs": tmp_path / "blobs", "pictures": tmp_path / pictures}
        return Service(ServeSettings(data=tmp_path / data, **shared))

    one, two = opened("one", "images"), opened("two", "images")
    with pytest.raises(ConflictError, match=r"--pictures .* use another folder"):
        opened("three", "elsewhere")
    assert one.gallery.enabled and two.gallery.enabled
