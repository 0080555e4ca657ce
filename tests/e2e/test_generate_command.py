"""inweave generate, demo and bench as a user runs them: files, exit codes, JSON, pipes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from inweave.cli.app import app
from inweave.demo import story
from inweave.generate.record import read_record
from tests.peers import tiny_models as tiny
from tests.support import DATA, sized

SD15 = DATA / "files" / "catundchat_sd15_pytorch_lora_weights.safetensors"


def inweave(*arguments: object, code: int = 0, stdin: str | None = None) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


def test_an_image_is_reproduced_from_its_own_settings(tmp_path: Path) -> None:
    first, again, other = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "c.png"
    report = inweave(
        "generate", "cat face <lora:ink:0.4>", "--lora", "pixel:0.6", "--seed", 7, "--steps", 3, "-o", first
    )
    assert "seed 7" in report and "modules changed" in report
    inweave("generate", "--from", first, "-o", again)
    inweave("generate", "--from", first, "--seed", 8, "-o", other)
    assert pixels(first) == pixels(again) != pixels(other)
    record = read_record(first)
    assert [(lora["name"], lora["in_prompt"]) for lora in record["loras"]] == [("pixel", False), ("ink", True)]
    assert all(lora["modules"] > 10 and len(lora["sha256"]) == 64 for lora in record["loras"])
    with Image.open(first) as image:
        image.load()
        text = image.info["parameters"]
    assert text.startswith("cat face <lora:ink:0.4> <lora:pixel:0.6>\nSteps: 3, Sampler: DDIM")
    assert f'Lora hashes: "pixel: {record["loras"][0]["autov3"]}, ink: {record["loras"][1]["autov3"]}"' in text


def test_json_names_every_file_and_setting(tmp_path: Path) -> None:
    report = json.loads(
        inweave("generate", "rocket", "--count", 2, "--steps", 2, "--seed", 3, "-o", tmp_path / "r.png", "--json")
    )
    assert report["ok"] and [Path(image["path"]).name for image in report["images"]] == ["r-1.png", "r-2.png"]
    assert [image["seed"] for image in report["images"]] == [3, 4]
    assert {"images", "loras", "warnings", "seconds"} <= report.keys()
    assert all(Path(image["path"]).is_file() for image in report["images"])


#: the packages that an image of the embedded model may import: its start is most of what a first image takes
ALLOWED = {
    "PIL", "annotated_doc", "annotated_types", "inweave", "numpy", "pydantic", "pydantic_core", "rich", "shellingham",
    "tokenizers", "torch", "torchgen", "tqdm", "typer", "typing_extensions", "typing_inspection",
    "_distutils_hack", "opt_einsum", "pynvml", "torchcomms", "triton",  # by Python and torch, where they are installed
}  # fmt: skip
#: torch's compiler and what it imports, which together take as long as the rest
NEEDLESS_TORCH = ("torch._dynamo.convert_frame", "torch._inductor", "torch.fx.experimental.symbolic_shapes")
#: what a model's libraries could import, and what inweave needs for other commands
NEEDLESS = {
    "scipy.stats",
    "scipy.integrate",
    "scipy.optimize",
    "torchvision",
    "fastapi",
    "uvicorn",
    "diffusers.pipelines",
}
NEEDLESS_ROOMS = (
    "inweave.training", "inweave.serve", "inweave.layers", "inweave.bench", "inweave.models.fused",
    "transformers.models.t5", "transformers.models.qwen", "transformers.trainer",
)  # fmt: skip


def test_a_pipe_gets_png_and_nothing_else(tmp_path: Path) -> None:
    """A real process: standard input is the prompt, standard output the image, no progress bar on standard error.

    Python itself prints there what is imported: of the packages that are installed, those that are needed.
    """
    imported = _imported_for_a_pipe(tmp_path, (128, 128), "--device", "cpu")
    packages = {name.partition(".")[0] for name in imported} & packages_distributions().keys()
    assert "torch" in packages and sorted(packages - ALLOWED) == []
    assert not sorted(name for name in imported if name.startswith((*NEEDLESS_TORCH, *NEEDLESS_ROOMS)))


def test_a_model_of_the_libraries_imports_what_it_needs(tmp_path: Path) -> None:
    """The same with a model whose networks are those of its libraries: nothing of training, or of other models."""
    imported = _imported_for_a_pipe(tmp_path, (64, 64), "--model", tiny.folder("sd1.5"), "--width", 64, "--height", 64)
    assert {"torch", "diffusers", "transformers.modeling_utils"} <= imported
    assert not sorted(name for name in imported if name in NEEDLESS or name.startswith(NEEDLESS_ROOMS))


def _imported_for_a_pipe(folder: Path, size: tuple[int, int], *options: object) -> set[str]:
    """Return the modules that a process tries to import which writes an image to its standard output."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "inweave", "generate", "-", "--steps", "2", "--seed", "1",
         "-o", "-", *map(str, options)], input=b"red apple\n", capture_output=True, check=True, cwd=folder,
    )  # fmt: skip
    with Image.open(io.BytesIO(result.stdout)) as image:
        assert image.size == size and "inweave" in image.text  # type: ignore[attr-defined]
    lines = result.stderr.decode().splitlines()
    assert [line for line in lines if not line.startswith("import time:")] == []
    assert list(folder.iterdir()) == []
    return {line.rpartition("|")[2].strip() for line in lines}


