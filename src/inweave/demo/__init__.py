"""The main job in one go, on the model inside the package: generate, train a style, generate again, show the page."""
