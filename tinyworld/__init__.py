"""tinyworld: the scenes, training and verifier behind vivace's embedded models."""
