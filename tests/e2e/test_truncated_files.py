"""A file that is truncated while in use is an InweaveError, never a bus error that ends the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support import random, write

#: every use of a file that was cut to its header; each prints the error's class and "truncated" or "changed"
PROGRAM = """
import os, sys
import torch
import inweave
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(256, 256, bias=False)

def attempt(name, call):
    try:
        call()
    except inweave.InweaveError as error:
        print(name, type(error).__name__, str(error)[:300].replace("\\n", " "))
    else:
        print(name, "nothing was raised")

lora, base = sys.argv[1:]
adapter = inweave.load(lora)
plan = inweave.resolve(adapter, inweave.index_of(Net()))
used, fresh = Net(), Net()
weaver = inweave.Weaver(used)
weaver.apply([(lora, 0.5)])
before = used.lin.weight.detach().clone()
late = inweave.MergedSource(inweave.FileSource(base), [(adapter, 0.5)])
read = inweave.MergedSource(inweave.FileSource(base), [(lora, 0.5)])
kept = inweave.Weaver(used, sources=inweave.FileSource(base), keep="file")
os.truncate(lora, 600)
weaver.apply([])
assert not torch.equal(used.lin.weight, before)
attempt("path", lambda: weaver.apply([(lora, 0.5)]))
attempt("adapter", lambda: inweave.Weaver(fresh).apply([(adapter, 0.5)]))
attempt("plan", lambda: inweave.Weaver(fresh).apply([(plan, 0.5)]))
attempt("merged", lambda: inweave.MergedSource(inweave.DictSource(fresh.state_dict()), [(adapter, 0.5)]))
attempt("bake", lambda: inweave.bake(base, [adapter], lora + ".out.safetensors"))
net = inweave.index_of(Net())
attempt("save", lambda: inweave.save(adapter, lora + ".saved.safetensors", dialect="peft", base=net))
attempt("check", lambda: inweave.check(adapter, net))
attempt("attach", lambda: inweave.attach(fresh, adapter))
print("read", tuple(read.get("lin.weight").shape))
os.truncate(base, 600)
attempt("base", lambda: read.get("lin.weight"))
attempt("original", lambda: kept.apply([(inweave.load(sys.argv[0] + ".whole.safetensors"), 0.5)]))
"""


def test_truncated_files_never_end_the_process(tmp_path: Path) -> None:
    tensors = {"unet.lin.lora_down.weight": random(1, 32, 256), "unet.lin.lora_up.weight": random(2, 256, 32)}
    lora, base = write(tmp_path / "lora.safetensors", tensors), tmp_path / "base.safetensors"
    write(base, {"lin.weight": random(3, 256, 256)})
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    write(Path(f"{script}.whole.safetensors"), tensors)
    done = subprocess.run(
        [sys.executable, str(script), str(lora), str(base)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-2000:])
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    for name in ("path", "adapter", "plan", "merged", "bake", "save", "check", "attach", "base", "original"):
        assert "FormatError" in rows[name], rows[name]
    assert rows["read"] == "read (256, 256)", "what was read before is in memory"
