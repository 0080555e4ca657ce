"""Selection of the trained modules, and the adapters on them."""
