"""The name tables of image models with one original naming of their own (grammar: `inweave.targets.rules`)."""

from __future__ import annotations

from inweave.targets.rules import RuleTable, each_stack

#: rules common to PixArt and Sana
_PIXART_LIKE = """
=transformer_blocks.{i}.scale_shift_table   =blocks.{i}.scale_shift_table
transformer_blocks.{i}.attn1.to_q           blocks.{i}.attn.qkv                 1/3
transformer_blocks.{i}.attn1.to_k           blocks.{i}.attn.qkv                 2/3
transformer_blocks.{i}.attn1.to_v           blocks.{i}.attn.qkv                 3/3
transformer_blocks.{i}.attn1.to_out.0       blocks.{i}.attn.proj
transformer_blocks.{i}.attn2.to_q           blocks.{i}.cross_attn.q_linear
transformer_blocks.{i}.attn2.to_k           blocks.{i}.cross_attn.kv_linear     1/2
transformer_blocks.{i}.attn2.to_v           blocks.{i}.cross_attn.kv_linear     2/2
transformer_blocks.{i}.attn2.to_out.0       blocks.{i}.cross_attn.proj
caption_projection.linear_{i}               y_embedder.y_proj.fc{i}
proj_out                                    final_layer.linear
=scale_shift_table                          =final_layer.scale_shift_table
"""

PIXART = RuleTable(
    "pixart",
    _PIXART_LIKE
    + """
transformer_blocks.{i}.ff.net.0.proj              blocks.{i}.mlp.fc1
transformer_blocks.{i}.ff.net.2                   blocks.{i}.mlp.fc2
adaln_single.linear                               t_block.1
adaln_single.emb.timestep_embedder.linear_1       t_embedder.mlp.0
adaln_single.emb.timestep_embedder.linear_2       t_embedder.mlp.2
adaln_single.emb.resolution_embedder.linear_1     csize_embedder.mlp.0
adaln_single.emb.resolution_embedder.linear_2     csize_embedder.mlp.2
adaln_single.emb.aspect_ratio_embedder.linear_1   ar_embedder.mlp.0
adaln_single.emb.aspect_ratio_embedder.linear_2   ar_embedder.mlp.2
pos_embed.proj                                    x_embedder.proj
""",
)

SANA = RuleTable(
    "sana",
    _PIXART_LIKE
    + """
transformer_blocks.{i}.ff.conv_inverted     blocks.{i}.mlp.inverted_conv.conv
transformer_blocks.{i}.ff.conv_depth        blocks.{i}.mlp.depth_conv.conv
transformer_blocks.{i}.ff.conv_point        blocks.{i}.mlp.point_conv.conv
transformer_blocks.{i}.attn1.norm_q         blocks.{i}.attn.q_norm
transformer_blocks.{i}.attn1.norm_k         blocks.{i}.attn.k_norm
transformer_blocks.{i}.attn2.norm_q         blocks.{i}.cross_attn.q_norm
transformer_blocks.{i}.attn2.norm_k         blocks.{i}.cross_attn.k_norm
time_embed.linear                           t_block.1
time_embed.emb.timestep_embedder.linear_1   t_embedder.mlp.0
time_embed.emb.timestep_embedder.linear_2   t_embedder.mlp.2
caption_norm                                attention_y_norm
patch_embed.proj                            x_embedder.proj
""",
)

