"""The weights of a run in few small files, as a GPU machine gives them back, and from there into a work folder again.

<folder>/weights-1.safetensors, ...   float16, at most 15 MiB each, tensors called "<network>/<name>"
<folder>/run.json                     the size of the networks, and how far each stage is

python -m tools.embedded.shards --from FOLDER        into <work>/full, for `export` or another leg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tools.embedded.places import add_work, weights_file

LIMIT = 15 << 20


def write_shards(networks: Mapping[str, Mapping[str, torch.Tensor]], facts: Mapping[str, Any], folder: Path) -> int:
    """Write the states of networks; return the number of files."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("weights-*.safetensors"):
        old.unlink()
    shard: dict[str, torch.Tensor] = {}
    size, number = 0, 1
    for network, state in networks.items():
        for name, value in state.items():
            half = value.detach().half().cpu().contiguous()
            if size + half.nbytes > LIMIT and shard:
                save_file(shard, folder / f"weights-{number}.safetensors")
                shard, size, number = {}, 0, number + 1
            shard[f"{network}/{name}"] = half
            size += half.nbytes
    save_file(shard, folder / f"weights-{number}.safetensors")
    write_facts(facts, folder)
    return number


def write_facts(facts: Mapping[str, Any], folder: Path) -> None:
    (folder / "run.json").write_text(json.dumps(facts, indent=1) + "\n")


def read_shards(folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Read the states of the networks in a folder, and the facts of its run."""
    if not (folder / "run.json").exists():
        raise SystemExit(f"{folder}: no run.json is there; give the folder that a leg wrote with --out")
    networks: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted(folder.glob("weights-*.safetensors")):
        for label, value in load_file(path).items():
            network, _, name = label.partition("/")
            networks.setdefault(network, {})[name] = value.float()
    return networks, json.loads((folder / "run.json").read_text())


def take_back(folder: Path, work: Path) -> dict[str, Any]:
    """Put the weights of a folder into the work folder; return the facts of its run."""
    networks, facts = read_shards(folder)
    (work / "full").mkdir(parents=True, exist_ok=True)
    for name, state in networks.items():
        save_file(state, weights_file(work, name))
    (work / "size.json").write_text(json.dumps(facts["size"]))
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    parser.add_argument("--from", dest="source", type=Path, required=True)
    options = parser.parse_args()
    facts = take_back(options.source, options.work)
    print(json.dumps(facts["stages"]))


if __name__ == "__main__":
    main()
