"""What is in a file of weights: which model, what it predicts, and whether its weights are stored as they are."""
