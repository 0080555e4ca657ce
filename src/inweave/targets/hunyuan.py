"""HunyuanVideo, FramePack, HunyuanImage 2.1 and HunyuanVideo 1.5: diffusers <-> Tencent's names, and ComfyUI's.

ComfyUI spells Tencent's modules as Flux does, so each model has two original spellings. They differ in the last words
only:

    img_attn_qkv  img_attn_proj  mlp.fc1  mlp.fc2  mod.linear    t_embedder.mlp.0    c_embedder.linear_1    Tencent
    img_attn.qkv  img_attn.proj  mlp.0    mlp.2    mod.lin       t_embedder.in_layer c_embedder.in_layer    ComfyUI
    img_attn_q_norm.weight                                       time_in.mlp.0                              Tencent
    img_attn.norm.query_norm.scale                               time_in.in_layer                           ComfyUI

HunyuanVideo 1.5 keeps q, k and v apart in Tencent's files; ComfyUI joins them.
"""

from __future__ import annotations

import re

from inweave.targets.rules import RuleTable

_COMMON = """
transformer_blocks.{i}.norm1.linear             double_blocks.{i}.img_mod.linear
transformer_blocks.{i}.norm1_context.linear     double_blocks.{i}.txt_mod.linear
transformer_blocks.{i}.attn.norm_q              double_blocks.{i}.img_attn_q_norm
transformer_blocks.{i}.attn.norm_k              double_blocks.{i}.img_attn_k_norm
transformer_blocks.{i}.attn.norm_added_q        double_blocks.{i}.txt_attn_q_norm
transformer_blocks.{i}.attn.norm_added_k        double_blocks.{i}.txt_attn_k_norm
transformer_blocks.{i}.attn.to_out.0            double_blocks.{i}.img_attn_proj
transformer_blocks.{i}.attn.to_add_out          double_blocks.{i}.txt_attn_proj
transformer_blocks.{i}.ff.net.0.proj            double_blocks.{i}.img_mlp.fc1
transformer_blocks.{i}.ff.net.2                 double_blocks.{i}.img_mlp.fc2
transformer_blocks.{i}.ff_context.net.0.proj    double_blocks.{i}.txt_mlp.fc1
transformer_blocks.{i}.ff_context.net.2         double_blocks.{i}.txt_mlp.fc2
x_embedder.proj                                 img_in.proj
proj_out                                        final_layer.linear
norm_out.linear                                 final_layer.adaLN_modulation.1   swap
context_embedder.proj_in                        txt_in.input_embedder
context_embedder.time_text_embed.timestep_embedder.linear_1   txt_in.t_embedder.mlp.0
context_embedder.time_text_embed.timestep_embedder.linear_2   txt_in.t_embedder.mlp.2
context_embedder.time_text_embed.text_embedder.linear_{i}     txt_in.c_embedder.linear_{i}
""" + """
R.{i}.norm1             T.{i}.norm1
R.{i}.norm2             T.{i}.norm2
R.{i}.norm_out.linear   T.{i}.adaLN_modulation.1
R.{i}.attn.to_q         T.{i}.self_attn_qkv   qkv:0
R.{i}.attn.to_k         T.{i}.self_attn_qkv   qkv:1
R.{i}.attn.to_v         T.{i}.self_attn_qkv   qkv:2
R.{i}.attn.to_out.0     T.{i}.self_attn_proj
R.{i}.ff.net.0.proj     T.{i}.mlp.fc1
R.{i}.ff.net.2          T.{i}.mlp.fc2
""".replace("R.", "context_embedder.token_refiner.refiner_blocks.").replace(
    "T.", "txt_in.individual_token_refiner.blocks."
)

_FUSED = """
transformer_blocks.{i}.attn.to_q                double_blocks.{i}.img_attn_qkv   qkv:0
transformer_blocks.{i}.attn.to_k                double_blocks.{i}.img_attn_qkv   qkv:1
transformer_blocks.{i}.attn.to_v                double_blocks.{i}.img_attn_qkv   qkv:2
transformer_blocks.{i}.attn.add_q_proj          double_blocks.{i}.txt_attn_qkv   qkv:0
transformer_blocks.{i}.attn.add_k_proj          double_blocks.{i}.txt_attn_qkv   qkv:1
transformer_blocks.{i}.attn.add_v_proj          double_blocks.{i}.txt_attn_qkv   qkv:2
"""

_UNFUSED = """
transformer_blocks.{i}.attn.to_q                double_blocks.{i}.img_attn_q
transformer_blocks.{i}.attn.to_k                double_blocks.{i}.img_attn_k
transformer_blocks.{i}.attn.to_v                double_blocks.{i}.img_attn_v
transformer_blocks.{i}.attn.add_q_proj          double_blocks.{i}.txt_attn_q
transformer_blocks.{i}.attn.add_k_proj          double_blocks.{i}.txt_attn_k
transformer_blocks.{i}.attn.add_v_proj          double_blocks.{i}.txt_attn_v
"""

