"""Step caches: their base, the denoiser that computes or skips steps, schedules, and their measured parameters."""
