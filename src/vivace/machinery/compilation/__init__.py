"""What torch.compile compiled, and where its code is kept."""
