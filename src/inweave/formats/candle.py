"""candle-lora's spelling: `<module>.lora_linear.a0.weight` and `b0.weight`.

The format stores neither alpha nor rank; the Rust program passes them to `LoraConfig::new(rank, alpha, ..)`,
once for the whole model. So only an adapter with one rank and one alpha can be written, and the note says
which numbers to pass.
"""

from __future__ import annotations

from inweave.adapter import Adapter, Lora
from inweave.formats.spell import CANDLE_ALPHA, Lost, Target, Written, alpha_record, carried_metadata


class Candle:
    name = "candle"

    def write(self, adapter: Adapter, target: Target) -> Written:
        written = Written(metadata=carried_metadata(adapter))
        settings: dict[tuple[int, float], list[str]] = {}
        owners: dict[str, str] = {}
        for entry in adapter.entries:
            factors = entry.factors
            if not isinstance(factors, Lora) or factors.mid or factors.magnitude or factors.residual or factors.widen:
                written.lost.append(Lost(entry.keys, f"{entry.ref}: candle-lora holds plain LoRA pairs only"))
                continue
            if factors.transposed and not factors.embedding:
                written.lost.append(Lost(entry.keys, f"{entry.ref}: candle-lora has no transposed layers"))
                continue
            owner = owners.setdefault(entry.ref.name, entry.ref.component)
            if owner != entry.ref.component:
                written.lost.append(
                    Lost(
                        entry.keys,
                        f"{entry.ref}: {owner} has a module of the same name, and candle-lora names no network",
                    )
                )
                continue
            home = (
                "lora_embed" if factors.embedding else "lora_conv2d" if len(factors.down.shape) == 4 else "lora_linear"
            )
            settings.setdefault((factors.rank, factors.scale), []).extend(entry.keys)
            written.tensors[f"{entry.ref.name}.{home}.a0.weight"] = factors.down
            written.tensors[f"{entry.ref.name}.{home}.b0.weight"] = factors.up
        written.lost += [Lost((key,), "a carried tensor cannot be stored in a candle-lora file")
                         for key in adapter.carried]  # fmt: skip
        if len(settings) > 1:
            usual = max(settings, key=lambda pair: len(settings[pair]))
            for pair, keys in settings.items():
                if pair != usual:
                    reason = f"rank {pair[0]} and scale {pair[1]:g}, while candle-lora has one rank and alpha for the whole model"
                    written.lost.append(Lost(tuple(keys), reason))
        elif settings:
            rank, scale = next(iter(settings))
            written.metadata[CANDLE_ALPHA] = repr(scale * rank)
            written.notes.append(f"load it with LoraConfig::new({rank}, {scale * rank:g}, None)")
        written.metadata |= alpha_record(adapter.entries)
        return written
