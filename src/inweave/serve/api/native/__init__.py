"""The native API, `/v1/...`: jobs, queue, LoRAs, datasets, uploads, images, training, metrics."""
