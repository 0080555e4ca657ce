"""The name tables of the known families (grammar: `inweave.targets.rules`)."""

from __future__ import annotations

from inweave.targets.causal_vae import CAUSAL_VAE
from inweave.targets.hunyuan import (
    HUNYUAN_IMAGE,
    HUNYUAN_IMAGE_COMFY,
    HUNYUAN_VIDEO,
    HUNYUAN_VIDEO_15,
    HUNYUAN_VIDEO_15_COMFY,
    HUNYUAN_VIDEO_COMFY,
)
from inweave.targets.image_tables import ANIMA, AURAFLOW, CASCADE, CASCADE_COMFY, KREA2, PIXART, SANA
from inweave.targets.links import IdentityTable, Table
from inweave.targets.rules import RuleTable, each_stack
from inweave.targets.unet import UnetTable
from inweave.targets.vae import VaeTable
from inweave.targets.video_tables import LTX, MOCHI, WAN

_DOUBLE_ATTENTION = """
transformer_blocks.{i}.attn.to_q          double_blocks.{i}.img_attn.qkv   qkv:0
transformer_blocks.{i}.attn.to_k          double_blocks.{i}.img_attn.qkv   qkv:1
transformer_blocks.{i}.attn.to_v          double_blocks.{i}.img_attn.qkv   qkv:2
transformer_blocks.{i}.attn.add_q_proj    double_blocks.{i}.txt_attn.qkv   qkv:0
transformer_blocks.{i}.attn.add_k_proj    double_blocks.{i}.txt_attn.qkv   qkv:1
transformer_blocks.{i}.attn.add_v_proj    double_blocks.{i}.txt_attn.qkv   qkv:2
transformer_blocks.{i}.attn.to_out.0      double_blocks.{i}.img_attn.proj
transformer_blocks.{i}.attn.to_add_out    double_blocks.{i}.txt_attn.proj
=transformer_blocks.{i}.attn.norm_q.weight         =double_blocks.{i}.img_attn.norm.query_norm.scale
=transformer_blocks.{i}.attn.norm_k.weight         =double_blocks.{i}.img_attn.norm.key_norm.scale
=transformer_blocks.{i}.attn.norm_added_q.weight   =double_blocks.{i}.txt_attn.norm.query_norm.scale
=transformer_blocks.{i}.attn.norm_added_k.weight   =double_blocks.{i}.txt_attn.norm.key_norm.scale
=single_transformer_blocks.{i}.attn.norm_q.weight  =single_blocks.{i}.norm.query_norm.scale
=single_transformer_blocks.{i}.attn.norm_k.weight  =single_blocks.{i}.norm.key_norm.scale
x_embedder         img_in
context_embedder   txt_in
proj_out           final_layer.linear
norm_out.linear    final_layer.adaLN_modulation.1   swap
"""

_SINGLE_ATTENTION = """
single_transformer_blocks.{i}.attn.to_q      single_blocks.{i}.linear1   qkvm:0
single_transformer_blocks.{i}.attn.to_k      single_blocks.{i}.linear1   qkvm:1
single_transformer_blocks.{i}.attn.to_v      single_blocks.{i}.linear1   qkvm:2
single_transformer_blocks.{i}.proj_mlp       single_blocks.{i}.linear1   qkvm:3
single_transformer_blocks.{i}.proj_out       single_blocks.{i}.linear2
single_transformer_blocks.{i}.norm.linear    single_blocks.{i}.modulation.lin
"""

