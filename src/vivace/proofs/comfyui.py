"""A ComfyUI server as a source of images: queue a workflow, wait for it, fetch its one image."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

from vivace.foundation.untrusted.files import parse_json
from vivace.foundation.untrusted.terminal_text import plain
from vivace.proofs.drawing import DrawingFailed, DrawnImage, Settings, suffix_of
from vivace.proofs.http import HttpAnswer, NoAnswer, send_patiently
from vivace.proofs.sides import ComfySide
from vivace.proofs.workflow import Workflow

_LOOK_EVERY_S = (0.05, 1.0)  # the first wait, and the longest


class ComfyUI:
    """A server with a workflow."""

    def __init__(self, side: ComfySide, timeout_s: float = 600.0, key: str | None = None) -> None:
        self._url, self._timeout_s, self._key = side.url, timeout_s, key
        self._workflow = Workflow(side.workflow)

    def __enter__(self) -> ComfyUI:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def draw(self, prompt: str, seed: int, settings: Settings) -> DrawnImage:
        """Return one image; see `Drawer.draw`."""
        began = time.monotonic()
        try:
            number = self._queue(self._workflow.filled(prompt, seed, settings))
            outputs = self._wait(number, began + self._timeout_s)
            content = self._fetch(outputs)
        except NoAnswer as error:
            raise DrawingFailed(str(error)) from None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise DrawingFailed(f"the answer is not that of a ComfyUI server: {error}") from None
        return DrawnImage(content, suffix_of(content), time.monotonic() - began)

    def _queue(self, nodes: dict[str, Any]) -> str:
        answer = self._send("/prompt", {"prompt": nodes})
        if answer.status != 200:
            raise DrawingFailed(answer.complaint)
        return str(parse_json(answer.content)["prompt_id"])

    def _wait(self, number: str, until: float) -> dict[str, Any]:
        """Return the outputs of a workflow when it is done, by node."""
        wait_s, longest_s = _LOOK_EVERY_S
        while time.monotonic() < until:
            answer = self._send(f"/history/{number}", None)
            entry = parse_json(answer.content).get(number) if answer.status == 200 else None
            if entry is not None:
                status = entry.get("status") or {}
                if status.get("status_str") == "error":
                    raise DrawingFailed(f"the workflow failed: {_why(status)}")
                return dict(entry["outputs"])
            time.sleep(wait_s)
            wait_s = min(longest_s, 1.5 * wait_s)
        raise NoAnswer(f"no image within {self._timeout_s:g} s; give a larger --timeout")

    def _fetch(self, outputs: dict[str, Any]) -> bytes:
        files = [file for output in outputs.values() for file in output.get("images", [])]
        saved = [file for file in files if file.get("type") == "output"] or files
        if len(saved) != 1:
            raise DrawingFailed(f"the workflow gave {len(saved)} images; it must save one")
        query = {key: str(saved[0].get(key, "")) for key in ("filename", "subfolder", "type")}
        answer = self._send(f"/view?{urlencode(query)}", None)
        if answer.status != 200:
            raise DrawingFailed(f"the image is not there ({answer.complaint})")
        return answer.content

    def _send(self, path: str, body: dict[str, Any] | None) -> HttpAnswer:
        return send_patiently(f"{self._url}{path}", body, self._timeout_s, self._key)


def _why(status: dict[str, Any]) -> str:
    """Return the message of the node that failed."""
    for message in status.get("messages", []):
        if isinstance(message, list) and len(message) == 2 and message[0] == "execution_error":
            details = message[1]
            return plain(f"{details.get('node_type')}: {details.get('exception_message')}".strip())[:300]
    return "it does not say why"
