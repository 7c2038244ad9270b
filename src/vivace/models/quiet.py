"""Silence the libraries' logs and progress bars while models are loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide loading bars, which would disturb vivace's progress display, and warnings about missing GPUs."""
    import logging

    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    names = ("torchao", "transformers", "diffusers", "torch.utils._pytree")
    before = {name: logging.getLogger(name).level for name in names}
    bars = diffusers_logging.is_progress_bar_enabled()
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
        if bars:
            diffusers_logging.enable_progress_bar()
            transformers_logging.enable_progress_bar()
