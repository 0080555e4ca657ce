"""The main job in one go, on the model inside the package: draw, train a style, draw again, show the page."""
