"""Folders of strangers: nothing in one chooses code, a file outside, another way to load weights, or endless work."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inweave.errors import FormatError, InweaveError
from inweave.models.language_models import blank_language_model, load_language_model, load_tokenizer
from inweave.models.model import load_model
from tests.peers import tiny_models as tiny
from tests.support import stopwatch
from tests.unit.training.tasks.test_language import write_language_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_language_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def llama(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "llama"))


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def state(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_language_model(folder, CPU, torch.float32)[0].state_dict())


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def split(folder: Path, shard: str) -> None:
    """The weights in a shard of another name, and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "beside.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_folder_loads_as_the_library_loads_it(llama: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = load_language_model(llama, CPU, torch.float32)
    peer = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    assert same(dict(model.state_dict()), dict(peer.state_dict()))
    texts = ["the cat sat", "", "on </s> a log"]
    assert tokenizer(texts).input_ids == AutoTokenizer.from_pretrained(llama)(texts).input_ids
    split(llama, "beside.safetensors")
    assert same(dict(model.state_dict()), state(llama))


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/tmp/x.safetensors", "weights.bin", "a/../b.safetensors", ""]
)
def test_an_index_names_files_beside_it_and_no_pickle(shard: str, llama: Path) -> None:
    split(llama, shard)
    shutil.copy(llama / "beside.safetensors", llama.parent / "outside.safetensors")
    (llama / "weights.bin").write_bytes(b"\x80\x02}.")  # a pickle: {}
    for load in (lambda: state(llama), lambda: blank_language_model(llama, torch.float32)):
        with pytest.raises(FormatError, match="next to the index"):
            load()


def test_an_adapter_beside_the_model_is_not_attached(llama: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plain = state(llama)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(llama), LoraConfig(target_modules=["q_proj"]))
    peft.save_pretrained(str(llama / "adapter"))
    for file in (llama / "adapter").iterdir():
        shutil.copy(file, llama)
    assert same(plain, state(llama))


@pytest.mark.parametrize(
    "fields",
    [
        {"_attn_implementation": "kernels-community/flash-attn"},
        {"attn_implementation": "kernels-community/flash-attn"},
        {"_attn_implementation_internal": "kernels-community/flash-attn"},
        {"_experts_implementation": "someone/kernel"},
        {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}},
        {"transformers_weights": "../outside.safetensors"},
        {"use_kernels": True, "fusion_config": {"a": "b"}, "distributed_config": {"tp_size": 2}},
        {"name_or_path": "/etc", "_name_or_path": "someone/else", "torch_dtype": "float8_e4m3fn", "dtype": "nonsense"},
    ],
)
def test_settings_that_choose_code_or_files_stay_behind(
    fields: dict[str, Any], llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = state(llama)
    marker = tmp_path / "ran"
    (llama / "code.py").write_text(f"open({str(marker)!r}, 'w')\nraise SystemExit\n")
    edit(llama / "config.json", **fields)
    edit(llama / "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Tokenizer", None]}, chat_template="{% for")
    assert same(plain, state(llama)) and not marker.exists()
    network = blank_language_model(llama, torch.float32)
    assert network.config._attn_implementation == "sdpa"


def test_quantized_weights_are_refused_by_name(llama: Path) -> None:
    edit(llama / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(FormatError, match=r"quantized .*gptq"):
        state(llama)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**7},
        {"num_hidden_layers": 10**5},
        {"num_hidden_layers": 10**400},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": -1},
        {"hidden_size": 10**12},
        {"vocab_size": 10**9},
        {"num_attention_heads": 0},
        {"layer_types": ["full_attention"] * 10**5},
        {"rope_scaling": {"rope_type": "nonsense", "factor": 2.0}},
        {"rms_norm_eps": "small"},
        {"hidden_act": "exec"},
        {"model_type": "nonsense"},
        {"model_type": ["llama"]},
        {"model_type": "gpt2"},
    ],
    ids=str,
)
def test_a_configuration_is_bounded_by_its_weights(fields: dict[str, Any], llama: Path) -> None:
    edit(llama / "config.json", **fields)
    with pytest.raises(FormatError) as caught, stopwatch(time.process_time) as cost:
        state(llama)
    assert cost.seconds < 1.5 and len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"[" * 100_000),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 99999999999999}, "merges": []}}'),
        ("tokenizer_config.json", b'{"bos_token": 5}'),
        ("tokenizer_config.json", b'{"model_max_length": "long"}'),
        ("tokenizer_config.json", b'{"tokenizer_class": ["x"]}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"0": {"content": 5}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"' + b"9" * 5000 + b'": {"content": "a"}}}'),
    ],
    ids=lambda value: value[:40].decode() if isinstance(value, bytes) else value,
)
def test_a_broken_tokenizer_is_one_error(file: str, content: bytes, llama: Path) -> None:
    (llama / file).write_bytes(content)
    with pytest.raises(FormatError, match="llama"):
        load_tokenizer(llama)


def test_a_text_encoder_is_built_from_declared_settings_alone(folder: Path) -> None:
    with tiny.quick_tokenizers():
        plain = load_model(folder).networks["text_encoder"]
        edit(
            folder / "text_encoder" / "config.json",
            _attn_implementation="kernels-community/flash-attn", auto_map={"AutoModel": "code.Model"}, is_decoder=True,
        )  # fmt: skip
        (folder / "text_encoder" / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
        network = load_model(folder).networks["text_encoder"]
    assert network.config._attn_implementation == "sdpa" == plain.config._attn_implementation
    assert same(dict(plain.state_dict()), dict(network.state_dict()))


def test_names_in_an_index_stay_inside_the_folder(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "tokenizer", tmp_path / "outside")
    index = json.loads((folder / "model_index.json").read_text())
    index["tokenizer/../../outside"] = index.pop("tokenizer")
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(InweaveError, match="tokenizer missing"):
        load_model(folder)
