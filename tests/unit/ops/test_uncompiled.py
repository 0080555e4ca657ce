"""Without torch's compiler the same numbers, and afterwards the compiler as if nothing had been."""

from __future__ import annotations

import subprocess
import sys

#: gradients through checkpointing, a dispatch mode and meta kernels; then a compiled function that checkpoints
_PROGRAM = """
import sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from inweave.ops.tensors.uncompiled import uncompiled

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return operation(*args, **(kwargs or {}))

def gradient(x):
    x = x.detach().requires_grad_()
    checkpoint(lambda x: (x.sin() * x).cos(), x, use_reentrant=False).sum().backward()
    return x.grad

x = torch.linspace(-1, 1, 7)
with uncompiled(), Mode():
    plain = gradient(x)
    torch.nn.functional.gelu(torch.empty(3, device="meta"))
assert "torch._dynamo" not in sys.modules, "imported"
assert torch.equal(plain, gradient(x)) and sys.modules["torch._dynamo"].__file__
with uncompiled():
    assert torch.equal(plain, gradient(x))
assert sys.modules["torch._dynamo"].__file__
compiled = torch.compile(lambda x: checkpoint(torch.sin, x, use_reentrant=False), backend="eager")
assert torch.equal(compiled(x), x.sin())
"""
_OTHER_USES = """
import sys
from inweave.ops.tensors.uncompiled import uncompiled
with uncompiled():
    {}
    assert sys.modules["torch._dynamo"].__file__
import torch
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch._dynamo.eval_frame is sys.modules["torch._dynamo.eval_frame"]
"""


def _run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_gradients_are_the_same_and_the_compiler_works_afterwards() -> None:
    _run(_PROGRAM)


def test_any_other_use_imports_the_compiler() -> None:
    for use in (
        "from torch._dynamo import allow_in_graph",
        "from torch._dynamo.eval_frame import innermost_fn",
        "import torch; torch._dynamo.reset()",
    ):
        _run(_OTHER_USES.format(use))
