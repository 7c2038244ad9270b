"""Two sizes within one call: frequencies of latents, noise levels of samplers, and the pipeline that switches."""
