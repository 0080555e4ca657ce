"""The name tables of video models (grammar: `inweave.targets.rules`); HunyuanVideo's are in
`inweave.targets.hunyuan`.
"""

from __future__ import annotations

from inweave.targets.rules import RuleTable, each_stack

_WAN_BLOCK = """
@.{i}.attn1.to_q              @.{i}.self_attn.q
@.{i}.attn1.to_k              @.{i}.self_attn.k
@.{i}.attn1.to_v              @.{i}.self_attn.v
@.{i}.attn1.to_out.0          @.{i}.self_attn.o
@.{i}.attn1.norm_q            @.{i}.self_attn.norm_q
@.{i}.attn1.norm_k            @.{i}.self_attn.norm_k
@.{i}.attn2.to_q              @.{i}.cross_attn.q
@.{i}.attn2.to_k              @.{i}.cross_attn.k
@.{i}.attn2.to_v              @.{i}.cross_attn.v
@.{i}.attn2.to_out.0          @.{i}.cross_attn.o
@.{i}.attn2.norm_q            @.{i}.cross_attn.norm_q
@.{i}.attn2.norm_k            @.{i}.cross_attn.norm_k
@.{i}.attn2.add_k_proj        @.{i}.cross_attn.k_img
@.{i}.attn2.add_v_proj        @.{i}.cross_attn.v_img
@.{i}.attn2.norm_added_k      @.{i}.cross_attn.norm_k_img
@.{i}.norm2                   @.{i}.norm3
@.{i}.norm3                   @.{i}.norm2
@.{i}.ffn.net.0.proj          @.{i}.ffn.0
@.{i}.ffn.net.2               @.{i}.ffn.2
=@.{i}.scale_shift_table      =@.{i}.modulation
"""

WAN = RuleTable(
    "wan",
    each_stack(_WAN_BLOCK, "blocks", "vace_blocks")
    + """
vace_blocks.{i}.proj_in            vace_blocks.{i}.before_proj
vace_blocks.{i}.proj_out           vace_blocks.{i}.after_proj
vace_patch_embedding
=scale_shift_table                 =head.modulation
proj_out                           head.head
patch_embedding
condition_embedder.time_embedder.linear_1            time_embedding.0
condition_embedder.time_embedder.linear_2            time_embedding.2
condition_embedder.text_embedder.linear_1            text_embedding.0
condition_embedder.text_embedder.linear_2            text_embedding.2
condition_embedder.time_proj                         time_projection.1
condition_embedder.image_embedder.norm1              img_emb.proj.0
condition_embedder.image_embedder.ff.net.0.proj      img_emb.proj.1
condition_embedder.image_embedder.ff.net.2           img_emb.proj.3
condition_embedder.image_embedder.norm2              img_emb.proj.4
=condition_embedder.image_embedder.pos_embed         =img_emb.emb_pos
""",
)

_LTX_ATTENTION = """
transformer_blocks.{i}.@.to_q
transformer_blocks.{i}.@.to_k
transformer_blocks.{i}.@.to_v
transformer_blocks.{i}.@.to_out.0
transformer_blocks.{i}.@.to_gate_logits
transformer_blocks.{i}.@.norm_q   transformer_blocks.{i}.@.q_norm
transformer_blocks.{i}.@.norm_k   transformer_blocks.{i}.@.k_norm
"""
_LTX_ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_LTX_MODULATION = """
A.linear                            B.linear
A.emb.timestep_embedder.linear_{i}  B.emb.timestep_embedder.linear_{i}
"""
_LTX_MODULATIONS = {
    "time_embed": "adaln_single",
    "audio_time_embed": "audio_adaln_single",
    "prompt_adaln": "prompt_adaln_single",
    "audio_prompt_adaln": "audio_prompt_adaln_single",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
    "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
}

#: LTX-Video and LTX-2, which adds audio
LTX = RuleTable(
    "ltx",
    each_stack(_LTX_ATTENTION, *_LTX_ATTENTIONS)
    + "".join(_LTX_MODULATION.replace("A.", f"{a}.").replace("B.", f"{b}.") for a, b in _LTX_MODULATIONS.items())
    + each_stack(
        """
transformer_blocks.{i}.@ff.net.0.proj
transformer_blocks.{i}.@ff.net.2
=transformer_blocks.{i}.@scale_shift_table
=transformer_blocks.{i}.@prompt_scale_shift_table
=@scale_shift_table
@proj_in                 @patchify_proj
@proj_out
@caption_projection.linear_{i}
""",
        "",
        "audio_",
    )
    + """
=transformer_blocks.{i}.video_a2v_cross_attn_scale_shift_table   =transformer_blocks.{i}.scale_shift_table_a2v_ca_video
=transformer_blocks.{i}.audio_a2v_cross_attn_scale_shift_table   =transformer_blocks.{i}.scale_shift_table_a2v_ca_audio
=keyframes_abs_pos_embedding
""",
)

MOCHI = RuleTable(
    "mochi",
    """
transformer_blocks.{i}.attn1.to_q              blocks.{i}.attn.qkv_x      1/3
transformer_blocks.{i}.attn1.to_k              blocks.{i}.attn.qkv_x      2/3
transformer_blocks.{i}.attn1.to_v              blocks.{i}.attn.qkv_x      3/3
transformer_blocks.{i}.attn1.add_q_proj        blocks.{i}.attn.qkv_y      1/3
transformer_blocks.{i}.attn1.add_k_proj        blocks.{i}.attn.qkv_y      2/3
transformer_blocks.{i}.attn1.add_v_proj        blocks.{i}.attn.qkv_y      3/3
transformer_blocks.{i}.attn1.to_out.0          blocks.{i}.attn.proj_x
transformer_blocks.{i}.attn1.to_add_out        blocks.{i}.attn.proj_y
transformer_blocks.{i}.attn1.norm_q            blocks.{i}.attn.q_norm_x
transformer_blocks.{i}.attn1.norm_k            blocks.{i}.attn.k_norm_x
transformer_blocks.{i}.attn1.norm_added_q      blocks.{i}.attn.q_norm_y
transformer_blocks.{i}.attn1.norm_added_k      blocks.{i}.attn.k_norm_y
transformer_blocks.{i}.ff.net.0.proj           blocks.{i}.mlp_x.w1   swap
transformer_blocks.{i}.ff.net.2                blocks.{i}.mlp_x.w2
transformer_blocks.{i}.ff_context.net.0.proj   blocks.{i}.mlp_y.w1   swap
transformer_blocks.{i}.ff_context.net.2        blocks.{i}.mlp_y.w2
transformer_blocks.{i}.norm1.linear            blocks.{i}.mod_x
transformer_blocks.{i}.norm1_context.linear_1  blocks.{i}.mod_y      last
transformer_blocks.{i}.norm1_context.linear    blocks.{i}.mod_y
patch_embed.proj                               x_embedder.proj
time_embed.timestep_embedder.linear_1          t_embedder.mlp.0
time_embed.timestep_embedder.linear_2          t_embedder.mlp.2
time_embed.pooler.to_kv                        t5_y_embedder.to_kv
time_embed.pooler.to_q                         t5_y_embedder.to_q
time_embed.pooler.to_out                       t5_y_embedder.to_out
time_embed.caption_proj                        t5_yproj
norm_out.linear                                final_layer.mod   swap
proj_out                                       final_layer.linear
=pos_frequencies
""",
)
