"""Untrusted files, read in a confined process: LoRA checks, images, conversions, library scans."""
