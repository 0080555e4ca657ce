"""`inweave serve`: a worker that generates images over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from inweave.cli.adapters import lora_folders, present
from inweave.cli.console import reporting_errors
from inweave.cli.extras import require

MODELS, SEVERAL, CLUSTER = "Models", "Several workers", "Several machines"
GALLERY, LIMITS, RBEE = "Gallery", "Limits", "Started by rbee"


def serve(
    host: Annotated[str | None, typer.Option(
        "--host", help="Address to listen on; other machines need --token.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(
        "--port", "-p", envvar="PORT", help="Port; 0 picks a free one.", show_default="7870")] = None,
    token: Annotated[str | None, typer.Option(
        "--token", envvar="INWEAVE_TOKEN", help="The bearer token that clients must send.",
        show_default="none")] = None,
    tokens: Annotated[Path | None, typer.Option(
        "--tokens", envvar="INWEAVE_TOKENS", metavar="FILE", help="TOML file of accounts: tokens and their quotas.",
        show_default="none")] = None,
    data: Annotated[Path | None, typer.Option(
        "--data", help="Folder of the queue and the results.", show_default="in the user's data folder")] = None,
    store: Annotated[str | None, typer.Option(
        "--store", envvar="INWEAVE_STORE", metavar="postgresql://...", rich_help_panel=SEVERAL,
        help="The queue in PostgreSQL, for several workers.", show_default="SQLite in the --data folder")] = None,
    blobs: Annotated[str | None, typer.Option(
        "--blobs", metavar="FOLDER|s3://...", help="Images that all workers see: a folder or a bucket.",
        show_default="in --data", rich_help_panel=SEVERAL)] = None,
    shared: Annotated[Path | None, typer.Option(
        "--shared", help="Folder of datasets, training runs and added LoRAs that all workers and nodes see.",
        show_default="--blobs or --data", rich_help_panel=SEVERAL)] = None,
    lease_seconds: Annotated[float | None, typer.Option(
        "--lease-seconds", help="After this time, jobs of a worker that does not answer run elsewhere.",
        show_default="30", rich_help_panel=SEVERAL)] = None,
    model: Annotated[str | None, typer.Option(
        "--model", "-m", help="The default model.", show_default="inweave/emoji", rich_help_panel=MODELS)] = None,
    also: Annotated[list[str] | None, typer.Option(
        "--also", metavar="NAME=MODEL", help="Another model that requests may name.", rich_help_panel=MODELS)] = None,
    lora_dir: Annotated[list[Path] | None, typer.Option(
        "--lora-dir", help="A folder of LoRAs.", show_default="./loras", rich_help_panel=MODELS)] = None,
    wildcards: Annotated[list[Path] | None, typer.Option(
        "--wildcards", metavar="DIR", help="A folder of the text files that __name__ in prompts means.",
        show_default="./wildcards", rich_help_panel=MODELS)] = None,
    styles: Annotated[Path | None, typer.Option(
        "--styles", metavar="FILE", help="The file of styles, as A1111 keeps them.",
        show_default="styles.csv in --shared", rich_help_panel=MODELS)] = None,
    upscalers: Annotated[list[Path] | None, typer.Option(
        "--upscalers", metavar="DIR", help="A folder of upscalers: ESRGAN-type networks in safetensors.",
        show_default="./upscalers", rich_help_panel=MODELS)] = None,
    device: Annotated[list[str] | None, typer.Option(
        "--device", "--devices", help="One model process per device: cuda:0,cuda:1 or all.",
        rich_help_panel=MODELS)] = None,
    train_device: Annotated[list[str] | None, typer.Option(
        "--train-device", help="A device that only trains; the others only make images.", show_default="none",
        rich_help_panel=MODELS)] = None,
    dtype: Annotated[str | None, typer.Option(
        "--dtype", help="fp32, fp16 or bf16.", show_default="fp32 on a CPU, bf16 or fp16 on a GPU",
        rich_help_panel=MODELS)] = None,
    quantize: Annotated[str | None, typer.Option(
        "--quantize", help="Memory: int8, nf4, nf4-hadamard, int8-hadamard or fp8 quantizes denoisers; "
        "keep: checkpoints stored quantized stay so.", show_default="off", rich_help_panel=MODELS)] = None,
    offload: Annotated[str | None, typer.Option(
        "--offload", help="Memory: blocks keeps weights in host memory and copies them to the GPU block by block; "
        "auto: those of models that would not fit.", show_default="off", rich_help_panel=MODELS)] = None,
    quantized_cache_gb: Annotated[float | None, typer.Option(
        "--quantized-cache-gb", help="Disk space for quantized denoisers; 0: none.", show_default="32",
        rich_help_panel=MODELS)] = None,
    batch: Annotated[str | None, typer.Option(
        "--batch", help="How many images are made together, at most, of one job or several: a number, or auto.",
        show_default="auto", rich_help_panel=MODELS)] = None,
    lora_cache_gb: Annotated[float | None, typer.Option(
        "--lora-cache-gb", help="Memory for LoRAs that were read; the least recently used ones make room.",
        show_default="4", rich_help_panel=MODELS)] = None,
    graph: Annotated[str | None, typer.Option(
        "--graph", help="Steps recorded in CUDA graphs, on an NVIDIA GPU: auto or off.", show_default="off",
        rich_help_panel=MODELS)] = None,
    memory: Annotated[float | None, typer.Option(
        "--memory", help="Gigabytes for loaded models; as many as fit stay loaded.", show_default="the device's memory",
        rich_help_panel=MODELS)] = None,
    cluster: Annotated[str | None, typer.Option(
        "--cluster", metavar="[ADDRESS]", help="Run jobs in a Ray cluster: HOST:PORT of its head; without a value, the "
        "cluster that this machine belongs to; local starts one here.", show_default="none",
        rich_help_panel=CLUSTER)] = None,
    min_runners: Annotated[int | None, typer.Option(
        "--min-runners", help="Runners that stay without work; 0 frees every device.", show_default="1",
        rich_help_panel=CLUSTER)] = None,
    max_runners: Annotated[int | None, typer.Option(
        "--max-runners", help="Runners at most.", show_default="one per device", rich_help_panel=CLUSTER)] = None,
    idle_seconds: Annotated[float | None, typer.Option(
        "--idle-seconds", help="Time after which a runner without work ends.", show_default="300",
        rich_help_panel=CLUSTER)] = None,
    runner_cpus: Annotated[float | None, typer.Option(
        "--runner-cpus", help="CPUs that Ray reserves for a runner.",
        show_default="1 with a GPU, else all of the smallest node", rich_help_panel=CLUSTER)] = None,
    node_cache: Annotated[str | None, typer.Option(
        "--node-cache", help="Folder on each node for copies of models and LoRAs.",
        show_default="~/.cache/inweave/node", rich_help_panel=CLUSTER)] = None,
    node_cache_gb: Annotated[float | None, typer.Option(
        "--node-cache-gb", help="Gigabytes of these copies.", show_default="50", rich_help_panel=CLUSTER)] = None,
    pictures: Annotated[Path | None, typer.Option(
        "--pictures", metavar="DIR", help="Folder where images of finished jobs stay, as ordinary files.",
        show_default="images in --data", rich_help_panel=GALLERY)] = None,
    picture_names: Annotated[str | None, typer.Option(
        "--picture-names", metavar="PATTERN", help=r"Folders and names of its files, such as \[model_name]/\[seed].",
        show_default="[date]/[seed]-[prompt_words]", rich_help_panel=GALLERY)] = None,
    picture_days: Annotated[float | None, typer.Option(
        "--picture-days", help="Days after which images without a star or an album are deleted.", show_default="never",
        rich_help_panel=GALLERY)] = None,
    picture_gb: Annotated[float | None, typer.Option(
        "--picture-gb", help="Gigabytes beyond which the oldest images without a star or an album are deleted.",
        show_default="no limit", rich_help_panel=GALLERY)] = None,
    no_gallery: Annotated[bool, typer.Option(
        "--no-gallery", help="Let images expire with their jobs.", rich_help_panel=GALLERY)] = False,
    captioner: Annotated[Path | None, typer.Option(
        "--captioner", metavar="DIR", help="Local image-to-text model (transformers) that may caption datasets.",
        show_default="none", rich_help_panel=MODELS)] = None,
    captioner_device: Annotated[str | None, typer.Option(
        "--captioner-device", help="Device it runs on.", show_default="cpu", rich_help_panel=MODELS)] = None,
    queue_limit: Annotated[int | None, typer.Option(
        "--queue-limit", help="Maximum number of waiting jobs; more are refused with 429.", show_default="1000",
        rich_help_panel=LIMITS)] = None,
    keep_hours: Annotated[float | None, typer.Option(
        "--keep-hours", help="Hours to keep results.", show_default="24", rich_help_panel=LIMITS)] = None,
    keep_gb: Annotated[float | None, typer.Option(
        "--keep-gb", help="Gigabytes of results to keep.", show_default="4", rich_help_panel=LIMITS)] = None,
    upload_gb: Annotated[float | None, typer.Option(
        "--upload-gb", help="Gigabytes of uploaded images to keep.", show_default="1", rich_help_panel=LIMITS)] = None,
    dataset_gb: Annotated[float | None, typer.Option(
        "--dataset-gb", help="Gigabytes that all datasets may take.", show_default="20",
        rich_help_panel=LIMITS)] = None,
    job_seconds: Annotated[float | None, typer.Option(
        "--job-seconds", help="Longest time for one job.", show_default="3600", rich_help_panel=LIMITS)] = None,
    train_hours: Annotated[float | None, typer.Option(
        "--train-hours", help="Longest time for one train job.", show_default="168", rich_help_panel=LIMITS)] = None,
    plan_seconds: Annotated[float | None, typer.Option(
        "--plan-seconds", help="Longest time for one plan of a training run.", show_default="60",
        rich_help_panel=LIMITS)] = None,
    drain_seconds: Annotated[float | None, typer.Option(
        "--drain-seconds", help="Time for the running job after SIGTERM.", show_default="30",
        rich_help_panel=LIMITS)] = None,
    origin: Annotated[list[str] | None, typer.Option(
        "--origin", help="Another origin whose pages may call this worker.", rich_help_panel=LIMITS)] = None,
    behind_proxy: Annotated[bool, typer.Option(
        "--behind-proxy", help="Obey X-Forwarded-For, -Host and -Proto of a proxy on this machine; needs --token.",
        rich_help_panel=LIMITS)] = False,
    proxy: Annotated[list[str] | None, typer.Option(
        "--proxy", help="Address or network of a proxy on another machine.", rich_help_panel=LIMITS)] = None,
    log_level: Annotated[str | None, typer.Option(
        "--log-level", help="debug: every request, info: every job, warning or error.", show_default="warning")] = None,
    worker_id: Annotated[str | None, typer.Option(
        "--worker-id", envvar="WORKER_ID", help="Name of this worker in /info.", show_default="chosen",
        rich_help_panel=RBEE)] = None,
    sd_version: Annotated[str | None, typer.Option(
        "--sd-version", envvar="SD_VERSION", help="Model, by its variant.", show_default="none",
        rich_help_panel=RBEE)] = None,
    model_path: Annotated[str | None, typer.Option(
        "--model-path", envvar="MODEL_PATH", help="Model, by its path.", show_default="none",
        rich_help_panel=RBEE)] = None,
    model_ref: Annotated[str | None, typer.Option(
        "--model-ref", help="Model, by its reference.", show_default="none", rich_help_panel=RBEE)] = None,
    cuda_device: Annotated[int | None, typer.Option(
        "--cuda-device", envvar="CUDA_DEVICE", help="Number of the GPU.", show_default="none",
        rich_help_panel=RBEE)] = None,
    use_f16: Annotated[bool, typer.Option(
        "--use-f16", envvar="USE_F16", help="The same as --dtype fp16.", rich_help_panel=RBEE)] = False,
    backend: Annotated[str | None, typer.Option(
        "--backend", help="cpu, cuda, metal or rocm: what a number after --device selects.", show_default="none",
        rich_help_panel=RBEE)] = None,
    ignored: Annotated[list[str] | None, typer.Option(
        "--callback-url", "--queen-url", "--hive-url", help="Accepted and ignored.", rich_help_panel=RBEE)] = None,
    flags: Annotated[bool, typer.Option(
        "--use-flash-attn", "--local-mode", help="Accepted and ignored.", rich_help_panel=RBEE)] = False,
) -> None:  # fmt: skip
    """Serve images over HTTP: a durable queue, streams that can be rejoined, the APIs of A1111 and OpenAI.

    Example: inweave serve --model inweave/emoji --port 7870
    """
    require("serve", False)
    if store is not None:
        require("postgresql", False)
    if cluster is not None:
        require("cluster", False)
    if blobs is not None and blobs.startswith("s3://"):
        require("s3", False)
    with reporting_errors(False):
        from inweave.errors import ConfigError
        from inweave.serve.run import run
        from inweave.serve.settings import from_options

        models: dict[str, str] = {}
        for text in also or ():
            name, equals, where = text.partition("=")
            if not equals or not name or not where:
                raise ConfigError(f"--also {text}: write NAME=MODEL, such as sdxl=/models/sdxl")
            models[name] = where
        devices = _devices(device or (), backend) or ((f"cuda:{cuda_device}",) if cuda_device is not None else None)
        options: dict[str, Any] = {
            "host": host, "port": port, "token": token, "tokens": tokens, "data": data, "models": models,
            "store": store, "blobs": blobs, "shared": shared, "lease_seconds": lease_seconds,
            "lora_folders": tuple(lora_folders(lora_dir)), "wildcards": tuple(present(wildcards, "wildcards")),
            "styles": styles, "upscalers": tuple(present(upscalers, "upscalers")),
            "model": model or model_path or model_ref or _variant(sd_version), "devices": devices,
            "train_devices": _devices(train_device or (), backend), "memory_gb": memory,
            "dtype": dtype or ("fp16" if use_f16 else None), "quantize": quantize, "offload": offload,
            "quantized_cache_gb": quantized_cache_gb, "batch": batch, "graph": graph,
            "lora_cache_gb": lora_cache_gb,
            "queue_limit": queue_limit, "keep_hours": keep_hours,
            "keep_gb": keep_gb, "upload_gb": upload_gb, "dataset_gb": dataset_gb, "job_seconds": job_seconds,
            "gallery": not no_gallery, "pictures": pictures, "picture_names": picture_names,
            "picture_days": picture_days, "picture_gb": picture_gb,
            "captioner": captioner, "captioner_device": captioner_device,
            "train_hours": train_hours, "plan_seconds": plan_seconds, "drain_seconds": drain_seconds,
            "origins": tuple(origin or ()),
            "cluster": cluster, "min_runners": min_runners, "max_runners": max_runners,
            "idle_seconds": idle_seconds, "runner_cpus": runner_cpus, "node_cache": node_cache,
            "node_cache_gb": node_cache_gb,
            "behind_proxy": behind_proxy or bool(proxy), "proxies": tuple(proxy) if proxy else None,
            "log_level": log_level.lower() if log_level else None,
        }  # fmt: skip
        settings = from_options(**options)
        run(settings, {"worker_id": worker_id}, lambda address: typer.echo(f"inweave is listening on {address}"))


def _devices(options: Sequence[str], backend: str | None) -> tuple[str, ...]:
    """Return the devices of repeated or comma-separated options; "all" are the GPUs of this machine, or its CPU."""
    names = [name.strip() for option in options for name in option.split(",") if name.strip()]
    if "all" not in names:
        return tuple(_device(name, backend) for name in names)
    if len(names) > 1:
        raise typer.BadParameter("all means every GPU; do not list other devices with it", param_hint="--devices")
    from inweave.ops.tensors.device import all_devices

    return all_devices()


def _device(text: str, backend: str | None) -> str:
    """Return the device; rbee passes a number, whose kind is its backend."""
    kind = {"cpu": "cpu", "metal": "mps"}.get((backend or "").lower())
    return text if not text.isdigit() else kind or f"cuda:{text}"


def _variant(text: str | None) -> str | None:
    """Return the repository of rbee's variant (v1-5, xl, turbo, ...), which must be in the Hub cache."""
    from inweave.errors import ConfigError
    from inweave.models.variants import find_variant, variants

    if text is None:
        return None
    if (variant := find_variant(text)) is None:
        raise ConfigError(f"--sd-version {text}: unknown; known are {', '.join(each.name for each in variants())}")
    return variant.repo
