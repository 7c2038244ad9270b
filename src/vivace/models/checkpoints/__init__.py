"""The contents of a file of weights: its model, its prediction type, and whether its weights are stored plainly."""
