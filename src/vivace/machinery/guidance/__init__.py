"""Classifier-free guidance in pipelines, as rows of a batch or as calls of the denoiser, and its early end."""
