"""`inweave cluster`: the machines behind a worker."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from inweave.cli.console import fail, print_json, print_lines
from inweave.cli.options import JSON
from inweave.cli.tables import table

cluster_app = typer.Typer(help="Show the machines behind a worker.", no_args_is_help=True)
SECONDS = 10.0


@cluster_app.callback()
def cluster() -> None:
    """Show the machines behind a worker."""


@cluster_app.command("status")
def status(
    url: Annotated[str, typer.Option("--url", help="Address of the worker.")] = "http://127.0.0.1:7870",
    token: Annotated[str | None, typer.Option(
        "--token", envvar="INWEAVE_TOKEN", help="The worker's bearer token.", show_default="none")] = None,
    as_json: JSON = False,
) -> None:  # fmt: skip
    """Print nodes, devices, what each has loaded, and what waits and why.

    Example: inweave cluster status --url http://127.0.0.1:7870
    """
    queue = _queue(url, token, as_json)
    if as_json:
        print_json({"ok": True, **queue})
        return
    nodes = [
        [each["name"], "alive" if each["alive"] else "gone", f"{each['cpus']:g}", f"{each['gpus']:g}"]
        for each in queue["nodes"]
    ]
    devices = [
        [each["name"], each["node"], each["device"] or "", each["reason"] or each["status"], each["job"] or "",
         ", ".join(each["models"]), ", ".join(each["loras"])]
        for each in queue["devices"]
    ]  # fmt: skip
    waiting = [[each["id"], each["operation"], each["model"], each["reason"]] for each in queue["waiting"]]
    for title, columns, rows in (
        ("nodes", ("node", "state", "CPUs", "GPUs"), nodes),
        ("devices", ("runner", "node", "device", "state", "job", "models loaded", "LoRAs loaded"), devices),
        (f"waiting: {queue['length']}", ("job", "operation", "model", "why it waits"), waiting),
    ):
        typer.echo(f"{title}:" if rows else f"{title}: none")
        if rows:
            print_lines(table([columns, *rows], None))


def _queue(url: str, token: str | None, as_json: bool) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        fail(f"--url {url}: an address that begins with http:// or https:// is needed", as_json)
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urlopen(Request(f"{url.rstrip('/')}/v1/queue", headers=headers), timeout=SECONDS) as answer:
            queue: dict[str, Any] = json.load(answer)
            return queue
    except HTTPError as error:
        advice = "; pass its token with --token or INWEAVE_TOKEN" if error.code == 401 else ""
        fail(f"{url}: the worker answered {error.code} {error.reason}{advice}", as_json)
    except (URLError, OSError, ValueError) as error:
        fail(f"{url}: no worker answers: {getattr(error, 'reason', error)}; start one with inweave serve", as_json)
