"""A1111's fields: each works, or is named in the answer."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import webuiapi
from PIL import Image

from inweave.errors import ConfigError, InweaveError
from inweave.generate.canvas import fill_masked
from inweave.serve.api.a1111.fields import ignored_fields, image_fields, refuse_unsupported
from inweave.serve.api.a1111.images import MaskSettings, crop_region, prepare_inpainting
from inweave.serve.api.a1111.requests import Img2Img
from inweave.serve.api.openai.output import Output
from inweave.serve.api.openai.requests import ImagesEdit, image_request
from inweave.serve.api.openai.requests import ignored_fields as openai_ignored
from inweave.serve.jobs.image_request import ImageRequest
from inweave.serve.jobs.job import Event, Submission
from inweave.serve.jobs.store import JobStore
from tests.serve.worker import Worker

BODY = {"prompt": "a red apple", "steps": 1, "width": 64, "height": 64, "seed": 1}


def png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, format="PNG")
    return content.getvalue()


def text(image: Image.Image) -> str:
    return base64.b64encode(png(image)).decode()


def opened(content: bytes | str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(content) if isinstance(content, str) else content))


def about_request(warnings: list[str]) -> list[str]:
    """Without those about options that other tests have set for everybody."""
    return [line for line in warnings if not line.startswith("option ")]


def noise(size: tuple[int, int] = (128, 128)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), np.uint8))


def box_mask(box: tuple[int, int, int, int], size: tuple[int, int] = (128, 128)) -> Image.Image:
    mask = Image.new("L", size, 0)
    mask.paste(255, box)
    return mask


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"override_settings": {"sd_vae": "other.vae"}}, "sd_vae"),
        ({"override_settings": {"eta_noise_seed_delta": 31337}}, "eta_noise_seed_delta"),
        ({"override_settings": {"samples_format": "jpg"}}, "samples_format"),
        ({"alwayson_scripts": {"ADetailer": {"args": [True]}}}, "ADetailer"),
        ({"restore_faces": True}, "restore_faces"),
        ({"tiling": True}, "tiling"),
        ({"subseed_strength": 0.3}, "subseed_strength"),
        ({"s_tmax": 5}, "s_tmax"),
        ({"save_images": True}, "save_images"),
        ({"refiner_checkpoint": "x"}, "refiner_checkpoint"),
        ({"mask_round": False}, "mask_round"),
        ({"nosuch": 1}, "nosuch"),
    ],
)
def test_what_has_no_effect_is_named(fields: dict[str, Any], name: str) -> None:
    (line,) = ignored_fields(BODY | fields)
    assert name in line


def test_what_clients_always_send_gives_no_warning() -> None:
    """The defaults of webuiapi, SillyTavern and Open WebUI."""
    quiet = {
        "enable_hr": False,
        "hr_scale": 2,
        "hr_upscaler": "Latent",
        "hr_second_pass_steps": 0,
        "hr_resize_x": 0,
        "hr_prompt": "",
        "denoising_strength": 0.7,
        "firstphase_width": 0,
        "styles": [],
        "subseed": -1,
        "subseed_strength": 0.0,
        "seed_resize_from_h": 0,
        "restore_faces": False,
        "tiling": False,
        "do_not_save_samples": False,
        "eta": 1.0,
        "s_churn": 0,
        "s_tmax": 0,
        "s_tmin": 0,
        "s_noise": 1,
        "override_settings": {"sd_model_checkpoint": "x", "CLIP_stop_at_last_layers": 1},
        "override_settings_restore_afterwards": True,
        "sampler_index": "Euler",
        "script_args": [],
        "send_images": True,
        "save_images": False,
        "alwayson_scripts": {"ControlNet": {"args": []}, "ADetailer": {"args": [False]}},
        "image_cfg_scale": 1.5,
        "initial_noise_multiplier": 1,
        "include_init_images": False,
        "url": "http://x",
        "auth": "y",
    }
    assert ignored_fields(BODY | quiet) == []


@pytest.mark.parametrize(
    ("body", "expected", "warns"),
    [
        ({"sampler_name": "DPM++ 2M Karras"}, {"sampler": "dpm_solver_multistep", "schedule": "karras"}, False),
        (
            {"sampler_name": "DPM++ 2M", "scheduler": "Karras"},
            {"sampler": "dpm_solver_multistep", "schedule": "karras"},
            False,
        ),
        (
            {"sampler_index": "Euler a", "scheduler": "Automatic"},
            {"sampler": "euler_ancestral", "schedule": "simple"},
            False,
        ),
        ({"scheduler": "SGM Uniform"}, {"sampler": "euler", "schedule": "sgm_uniform"}, False),
        ({"scheduler": "Automatic"}, {}, False),
        ({"sampler_name": "Nosuch", "scheduler": "Karras", "on_mismatch": "warn"}, {}, True),
        ({"sampler_name": "DDIM", "scheduler": "Karras"}, {"sampler": "ddim", "schedule": "simple"}, True),
        ({"sampler_name": "Euler", "scheduler": "Beta57", "on_mismatch": "warn"}, {"sampler": "euler"}, True),
    ],
)
def test_samplers_and_schedulers_in_every_combination(
    body: dict[str, Any], expected: dict[str, Any], warns: bool
) -> None:
    warnings: list[str] = []
    fields = image_fields({"prompt": "x"} | body, warnings)
    assert {name: fields[name] for name in ("sampler", "schedule") if name in fields} == expected
    assert bool(warnings) == warns


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sampler_name": "Nosuch"}, "sampler_name"),
        ({"sampler_index": "Nosuch", "sampler_name": ""}, "sampler_name"),
        ({"sampler_name": "Euler", "scheduler": "Beta57"}, "scheduler"),
        ({"sampler_name": ["Euler"]}, "sampler_name"),
        ({"scheduler": {}, "sampler_name": 3}, "sampler_name"),
        ({"enable_hr": True, "hr_upscaler": "nosuch"}, "hr_upscaler"),
        ({"enable_hr": True, "hr_scale": 0.5}, "hr_scale"),
        ({"enable_hr": True, "hr_prompt": "another"}, "hr_prompt"),
        ({"enable_hr": True, "hr_checkpoint_name": "another"}, "hr_checkpoint_name"),
        ({"tiling": True}, "tiling"),
        ({"styles": ["nosuch"]}, "styles"),
        ({"styles": "nosuch"}, "styles"),
        ({"subseed_strength": 0.3}, "subseed_strength"),
        ({"refiner_checkpoint": "x"}, "refiner_checkpoint"),
        ({"alwayson_scripts": {"ControlNet": {"args": [{"enabled": True}]}}}, "alwayson_scripts"),
        ({"script_name": "X/Y/Z plot"}, "script_name"),
        ({"send_images": [0]}, "send_images"),
    ],
)
def test_what_asks_for_another_image_is_refused_by_name(worker: Worker, fields: dict[str, Any], name: str) -> None:
    answer = worker.http.post("/sdapi/v1/txt2img", json=BODY | fields)
    assert answer.status_code == 400 and answer.json()["detail"].startswith(f"{name}: "), answer.text


def test_what_is_not_honored_is_where_people_see_it(worker: Worker) -> None:
    body = BODY | {"restore_faces": True, "tiling": True, "sampler_name": "Nosuch", "on_mismatch": "warn"}
    answer = worker.http.post("/sdapi/v1/txt2img", json=body).json()
    assert [line.split()[0].rstrip(":") for line in about_request(answer["warnings"])] == [
        "restore_faces",
        "tiling",
        "sampler_name",
    ]
    (text_of_image,) = json.loads(answer["info"])["infotexts"]
    assert all(line in text_of_image for line in ("restore_faces has no effect", "tiling has no effect", "Nosuch"))


def test_values_of_any_type_are_refused_or_read(worker: Worker) -> None:
    """No field of any API ends in an error of the worker, whatever it holds."""
    wrong: list[str] = []
    for value in (["x"], {"x": [1]}, "x", 1e300, True, -1):
        for name in [*Img2Img.model_fields, "mask_round", "styles"]:
            try:
                body = {"prompt": "x", name: value}
                refuse_unsupported(body)
                ignored_fields(body)
                ImageRequest.parse(image_fields(body, []))
            except InweaveError:
                pass
            except Exception as error:
                wrong.append(f"{name}={value!r}: {error!r}")
        for name in (*ImagesEdit.model_fields, "preview_every"):
            try:
                body = {"prompt": "x", name: value}
                Output.take(body)
                openai_ignored(body, False)
                image_request(body, "image_generation", 20)
            except InweaveError:
                pass
            except Exception as error:
                wrong.append(f"{name}={value!r}: {error!r}")
    assert wrong == []
    answer = worker.http.post("/v1/images/generations", json={"prompt": "x", "output_format": ["png"]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "output_format"


def test_an_interrupt_ends_what_runs_and_only_for_its_own_client(worker: Worker) -> None:
    """A1111's meaning of it: the running image, not the newest one; of this client, not of the others."""

    async def ask(client: httpx.AsyncClient, width: int, **headers: str) -> dict[str, Any]:
        body = {"prompt": "x", "steps": 100, "width": width, "height": 64, "batch_size": 2}
        answer = await client.post("/sdapi/v1/txt2img", json=body, headers=headers)
        return dict(answer.json())

    def states() -> dict[str, str]:
        jobs = worker.http.get("/v1/jobs", params={"limit": 5, "state": ["queued", "running"]}).json()["jobs"]
        return {job["id"]: job["state"] for job in jobs}

    async def story() -> None:
        async with httpx.AsyncClient(base_url=worker.url, timeout=60) as client:
            ann = {"Authorization": "Basic " + base64.b64encode(b"ann:any").decode()}
            requests = []
            # a job of another size cannot join the batch that runs
            for width, headers in ((64, ann), (72, ann), (80, {"X-Client-Id": "bob"})):
                requests.append(asyncio.create_task(ask(client, width, **headers)))
                while len(await asyncio.to_thread(states)) < len(requests):
                    await asyncio.sleep(0.02)
            while "running" not in (before := await asyncio.to_thread(states)).values():
                await asyncio.sleep(0.02)
            running = next(job for job, state in before.items() if state == "running")
            mine = (await client.get("/sdapi/v1/progress", headers=ann)).json()
            assert mine["state"]["job"] == running and mine["state"]["job_count"] == 3
            await client.post("/sdapi/v1/interrupt", headers={"X-Client-Id": "carol"})
            assert len(await asyncio.to_thread(states)) == 3, "carol has no job"
            await client.post("/sdapi/v1/interrupt", headers=ann)
            first = await requests[0]
            info = json.loads(first["info"])
            assert first["job_id"] == running and info["interrupted"]
            assert len(info["all_seeds"]) == len(info["all_prompts"]) == 2 and info["seed"] == info["all_seeds"][0] >= 0
            left = await asyncio.to_thread(states)
            assert set(left) == set(before) - {running}, "the jobs that wait go on"
            await client.post("/sdapi/v1/interrupt", params={"id_task": next(iter(left))})
            await client.post("/sdapi/v1/interrupt", headers=ann)
            await client.post("/sdapi/v1/interrupt", headers={"X-Client-Id": "bob"})
            for each in requests:
                assert json.loads((await each)["info"])["interrupted"]

    asyncio.run(story())