def test_without_a_name_nothing_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        inweave("generate", "a red apple!", "--steps", 1, "--seed", 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-red-apple-5-2.png", "a-red-apple-5.png"]


def test_image_to_image_and_inpainting(tmp_path: Path) -> None:
    start, mask, out = tmp_path / "s.png", tmp_path / "m.png", tmp_path / "o.png"
    inweave("generate", "red apple", "--seed", 7, "--steps", 6, "-o", start)
    half = Image.new("L", (128, 128), 0)
    half.paste(255, (0, 64, 128, 128))
    half.save(mask)
    inweave("generate", "pizza", "--init", start, "--strength", 0.5, "--steps", 4, "--seed", 1, "-o", out)
    assert pixels(out) != pixels(start)
    inweave(
        "generate",
        "pizza",
        "--init",
        start,
        "--mask",
        mask,
        "--strength",
        1,
        "--steps",
        4,
        "--seed",
        1,
        "-o",
        out,
        "--force",
    )
    with Image.open(out) as new, Image.open(start) as old:
        top = (0, 0, 128, 64)
        assert new.crop(top).tobytes() == old.crop(top).tobytes()
        assert new.tobytes() != old.tobytes()


def test_sheets(tmp_path: Path) -> None:
    grid, comparison = tmp_path / "g.png", tmp_path / "c.png"
    inweave(
        "generate",
        "cat face",
        "--lora",
        "pixel",
        "--grid",
        "strength=0,1",
        "--grid",
        "seed=1,2",
        "--steps",
        2,
        "-o",
        grid,
    )
    report = json.loads(
        inweave(
            "generate",
            "cat face",
            "--lora",
            "pixel",
            "--lora",
            "ink:0.5",
            "--compare",
            "--steps",
            2,
            "-o",
            comparison,
            "--json",
        )
    )
    assert len(report["images"][0]["cells"]) == 4
    with Image.open(grid) as sheet:
        assert sheet.width > 2 * 128 and sheet.height > 2 * 128
    inweave("generate", "cat face", "--compare", "-o", comparison, code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--steps", "0", "--sampler", "eulr", "--lora", "nope"], ["3 problems", "steps", "eulr", "nope"]),
        (["x", "--lora", str(SD15), "--steps", "1"], ["made for sd1.5", "inweave/emoji"]),
        (["x", "--model", "gone/model"], ["--allow-download"]),
        (["x", "--model", "gone.safetensors"], ["no such file"]),
        (["x", "-o", "a.gif", "--steps", "1"], [".png, .jpg or .webp"]),
        (["x", "-o", "a-{sed}.png", "--steps", "1"], ["{sed}", "{seed}"]),
        (["x", "-o", "/dev/null/a.png", "--steps", "1"], ["/dev/null", "not a folder"]),
        (["x", "--init", "gone.png"], ["gone.png", "no such file"]),
        (["x", "--device", "cuda:7"], ["no CUDA device"]),
        (["x", "--dtype", "int3"], ["int3"]),
        ([], ["a prompt is needed"]),
        (["x", "--from", str(SD15)], ["not an image"]),
        (["x", "--part", "vae"], ["PART=FILE"]),
        (["x", "--json", "-o", "-"], ["standard output"]),
    ],
)
def test_errors_are_reported_as_text(
    arguments: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = inweave("generate", *arguments, code=2)
    assert all(word in report for word in words), report
    assert "Traceback" not in report


def test_the_demo_leaves_a_page_with_everything_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole story with a few training steps: the sheets, the curve, every command, and a LoRA that loads."""
    monkeypatch.setattr(story, "BASE", story.BASE[: sized(1, len(story.BASE))])
    monkeypatch.setattr(story, "SUBJECTS", story.SUBJECTS[: sized(1, len(story.SUBJECTS))])
    report = json.loads(inweave("demo", "--out", tmp_path / "demo", "--steps", 3, "--image-steps", 2, "--json"))
    page = Path(report["page"]).read_text()
    for image in report["images"]:
        assert Path(image).is_file() and f'src="{Path(image).name}"' in page
    assert "<polyline" in page and "inweave generate" in page and "http" not in page.replace("http-equiv", "")
    check = json.loads(
        inweave("check", tmp_path / "demo" / "training" / "pixel.safetensors", "--base", "inweave/emoji", "--json")
    )
    assert check["ok"] and check["placed"] == check["tensors"]


@pytest.mark.full
def test_bench_reports_recall_and_styles() -> None:
    report = json.loads(
        inweave(
            "bench", "embedded", "--captions", sized(2, 6), "--styled", sized(2, 4), "--steps", sized(5, 8), "--json"
        )
    )
    assert report["recall"]["top5"] >= 0.8
    assert set(report["styles"]) == {"ink", "pixel"} and all(row["ratio"] < 1 for row in report["styles"].values())


def test_a_strength_without_an_image_is_an_error_that_names_lora_and_tensor(tmp_path: Path) -> None:
    for strength in ("1e30", "1e15"):  # weights that overflow, and weights that make the network overflow
        text = inweave(
            "generate", "red apple", "--lora", f"pixel:{strength}", "--steps", 1, "--seed", 1, "-o", tmp_path / "o.png",
            "--json", code=2,
        )  # fmt: skip
        error = json.loads(text)["error"]
        assert "pixel" in error and ("finite" in error or "overflow" in error) and ".weight" in error
        assert not (tmp_path / "o.png").exists()


def test_an_image_of_another_program_is_repeated_with_a_warning_for_all_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL.PngImagePlugin import PngInfo

    monkeypatch.chdir(tmp_path)
    info = PngInfo()
    info.add_text(
        "parameters",
        "cat <lora:pixel:0.5>\nSteps: 1, Sampler: DDIM, CFG scale: 3, Seed: 5, Size: 128x128, Model: v1-5, VAE: kl-f8, "
        'Hires upscale: 2, TI hashes: "bad: 0123", Lora hashes: "pixel: 0123456789ab"',
    )
    Image.new("RGB", (8, 8)).save("theirs.png", pnginfo=info)
    report = json.loads(inweave("generate", "--from", "theirs.png", "--json"))
    assert [Path(image["path"]).name for image in report["images"]] == ["cat-5.png"]  # no tag in a name
    for word in ("v1-5", "VAE", "Hires upscale", "TI hashes", "0123456789ab"):
        assert len([warning for warning in report["warnings"] if word in warning]) == 1, (word, report["warnings"])
    assert len(report["warnings"]) == 5
    again = json.loads(inweave("generate", "--from", "cat-5.png", "-o", "again.png", "--json"))
    assert again["warnings"] == [] and pixels(Path("again.png")) == pixels(Path("cat-5.png"))


def test_a_sheet_carries_its_settings(tmp_path: Path) -> None:
    sheet = tmp_path / "s.png"
    inweave(
        "generate",
        "cat <lora:ink:0.2>",
        "--lora",
        "pixel",
        "--grid",
        "strength=0,1",
        "--steps",
        1,
        "--seed",
        3,
        "-o",
        sheet,
    )
    record = read_record(sheet)
    assert record["config"]["seed"] == 3 and [lora["name"] for lora in record["loras"]] == ["pixel", "ink"]
    assert "--grid strength=0,1" in record["warnings"][0]
    with Image.open(sheet) as image:
        image.load()
        cells = json.loads(image.info["inweave"])["grid"]["settings"]
    assert [cell["loras"][0]["unet"] for cell in cells[0]] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("recorded", "words"),
    [
        ("Sampler: DPM++ 2S a, Schedule type: Karras", ("Sampler", "Schedule type")),  # ours has neither
        ("Sampler: DPM++ 2S a Karras", ("Sampler", "Schedule type")),
        ("Sampler: DDIM, Schedule type: Karras", ("Schedule type",)),  # each of them exists, but not together
        ("Sampler: Euler, Schedule type: Karras", ()),
    ],
)
def test_a_sampler_or_schedule_that_the_model_cannot_use_is_a_warning(
    recorded: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL.PngImagePlugin import PngInfo

    monkeypatch.chdir(tmp_path)
    info = PngInfo()
    info.add_text("parameters", f"cat\nSteps: 1, {recorded}, CFG scale: 1, Seed: 5, Size: 64x64")
    Image.new("RGB", (8, 8)).save("theirs.png", pnginfo=info)
    report = json.loads(inweave("generate", "--from", "theirs.png", "--json"))
    warned = [warning for warning in report["warnings"] if "is not reproduced" in warning]
    assert [warning.partition(" (")[0] for warning in warned] == list(words)
    if recorded.startswith("Sampler: DDIM"):  # what the user asks for is never replaced
        inweave("generate", "--from", "theirs.png", "--schedule", "karras", "--json", code=2)


def test_an_output_that_is_there_is_refused_before_work_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(b"mine")
    (tmp_path / "b-2.png").write_bytes(b"mine")
    with monkeypatch.context() as patch:
        patch.setattr("inweave.generate.pipeline.load_for_images", lambda *_, **__: pytest.fail("work started"))
        for arguments in (["-o", tmp_path / "a.png"], ["-o", tmp_path / "b.png", "--count", 2]):
            report = inweave("generate", "x", "--steps", 1, *arguments, code=2)
            assert "already exists" in report and "--force" in report
        for place in ("/proc/a.png", "/proc/new/", "/dev/null/a.png"):  # root may write there, by its permissions
            assert "cannot be written" in inweave("generate", "x", "--steps", 1, "-o", place, code=2)
    inweave("generate", "x", "--steps", 1, "-o", tmp_path / "a.png", "--force")
    assert pixels(tmp_path / "a.png") and (tmp_path / "b-2.png").read_bytes() == b"mine"


@pytest.mark.sample(2)
@pytest.mark.parametrize("ending", ["png", "jpg", "webp"])
def test_folders_are_made_and_every_format_repeats(ending: str, tmp_path: Path) -> None:
    """From a JPEG or WebP too: the settings are exact, although its pixels are not."""
    inweave(
        "generate",
        "café (cat:1.2) <lora:ink:0.4>",
        "--seed",
        7,
        "--steps",
        1,
        "-o",
        f"{tmp_path}/new/a-{{seed}}.{ending}",
    )
    first, again = tmp_path / "new" / f"a-7.{ending}", tmp_path / f"again.{ending}"
    record = read_record(first)
    assert record["config"]["prompt"].startswith("café") and len(record["loras"][0]["sha256"]) == 64
    report = json.loads(inweave("generate", "--from", first, "-o", again, "--json"))
    (warning,) = report["warnings"]
    assert "does not know 'café'" in warning and pixels(first) == pixels(again)
    if ending != "png":
        with Image.open(first) as image:
            comment = image.getexif().get_ifd(0x8769)[0x9286]
        assert comment.startswith(b"UNICODE\0") and "Steps: 1" in comment[8:].decode("utf-16-be")


def test_a_folder_as_output_never_replaces(tmp_path: Path) -> None:
    for _ in range(2):
        inweave("generate", "red apple", "--seed", 7, "--steps", 1, "-o", f"{tmp_path}/pictures/")
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == ["red-apple-7-2.png", "red-apple-7.png"]


def test_ctrl_c_keeps_the_images_that_are_done(tmp_path: Path) -> None:
    """A real process, stopped by a real signal in the third of four images."""
    process = subprocess.Popen(
        [sys.executable, "-m", "inweave", "generate", "red apple", "--steps", "16", "--seed", "1", "--count", "4",
         "-o", str(tmp_path / "a.png"), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "a-1.png").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    report = json.loads(out)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert process.returncode == 130 and not report["ok"] and f"{len(names)} of 4" in report["error"], err
    assert names[0] == "a-1.png" and len(names) < 4
    assert [Path(image["path"]).name for image in report["images"]] == names


def test_the_screen_is_never_empty(tmp_path: Path) -> None:
    """On a terminal something is shown before libraries are imported; then the bytes of the model, and the steps."""
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "inweave", "generate", "red apple", "--steps", "2", "-o", str(tmp_path / "a.png")],
        stdout=slave, stderr=slave, env={**os.environ, "NO_COLOR": "1", "COLUMNS": "70", "TERM": "xterm"},
    )  # fmt: skip
    os.close(slave)
    screen: list[bytes] = []
    with suppress(OSError):  # Linux: the terminal is gone with its last process
        while chunk := os.read(master, 65536):
            screen.append(chunk)
    os.close(master)
    assert process.wait(30) == 0
    text = b"".join(screen).decode("utf-8", "replace")
    assert text.index("starting") < text.index("loading inweave/emoji") < text.index("a.png")
    assert "28 MB" in text
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", text), "a color in spite of NO_COLOR"
