"""One leg of the training: the stages in order, for as long as the leg may take, from where the last leg stopped.

    vae       the shipped VAE, trained further on all sets
    unet      text encoder and UNet
    decoder   the VAE's decoder on what the UNet generates
    show      sheets and scores, after every leg

    python -m tools.embedded.leg --seconds 540 --out $OUT        again and again, until it says that all is done

What a later leg needs lies in the work folder (full precision, exact). What is written to --out is small: the weights
in float16 in files of at most 15 MiB, sheets, scores. If the machine is lost between two legs, `--restart FOLDER` goes
on from those: the same weights, new moments.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tools.embedded import show, train_decoder, train_unet, train_vae
from tools.embedded.compose import on_white
from tools.embedded.fit import Fit, Group, Length, add_training, prepare
from tools.embedded.lessons import make_pool
from tools.embedded.library import Library, load_library
from tools.embedded.networks import (
    SIZES,
    keep_weights,
    load_tokenizer,
    new_text_encoder,
    new_unet,
    new_vae,
    parameters_of,
    round_to_half,
    take_shipped_vae,
    take_weights,
    write_size,
)
from tools.embedded.places import add_work, weights_file
from tools.embedded.render import TRAINED
from tools.embedded.shards import read_shards, write_facts, write_shards
from torch import nn

STAGES = ("vae", "unet", "decoder")
#: what is kept for sheets, scores and files at the end of a leg
_RESERVE = 45.0


class Run:
    """The parts of a run, and its facts: how far each stage is."""

    def __init__(self, options: argparse.Namespace, deadline: float) -> None:
        self.options, self.deadline = options, deadline
        self.size = SIZES[options.size]
        self.device = prepare(options.seed, options.device)
        self.library: Library = load_library(options.work, self.device, options.limit, tuple(options.sets))
        self.facts: dict[str, Any] = {"size": asdict(self.size), "prediction": options.prediction, "stages": {}}
        self.tokenizer = load_tokenizer(options.work)
        self.vae = new_vae(self.size)
        self.unet = new_unet(self.size)
        self.text_encoder = new_text_encoder(self.size, self.tokenizer)
        if take_shipped_vae(self.vae):
            print("the VAE starts from the shipped one", flush=True)
        for network in (self.vae, self.unet):
            network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.text_encoder.to(self.device)

    @property
    def networks(self) -> dict[str, nn.Module]:
        return {"vae": self.vae, "unet": self.unet, "text_encoder": self.text_encoder}

    @property
    def seed(self) -> int:
        return int(self.options.seed)

    def length(self, stage: str) -> Length:
        return Length(getattr(self.options, f"{stage}_steps"), getattr(self.options, f"{stage}_seconds"))

    def fit(self, stage: str, groups: list[Group], loss: Any, **settings: Any) -> Fit:
        compiled = torch.compile(loss) if self.options.compile and stage == "unet" else loss
        state = self.options.work / "state" / f"{stage}.safetensors"
        fit = Fit(stage, groups, compiled, state, graph=not self.options.no_graph, **settings)
        if known := self.facts["stages"].get(stage):
            fit.restart(known["steps"], known["seconds"])
        return fit

    def train(self, fit: Fit, batch: Any) -> bool:
        """Train until the stage or the leg is over; leave the averaged weights in the networks."""
        is_done = fit.run(batch, self.length(fit.name), self.deadline, self.options.most_steps)
        self.facts["stages"][fit.name] = {"steps": fit.steps, "seconds": round(fit.spent, 1), "done": is_done}
        fit.take_average()
        return is_done


def train_the_vae(run: Run) -> bool:
    groups = [Group(list(run.vae.parameters()), train_vae.LEARNING_RATE)]
    fit = run.fit("vae", groups, train_vae.vae_loss(run.vae))
    if not run.train(fit, train_vae.vae_batches(run.library, run.options.vae_batch, run.seed)):
        return False
    rows = torch.linspace(0, len(run.library) - 1, min(1024, len(run.library))).long()
    train_vae.normalize_latents(run.vae, on_white(run.library.images[rows.to(run.device)]))
    round_to_half(run.vae)
    keep_weights(run.vae, run.options.work, "vae")
    return True


def train_the_unet(run: Run) -> bool:
    options = run.options
    run.vae.eval().requires_grad_(False)
    run.unet.requires_grad_(True)
    sizes = ", ".join(f"{name} {parameters_of(network) / 1e6:.2f}" for name, network in run.networks.items())
    print(f"{sizes} million parameters; {len(run.library)} drawings", flush=True)

    def pool(number: int) -> Any:
        started = time.monotonic()
        made = make_pool(run.vae, run.tokenizer, run.library, options.pool, run.seed, number)
        print(f"pool {number}: {time.monotonic() - started:.0f} s", flush=True)
        return made

    groups = [
        Group(list(run.unet.parameters()), train_unet.UNET_RATE),
        Group(list(run.text_encoder.parameters()), train_unet.TEXT_RATE),
    ]
    loss = train_unet.unet_loss(run.unet, run.text_encoder, options.prediction)
    fit = run.fit("unet", groups, loss, weight_decay=0.01, decay=0.9995)
    batches = train_unet.lesson_batches(pool, options.batch, run.seed, options.pool_steps)
    batches(fit.steps)  # the first pool is made before the clock of the stage starts
    if not run.train(fit, batches):
        return False
    for name in ("unet", "text_encoder"):
        round_to_half(run.networks[name])
        keep_weights(run.networks[name], options.work, name)
    return True


def train_the_decoder(run: Run) -> bool:
    for network in run.networks.values():
        network.eval().requires_grad_(False)
    deadline = min(run.deadline, time.monotonic() + run.options.bank_seconds)
    bank = train_decoder.generated_bank(
        run.vae, run.unet, run.text_encoder, run.tokenizer, run.library,
        size=run.options.bank, deadline=deadline, seed=run.seed, prediction=run.options.prediction,
    )  # fmt: skip
    parts = [run.vae.decoder, run.vae.post_quant_conv]
    parameters = [parameter for part in parts for parameter in part.requires_grad_(True).parameters()]
    fit = run.fit(
        "decoder", [Group(parameters, train_decoder.LEARNING_RATE)], train_decoder.decoder_loss(run.vae), decay=0.998
    )
    draw = train_decoder.decoder_batches(run.vae, run.library, bank, run.options.vae_batch, run.seed)
    if not run.train(fit, draw):
        return False
    keep_weights(run.vae, run.options.work, "vae_adapted")
    return True


_TRAINED_BY = {
    "vae": (train_the_vae, ("vae",)),
    "unet": (train_the_unet, ("unet", "text_encoder")),
    "decoder": (train_the_decoder, ("vae_adapted",)),
}


def run_stages(run: Run) -> bool:
    """Run the stages that are left; return whether all are done."""
    work: Path = run.options.work
    for stage in STAGES:
        train, kept_rows = _TRAINED_BY[stage]
        if all(weights_file(work, name).exists() for name in kept_rows):
            for name in kept_rows:
                take_weights(run.networks[name.removesuffix("_adapted")], work, name)
            run.facts["stages"].setdefault(stage, {"done": True})
            continue
        if time.monotonic() >= run.deadline or not train(run):
            return False
    return True


def restart(run: Run, folder: Path) -> None:
    """Take the weights of an earlier leg where the work folder has neither them nor a state."""
    networks, facts = read_shards(folder)
    if facts["size"] != json.loads(json.dumps(asdict(run.size))):
        raise SystemExit(f"{folder}: its networks are of another size: {facts['size']}")
    work: Path = run.options.work
    for name, state in networks.items():
        run.networks[name].load_state_dict(state)
    for stage, (_, kept_rows) in _TRAINED_BY.items():
        known = facts["stages"].get(stage, {})
        if (work / "state" / f"{stage}.safetensors").exists() or any(weights_file(work, n).exists() for n in kept_rows):
            continue
        if known:
            run.facts["stages"][stage] = known
        if known.get("done"):
            for name in kept_rows:
                keep_weights(run.networks[name.removesuffix("_adapted")], work, name)


def add_lengths(parser: argparse.ArgumentParser) -> None:
    for stage, seconds in (("vae", 140.0), ("unet", 900.0), ("decoder", 75.0)):
        parser.add_argument(f"--{stage}-seconds", type=float, default=seconds, help=f"default: {seconds:g}")
        parser.add_argument(f"--{stage}-steps", type=int, default=0, help="steps instead of seconds")
    parser.add_argument("--vae-batch", type=int, default=128)
    parser.add_argument("--pool", type=int, default=80_000, help="plain images of a pool")
    parser.add_argument("--pool-steps", type=int, default=3000, help="steps after which another pool is made")
    parser.add_argument("--bank", type=int, default=12_288, help="latents that are generated for the decoder")
    parser.add_argument("--bank-seconds", type=float, default=30)
    parser.add_argument("--prediction", choices=("v", "flow"), default="v")


def main(arguments: Sequence[str] | None = None) -> bool:
    """Run a leg; return whether all stages are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_work(parser)
    add_training(parser, batch=512)
    add_lengths(parser)
    parser.add_argument("--seconds", type=float, default=540, help="the leg ends itself after this (default: 540)")
    parser.add_argument("--out", type=Path, required=True, help="where weights, sheets and scores are written")
    parser.add_argument("--restart", type=Path, default=None, help="what an earlier leg wrote, if the machine is new")
    parser.add_argument("--most-steps", type=int, default=0, help="steps of a stage after which the leg ends (0: any)")
    parser.add_argument("--sets", nargs="+", choices=TRAINED, default=list(TRAINED), help="learn from these alone")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--names", type=int, default=256, help="names that are scored at the end (0: no sheets)")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    write_size(options.work, SIZES[options.size])
    run = Run(options, started + options.seconds - min(_RESERVE, options.seconds / 4))
    if options.restart is not None:
        restart(run, options.restart)
    print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
    is_done = run_stages(run)
    for network in run.networks.values():
        network.eval()
    states = {name: network.state_dict() for name, network in run.networks.items()}
    files = write_shards(states, run.facts, options.out)  # first: sheets and scores may fail
    if options.names:
        run.facts["scores"] = show.show(
            run.networks, run.tokenizer, run.library, options.out, options.names, options.prediction
        )
        print(json.dumps(run.facts["scores"]), flush=True)
        write_facts(run.facts, options.out)
    ended = "all stages are done" if is_done else "to be continued by another leg"
    print(f"{files} files of weights; {ended}, after {time.monotonic() - started:.0f} s", flush=True)
    return is_done


if __name__ == "__main__":
    main()
