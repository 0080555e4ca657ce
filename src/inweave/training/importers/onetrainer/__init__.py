"""OneTrainer's JSON configurations and concepts."""