def test_an_interrupt_without_a_name_never_ends_the_job_of_another_at_the_same_address(worker: Worker) -> None:
    body = {"prompt": "x", "steps": 150, "width": 64, "height": 64, "batch_size": 4}

    def unfinished() -> list[str]:
        jobs = worker.http.get("/v1/jobs", params={"state": ["queued", "running"]}).json()["jobs"]
        return [job["id"] for job in jobs]

    async def story() -> None:
        one, other = (httpx.AsyncClient(base_url=worker.url, timeout=60) for _ in range(2))
        browser = {"User-Agent": "Browser/1.0"}
        requests = []
        for client in (one, other):
            requests.append(asyncio.create_task(client.post("/sdapi/v1/txt2img", json=body)))
            while len(await asyncio.to_thread(unfinished)) < len(requests):
                await asyncio.sleep(0.02)
        ids = await asyncio.to_thread(unfinished)
        refusal = await other.post("/sdapi/v1/interrupt")
        assert refusal.status_code == 409 and "X-Client-Id" in refusal.json()["detail"]
        assert (await other.post("/sdapi/v1/skip")).status_code == 409
        assert (await other.post("/sdapi/v1/interrupt", headers=browser)).status_code == 200, "it has no jobs"
        assert await asyncio.to_thread(unfinished) == ids
        await other.post("/sdapi/v1/interrupt", params={"id_task": ids[0]})
        assert (await requests[1]).json()["job_id"] == ids[0]
        assert await asyncio.to_thread(unfinished) == ids[1:]
        assert (await one.post("/sdapi/v1/interrupt")).status_code == 200, "a single job can only be the caller's"
        assert json.loads((await requests[0]).json()["info"])["interrupted"]
        await one.aclose()
        await other.aclose()

    asyncio.run(story())


