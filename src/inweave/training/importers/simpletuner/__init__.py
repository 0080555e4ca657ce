"""SimpleTuner's JSON configurations and data backends."""
