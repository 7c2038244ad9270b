"""Classifier-free guidance as pipelines run it: as rows of a batch or as calls of the denoiser, and its end."""
