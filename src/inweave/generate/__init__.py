"""One request -> images: text to image, image to image, inpainting, with stacked LoRAs."""