AURAFLOW = RuleTable(
    "auraflow",
    """
joint_transformer_blocks.{i}.attn.to_q                   double_layers.{i}.attn.w2q
joint_transformer_blocks.{i}.attn.to_k                   double_layers.{i}.attn.w2k
joint_transformer_blocks.{i}.attn.to_v                   double_layers.{i}.attn.w2v
joint_transformer_blocks.{i}.attn.to_out.0               double_layers.{i}.attn.w2o
joint_transformer_blocks.{i}.attn.add_q_proj             double_layers.{i}.attn.w1q
joint_transformer_blocks.{i}.attn.add_k_proj             double_layers.{i}.attn.w1k
joint_transformer_blocks.{i}.attn.add_v_proj             double_layers.{i}.attn.w1v
joint_transformer_blocks.{i}.attn.to_add_out             double_layers.{i}.attn.w1o
joint_transformer_blocks.{i}.ff.linear_1                 double_layers.{i}.mlpX.c_fc1
joint_transformer_blocks.{i}.ff.linear_2                 double_layers.{i}.mlpX.c_fc2
joint_transformer_blocks.{i}.ff.out_projection           double_layers.{i}.mlpX.c_proj
joint_transformer_blocks.{i}.ff_context.linear_1         double_layers.{i}.mlpC.c_fc1
joint_transformer_blocks.{i}.ff_context.linear_2         double_layers.{i}.mlpC.c_fc2
joint_transformer_blocks.{i}.ff_context.out_projection   double_layers.{i}.mlpC.c_proj
joint_transformer_blocks.{i}.norm1.linear                double_layers.{i}.modX.1
joint_transformer_blocks.{i}.norm1_context.linear        double_layers.{i}.modC.1
single_transformer_blocks.{i}.attn.to_q                  single_layers.{i}.attn.w1q
single_transformer_blocks.{i}.attn.to_k                  single_layers.{i}.attn.w1k
single_transformer_blocks.{i}.attn.to_v                  single_layers.{i}.attn.w1v
single_transformer_blocks.{i}.attn.to_out.0              single_layers.{i}.attn.w1o
single_transformer_blocks.{i}.ff.linear_1                single_layers.{i}.mlp.c_fc1
single_transformer_blocks.{i}.ff.linear_2                single_layers.{i}.mlp.c_fc2
single_transformer_blocks.{i}.ff.out_projection          single_layers.{i}.mlp.c_proj
single_transformer_blocks.{i}.norm1.linear               single_layers.{i}.modCX.1
time_step_proj.linear_1                                  t_embedder.mlp.0
time_step_proj.linear_2                                  t_embedder.mlp.2
context_embedder                                         cond_seq_linear
proj_out                                                 final_linear
norm_out.linear                                          modF.1   swap
=pos_embed.pos_embed                                     =positional_encoding
pos_embed.proj                                           init_x_linear
=register_tokens
""",
)

#: Anima is Cosmos-Predict2 with a text conditioner, which single files keep inside the transformer
ANIMA = RuleTable(
    "anima",
    """
transformer_blocks.{i}.attn1.to_q       blocks.{i}.self_attn.q_proj
transformer_blocks.{i}.attn1.to_k       blocks.{i}.self_attn.k_proj
transformer_blocks.{i}.attn1.to_v       blocks.{i}.self_attn.v_proj
transformer_blocks.{i}.attn1.to_out.0   blocks.{i}.self_attn.output_proj
transformer_blocks.{i}.attn1.norm_q     blocks.{i}.self_attn.q_norm
transformer_blocks.{i}.attn1.norm_k     blocks.{i}.self_attn.k_norm
transformer_blocks.{i}.attn2.to_q       blocks.{i}.cross_attn.q_proj
transformer_blocks.{i}.attn2.to_k       blocks.{i}.cross_attn.k_proj
transformer_blocks.{i}.attn2.to_v       blocks.{i}.cross_attn.v_proj
transformer_blocks.{i}.attn2.to_out.0   blocks.{i}.cross_attn.output_proj
transformer_blocks.{i}.attn2.norm_q     blocks.{i}.cross_attn.q_norm
transformer_blocks.{i}.attn2.norm_k     blocks.{i}.cross_attn.k_norm
transformer_blocks.{i}.ff.net.0.proj    blocks.{i}.mlp.layer1
transformer_blocks.{i}.ff.net.2         blocks.{i}.mlp.layer2
transformer_blocks.{i}.norm1.linear_1   blocks.{i}.adaln_modulation_self_attn.1
transformer_blocks.{i}.norm1.linear_2   blocks.{i}.adaln_modulation_self_attn.2
transformer_blocks.{i}.norm2.linear_1   blocks.{i}.adaln_modulation_cross_attn.1
transformer_blocks.{i}.norm2.linear_2   blocks.{i}.adaln_modulation_cross_attn.2
transformer_blocks.{i}.norm3.linear_1   blocks.{i}.adaln_modulation_mlp.1
transformer_blocks.{i}.norm3.linear_2   blocks.{i}.adaln_modulation_mlp.2
norm_out.linear_{i}                     final_layer.adaln_modulation.{i}
proj_out                                final_layer.linear
patch_embed.proj                        x_embedder.proj.1
time_embed.t_embedder.linear_1          t_embedder.1.linear_1
time_embed.t_embedder.linear_2          t_embedder.1.linear_2
time_embed.norm                         t_embedding_norm
llm_adapter.blocks.{i}.self_attn.q_proj
llm_adapter.blocks.{i}.self_attn.k_proj
llm_adapter.blocks.{i}.self_attn.v_proj
llm_adapter.blocks.{i}.self_attn.o_proj
llm_adapter.blocks.{i}.self_attn.q_norm
llm_adapter.blocks.{i}.self_attn.k_norm
llm_adapter.blocks.{i}.cross_attn.q_proj
llm_adapter.blocks.{i}.cross_attn.k_proj
llm_adapter.blocks.{i}.cross_attn.v_proj
llm_adapter.blocks.{i}.cross_attn.o_proj
llm_adapter.blocks.{i}.cross_attn.q_norm
llm_adapter.blocks.{i}.cross_attn.k_norm
llm_adapter.blocks.{i}.mlp.0
llm_adapter.blocks.{i}.mlp.2
llm_adapter.blocks.{i}.norm_self_attn
llm_adapter.blocks.{i}.norm_cross_attn
llm_adapter.blocks.{i}.norm_mlp
llm_adapter.embed
llm_adapter.norm
llm_adapter.out_proj
""",
)

