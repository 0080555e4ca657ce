"""musubi-tuner's dataset files."""