FLUX = RuleTable(
    "flux",
    _DOUBLE_ATTENTION
    + _SINGLE_ATTENTION
    + """
transformer_blocks.{i}.norm1.linear              double_blocks.{i}.img_mod.lin
transformer_blocks.{i}.norm1_context.linear      double_blocks.{i}.txt_mod.lin
transformer_blocks.{i}.ff.net.0.proj             double_blocks.{i}.img_mlp.0
transformer_blocks.{i}.ff.net.2                  double_blocks.{i}.img_mlp.2
transformer_blocks.{i}.ff_context.net.0.proj     double_blocks.{i}.txt_mlp.0
transformer_blocks.{i}.ff_context.net.2          double_blocks.{i}.txt_mlp.2
time_text_embed.timestep_embedder.linear_1       time_in.in_layer
time_text_embed.timestep_embedder.linear_2       time_in.out_layer
time_text_embed.text_embedder.linear_1           vector_in.in_layer
time_text_embed.text_embedder.linear_2           vector_in.out_layer
time_text_embed.guidance_embedder.linear_1       guidance_in.in_layer
time_text_embed.guidance_embedder.linear_2       guidance_in.out_layer
distilled_guidance_layer.in_proj
distilled_guidance_layer.out_proj
distilled_guidance_layer.layers.{i}.linear_1     distilled_guidance_layer.layers.{i}.in_layer
distilled_guidance_layer.layers.{i}.linear_2     distilled_guidance_layer.layers.{i}.out_layer
=distilled_guidance_layer.norms.{i}.weight       =distilled_guidance_layer.norms.{i}.scale
""",
    """
double_blocks.{i}.processor.qkv_lora1    double_blocks.{i}.img_attn.qkv
double_blocks.{i}.processor.proj_lora1   double_blocks.{i}.img_attn.proj
double_blocks.{i}.processor.qkv_lora2    double_blocks.{i}.txt_attn.qkv
double_blocks.{i}.processor.proj_lora2   double_blocks.{i}.txt_attn.proj
single_blocks.{i}.processor.qkv_lora     single_blocks.{i}.linear1   3
single_blocks.{i}.processor.proj_lora    single_blocks.{i}.linear2
""",
)

FLUX2 = RuleTable(
    "flux2",
    _DOUBLE_ATTENTION
    + """
transformer_blocks.{i}.ff.linear_in                     double_blocks.{i}.img_mlp.0
transformer_blocks.{i}.ff.linear_out                    double_blocks.{i}.img_mlp.2
transformer_blocks.{i}.ff_context.linear_in             double_blocks.{i}.txt_mlp.0
transformer_blocks.{i}.ff_context.linear_out            double_blocks.{i}.txt_mlp.2
single_transformer_blocks.{i}.attn.to_qkv_mlp_proj      single_blocks.{i}.linear1
single_transformer_blocks.{i}.attn.to_out               single_blocks.{i}.linear2
double_stream_modulation_img.linear                     double_stream_modulation_img.lin
double_stream_modulation_txt.linear                     double_stream_modulation_txt.lin
single_stream_modulation.linear                         single_stream_modulation.lin
time_guidance_embed.timestep_embedder.linear_1          time_in.in_layer
time_guidance_embed.timestep_embedder.linear_2          time_in.out_layer
time_guidance_embed.guidance_embedder.linear_1          guidance_in.in_layer
time_guidance_embed.guidance_embedder.linear_2          guidance_in.out_layer
""",
)

_OVIS = (
    """
transformer_blocks.{i}.norm1.linear           double_blocks.{i}.img_mod.lin
transformer_blocks.{i}.norm1_context.linear   double_blocks.{i}.txt_mod.lin
transformer_blocks.{i}.ff.net.0.proj          double_blocks.{i}.img_mlp.up_proj     in:1/2
transformer_blocks.{i}.ff.net.0.proj          double_blocks.{i}.img_mlp.gate_proj   in:2/2
transformer_blocks.{i}.ff.net.2               double_blocks.{i}.img_mlp.down_proj
transformer_blocks.{i}.ff_context.net.0.proj  double_blocks.{i}.txt_mlp.up_proj     in:1/2
transformer_blocks.{i}.ff_context.net.0.proj  double_blocks.{i}.txt_mlp.gate_proj   in:2/2
transformer_blocks.{i}.ff_context.net.2       double_blocks.{i}.txt_mlp.down_proj
timestep_embedder.linear_1                    time_in.in_layer
timestep_embedder.linear_2                    time_in.out_layer
"""
    + _SINGLE_ATTENTION
)

OVIS_COMFY = RuleTable("ovis-comfy", _DOUBLE_ATTENTION + _OVIS + "=context_embedder_norm.weight   =txt_norm.scale")
OVIS = RuleTable(
    "ovis",
    _DOUBLE_ATTENTION.replace("_norm.scale", "_norm.weight").replace("txt_in", "semantic_txt_in")
    + _OVIS
    + "context_embedder_norm   semantic_txt_norm",
)

