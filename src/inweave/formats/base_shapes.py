"""Names and shapes of the weights in a base model's file, as the model has them, however they are packed.

    GGUF         the header alone (`formats.gguf`)
    safetensors  the header, and small texts beside packed weights (`formats.packed`)
    SVDQuant     other layers than the model's, fused and renamed (qweight, proj_down): refused by name
    torchao      `module._weight_qdata` and `_weight_scale` in place of `module.weight`: refused by name

Files with packed weights can be checked against.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from inweave.errors import FormatError
from inweave.files.reading import open_regular
from inweave.formats.files import read_header
from inweave.formats.gate import Header
from inweave.formats.gguf import is_gguf, read_gguf
from inweave.formats.packed import LONGEST_STATE, Packing, packing_of

Shape = tuple[int, ...]


def base_shapes(path: Path) -> dict[str, Shape]:
    """Return names and shapes of the weights in a safetensors or GGUF file; raise FormatError if it is neither."""
    if is_gguf(path):
        return {name: tensor.shape for name, tensor in read_gguf(path).tensors.items()}
    header = read_header(path)
    refuse_renamed(path, header.spans)
    packing = _packing(path, header)
    return {
        name: packing.weights[name].shape if name in packing.weights else span.shape
        for name, span in header.spans.items()
        if name not in packing.companions
    }


def refuse_renamed(path: object, names: Iterable[str]) -> None:
    """Raise FormatError for a checkpoint whose layers or tensors are not those of its model."""
    names = list(names)
    if any(name.endswith("._weight_qdata") for name in names):
        raise FormatError(
            f"{path}: a checkpoint of torchao, whose weights are tensors that only torchao reads: use the model in "
            "bf16, fp16, fp8, bitsandbytes' 4 or 8 bits, or GGUF"
        )
    if any(name.endswith((".qweight", ".wscales")) for name in names):
        raise FormatError(
            f"{path}: a checkpoint of Nunchaku (SVDQuant), GPTQ or AWQ, whose layers are fused, renamed or packed for "
            "one kernel: name the model that it was made from instead, such as flux1-dev"
        )


def _packing(path: Path, header: Header) -> Packing:
    def read(name: str) -> bytes:
        span = header.spans[name]
        with open_regular(path) as file:
            file.seek(header.data_start + span.begin)
            return file.read(min(span.end - span.begin, LONGEST_STATE))

    try:
        return packing_of(header.spans, read)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
