"""Damaged, hostile and strange files of every trainer are refused in words, in time."""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inweave.errors import ConfigError, FormatError, InweaveError
from inweave.training.config.schema import TrainConfig
from inweave.training.config.translate import Translation
from inweave.training.importers.ai_toolkit.settings import AI_TOOLKIT as TOOLKIT_TABLE
from inweave.training.importers.detect import IMPORTERS, _translated, import_config, import_table
from inweave.training.importers.kohya.settings import KOHYA as KOHYA_TABLE
from inweave.training.importers.onetrainer.settings import ONE_TRAINER as ONE_TRAINER_TABLE
from inweave.training.importers.simpletuner.settings import SIMPLE_TUNER as TUNER_TABLE
from inweave.training.importers.source import Importer, Source
from tests.support import stopwatch
from tests.unit.training.importers.other_trainers import AI_TOOLKIT, KOHYA, ONE_TRAINER, write_text
from tests.unit.training.importers.small_imports import ONE, TOOLKIT, TUNER, imported

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
HOSTILE = {
    "deep json": '{"config": {"process": ' + "[" * 50_000 + "]" * 50_000 + "}}",
    "deep json objects": '{"a":' * 20_000 + "1" + "}" * 20_000,
    "deep toml": "network_dim = " + "[" * 50_000 + "]" * 50_000,
    "deep toml key": "a" + ".a" * 200_000 + " = 1",
    "deep yaml": "config: " + "[" * 5_000 + "]" * 5_000,
    "deep yaml maps": "".join(f"{' ' * i}a:\n" for i in range(400)),
    "laughs": "config: {process: [{}]}\n" + LAUGHS,
    "laughs inside": LAUGHS + "config:\n  process:\n    - x: *a39\n",
    "loop": "config: &c\n  process:\n    - *c\n",
    "long number": "network_dim = " + "9" * 10_000,
    "long hex number": 'train_data_dir = "x"\nnetwork_dim = 0x' + "f" * 10_000,
    "long number in json": '{"training_method": "LORA", "lora_rank": ' + "9" * 6_000 + "}",
    "huge exponent": '{"training_method": "LORA", "lora_rank": 1e400, "resolution": "1e999"}',
    "nan": '{"training_method": "LORA", "lora_alpha": NaN, "concepts": [{"path": "x"}]}',
    "long base 60": "config: {process: [{train: {steps: 1" + ":1" * 2_000 + "}}]}",
    "bad date": "config: {process: [{train: {steps: 2024-99-99}}]}",
    "strange keys": "config: {process: [{null: 1, 2: 3, 2024-01-01: 4, [a]: 5}]}",
    "long key": '{"training_method": "LORA", "' + "k" * 100_000 + '": 1}',
    "many": "seed = 1\n" + "".join(f"a{i} = {{b = 1}}\n" for i in range(10_000)),
    "wrong shapes": json.dumps({name: {"x": [{"y": [[1]]}]} for name in ONE_TRAINER} | {"model_type": [1]}),
    "wrong shapes too": json.dumps({name: [[1], {"z": None}] for name in ONE_TRAINER}),
    "wrong concepts": '{"training_method": "LORA", "concepts": {"a": 1, "0": [[]]}, "concept_file_name": "/dev/zero"}',
    "wrong toolkit": "config: {process: [3, [], {network: 5, train: [1], datasets: {a: b}, sample: x}]}",
    "surrogate": '{"training_method": "LORA", "concepts": [{"path": "\\ud800"}]}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_a_message(name: str, tmp_path: Path) -> None:
    file = write_text(tmp_path, HOSTILE[name])
    with pytest.raises(InweaveError) as caught, stopwatch(time.monotonic) as cost:
        import_config(file)
    assert len(str(caught.value)) < 20_000
    assert cost.seconds < 5


@pytest.mark.parametrize("data", [b"\x80\x04\x95", b"\xff" * 100, b"a = 1\0", bytes(range(256)), b"x" * (2**20 + 1)])
def test_files_that_are_no_text_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(data)
    with pytest.raises(FormatError, match=r"run\.toml"):
        import_config(tmp_path / "run.toml")


def test_places_that_hold_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path("/dev/zero"), "a\0b"):
        with pytest.raises(ConfigError):
            import_config(path)


