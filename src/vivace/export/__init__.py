"""A recipe as a plain diffusers script."""
