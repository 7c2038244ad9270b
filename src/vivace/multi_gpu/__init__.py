"""One denoiser on several GPUs: processes, collectives, sharded forwards."""