WEIRD = [
    10**5000,
    -1,
    1e308,
    "x" * 5000,
    "",
    True,
    [[[]]],
    {"a": {"b": 1}},
    [None, {"c": 10**5000}],
    "\ud800",
    "1e9999",
    [],
]


WHOLE: dict[str, dict[str, Any]] = {
    "kohya": {"train_data_dir": "x", "network_dim": 4},
    "kohya_ss": {"LoRA_type": "Standard", "train_data_dir": "x", "network_dim": 4},
    "OneTrainer": {"training_method": "LORA", "concepts.0.path": "x"},
    "ai-toolkit": {"network.type": "lora", "datasets.0.folder_path": "x"},
    "SimpleTuner": {
        "model_family": "flux",
        "model_type": "lora",
        "caption_strategy": "textfile",
        "data_backend_config": [{"instance_data_dir": "x"}],
    },
}
TABLES = {
    "kohya": KOHYA_TABLE, "kohya_ss": KOHYA_TABLE, "OneTrainer": ONE_TRAINER_TABLE, "ai-toolkit": TOOLKIT_TABLE,
    "SimpleTuner": TUNER_TABLE,
}  # fmt: skip
BY_NAME = {importer.name: importer for importer in IMPORTERS}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("index", range(len(WEIRD)))
def test_weird_values_never_end_in_a_traceback(
    kind: str, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting in its turn, and all at once; parsing is passed over, for no file could hold some of these."""
    import inweave.training.importers.detect as importing

    names = [name.replace("*", "x") for name, row in TABLES[kind].items() if row.kind == "read"]
    for chosen in (*([name] for name in [*names, "model_type"]), names):
        settings = {**WHOLE[kind], **dict.fromkeys(chosen, WEIRD[index])}
        monkeypatch.setattr(importing, "recognize", lambda table, settings=settings: (BY_NAME[kind], settings))
        try:
            import_table({}, tmp_path / "x")
        except InweaveError as error:
            assert len(str(error)) < 50_000


@pytest.mark.parametrize("kind", WHOLE)
def test_what_every_weird_value_is_put_into_can_be_imported(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import inweave.training.importers.detect as importing

    options = {"optimizer": "adamw", "lr_scheduler": "constant"} if kind == "SimpleTuner" else {}
    monkeypatch.setattr(importing, "recognize", lambda table: (BY_NAME[kind], {**WHOLE[kind], **options}))
    overrides: dict[str, Any] = {} if kind != "OneTrainer" else {"train_text_encoders": True}
    assert import_table({}, tmp_path / "x", **overrides).config.rank in (4, 8, 16)


@pytest.mark.parametrize(
    "text", [KOHYA, AI_TOOLKIT, json.dumps(ONE_TRAINER)], ids=["kohya", "ai-toolkit", "OneTrainer"]
)
def test_truncated_and_damaged_files_never_end_in_a_traceback(text: str, tmp_path: Path) -> None:
    for at in range(0, len(text), max(1, len(text) // 40)):
        for damaged in (text[:at], text[:at] + "\x01[{=" + text[at + 3 :]):
            try:
                import_config(write_text(tmp_path, damaged))
            except InweaveError as error:
                assert str(error)


MERGES = "a0: &a0 {b: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}], k{n}: 1}}\n" for n in range(1, 12)
)
BOMBS = {
    "merge keys.yaml": MERGES,
    "merge keys of ai-toolkit.yaml": f"config: {{process: [{{}}]}}\n{MERGES}",
    "one merge key of many.yaml":
        "a: &a {" + ", ".join(f"k{n}: 1" for n in range(500)) + "}\nb: {<<: [" + "*a, " * 5000 + "*a]}",
    "aliases.yaml":
        "a0: &a0 [1, 2]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)),
    "circle.yaml": "config: &c {process: [*c]}",
    "merged circle.yaml": "rank: 3\na: &a {<<: *a}",
    "not a mapping.yaml": "a: {<<: [1, 2]}",
    "dashes.yaml": "- " * 20_000,
    "sexagesimal.yaml": "rank: " + "1:" * 10_000 + "1",
    "hex.yaml": "rank: 0x" + "f" * 5000,
    "digits.yaml": "rank: 1" + "0" * 5000,
    "surrogate.yaml": 'rank: "\\ud800"',
    "surrogate.json": '{"rank": "\\ud800"}',
    "digits.json": '{"rank": 1' + "0" * 5000 + "}",
    "nested.json": '{"rank": ' + "[" * 100_000,
    "nested a little less.json": '{"training_method": "LORA", "a": ' + "[" * 500 + "]" * 500 + "}",
    "dots.toml": "rank" + ".a" * 20_000 + " = 1",
    "many dots.toml": "\n".join(f"k{n}" + ".a" * 500 + " = 1" for n in range(200)),
    "fewer dots.toml": "rank" + ".a" * 500 + " = 1", "hex.toml": "rank = 0x" + "f" * 100_000,
    "nested.toml": "rank = " + "[" * 50_000, "large.toml": "a = 1\n" * 60_000,
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_in_an_error_of_ours_within_a_second(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(BOMBS[name])
    with pytest.raises((ConfigError, FormatError)) as raised, stopwatch(time.thread_time) as cost:
        import_config(file)
    assert cost.seconds < 2 and len(str(raised.value)) < 5000
    if name.endswith(".toml"):
        with pytest.raises((ConfigError, FormatError)):
            TrainConfig.load(file)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"LoRA_type": "Standard", "lr_warmup": "lots"}, "lr_warmup: expected a number, got 'lots'"),
        ({**TUNER, "max_train_steps": "w"}, "max_train_steps: expected a number, got 'w'"),
        ({**ONE, "resolution": "512,big"}, "resolution: expected a number, got 'big'"),
        ({**ONE, "concepts": [{"path": "p", "balancing": "z"}]}, "concepts.0.balancing: expected a number, got 'z'"),
        (
            {"config": {"process": [{**TOOLKIT, "datasets": [{"folder_path": "p", "resolution": "many"}]}]}},
            "datasets.0.resolution: expected a number, got 'many'",
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_named(table: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, table)
    assert any(str(problem).endswith(message) for problem in caught.value.problems), caught.value.problems


CHANGES: tuple[Any, ...] = (..., "", None, -1, "x", [[1]], {"a": {"b": 1}})  # the first deletes


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield (*at, key)
        yield from _places(each, (*at, key))


BACKEND = {"id": "a", "instance_data_dir": "x", "repeats": 1, "resolution": 512, "crop": True, "crop_style": "center"}
LYCORIS = {"algo": "lokr", "linear_dim": 8, "linear_alpha": 1, "factor": 12, "apply_preset": {
    "target_module": ["Attention"], "module_algo_map": {"Attention": {"factor": 12}},
}}  # fmt: skip
COMPLETE: dict[str, dict[str, Any]] = {
    "OneTrainer": {**ONE, "layer_filter": "a,b", "concepts": [{"path": "x", "balancing": 2, "image": {"a": 1}}]},
    "ai-toolkit": {"config": {"process": [{**TOOLKIT, "sample": {"prompts": ["a"], "samples": [{"prompt": "b"}]}}]}},
    "SimpleTuner": {**TUNER, "data_backend_config": [BACKEND], "lora_rank": 4},
    "LyCORIS": {**TUNER, "lora_type": "lycoris", "lycoris_config": LYCORIS},
}


@pytest.mark.parametrize("kind", COMPLETE)
def test_deleted_settings_and_wrong_types_never_end_in_a_traceback(kind: str, tmp_path: Path) -> None:
    for place in _places(COMPLETE[kind]):
        for change in CHANGES:
            table = inner = copy.deepcopy(COMPLETE[kind])
            for key in place[:-1]:
                inner = inner[key]
            if change is ...:
                del inner[place[-1]]
            else:
                inner[place[-1]] = change
            with contextlib.suppress(InweaveError):
                import_table(table, tmp_path / "x.json", dataset="d")


def test_a_value_of_another_type_is_said_with_the_settings_that_may_have_it(tmp_path: Path) -> None:
    def translate(out: Translation, source: Source) -> None:
        dict[Any, Any]().get(out.settings["network_args"])

    table = {"rank": 4, "network_args": ["a"]}
    source = Source(table, dict(table), tmp_path / "x.json")
    importer = Importer("x", dict, lambda file: file.start("", file.settings, {}), translate)
    with pytest.raises(ConfigError, match=r"another type than its trainer writes \(.*list.*\); check network_args"):
        _translated(importer, source)
