"""The files of deploy/: linted, valid by their schemas, with options that exist; the container file's steps are run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import typer.main
import yaml  # type: ignore[import-untyped]

from inweave.cli.app import app
from inweave.serve.jobs.accounts import read_accounts

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
SCHEMAS = json.loads((ROOT / "tests" / "data" / "deploy" / "kubernetes.json").read_text("utf-8"))
MANIFESTS = ["kubernetes.yaml", "kuberay.yaml"]
#: folders of the image that the tests put into a temporary one
FOLDERS = re.compile(r"(?<![\w./-])/(src|wheels|opt/inweave|data|loras|models)(?=[/\s\"'\[*]|$)")
#: what takes root, or the packages of Debian
SYSTEM = re.compile(r"^(useradd|apt-get)\b")


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def instructions() -> Iterator[tuple[str, str, str]]:
    """Yield (stage, instruction, value) of the container file."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Containerfile").read_text("utf-8"), flags=re.MULTILINE)
    stage = ""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            name, value = line.split(maxsplit=1)
            stage = value.split()[-1] if name == "FROM" else stage
            yield stage, name, " ".join(value.split())


def documents(name: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((DEPLOY / name).read_text("utf-8"))]


def containers(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield every container of a manifest with the specification of its pod."""
    for document in documents(name):
        spec = document.get("spec", {})
        groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]] if document["kind"] == "RayCluster" else [spec]
        for pod in (each["template"]["spec"] for each in groups if "template" in each):
            yield from ((container, pod) for container in pod["containers"])


def serve_options() -> set[str]:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts}


def test_the_container_file_and_the_compose_file_are_clean() -> None:
    linted = tool("hadolint", "deploy/Containerfile")
    assert linted.returncode == 0, linted.stdout
    checked = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "deploy/compose.yaml")
    assert checked.returncode == 0, checked.stdout


def test_a_wrong_compose_file_is_seen(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(
        (DEPLOY / "compose.yaml").read_text("utf-8").replace("profiles:", "profile:")
    )
    path = str(tmp_path / "compose.yaml")
    assert tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", path).returncode == 1


def test_images_run_without_root_and_name_their_data_and_their_health() -> None:
    values = {(stage, name): value for stage, name, value in instructions()}
    assert values["base", "USER"] == values["cuda", "USER"] == "10001", "a number: clusters verify that it is not root"
    assert values["base", "VOLUME"] == "/data"
    entry = json.loads(values["base", "ENTRYPOINT"])
    assert entry[:2] == ["inweave", "serve"] and set(entry[2::2]) <= serve_options()
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    targets = {service["build"]["target"] for service in compose["services"].values()}
    assert targets == {"cpu", "cuda"} <= {stage for stage, _ in values}
    options = [word for service in compose["services"].values() for word in service.get("command", [])]
    assert {word for word in options if word.startswith("-")} <= serve_options()


def test_what_the_build_copies_is_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        word for _, name, value in instructions() if name == "COPY" and not value.startswith("--")
        for word in value.split()[:-1]
    }  # fmt: skip
    assert copied == allowed and all((ROOT / each).exists() for each in copied)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_are_valid(name: str) -> None:
    for document in documents(name):
        schema = {**SCHEMAS["kinds"][document["kind"]], "$defs": SCHEMAS["$defs"]}
        jsonschema_rs.validator_for(schema).validate(document)


def test_a_wrong_manifest_is_seen() -> None:
    for name, key in (("kubernetes.yaml", "image"), ("kuberay.yaml", "containers")):
        wrong = (DEPLOY / name).read_text("utf-8").replace(f"{key}:", f"{key}s:")
        with pytest.raises(jsonschema_rs.ValidationError):
            for document in yaml.safe_load_all(wrong):
                schema = {**SCHEMAS["kinds"][document["kind"]], "$defs": SCHEMAS["$defs"]}
                jsonschema_rs.validator_for(schema).validate(document)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_fit_together(name: str) -> None:
    """Volumes, ports, secrets and labels that are named exist; options are those of the command; nobody is root."""
    every = [document for each in MANIFESTS for document in documents(each)]
    claims = {each["metadata"]["name"] for each in every if each["kind"] == "PersistentVolumeClaim"}
    secrets = {each["metadata"]["name"]: each["stringData"] for each in every if each["kind"] == "Secret"}
    for container, pod in containers(name):
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
        for volume in volumes.values():
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "inweave-data") in claims
            assert volume.get("secret", {}).get("secretName", "inweave") in secrets
        ports = {port["name"] for port in container.get("ports", [])}
        probes = [container[probe] for probe in container if probe.endswith("Probe")]
        assert all(probe["httpGet"]["port"] in ports for probe in probes)
        assert {probe["httpGet"]["path"] for probe in probes} <= {"/health", "/ready"}
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
        words = shlex.split(" ".join(container.get("args", [])).partition("exec inweave serve")[2]) or container.get(
            "args", []
        )
        assert {word for word in words if word.startswith("--")} <= serve_options()
    deployments = [each for each in documents(name) if each["kind"] == "Deployment"]
    services = [each for each in documents(name) if each["kind"] == "Service"]
    for deployment, service in zip(deployments, services, strict=True):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels


def test_the_tokens_of_the_secret_are_a_file_of_accounts(tmp_path: Path) -> None:
    (tmp_path / "tokens.toml").write_text(documents("kubernetes.yaml")[0]["stringData"]["tokens.toml"])
    accounts = {account.name: account.quotas for account in read_accounts(tmp_path / "tokens.toml")}
    assert accounts["admin"] == {} and accounts["team"]["images_per_day"] == 2000


def test_the_units_of_systemd_are_valid(tmp_path: Path) -> None:
    text = (DEPLOY / "inweave-worker.service").read_text("utf-8")
    start = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    words = shlex.split(start.removeprefix("ExecStart="))
    assert words[1] == "serve" and {word for word in words if word.startswith("--")} <= serve_options()
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "inweave-worker.service"
    unit.write_text(text.replace(words[0], "/bin/true").replace("User=inweave", "User=root"))
    verified = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    complaints = [line for line in verified.stderr.splitlines() if unit.name in line]
    assert verified.returncode == 0 and not complaints, verified.stderr


def run_steps(root: Path, *stages: str) -> list[str]:
    """Run the RUN and COPY steps of stages below a folder; return the commands that take root or Debian's packages."""
    left_out, arguments = list[str](), dict[str, str]()
    for stage, name, value in instructions():
        if name == "ARG" and "=" in value:
            argument, _, default = value.partition("=")
            arguments[argument] = default
        if stage not in stages:
            continue
        for argument, chosen in arguments.items():
            value = value.replace(f"${{{argument}}}", chosen)
        here = FOLDERS.sub(lambda match: f"{root}/{match[1]}", value)
        if name == "COPY" and not value.startswith("--"):
            *sources, target = here.split()
            Path(target).mkdir(parents=True, exist_ok=True)
            for source in sources:  # of a folder its content is copied
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pyc*"))
                else:
                    shutil.copy(ROOT / source, target)
        elif name == "RUN" and SYSTEM.match(value):
            left_out.append(value)
        elif name == "RUN":
            # the index that this machine has; torch's own one is another
            command = re.sub(r"--extra-index-url \S+", "", here)
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"} | {"PATH": path}
            done = subprocess.run(command, shell=True, cwd=root, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return left_out


@pytest.mark.full
def test_the_first_stage_builds_a_whole_wheel(tmp_path: Path) -> None:
    assert run_steps(tmp_path, "wheel") == []
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    packed = {name.removeprefix("inweave/") for name in zipfile.ZipFile(wheel).namelist()}
    source = ROOT / "src" / "inweave"
    needed = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert needed <= packed


@pytest.mark.full
def test_the_image_of_the_cpu_is_installed_and_serves(tmp_path: Path) -> None:
    """Every step but those that take root; then the entry point and the health check, as a container runs them."""
    left_out = run_steps(tmp_path, "wheel", "venv-cpu", "base", "cpu")
    assert [value.split()[0] for value in left_out] == ["useradd"]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    frozen = subprocess.run([tmp_path / "opt/inweave/bin/pip", "freeze"], capture_output=True, text=True).stdout
    installed = dict(line.partition("+")[0].split("==") for line in frozen.splitlines() if "==" in line)
    assert all(installed.get(pin.split("==")[0], pin.split("==")[1]) == pin.split("==")[1] for pin in pins)
    values = {(stage, name): value for stage, name, value in instructions()}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    entry = [
        FOLDERS.sub(lambda match: f"{tmp_path}/{match[1]}", word) for word in json.loads(values["base", "ENTRYPOINT"])
    ]
    environment = {**os.environ, "PORT": str(port), "INWEAVE_TOKEN": "token-of-a-test"}
    environment.pop("PYTHONPATH", None)
    environment["PATH"] = f"{tmp_path}/opt/inweave/bin{os.pathsep}{os.environ['PATH']}"
    address = entry.index("0.0.0.0")
    entry[address] = "127.0.0.1"
    process = subprocess.Popen(entry, env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert process.stdout is not None and "listening" in process.stdout.readline()
        check = [
            word.replace("7870", str(port)) for word in json.loads(values["base", "HEALTHCHECK"].partition("CMD ")[2])
        ]
        assert subprocess.run(check, env=environment).returncode == 0
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            assert answer.status == 200
    finally:
        process.terminate()
        assert process.wait(60) == 0
    assert subprocess.run(check, env=environment, capture_output=True).returncode != 0, "nothing answers any more"
