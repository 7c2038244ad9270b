"""One denoiser on several GPUs: peer processes, collectives, sharded forwards."""