SD3 = RuleTable(
    "sd3",
    """
transformer_blocks.{i}.attn.to_q                joint_blocks.{i}.x_block.attn.qkv         qkv:0
transformer_blocks.{i}.attn.to_k                joint_blocks.{i}.x_block.attn.qkv         qkv:1
transformer_blocks.{i}.attn.to_v                joint_blocks.{i}.x_block.attn.qkv         qkv:2
transformer_blocks.{i}.attn2.to_q               joint_blocks.{i}.x_block.attn2.qkv        qkv:0
transformer_blocks.{i}.attn2.to_k               joint_blocks.{i}.x_block.attn2.qkv        qkv:1
transformer_blocks.{i}.attn2.to_v               joint_blocks.{i}.x_block.attn2.qkv        qkv:2
transformer_blocks.{i}.attn.add_q_proj          joint_blocks.{i}.context_block.attn.qkv   qkv:0
transformer_blocks.{i}.attn.add_k_proj          joint_blocks.{i}.context_block.attn.qkv   qkv:1
transformer_blocks.{i}.attn.add_v_proj          joint_blocks.{i}.context_block.attn.qkv   qkv:2
transformer_blocks.{i}.attn.to_out.0            joint_blocks.{i}.x_block.attn.proj
transformer_blocks.{i}.attn2.to_out.0           joint_blocks.{i}.x_block.attn2.proj
transformer_blocks.{i}.attn.to_add_out          joint_blocks.{i}.context_block.attn.proj
transformer_blocks.{i}.ff.net.0.proj            joint_blocks.{i}.x_block.mlp.fc1
transformer_blocks.{i}.ff.net.2                 joint_blocks.{i}.x_block.mlp.fc2
transformer_blocks.{i}.ff_context.net.0.proj    joint_blocks.{i}.context_block.mlp.fc1
transformer_blocks.{i}.ff_context.net.2         joint_blocks.{i}.context_block.mlp.fc2
transformer_blocks.{i}.norm1.linear             joint_blocks.{i}.x_block.adaLN_modulation.1
transformer_blocks.{i}.norm1_context.linear     joint_blocks.{i}.context_block.adaLN_modulation.1   swap-last
transformer_blocks.{i}.attn.norm_q              joint_blocks.{i}.x_block.attn.ln_q
transformer_blocks.{i}.attn.norm_k              joint_blocks.{i}.x_block.attn.ln_k
transformer_blocks.{i}.attn2.norm_q             joint_blocks.{i}.x_block.attn2.ln_q
transformer_blocks.{i}.attn2.norm_k             joint_blocks.{i}.x_block.attn2.ln_k
transformer_blocks.{i}.attn.norm_added_q        joint_blocks.{i}.context_block.attn.ln_q
transformer_blocks.{i}.attn.norm_added_k        joint_blocks.{i}.context_block.attn.ln_k
=pos_embed.pos_embed                            =pos_embed
pos_embed.proj                                  x_embedder.proj
context_embedder
proj_out                                        final_layer.linear
norm_out.linear                                 final_layer.adaLN_modulation.1   swap
time_text_embed.timestep_embedder.linear_1      t_embedder.mlp.0
time_text_embed.timestep_embedder.linear_2      t_embedder.mlp.2
time_text_embed.text_embedder.linear_1          y_embedder.mlp.0
time_text_embed.text_embedder.linear_2          y_embedder.mlp.2
""",
)


_LUMINA_STACKS = ("layers", "noise_refiner", "context_refiner")


Z_IMAGE = RuleTable(
    "z-image",
    each_stack(
        """
@.{i}.attention.to_q       @.{i}.attention.qkv      qkv:0
@.{i}.attention.to_k       @.{i}.attention.qkv      qkv:1
@.{i}.attention.to_v       @.{i}.attention.qkv      qkv:2
@.{i}.attention.to_out.0   @.{i}.attention.out
@.{i}.attention.norm_q     @.{i}.attention.q_norm
@.{i}.attention.norm_k     @.{i}.attention.k_norm
@.{i}.feed_forward.w1
@.{i}.feed_forward.w2
@.{i}.feed_forward.w3
@.{i}.adaLN_modulation.0
@.{i}.attention_norm1
@.{i}.attention_norm2
@.{i}.ffn_norm1
@.{i}.ffn_norm2
""",
        *_LUMINA_STACKS,
    )
    + """
all_x_embedder.2-1                        x_embedder
all_final_layer.2-1.linear                final_layer.linear
all_final_layer.2-1.adaLN_modulation.1    final_layer.adaLN_modulation.1
cap_embedder.0
cap_embedder.1
t_embedder.mlp.0
t_embedder.mlp.2
=x_pad_token
=cap_pad_token
""",
)