_KREA_BLOCK = """
A.{i}.attn.to_q              B.{i}.attn.wq
A.{i}.attn.to_k              B.{i}.attn.wk
A.{i}.attn.to_v              B.{i}.attn.wv
A.{i}.attn.to_gate           B.{i}.attn.gate
A.{i}.attn.to_out.0          B.{i}.attn.wo
=A.{i}.attn.norm_q.weight    =B.{i}.attn.qknorm.qnorm.scale
=A.{i}.attn.norm_k.weight    =B.{i}.attn.qknorm.knorm.scale
A.{i}.ff.gate                B.{i}.mlp.gate
A.{i}.ff.up                  B.{i}.mlp.up
A.{i}.ff.down                B.{i}.mlp.down
=A.{i}.norm1.weight          =B.{i}.prenorm.scale
=A.{i}.norm2.weight          =B.{i}.postnorm.scale
"""


def _krea(part: str, original: str) -> str:
    return _KREA_BLOCK.replace("A.", f"{part}.").replace("B.", f"{original}.")


KREA2 = RuleTable(
    "krea2",
    _krea("transformer_blocks", "blocks")
    + _krea("text_fusion.layerwise_blocks", "txtfusion.layerwise_blocks")
    + _krea("text_fusion.refiner_blocks", "txtfusion.refiner_blocks")
    + """
=transformer_blocks.{i}.scale_shift_table   =blocks.{i}.mod.lin   rows:6
text_fusion.projector                       txtfusion.projector
img_in                                      first
time_embed.linear_1                         tmlp.0
time_embed.linear_2                         tmlp.2
time_mod_proj                               tproj.1
=txt_in.norm.weight                         =txtmlp.0.scale
txt_in.linear_1                             txtmlp.1
txt_in.linear_2                             txtmlp.3
=final_layer.norm.weight                    =last.norm.scale
final_layer.linear                          last.linear
=final_layer.scale_shift_table              =last.modulation.lin
""",
)

_CASCADE = (
    each_stack(
        """
@.{i}.{j}.depthwise
@.{i}.{j}.channelwise.0
=@.{i}.{j}.channelwise.2.gamma
=@.{i}.{j}.channelwise.2.beta
@.{i}.{j}.channelwise.4
@.{i}.{j}.mapper
@.{i}.{j}.mapper_sca
@.{i}.{j}.mapper_crp
@.{i}.{j}.kv_mapper.1
@.{i}.{j}.attention.to_out.0   @.{i}.{j}.attention.attn.out_proj
""",
        "down_blocks",
        "up_blocks",
    )
    + """
embedding.1
down_downscalers.1.1.blocks.0
up_upscalers.0.1.blocks.1
clf.1
clip_txt_mapper
clip_txt_pooled_mapper
clip_img_mapper
"""
)

#: the prior (stage C): the published files fuse q, k and v, ComfyUI cuts them apart
CASCADE = RuleTable(
    "cascade",
    _CASCADE
    + each_stack(
        """
=@.{i}.{j}.attention.to_q.weight   =@.{i}.{j}.attention.attn.in_proj_weight   1/3
=@.{i}.{j}.attention.to_k.weight   =@.{i}.{j}.attention.attn.in_proj_weight   2/3
=@.{i}.{j}.attention.to_v.weight   =@.{i}.{j}.attention.attn.in_proj_weight   3/3
=@.{i}.{j}.attention.to_q.bias     =@.{i}.{j}.attention.attn.in_proj_bias     1/3
=@.{i}.{j}.attention.to_k.bias     =@.{i}.{j}.attention.attn.in_proj_bias     2/3
=@.{i}.{j}.attention.to_v.bias     =@.{i}.{j}.attention.attn.in_proj_bias     3/3
""",
        "down_blocks",
        "up_blocks",
    ),
)
CASCADE_COMFY = RuleTable(
    "cascade-comfy",
    _CASCADE
    + each_stack(
        """
@.{i}.{j}.attention.to_q   @.{i}.{j}.attention.attn.to_q
@.{i}.{j}.attention.to_k   @.{i}.{j}.attention.attn.to_k
@.{i}.{j}.attention.to_v   @.{i}.{j}.attention.attn.to_v
""",
        "down_blocks",
        "up_blocks",
    ),
)