_SINGLE = """
single_transformer_blocks.{i}.attn.to_q         single_blocks.{i}.linear1   qkvm:0
single_transformer_blocks.{i}.attn.to_k         single_blocks.{i}.linear1   qkvm:1
single_transformer_blocks.{i}.attn.to_v         single_blocks.{i}.linear1   qkvm:2
single_transformer_blocks.{i}.proj_mlp          single_blocks.{i}.linear1   qkvm:3
single_transformer_blocks.{i}.proj_out          single_blocks.{i}.linear2
single_transformer_blocks.{i}.attn.norm_q       single_blocks.{i}.q_norm
single_transformer_blocks.{i}.attn.norm_k       single_blocks.{i}.k_norm
single_transformer_blocks.{i}.norm.linear       single_blocks.{i}.modulation.linear
"""

_BYT5 = """
context_embedder_2.norm         byt5_in.layernorm
context_embedder_2.linear_{i}   byt5_in.fc{i}
"""

_VIDEO = """
time_text_embed.timestep_embedder.linear_1    time_in.mlp.0
time_text_embed.timestep_embedder.linear_2    time_in.mlp.2
time_text_embed.guidance_embedder.linear_1    guidance_in.mlp.0
time_text_embed.guidance_embedder.linear_2    guidance_in.mlp.2
time_text_embed.text_embedder.linear_1        vector_in.in_layer
time_text_embed.text_embedder.linear_2        vector_in.out_layer
clean_x_embedder.proj
clean_x_embedder.proj_{i}x
image_projection.up
image_projection.down
"""

_IMAGE = """
time_guidance_embed.timestep_embedder.linear_1     time_in.mlp.0
time_guidance_embed.timestep_embedder.linear_2     time_in.mlp.2
time_guidance_embed.timestep_embedder_r.linear_1   time_r_in.mlp.0
time_guidance_embed.timestep_embedder_r.linear_2   time_r_in.mlp.2
time_guidance_embed.guidance_embedder.linear_1     guidance_in.mlp.0
time_guidance_embed.guidance_embedder.linear_2     guidance_in.mlp.2
"""

_VIDEO_15 = """
time_embed.timestep_embedder.linear_1      time_in.mlp.0
time_embed.timestep_embedder.linear_2      time_in.mlp.2
time_embed.timestep_embedder_r.linear_1    time_r_in.mlp.0
time_embed.timestep_embedder_r.linear_2    time_r_in.mlp.2
image_embedder.norm_in                     vision_in.proj.0
image_embedder.linear_1                    vision_in.proj.1
image_embedder.linear_2                    vision_in.proj.3
image_embedder.norm_out                    vision_in.proj.4
cond_type_embed                            cond_type_embedding
"""

#: Tencent's words -> ComfyUI's
_COMFY = (
    (r"attn_(qkv|proj)$", r"attn.\1"),
    (r"mlp\.fc1$", "mlp.0"),
    (r"mlp\.fc2$", "mlp.2"),
    (r"(mod|modulation)\.linear$", r"\1.lin"),
    (r"(time_in|time_r_in|guidance_in|t_embedder)\.mlp\.0$", r"\1.in_layer"),
    (r"(time_in|time_r_in|guidance_in|t_embedder)\.mlp\.2$", r"\1.out_layer"),
)


def _comfy(text: str) -> str:
    """Return the same rules with ComfyUI's spelling on the right."""
    return "\n".join(line for rule in text.splitlines() for line in _comfy_rules(rule.split()))


def _comfy_rules(words: list[str]) -> list[str]:
    if len(words) < 2:
        return [" ".join(words)]
    part, original, *flags = words
    if "c_embedder" in original:
        ends = (("1", "in_layer"), ("2", "out_layer"))
        return [f"{part.replace('{i}', n)} {original.replace('linear_{i}', end)}" for n, end in ends]
    if norm := re.search(r"[._]([qk])_norm$", original):
        kind = {"q": "query", "k": "key"}[norm[1]]
        return [f"={part}.weight ={original[: norm.start()]}.norm.{kind}_norm.scale"]
    for tencent, comfy in _COMFY:
        original = re.sub(tencent, comfy, original)
    return [" ".join((part, original, *flags))]


def _pair(name: str, text: str, comfy: str | None = None) -> tuple[RuleTable, RuleTable]:
    return RuleTable(name, text), RuleTable(f"{name}-comfy", _comfy(comfy or text))


#: HunyuanImage first: HunyuanVideo's table knows every name of its refiner too
HUNYUAN_IMAGE, HUNYUAN_IMAGE_COMFY = _pair("hunyuan-image", _COMMON + _FUSED + _SINGLE + _BYT5 + _IMAGE)
HUNYUAN_VIDEO, HUNYUAN_VIDEO_COMFY = _pair("hunyuan-video", _COMMON + _FUSED + _SINGLE + _VIDEO)
HUNYUAN_VIDEO_15, HUNYUAN_VIDEO_15_COMFY = _pair(
    "hunyuan-video-1.5", _COMMON + _UNFUSED + _BYT5 + _VIDEO_15, _COMMON + _FUSED + _BYT5 + _VIDEO_15
)
