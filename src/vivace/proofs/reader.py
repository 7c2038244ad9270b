"""The reader of text in images: PP-OCRv6 by RapidOCR, whose wheel contains the networks, so that nothing is
downloaded."""

from __future__ import annotations

import importlib.util
import unicodedata
from pathlib import Path
from typing import Any, Protocol

HOW_TO_INSTALL = "pip install rapidocr onnxruntime"
_NETWORKS = {"Det": "*_det_*.onnx", "Rec": "*_rec_*.onnx", "Cls": "*_cls_*.onnx"}


class TextReader(Protocol):
    """Reads the text in an image."""

    def read(self, image: Any) -> str:
        """Return the text in an RGB image (PIL), its lines from top to bottom."""
        ...

    def unknown(self, text: str) -> str:
        """Return the letters of a text that the reader cannot read."""
        ...


class RapidReader:
    """RapidOCR on the CPU. It reads Latin, Chinese and Japanese.

    Args:
        networks: their files, by the name of the step.
        threads: None for all cores.
    """

    def __init__(self, networks: dict[str, Path], threads: int | None = None) -> None:
        import onnxruntime
        from rapidocr import RapidOCR

        engine = "EngineConfig.onnxruntime."
        limits = {} if threads is None else {f"{engine}intra_op_num_threads": threads}
        paths = {f"{step}.model_path": str(path) for step, path in networks.items()}
        self._read = RapidOCR(params={"Global.log_level": "critical"} | paths | limits)
        session = onnxruntime.InferenceSession(str(networks["Rec"]), providers=["CPUExecutionProvider"])
        self._letters = frozenset(session.get_modelmeta().custom_metadata_map["character"].splitlines())

    def read(self, image: Any) -> str:
        """Return the text in an image; see `TextReader.read`."""
        import numpy as np

        result = self._read(np.asarray(image)[:, :, ::-1])  # as OpenCV orders colours
        return "\n".join(result.txts or ())

    def unknown(self, text: str) -> str:
        """Return the letters that are not in its alphabet."""
        composed = unicodedata.normalize("NFKC", text)
        unknown = (c for c in composed if unicodedata.category(c)[0] in "LMN" and c not in self._letters)
        return "".join(dict.fromkeys(unknown))


def find_reader(threads: int | None = None) -> TextReader | None:
    """Return the reader; None if it is not installed."""
    spec = importlib.util.find_spec("rapidocr")
    if spec is None or spec.origin is None or importlib.util.find_spec("onnxruntime") is None:
        return None
    folder = Path(spec.origin).parent / "models"
    networks = {step: next(iter(sorted(folder.glob(name))), None) for step, name in _NETWORKS.items()}
    present = {step: path for step, path in networks.items() if path is not None}
    return RapidReader(present, threads) if len(present) == len(networks) else None
