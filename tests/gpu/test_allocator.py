"""The memory settings of `train` and `bench step` reach torch's allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

SCRIPT = """
import json
from inweave.cli.environment import use_expandable_segments
use_expandable_segments()
import torch
torch.zeros(1, device="cuda")
print(json.dumps(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]))
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_segments_are_expandable_unless_the_user_decides(settings: dict[str, str], expected: bool) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    result = subprocess.run([sys.executable, "-c", SCRIPT], env=inherited | settings, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) is expected
