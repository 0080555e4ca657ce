"""The published models whose tensors inweave knows, and of which networks each consists.

A base is a set of names and shapes: models that share them are one base, and ``same_tensors`` lists those that no file
can tell apart. Hub ids, site labels and trainers' strings are in `aliases.json` (`inweave.targets.aliases`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One network of a base: its listing, table, and prefix inside a single-file checkpoint."""

    component: str
    listing: str
    table: str
    prefix: str
    only_original: str = ""  # listing of parts that single files have and diffusers folders lack
    other_folder: str = ""  # listing of what single files keep in this network and diffusers keeps in another folder


@dataclass(frozen=True, slots=True)
class Known:
    name: str
    parts: tuple[Part, ...]
    aliases: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()  # how trainers' metadata calls it
    variant_of: str = ""  # the base this one differs from in its input layers only
    experts: int = 1  # denoisers of the same names and shapes: Wan 2.2 has one for high and one for low noise
    language_model: Part | None = None  # encodes the prompts; it comes as a folder or a file of its own
    same_tensors: tuple[str, ...] = ()  # published models with the same names and shapes: no file tells them apart

    @property
    def networks(self) -> tuple[Part, ...]:
        """Everything that an adapter may change."""
        return self.parts if self.language_model is None else (*self.parts, self.language_model)


def _unet(listing: str) -> Part:
    return Part("unet", listing, "unet", "model.diffusion_model.")


def _dit(listing: str, table: str) -> Part:
    return Part("unet", listing, table, "model.diffusion_model.")


_SD1_TE = Part("te1", "clip-l", "own", "cond_stage_model.transformer.")
_SD2_TE = Part("te1", "clip-h", "openclip", "cond_stage_model.model.", "clip-h-layer23")
_XL_TE = (
    Part("te1", "clip-l", "own", "conditioner.embedders.0.transformer."),
    Part("te2", "clip-g", "openclip", "conditioner.embedders.1.model."),
)
_SD3_TE = (
    Part("te1", "clip-l-projection", "own", "text_encoders.clip_l.transformer."),
    Part("te2", "clip-g", "own", "text_encoders.clip_g.transformer."),
    Part("te3", "t5-xxl", "own", "text_encoders.t5xxl.transformer."),
)
_FLUX_TE = (
    Part("te1", "clip-l", "own", "text_encoders.clip_l.transformer."),
    Part("te2", "t5-xxl", "own", "text_encoders.t5xxl.transformer."),
)

_QWEN25_7B = Part("te1", "qwen2.5-vl-7b", "own", "text_encoders.qwen25_7b.transformer.")
_QWEN3_4B = Part("te1", "qwen3-4b", "own", "text_encoders.qwen3_4b.transformer.")
_QWEN3_06B = Part("te1", "qwen3-0.6b", "own", "text_encoders.qwen3_06b.transformer.")
_GEMMA2_2B = Part("te1", "gemma-2-2b", "own", "text_encoders.gemma2_2b.transformer.")