LUMINA2 = RuleTable(
    "lumina2",
    each_stack(
        """
@.{i}.attn.to_q                @.{i}.attention.qkv      qkv:0
@.{i}.attn.to_k                @.{i}.attention.qkv      qkv:1
@.{i}.attn.to_v                @.{i}.attention.qkv      qkv:2
@.{i}.attn.to_out.0            @.{i}.attention.out
@.{i}.attn.norm_q              @.{i}.attention.q_norm
@.{i}.attn.norm_k              @.{i}.attention.k_norm
@.{i}.feed_forward.linear_1    @.{i}.feed_forward.w1
@.{i}.feed_forward.linear_2    @.{i}.feed_forward.w2
@.{i}.feed_forward.linear_3    @.{i}.feed_forward.w3
@.{i}.norm2                    @.{i}.attention_norm2
@.{i}.ffn_norm1
@.{i}.ffn_norm2
""",
        *_LUMINA_STACKS,
    )
    + """
layers.{i}.norm1.linear                             layers.{i}.adaLN_modulation.1
layers.{i}.norm1.norm                               layers.{i}.attention_norm1
noise_refiner.{i}.norm1.linear                      noise_refiner.{i}.adaLN_modulation.1
noise_refiner.{i}.norm1.norm                        noise_refiner.{i}.attention_norm1
context_refiner.{i}.norm1                           context_refiner.{i}.attention_norm1
x_embedder
time_caption_embed.timestep_embedder.linear_1       t_embedder.mlp.0
time_caption_embed.timestep_embedder.linear_2       t_embedder.mlp.2
time_caption_embed.caption_embedder.0               cap_embedder.0
time_caption_embed.caption_embedder.1               cap_embedder.1
norm_out.linear_1                                   final_layer.adaLN_modulation.1
norm_out.linear_2                                   final_layer.linear
""",
)

OPENCLIP = RuleTable(
    "openclip",
    """
=text_model.encoder.layers.{i}.self_attn.q_proj.weight   =transformer.resblocks.{i}.attn.in_proj_weight   qkv:0
=text_model.encoder.layers.{i}.self_attn.k_proj.weight   =transformer.resblocks.{i}.attn.in_proj_weight   qkv:1
=text_model.encoder.layers.{i}.self_attn.v_proj.weight   =transformer.resblocks.{i}.attn.in_proj_weight   qkv:2
=text_model.encoder.layers.{i}.self_attn.q_proj.bias     =transformer.resblocks.{i}.attn.in_proj_bias     qkv:0
=text_model.encoder.layers.{i}.self_attn.k_proj.bias     =transformer.resblocks.{i}.attn.in_proj_bias     qkv:1
=text_model.encoder.layers.{i}.self_attn.v_proj.bias     =transformer.resblocks.{i}.attn.in_proj_bias     qkv:2
text_model.encoder.layers.{i}.self_attn.out_proj         transformer.resblocks.{i}.attn.out_proj
text_model.encoder.layers.{i}.mlp.fc1                    transformer.resblocks.{i}.mlp.c_fc
text_model.encoder.layers.{i}.mlp.fc2                    transformer.resblocks.{i}.mlp.c_proj
text_model.encoder.layers.{i}.layer_norm1                transformer.resblocks.{i}.ln_1
text_model.encoder.layers.{i}.layer_norm2                transformer.resblocks.{i}.ln_2
text_model.final_layer_norm                              ln_final
=text_model.embeddings.token_embedding.weight            =token_embedding.weight
=text_model.embeddings.position_embedding.weight         =positional_embedding
=text_projection.weight                                  =text_projection   transpose
""",
)

OWN = IdentityTable()

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        UnetTable(), FLUX, FLUX2, SD3, Z_IMAGE, LUMINA2, WAN, LTX, MOCHI,
        HUNYUAN_IMAGE, HUNYUAN_IMAGE_COMFY, HUNYUAN_VIDEO, HUNYUAN_VIDEO_COMFY,
        HUNYUAN_VIDEO_15, HUNYUAN_VIDEO_15_COMFY, OVIS, OVIS_COMFY, PIXART, SANA, AURAFLOW, ANIMA, KREA2,
        CASCADE, CASCADE_COMFY,
        OPENCLIP, VaeTable(), CAUSAL_VAE, OWN,
    )
}  # fmt: skip

#: table -> the tables of the other original spellings of the same models
SPELLINGS: dict[str, tuple[str, ...]] = {
    name: (other,)
    for own, comfy in ((table, f"{table}-comfy") for table in TABLES if f"{table}-comfy" in TABLES)
    for name, other in ((own, comfy), (comfy, own))
}
