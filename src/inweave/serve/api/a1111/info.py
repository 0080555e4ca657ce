"""The `info` of A1111's answers: a text that holds JSON."""

from __future__ import annotations

import json
import time
from typing import Any

from inweave.generate.infotext import SAMPLER_LABELS, infotext, second_pass_fields
from inweave.serve.jobs.job import Job


def generation_info(job: Job, warnings: list[str], batch_size: int) -> dict[str, Any]:
    """Return the object whose JSON text A1111 sends next to the images."""
    result = job.result or {"images": [], "loras": [], "warnings": [], "model": {"name": job.model}}
    images = result["images"]
    first = images[0]["settings"] if images else {**job.request["config"]}
    count = len(images) or int(first.get("count", 1))  # interrupted: the images that were asked for
    seeds = [image["seed"] for image in images] or [int(first.get("seed", -1)) + number for number in range(count)]
    records = [
        {"config": image["settings"], "loras": result["loras"], "model": result["model"], "inputs": {}}
        for image in images
    ]
    extra: dict[str, Any] = {}
    if result["loras"]:
        extra["Lora hashes"] = ", ".join(f"{lora['name']}: {lora['autov3']}" for lora in result["loras"])
        extra["LoRA modules"] = {lora["name"]: lora["modules"] for lora in result["loras"]}
    extra |= {name: value for name, value in second_pass_fields(first).items() if name != "Denoising strength"}
    if every := [*warnings, *result["warnings"], *job.request.get("warnings", [])]:
        extra["Warnings"] = every
    prompt, negative = first.get("prompt", ""), first.get("negative_prompt", "")
    note = f", Warnings: {json.dumps('; '.join(every), ensure_ascii=False)}" if every else ""
    return {
        "prompt": prompt, "all_prompts": [prompt] * count, "negative_prompt": negative,
        "all_negative_prompts": [negative] * count, "seed": seeds[0],
        "all_seeds": seeds, "subseed": -1, "all_subseeds": [-1] * count, "subseed_strength": 0,
        "width": first.get("width"), "height": first.get("height"),
        "sampler_name": SAMPLER_LABELS.get(first.get("sampler", ""), first.get("sampler")),
        "cfg_scale": first.get("guidance"), "steps": first.get("steps"),
        "batch_size": batch_size, "restore_faces": False, "face_restoration_model": None,
        "sd_model_name": job.model, "sd_model_hash": None, "sd_vae_name": None, "sd_vae_hash": None,
        "seed_resize_from_w": -1, "seed_resize_from_h": -1,
        "denoising_strength": (first.get("upscale") or first).get("strength"),
        "extra_generation_params": extra, "index_of_first_image": 0,
        "infotexts": [infotext(record) + note for record in records],
        "styles": [*(first.get("template") or {}).get("styles", ())],
        "job_timestamp": time.strftime("%Y%m%d%H%M%S", time.localtime(job.created)),
        "clip_skip": first.get("clip_skip", 1), "is_using_inpainting_conditioning": False, "version": "inweave",
        "interrupted": job.state == "cancelled",
    }  # fmt: skip