def test_progress_costs_the_same_however_many_jobs_wait(tmp_path: Path) -> None:
    store = JobStore(tmp_path, queue_limit=3000)
    request = {"config": {"prompt": "x" * 2000}}
    store.submit(Submission("image_generation", "m", request, client="a", priority=1))
    fields = "kind, model, state, priority, client, request, created"
    copies = "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 2000)"
    query = (
        f"INSERT INTO jobs (id, {fields}) {copies} SELECT 'job-' || n, {fields.replace('priority', '0')} FROM jobs, n"
    )
    with store._transaction():
        store._db.execute(query)
    job = store.claim()
    assert job is not None
    with store._transaction():
        for step in range(1200):
            store._append(job.id, Event("progress", {"step": step, "total": 1200, "eta": 1.0}))
    started = time.process_time()
    for _ in range(10):
        (running,) = store.jobs(states=("running",), limit=100)
        last, waiting = store.last_event(running.id, "progress", "preview"), store.count("running", "queued")
    seconds = (time.process_time() - started) / 10
    assert running.id == job.id and waiting == 2001 and last is not None and last.data["step"] == 1199
    assert len(store.waiting_ids()) == 2000 and store.waiting(1, "a")[0].id == store.waiting_ids()[0]
    assert seconds < 0.01, f"{seconds * 1000:.1f} ms"
    store.close()


