"""Export a recipe as a plain diffusers script."""
