"""From a model's name to a draft head."""
