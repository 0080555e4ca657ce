"""diffusion-pipe's TOML configurations, and the dataset files that they name."""