#: earlier names win ties between bases that an adapter fits equally well
KNOWN: tuple[Known, ...] = (
    Known("sd1.5", (_unet("unet-sd1.5"), _SD1_TE), ("sd15", "sd1", "sd-1.5", "sd1.x", "sd1.4", "v1-5", "v1.5", "1.5", "stable-diffusion-v1-5"), ("sd_v1", "sd_1.5", "stable-diffusion-v1")),
    Known("sd1.5-inpaint", (_unet("unet-sd1.5-inpaint"), _SD1_TE), ("sd15-inpaint", "v1-5-inpaint", "v1.5-inpaint", "sd1.5-inpainting", "sd15-inpainting"), variant_of="sd1.5"),
    Known("sd2.1", (_unet("unet-sd2.1"), _SD2_TE), ("sd21", "sd2", "sd2.x", "sd2.0", "sd-2.1", "v2-1", "v2.1", "2.1"), ("sd_v2", "stable-diffusion-v2")),
    Known("sd2-inpaint", (_unet("unet-sd2-inpaint"), _SD2_TE), ("sd2.1-inpaint", "sd21-inpaint", "v2-inpaint", "v2.1-inpaint"), variant_of="sd2.1"),
    Known("sdxl", (_unet("unet-sdxl"), *_XL_TE), ("xl", "sdxl1.0", "sdxl-1.0", "sdxl-base", "sdxl-base-1.0", "sd-xl-base-1.0", "stable-diffusion-xl", "sdxl-turbo", "turbo", "pony", "illustrious", "noobai", "stable-diffusion-xl-base-1.0"), ("sdxl_base", "stable-diffusion-xl", "sdxl")),
    Known("sdxl-inpaint", (_unet("unet-sdxl-inpaint"), *_XL_TE), ("xl-inpaint",), variant_of="sdxl"),
    Known("sdxl-refiner", (_unet("unet-sdxl-refiner"), Part("te1", "clip-g", "openclip", "conditioner.embedders.0.model.")), ("refiner", "xl-refiner")),
    Known("ssd-1b", (_unet("unet-ssd-1b"), *_XL_TE), ("ssd1b", "ssd")),
    Known("segmind-vega", (_unet("unet-vega"), *_XL_TE), ("vega",)),
    Known("sd3.5-large", (_dit("sd3.5-large", "sd3"), *_SD3_TE), ("sd35-large", "sd3.5", "sd35", "sd3.5-large-turbo"), ("sd3.5-large", "stable-diffusion-3.5-large")),
    Known("sd3.5-medium", (_dit("sd3.5-medium", "sd3"), *_SD3_TE), ("sd35-medium",), ("sd3.5-medium", "stable-diffusion-3.5-medium")),
    Known("sd3-medium", (_dit("sd3-medium", "sd3"), *_SD3_TE), ("sd3", "sd3.0", "sd3.0-medium"), ("sd3", "stable-diffusion-3")),
    Known("flux1-dev", (_dit("flux1-dev", "flux"), *_FLUX_TE), ("flux", "flux1", "flux-dev", "flux-1-dev", "flux.1-dev", "flux.1", "flux1-kontext-dev", "flux-kontext", "flux1-krea-dev", "flux1-redux-dev"), ("flux1", "flux-1-dev", "flux"), same_tensors=("FLUX.1 Kontext dev", "FLUX.1 Krea dev", "FLUX.1 Redux dev")),
    Known("flux1-schnell", (_dit("flux1-schnell", "flux"), *_FLUX_TE), ("flux-schnell", "flux.1-schnell"), variant_of="flux1-dev"),
    Known("flux1-fill-dev", (_dit("flux1-fill-dev", "flux"), *_FLUX_TE), ("flux-fill", "flux1-fill", "flux.1-fill-dev"), variant_of="flux1-dev"),
    Known("flux1-control-dev", (_dit("flux1-control-dev", "flux"), *_FLUX_TE), ("flux1-canny-dev", "flux1-depth-dev", "flux-canny", "flux-depth"), variant_of="flux1-dev"),
    Known("chroma1-hd", (_dit("chroma1-hd", "flux"), Part("te1", "t5-xxl", "own", "text_encoders.t5xxl.transformer.")), ("chroma", "chroma1", "chroma1-base"), ("chroma",)),
    Known("flux2-dev", (_dit("flux2-dev", "flux2"),), ("flux2", "flux.2-dev"), ("flux2", "flux-2")),
    Known("flux2-klein-9b", (_dit("flux2-klein-9b", "flux2"),), ("klein-9b", "flux.2-klein-9b"), ("flux2_klein_9b", "flux.2-klein-9b"), same_tensors=("FLUX.2 klein base 9B",)),
    Known("flux2-klein-4b", (_dit("flux2-klein-4b", "flux2"),), ("klein-4b", "flux.2-klein-4b"), ("flux2_klein_4b", "flux.2-klein-4b"), same_tensors=("FLUX.2 klein base 4B",), language_model=_QWEN3_4B),
    Known("qwen-image", (_dit("qwen-image", "own"),), ("qwen", "qwen_image", "qwen-image-edit", "qwen-image-edit-plus", "qwen-image-edit-2509", "qwen-image-edit-2511", "qwen-image-2512"), ("qwen-image", "qwen_image"), same_tensors=("Qwen-Image-2512", "Qwen-Image-Edit", "Qwen-Image-Edit-2509", "Qwen-Image-Edit-2511"), language_model=_QWEN25_7B),
    Known("qwen-image-layered", (_dit("qwen-image-layered", "own"),), (), ("qwen-image-layered",), variant_of="qwen-image", language_model=_QWEN25_7B),
    Known("z-image-turbo", (_dit("z-image-turbo", "z-image"),), ("z-image", "zimage", "z_image"), ("z-image", "zimage", "z_image"), language_model=_QWEN3_4B),
    Known("lumina2", (_dit("lumina2", "lumina2"),), ("lumina-2", "lumina-image-2.0"), ("lumina-2", "lumina2"), language_model=_GEMMA2_2B),
    Known("wan2.1-t2v-14b", (_dit("wan2.1-t2v-14b", "wan"),), ("wan", "wan-14b", "wan2.1-14b", "wan2.2", "wan2.2-t2v-a14b", "wan2.2-t2v-14b"), ("wan2.1", "wan"), experts=2, same_tensors=("Wan2.2-T2V-A14B (both experts)",)),
    Known("wan2.2-i2v-a14b", (_dit("wan2.2-i2v-a14b", "wan"),), ("wan2.2-i2v-14b",), variant_of="wan2.1-t2v-14b", experts=2),
    Known("wan2.1-i2v-14b", (_dit("wan2.1-i2v-14b", "wan"),), ("wan-i2v",), variant_of="wan2.1-t2v-14b", same_tensors=("Wan2.1-I2V-14B-480P", "Wan2.1-I2V-14B-720P")),
    Known("wan2.1-flf2v-14b", (_dit("wan2.1-flf2v-14b", "wan"),), ("wan-flf2v",)),
    Known("wan2.1-vace-14b", (_dit("wan2.1-vace-14b", "wan"),), ("wan-vace",)),
    Known("wan2.1-vace-1.3b", (_dit("wan2.1-vace-1.3b", "wan"),)),
    Known("wan2.1-t2v-1.3b", (_dit("wan2.1-t2v-1.3b", "wan"),), ("wan-1.3b", "wan2.1-1.3b")),
    Known("wan2.2-ti2v-5b", (_dit("wan2.2-ti2v-5b", "wan"),), ("wan2.2-5b", "wan-5b")),
    Known("kolors", (_unet("kolors"),), variant_of="sdxl"),
    Known("hidream-i1", (_dit("hidream-i1", "own"),), ("hidream",), ("hidream",), same_tensors=("HiDream-I1-Dev", "HiDream-I1-Fast", "HiDream-E1-Full")),
    Known("kandinsky5-lite-video", (_dit("kandinsky5-lite-video", "own"),), ("kandinsky5",)),
    Known("kandinsky5-pro-video", (_dit("kandinsky5-pro-video", "own"),)),
    Known("kandinsky5-lite-t2i", (_dit("kandinsky5-lite-t2i", "own"),)),
    Known("kandinsky5-lite-i2i", (_dit("kandinsky5-lite-i2i", "own"),), variant_of="kandinsky5-lite-t2i"),
    Known("cogvideox-5b", (_dit("cogvideox-5b", "own"),)),
    Known("cogvideox-5b-i2v", (_dit("cogvideox-5b-i2v", "own"),), variant_of="cogvideox-5b"),
    Known("cogvideox1.5-5b", (_dit("cogvideox1.5-5b", "own"),)),
    Known("cogvideox1.5-5b-i2v", (_dit("cogvideox1.5-5b-i2v", "own"),)),
    Known("cogvideox-2b", (_dit("cogvideox-2b", "own"),)),
    Known("hunyuanvideo", (_dit("hunyuanvideo", "hunyuan-video"),), ("hunyuan-video",), ("hunyuan-video",), same_tensors=("HunyuanVideo-I2V (16 channels)",)),
    Known("hunyuanvideo-i2v-33ch", (_dit("hunyuanvideo-i2v-33ch", "hunyuan-video"),)),
    Known("framepack", (_dit("framepack", "hunyuan-video"),), (), ("framepack",), same_tensors=("FramePackI2V_HY", "FramePack_F1_I2V_HY_20250503")),
    Known("hunyuanvideo-1.5", (_dit("hunyuanvideo-1.5", "hunyuan-video-1.5"),), ("hv1.5",), ("hunyuan-video-1.5",), same_tensors=("HunyuanVideo-1.5 T2V and I2V, 480p and 720p",)),
    Known("hunyuanvideo-1.5-meanflow", (_dit("hunyuanvideo-1.5-meanflow", "hunyuan-video-1.5"),)),
    Known("hunyuanimage-2.1", (_dit("hunyuanimage-2.1", "hunyuan-image"),), ("hunyuan-image", "hunyuan-image-2.1"), ("hunyuan-image",)),
    Known("hunyuanimage-2.1-distilled", (_dit("hunyuanimage-2.1-distilled", "hunyuan-image"),)),
    Known("hunyuanimage-2.1-refiner", (_dit("hunyuanimage-2.1-refiner", "hunyuan-image"),)),
    Known("ltx-video-2b", (_dit("ltx-video-2b", "ltx"),), ("ltx-video", "ltxv-2b")),
    Known("ltx-video-13b", (_dit("ltx-video-13b", "ltx"),), ("ltxv-13b",)),
    Known("ltx-2", (_dit("ltx-2", "ltx"),), (), ("ltx2",)),
    Known("ltx-2.3", (_dit("ltx-2.3", "ltx"),)),
    Known("ltx-2.5", (_dit("ltx-2.5", "ltx"),)),
    Known("mochi-1-preview", (_dit("mochi-1-preview", "mochi"),), ("mochi", "mochi-1")),
    Known("ovis-image-7b", (_dit("ovis-image-7b", "ovis"),), ("ovis-image", "ovis")),
    Known("pixart-sigma-1024", (_dit("pixart-sigma-1024", "pixart"),), ("pixart-sigma",), ("pixart-sigma",), same_tensors=("PixArt-Sigma 512 and 2K",)),
    Known("pixart-alpha-1024", (_dit("pixart-alpha-1024", "pixart"),), ("pixart-alpha",), ("pixart-alpha", "pixart")),
    Known("pixart-alpha-512", (_dit("pixart-alpha-512", "pixart"),)),
    Known("sana-1.6b", (_dit("sana-1.6b", "sana"),)),
    Known("sana-1.5-1.6b", (_dit("sana-1.5-1.6b", "sana"),)),
    Known("sana-1.5-4.8b", (_dit("sana-1.5-4.8b", "sana"),)),
    Known("sana-0.6b", (_dit("sana-0.6b", "sana"),)),
    Known("auraflow-0.3", (_dit("auraflow-0.3", "auraflow"),), ("pony-v7",), same_tensors=("Pony V7",)),
    Known("auraflow-0.1", (_dit("auraflow-0.1", "auraflow"),), variant_of="auraflow-0.3", same_tensors=("AuraFlow 0.2",)),
    Known("anima", (Part("unet", "anima", "anima", "model.diffusion_model.", other_folder="anima-text-conditioner"),), (), ("anima",), language_model=_QWEN3_06B),
    Known("krea2", (_dit("krea2", "krea2"),), ("krea-2",), ("krea-2", "krea2"), same_tensors=("Krea-2-Raw", "Krea-2-Turbo")),
    Known("stable-cascade-prior-3.6b", (_dit("stable-cascade-prior-3.6b", "cascade"),), ("stable-cascade", "cascade"), ("stable-cascade",)),
    Known("stable-cascade-prior-1b", (_dit("stable-cascade-prior-1b", "cascade"),), ("stable-cascade-lite",)),
    Known("longcat-image", (_dit("longcat-image", "own"),), ("longcat",)),
    Known("omnigen2", (_dit("omnigen2", "own"),)),
    Known("inweave/emoji", (_unet("unet-emoji"), Part("te1", "clip-emoji", "own", "cond_stage_model.transformer.")), ("emoji", "inweave-emoji"), ("inweave-emoji", "inweave/emoji")),
    Known("clip-l", (Part("te1", "clip-l", "own", ""),), ("clip-vit-l-14", "clip-vit-large-patch14")),
    Known("clip-h", (Part("te1", "clip-h", "openclip", "", "clip-h-layer23"),), ("openclip-h", "openclip-vit-h-14")),
    Known("clip-g", (Part("te1", "clip-g", "openclip", ""),), ("openclip-bigg", "clip-bigg", "openclip-vit-bigg-14")),
    Known("t5-xxl", (Part("te3", "t5-xxl", "own", ""),), ("t5", "t5xxl", "t5-v1_1-xxl")),
    Known("gpt2", (Part("model", "gpt2", "own", ""),)),
    Known("distilbert", (Part("model", "distilbert", "own", ""),), ("distilbert-base-uncased",)),
)  # fmt: skip
