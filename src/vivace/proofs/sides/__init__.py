"""The two sides of a proof: what they are, what they draw, and where their images are kept."""
