"""Stable Diffusion in plain torch: the embedded model's networks, tokenizer and sampler without their libraries."""
