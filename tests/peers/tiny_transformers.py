"""Makers of tiny pipelines whose denoiser is a transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import transformers

from tests.peers.tiny_parts import (
    LENGTH,
    WIDTH,
    clip,
    compressing_vae,
    decoder,
    diffusion,
    flow,
    normalized_vae,
    plain_vae,
    qwen2_5,
    qwen3,
    t5,
    text_processor,
    tokenizer,
    vae,
    video_vae,
    vocabulary,
)

MAKERS: dict[str, Callable[[], Any]] = {}


def _made(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        MAKERS[name] = make
        return make

    return register


@_made("AuraFlow")
def aura_flow() -> Any:
    network = diffusers.AuraFlowTransformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1,
        attention_head_dim=8, num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=WIDTH,
        out_channels=4, pos_embed_max_size=1024,
    )  # fmt: skip
    return diffusers.AuraFlowPipeline(tokenizer(), t5(transformers.UMT5EncoderModel), plain_vae(), network, flow())


@_made("Bria")
def bria() -> Any:
    network = diffusers.BriaTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=None, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return diffusers.BriaPipeline(network, flow(), vae(shift_factor=0.0), t5(), tokenizer())


@_made("BriaFibo")
def bria_fibo() -> Any:
    network = diffusers.BriaFiboTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=2 * WIDTH, text_encoder_dim=WIDTH, pooled_projection_dim=None, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    autoencoder = video_vae(16, 4, diffusers.AutoencoderKLWan, out_channels=12, in_channels=12, patch_size=2,
                            scale_factor_spatial=16)  # fmt: skip
    encoder = decoder(transformers.SmolLM3ForCausalLM, vocab_size=128_001)  # an empty text is the token 128000
    return diffusers.BriaFiboPipeline(network, flow(), autoencoder, encoder, tokenizer())


@_made("CogView3Plus")
def cog_view3_plus() -> Any:
    network = diffusers.CogView3PlusTransformer2DModel(
        patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, out_channels=4,
        text_embed_dim=WIDTH, time_embed_dim=8, condition_dim=2, pos_embed_max_size=64, sample_size=32,
    )  # fmt: skip
    scheduler = diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    return diffusers.CogView3PlusPipeline(tokenizer(), t5(), plain_vae(), network, scheduler)


@_made("CogView4")
def cog_view4() -> Any:
    network = diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=4, out_channels=4,
        text_embed_dim=WIDTH, time_embed_dim=8, condition_dim=4,
    )  # fmt: skip
    return diffusers.CogView4Pipeline(tokenizer(), decoder(transformers.GlmModel), plain_vae(), network, flow())


@_made("CogView4Control")
def cog_view4_control() -> Any:
    plain = cog_view4()
    network = type(plain.transformer).from_config(plain.transformer.config, in_channels=8, out_channels=4)
    return diffusers.CogView4ControlPipeline(**plain.components | {"transformer": network})


@_made("ErnieImage")
def ernie_image() -> Any:
    network = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32, num_attention_heads=2, num_layers=1, ffn_hidden_size=48, in_channels=16, out_channels=16,
        patch_size=1, text_in_dim=WIDTH, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    encoder = decoder(transformers.Ministral3Model)
    return diffusers.ErnieImagePipeline(network, normalized_vae(), encoder, tokenizer(), flow())


@_made("HiDreamImage")
def hi_dream_image() -> Any:
    network = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=4, caption_channels=[WIDTH, WIDTH], text_emb_dim=48, num_routed_experts=4,
        num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(128, 128), llama_layers=(0, 1),
    )  # fmt: skip
    kind = transformers.CLIPTextModelWithProjection
    llama = decoder(transformers.LlamaForCausalLM)
    short = tokenizer(LENGTH)
    return diffusers.HiDreamImagePipeline(
        flow(), vae(), clip(kind), short, clip(kind, WIDTH), short, t5(), tokenizer(), llama, tokenizer(), network
    )


def _hunyuan_dit() -> tuple[Any, ...]:
    network = diffusers.HunyuanDiT2DModel(
        sample_size=32, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3, in_channels=4,
        cross_attention_dim=WIDTH, cross_attention_dim_t5=WIDTH, pooled_projection_dim=16, hidden_size=24,
        activation_fn="gelu-approximate", text_len=77, text_len_t5=256,
    )  # fmt: skip
    bert = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=vocabulary(),
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=LENGTH,
            pad_token_id=tokenizer().pad_token_id,
        )
    )
    scheduler = diffusion(diffusers.DDPMScheduler, prediction_type="v_prediction")
    return plain_vae(levels=4), bert, tokenizer(77), network, scheduler, None, None, False, t5(), tokenizer()


@_made("HunyuanDiT")
def hunyuan_dit() -> Any:
    return diffusers.HunyuanDiTPipeline(*_hunyuan_dit())


@_made("HunyuanDiTPAG")
def hunyuan_dit_pag() -> Any:
    return diffusers.HunyuanDiTPAGPipeline(*_hunyuan_dit(), pag_applied_layers="blocks.1")


@_made("HunyuanImage")
def hunyuan_image() -> Any:
    network = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=(1, 1), text_embed_dim=WIDTH, text_embed_2_dim=WIDTH, rope_axes_dim=(4, 4),
        guidance_embeds=True,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 32, 32), layers_per_block=1,
        scaling_factor=0.476986, spatial_compression_ratio=4, sample_size=64,
    )  # fmt: skip
    return diffusers.HunyuanImagePipeline(
        flow(shift=7.0), autoencoder, qwen2_5(), tokenizer(), t5(), tokenizer(), network
    )


@_made("HunyuanImageRefiner")
def hunyuan_image_refiner() -> Any:
    plain = hunyuan_image()
    autoencoder = diffusers.AutoencoderKLHunyuanImageRefiner(
        latent_channels=4, block_out_channels=(32, 32, 32), layers_per_block=1, spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )  # fmt: skip
    return diffusers.HunyuanImageRefinerPipeline(
        plain.scheduler, autoencoder, plain.text_encoder, plain.tokenizer, plain.transformer
    )


@_made("Ideogram4")
def ideogram4() -> Any:
    networks = [
        diffusers.Ideogram4Transformer2DModel(
            in_channels=16, num_layers=1, attention_head_dim=16, num_attention_heads=2, intermediate_size=24,
            adaln_dim=8, llm_features_dim=WIDTH, mrope_section=(4, 2, 2),
        )
        for _ in range(2)
    ]  # fmt: skip
    return diffusers.Ideogram4Pipeline(
        flow(), normalized_vae(), qwen3(transformers.Qwen3VLModel), tokenizer(), *networks
    )


@_made("Kandinsky5T2I")
def kandinsky5() -> Any:
    network = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=WIDTH, in_text_dim2=16, time_dim=16, out_visual_dim=4, patch_size=(1, 2, 2),
        model_dim=16, ff_dim=32, num_text_blocks=1, num_visual_blocks=2, axes_dims=(2, 2, 4), visual_cond=False,
        attention_type="regular",
    )  # fmt: skip
    return diffusers.Kandinsky5T2IPipeline(
        network, vae(levels=4), qwen2_5(), tokenizer(), clip(), tokenizer(LENGTH), flow(shift=7.0)
    )


@_made("Krea2")
def krea2() -> Any:
    network = diffusers.Krea2Transformer2DModel(
        in_channels=16, num_layers=1, attention_head_dim=8, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, timestep_embed_dim=8, text_hidden_dim=WIDTH, num_text_layers=3,
        text_num_attention_heads=2, text_num_key_value_heads=1, text_intermediate_size=16,
        num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 2, 2), rope_theta=1000.0,
    )  # fmt: skip
    encoder = qwen3(transformers.Qwen3VLModel)
    return diffusers.Krea2Pipeline(flow(), video_vae(), encoder, tokenizer(), network, (0, 1, 2))


@_made("LongCatImage")
def long_cat_image() -> Any:
    network = diffusers.LongCatImageTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    processor = text_processor(transformers.Qwen2VLProcessor)
    return diffusers.LongCatImagePipeline(flow(), vae(16), qwen2_5(), tokenizer(), processor, network)


@_made("Lumina")
def lumina() -> Any:
    network = diffusers.LuminaNextDiT2DModel(
        sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=1, num_attention_heads=3,
        num_kv_heads=1, multiple_of=16, norm_eps=1e-5, learn_sigma=True, qk_norm=True, cross_attention_dim=WIDTH,
        scaling_factor=1.0,
    )  # fmt: skip
    return diffusers.LuminaPipeline(network, flow(), plain_vae(levels=4), decoder(transformers.GemmaModel), tokenizer())


@_made("Lumina2")
def lumina2() -> Any:
    network = diffusers.Lumina2Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, hidden_size=24, num_layers=1, num_refiner_layers=1,
        num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2), axes_lens=(300, 64, 64),
        cap_feat_dim=WIDTH,
    )  # fmt: skip
    return diffusers.Lumina2Pipeline(network, flow(), vae(levels=4), decoder(transformers.Gemma2Model), tokenizer())


@_made("NucleusMoEImage")
def nucleus_image() -> Any:
    network = diffusers.NucleusMoEImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=WIDTH, axes_dims_rope=(8, 4, 4), moe_enabled=False, capacity_factors=[8.0],
    )  # fmt: skip
    processor = text_processor(transformers.Qwen3VLProcessor)
    return diffusers.NucleusMoEImagePipeline(network, flow(), video_vae(), qwen3(layers=8), processor)


@_made("OvisImage")
def ovis_image() -> Any:
    network = diffusers.OvisImageTransformer2DModel(
        patch_size=1, in_channels=16, out_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=WIDTH, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    encoder = decoder(transformers.Qwen3Model)
    return diffusers.OvisImagePipeline(flow(), vae(), encoder, tokenizer(), network)


def _pix_art(layers: int = 1) -> Any:
    return diffusers.PixArtTransformer2DModel(
        sample_size=16, num_layers=layers, patch_size=2, attention_head_dim=8, num_attention_heads=3,
        caption_channels=WIDTH,
        in_channels=4, cross_attention_dim=24, out_channels=8, attention_bias=True, activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
        use_additional_conditions=False,
    )  # fmt: skip


@_made("PixArtAlpha")
def pix_art_alpha() -> Any:
    scheduler = diffusers.DPMSolverMultistepScheduler()
    return diffusers.PixArtAlphaPipeline(tokenizer(), t5(), plain_vae(), _pix_art(), scheduler)


@_made("PixArtSigma")
def pix_art_sigma() -> Any:
    scheduler = diffusers.DPMSolverMultistepScheduler()
    return diffusers.PixArtSigmaPipeline(tokenizer(), t5(), plain_vae(), _pix_art(), scheduler)


@_made("PixArtSigmaPAG")
def pix_art_sigma_pag() -> Any:
    scheduler = diffusers.DPMSolverMultistepScheduler()
    return diffusers.PixArtSigmaPAGPipeline(tokenizer(), t5(), plain_vae(), _pix_art(2), scheduler)


@_made("QwenImage21")
def qwen_image21() -> Any:
    network = diffusers.QwenImage21Transformer2DModel(
        in_channels=4, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2,
        context_in_dim=WIDTH, mlp_ratio=2, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    kind = diffusers.AutoencoderKLQwenImage21
    autoencoder = video_vae(4, 5, kind, decoder_base_dim=4)
    processor = text_processor(transformers.Qwen3VLProcessor)
    return diffusers.QwenImage21Pipeline(flow(), autoencoder, qwen3(), processor, network)


def _sana(**more: Any) -> Any:
    return diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=4,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=WIDTH,
        sample_size=32, **more,
    )  # fmt: skip


@_made("Sana")
def sana() -> Any:
    encoder = decoder(transformers.Gemma2Model)
    return diffusers.SanaPipeline(tokenizer(), encoder, compressing_vae(), _sana(), flow(shift=3.0))


@_made("SanaPAG")
def sana_pag() -> Any:
    encoder = decoder(transformers.Gemma2Model)
    return diffusers.SanaPAGPipeline(
        tokenizer(), encoder, compressing_vae(), _sana(), flow(shift=3.0), "transformer_blocks.0"
    )


@_made("SanaSprint")
def sana_sprint() -> Any:
    encoder = decoder(transformers.Gemma2Model)
    network = _sana(qk_norm="rms_norm_across_heads", guidance_embeds=True)
    return diffusers.SanaSprintPipeline(tokenizer(), encoder, compressing_vae(), network, diffusers.SCMScheduler())
