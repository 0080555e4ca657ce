"""PEFT's adapter_config.json field by field: every field that affects the math is applied or refused by name.

    read     r, lora_alpha | alpha, *_pattern, use_rslora, use_dora, lora_bias, fan_in_fan_out, feedforward_modules,
             block_share, coft, *cayley_neumann*, target_parameters, trainable_token_indices, modules_to_save
             (`inweave.formats.config`)
    inert    selection of modules, initialization, dropout: already reflected in the tensors
    refused  fields that imply another forward pass or base weight than plain LoRA's (`_REFUSED`, `_CHANGED_BASE`)
    unknown  an unknown field with a value that is not a typical default: a warning that names it

The fields are those of PEFT 0.2 to 0.21.
"""

from __future__ import annotations

from collections.abc import Mapping

from inweave.errors import FormatError

_READ = (
    "peft_type r lora_alpha alpha alpha_pattern rank_pattern use_rslora use_dora lora_bias fan_in_fan_out "
    "feedforward_modules block_share coft use_cayley_neumann num_cayley_neumann_terms target_parameters "
    "trainable_token_indices modules_to_save"
)
_INERT = (
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules "
    "exclude_modules layers_to_transform layers_pattern init_weights init_ia3_weights init_lora_weights bias "
    "lora_dropout eva_config corda_config loftq_config lora_ga_config velora_config qalora_group_size runtime_config "
    "megatron_core merge_weights rank_dropout module_dropout rank_dropout_scale use_effective_conv2d decompose_both "
    "decompose_factor oft_block_size eps boft_block_size boft_block_num boft_n_butterfly_factor boft_dropout "
    "projection_prng_key save_projection d_initial vera_dropout"
)
_KNOWN = frozenset((*_READ.split(), *_INERT.split()))

#: field -> why an adapter that sets it is not a plain LoRA
_REFUSED = {
    "layer_replication": "changes the model's layers and cannot be applied to its tensors",
    "alora_invocation_tokens": (
        "makes it an activated LoRA (aLoRA), which affects only the tokens after its invocation and cannot be merged"
    ),
    "arrow_config": "makes it an Arrow router, which mixes other adapters for each token and cannot be merged",
    "use_qalora": "makes it a QA-LoRA: its factors belong to inputs averaged in groups, on a quantized base",
    "use_bdlora": "makes it a BD-LoRA: its factors are the blocks of block-diagonal matrices",
    "kasa_config": "makes it KaSA: it was trained on a base whose smallest singular values were cut off",
    "monteclora_config": "makes it MonteCLoRA: its factors are sampled around the stored ones",
    "ensure_weight_tying": (
        "ties the adapters of layers that share a weight: merged one by one, they would change the shared weight twice"
    ),
    "enable_lora": "is from PEFT's first versions, which adapted parts of fused layers; save it with a newer PEFT",
}
#: values of `init_lora_weights` that change the base before training
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: values that leave the base unchanged
_PLAIN_STARTS = ("none", "true", "false", "gaussian", "eva", "orthogonal", "mica")


def check_fields(config: Mapping[str, object]) -> list[str]:
    """Return a warning per unknown field; raise FormatError for fields that cannot be applied to a model's tensors."""
    for name, reason in _REFUSED.items():
        if config.get(name) or (name == "alora_invocation_tokens" and config.get(name) is not None):
            raise FormatError(f"adapter_config.json: {name} {reason}; inweave cannot apply it")
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(_CHANGED_BASE):
        raise FormatError(
            f"adapter_config.json: init_lora_weights={start[:40]!r} trained on a changed base, so merging into the "
            "original one would be wrong; save it from PEFT with path_initial_model_for_weight_conversion"
        )
    if start not in _PLAIN_STARTS:
        raise FormatError(
            f"adapter_config.json: init_lora_weights={start[:40]!r} is unknown, so the base that it was trained on is "
            f"unknown too; known are {', '.join((*_PLAIN_STARTS, *_CHANGED_BASE))}"
        )
    _check_megatron(config.get("megatron_config"))
    return [
        f"adapter_config.json: the field {name[:60]!r} is not known to this version and was ignored"
        for name, value in config.items()
        if name not in _KNOWN and name not in _REFUSED and name != "megatron_config" and value
    ]


def _check_megatron(config: object) -> None:
    """Raise FormatError if Megatron may have split the layers over processes, so that each file holds a part."""
    if not isinstance(config, Mapping):
        return
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
        size = config.get(name)
        if isinstance(size, int) and size > 1:
            raise FormatError(
                f"adapter_config.json: megatron_config was used with {name} = {size}: the file may hold one process's "
                "part of the layers; save it from one process"
            )


def token_indices(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Return `trainable_token_indices` by the end of the embedding's name; "" refers to the model's only embedding."""
    value = config.get("trainable_token_indices")
    if not value:
        return {}
    tables = {str(name): rows for name, rows in value.items()} if isinstance(value, Mapping) else {"": value}
    for rows in tables.values():
        if not isinstance(rows, list | tuple) or not all(type(row) is int and 0 <= row < 2**31 for row in rows):
            raise FormatError(
                "adapter_config.json: trainable_token_indices must be a list of token ids, or one list per embedding"
            )
    return {name: tuple(rows) for name, rows in tables.items()}  # type: ignore[arg-type]