def test_a_script_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="X/Y/Z plot"):
        image_fields({"prompt": "x", "script_name": "X/Y/Z plot"}, [])


def test_a_disabled_network_is_disabled_in_both_prompts() -> None:
    body = {"prompt": "a <lora:pixel:1>", "negative_prompt": "b <lora:ink:1>", "disable_extra_networks": True}
    fields = image_fields(body, [])
    assert (fields["prompt"].strip(), fields["negative_prompt"].strip()) == ("a", "b")


@pytest.mark.parametrize(
    ("box", "padding", "target"),
    [
        ((40, 40, 80, 60), 0, (64, 64)),
        ((0, 0, 5, 5), 32, (64, 128)),
        ((100, 120, 128, 128), 3, (128, 64)),
        ((0, 0, 128, 128), 0, (64, 64)),
        ((64, 0, 65, 128), 0, (64, 64)),
    ],
)
def test_the_region_holds_the_mask_and_has_the_shape_of_the_target(
    box: tuple[int, int, int, int], padding: int, target: tuple[int, int]
) -> None:
    left, top, right, bottom = crop_region(box_mask(box), padding, target) or (0, 0, 0, 0)
    assert 0 <= left <= max(0, box[0] - padding) and min(128, box[2] + padding) <= right <= 128
    assert 0 <= top <= max(0, box[1] - padding) and min(128, box[3] + padding) <= bottom <= 128
    wide, high = right - left, bottom - top
    assert abs(wide * target[1] - high * target[0]) <= 2 * max(target) or wide == 128 or high == 128
    assert crop_region(Image.new("L", (128, 128)), 0, target) is None


def test_masked_content_is_filled_from_around_it() -> None:
    image = Image.new("RGB", (128, 96), (10, 200, 30))
    image.paste((255, 0, 255), (40, 30, 70, 60))
    mask = box_mask((38, 28, 72, 62), (128, 96))
    filled = np.asarray(fill_masked(image, mask), np.int16)
    assert abs(filled - (10, 200, 30)).max() <= 2
    every = Image.new("L", (128, 96), 255)
    assert fill_masked(image, every).tobytes() == image.tobytes(), "there is nothing around it"


def test_only_the_masked_part_is_repainted_and_put_back() -> None:
    image, mask = noise(), box_mask((40, 40, 60, 60))
    settings = MaskSettings(blur=0, padding=4, fill=False)
    inpainting = prepare_inpainting(png(image), png(mask), (64, 64), 0, settings)
    assert inpainting.region == (36, 36, 64, 64) and opened(inpainting.image).size == (64, 64)
    painted = opened(inpainting.restore(png(Image.new("RGB", (64, 64), "red")))).convert("RGB")
    expected = image.copy()
    expected.paste((255, 0, 0), (40, 40, 60, 60))
    assert painted.tobytes() == expected.tobytes()
    inverted = prepare_inpainting(png(image), png(mask), (64, 64), 0, MaskSettings(invert=True, blur=0))
    assert inverted.region == (0, 0, 128, 128)
    whole = prepare_inpainting(png(image), png(mask), (64, 64), 0, MaskSettings(only_masked=False, fill=False))
    assert whole.region is None and opened(whole.image).size == opened(whole.mask).size == (64, 64)


