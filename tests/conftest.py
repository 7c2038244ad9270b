"""Shared set-up: one thread, no network, pictures that can be compared."""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiled code is kept between runs of the tests, and not among the user's own.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"vivace-tests-inductor-{os.getuid()}")
)
