"""Which modules are trained, and the adapters on them."""