def test_a_webui_client_inpaints_only_the_masked_part_by_default(worker: Worker) -> None:
    webui = webuiapi.WebUIApi(host="127.0.0.1", port=int(worker.url.rpartition(":")[2]), sampler="Euler", steps=2)
    image, mask = noise(), box_mask((40, 40, 80, 80))
    result = webui.img2img(images=[image], mask_image=mask, prompt="a pear", width=64, height=64, seed=1)
    assert (
        about_request(result.json["warnings"]) == [] and result.image.size == (128, 128) and result.info["steps"] == 2
    )
    difference = np.asarray(result.image.convert("RGB"), np.int16) - np.asarray(image, np.int16)
    assert not difference[np.asarray(mask) == 0].any() and difference[50:70, 50:70].any()
    assert "a pear" in webui.png_info(result.image).info


def test_every_setting_of_a_mask_changes_the_result_or_is_named(worker: Worker) -> None:
    body = BODY | {"init_images": [text(noise((64, 64)))], "mask": text(box_mask((16, 16, 48, 48), (64, 64)))}

    def ask(**fields: Any) -> tuple[str, list[str]]:
        answer = worker.http.post("/sdapi/v1/img2img", json=body | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["images"][0], about_request(answer.json()["warnings"])

    plain = ask()[0]
    assert ask(mask_blur=4, inpainting_fill=0, inpaint_full_res=True, resize_mode=0)[0] == plain, "A1111's defaults"
    others = [
        ask(mask_blur=0)[0],
        ask(inpainting_fill=1)[0],
        ask(inpaint_full_res=0)[0],
        ask(inpaint_full_res_padding=8)[0],
        ask(inpainting_mask_invert=1)[0],
    ]
    assert len({plain, *others}) == 6
    for fields in ({"inpainting_fill": 2}, {"resize_mode": 3}, {"mask_blur_x": 2, "mask_blur_y": 9}):
        assert list(fields)[-1] in ask(**fields)[1][0]
    for wrong in ({"resize_mode": 4}, {"inpainting_fill": 9}, {"inpaint_full_res": "x"}, {"mask_blur": -1}):
        answer = worker.http.post("/sdapi/v1/img2img", json=body | wrong)
        assert answer.status_code == 400 and next(iter(wrong)) in answer.json()["detail"]


def test_options_are_followed_or_named(worker: Worker) -> None:
    try:
        for name in ("inweave/emoji", "inweave/emoji [1a2b3c4d5e]", "inweave/emoji.safetensors [ab12]"):
            assert worker.http.post("/sdapi/v1/options", json={"sd_model_checkpoint": name}).json() is None
        options = {"CLIP_stop_at_last_layers": 2, "face_restoration_unload": True}
        worker.http.post("/sdapi/v1/options", json=options)
        assert worker.http.get("/sdapi/v1/options").json()["CLIP_stop_at_last_layers"] == 2
        answer = worker.http.post("/sdapi/v1/txt2img", json=BODY | {"batch_size": 2}).json()
        info = json.loads(answer["info"])
        assert info["clip_skip"] == 2 and info["batch_size"] == 2
        assert "option face_restoration_unload has no effect here" in answer["warnings"]
        override = {"override_settings": {"CLIP_stop_at_last_layers": 1}, "override_settings_restore_afterwards": False}
        assert json.loads(worker.http.post("/sdapi/v1/txt2img", json=BODY | override).json()["info"])["clip_skip"] == 1
        assert worker.http.get("/sdapi/v1/options").json()["CLIP_stop_at_last_layers"] == 1
        for wrong in ({"sd_model_checkpoint": "nosuch"}, {"CLIP_stop_at_last_layers": 99}):
            assert worker.http.post("/sdapi/v1/options", json=wrong).status_code in (400, 404)
    finally:
        worker.http.post("/sdapi/v1/options", json={"CLIP_stop_at_last_layers": 1, "face_restoration_unload": None})


@pytest.mark.parametrize("field", ["cfg_scale", "batch_size", "denoising_strength", "width"])
def test_problems_have_the_names_of_the_caller(worker: Worker, field: str) -> None:
    body = BODY | {"init_images": [text(noise((64, 64)))], field: 99}
    answer = worker.http.post("/sdapi/v1/img2img", json=body)
    assert answer.status_code == 400 and answer.json()["detail"].startswith(f"{field}:")
