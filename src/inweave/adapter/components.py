"""Components: the names of a model's networks that an adapter can change.

unet            the denoiser, of any architecture
unet2           the second denoiser of a model with two (Wan 2.2: the low-noise expert)
te1 te2 te3     text encoders, in the order of diffusers' folders; te: all of them, or one without a number
model           the only network of anything that is not a diffusion model
"""

from __future__ import annotations

COMPONENTS = ("unet", "unet2", "te", "te1", "te2", "te3", "model")

#: subfolder of a diffusers model, or attribute of its pipeline -> component
FOLDERS = {
    "unet": "unet", "transformer": "unet", "transformer_2": "unet2",
    "text_encoder": "te1", "text_encoder_2": "te2", "text_encoder_3": "te3",
}  # fmt: skip
