"""A ComfyUI server as a side of a proof: queue a workflow, wait for it, fetch its one image."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from vivace.benchmark.load_testing.images_endpoint import HttpServer, NoAnswer
from vivace.errors import UsageError
from vivace.foundation.untrusted.files import parse_json, read_object, reading, user_path
from vivace.foundation.untrusted.streams import plain
from vivace.proofs.sides.proof_store import file_digest
from vivace.proofs.sides.side import (
    SETTINGS,
    DrawingFailure,
    DrawJob,
    DrawnImage,
    ImageSettings,
    Side,
    suffix_of,
)

if TYPE_CHECKING:
    from vivace.proofs.sides.plan import ProofPlan

_COMFYUI = "comfyui:"
_LOOK_EVERY_S = (0.05, 1.0)  # the first wait, and the longest
_NAMES = {"steps": "num_inference_steps", "guidance": "guidance_scale", "width": "width", "height": "height"}
"""Placeholders of a workflow, by the settings that they stand for; besides %prompt% and %seed%."""
_TEXTS = ("text", "text_g", "text_l", "clip_l", "t5xxl", "prompt")
_INPUTS = {"seed": "seed", "noise_seed": "seed", "steps": "steps", "cfg": "guidance"}
"""Inputs of a sampler that take values, where there are no placeholders."""
Nodes = dict[str, dict[str, Any]]


# The file is what ComfyUI saves with "Export (API)": nodes by number, each with its class and inputs. Placeholders in
# the inputs say where values go: %prompt%, %seed%, %width%, %height%, %steps%, %guidance%. Without them they are put
# into a sampler's inputs, the texts that its positive input comes from, and the empty latent's size.
class Workflow:
    """A workflow in ComfyUI's API format. UsageError if the file is none, or the inputs for prompt and seed are
    unknown."""

    def __init__(self, file: str) -> None:
        with reading(f"workflow {file}", UsageError, "save it with ComfyUI's “Export (API)”"):
            self._nodes: Nodes = read_object(user_path(file))
            if not self._nodes or not all(_is_node(node) for node in self._nodes.values()):
                raise ValueError(
                    "it is not a workflow in the API format, which has class_type and inputs in each node"
                )
        if not any(f"%{name}%" in self._text for name in ("prompt", "seed")):
            self._add_placeholders()
        missing = [name for name in ("prompt", "seed") if f"%{name}%" not in self._text]
        if missing:
            raise UsageError(
                f"workflow {file}: nothing says where {' and '.join(missing)} go; write "
                + " and ".join(f"%{name}%" for name in missing)
                + " in the inputs that take them"
            )

    def filled(self, prompt: str, seed: int, settings: ImageSettings) -> Nodes:
        """Return the workflow for one image. Settings that have no value stay as they are saved."""
        values: dict[str, Any] = {name: settings.call.get(_NAMES[name]) for name in _NAMES}
        values |= {"seed": seed, "prompt": prompt}  # the prompt last, as its text holds no placeholders
        return {
            number: node | {"inputs": {key: _filled(value, values) for key, value in node["inputs"].items()}}
            for number, node in self._nodes.items()
        }

    @property
    def _text(self) -> str:
        values = [value for node in self._nodes.values() for value in node["inputs"].values()]
        return "\n".join(str(value) for value in values if isinstance(value, str))

    def _add_placeholders(self) -> None:
        for node in self._nodes.values():
            inputs = node["inputs"]
            places = {key: name for key, name in _INPUTS.items() if _is_number(inputs.get(key))}
            if "Latent" in node["class_type"] and all(_is_number(inputs.get(k)) for k in ("width", "height")):
                places |= {"width": "width", "height": "height"}
            for key, name in places.items():
                inputs[key] = Placeholder(f"%{name}%", inputs[key])
            if isinstance(inputs.get("positive"), list):
                self._add_prompt_before(inputs["positive"], set())

    def _add_prompt_before(self, link: Any, visited: set[str]) -> None:
        """Put the prompt into the texts that feed an input: those of its linked node, else of the nodes before it."""
        number = str(link[0]) if isinstance(link, list) and link else ""
        if number in visited or number not in self._nodes:
            return
        visited.add(number)
        inputs = self._nodes[number]["inputs"]
        own = [key for key in _TEXTS if isinstance(inputs.get(key), str)]
        inputs |= dict.fromkeys(own, "%prompt%")
        for value in list(inputs.values()) if not own else ():
            self._add_prompt_before(value, visited)


class Placeholder(str):
    """A placeholder that was put in the place of a saved value, which stays where there is no other."""

    saved: Any

    def __new__(cls, text: str, saved: Any) -> Placeholder:
        placeholder = super().__new__(cls, text)
        placeholder.saved = saved
        return placeholder


@dataclass(frozen=True)
class ComfySide(Side):
    """comfyui:http://HOST:PORT?workflow=FILE, a file in the API format."""

    text: str
    server: HttpServer
    file: str
    probed = SETTINGS
    untimed = "a ComfyUI server is asked once a second whether it is done, which is too coarse"

    @staticmethod
    def is_written(text: str) -> bool:
        return text.lower().startswith(_COMFYUI)

    @classmethod
    def parse(cls, text: str) -> ComfySide:
        parts = urlsplit(text[len(_COMFYUI) :])
        fields = dict(parse_qsl(parts.query))
        if parts.scheme not in ("http", "https") or not parts.hostname or set(fields) != {"workflow"}:
            raise UsageError(f"{text[:200]}: give comfyui:http://HOST:PORT?workflow=FILE")
        url = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
        return cls(text, HttpServer(url, uses_proxy=True), fields["workflow"])

    @property
    def identity(self) -> str:
        return self.text + file_digest(user_path(self.file))

    @cached_property
    def workflow(self) -> Workflow:
        return Workflow(self.file)

    def connect(self, timeout_s: float, key: str | None) -> ComfySide:
        return replace(self, server=replace(self.server, timeout_s=timeout_s, key=key))

    def check(self, plan: ProofPlan) -> None:
        assert self.workflow is not None

    def draw(self, job: DrawJob) -> DrawnImage:
        began = time.monotonic()
        try:
            number = self._queue(self.workflow.filled(job.prompt, job.seed, job.settings))
            content = self._fetch(self._wait(number, began + self.server.timeout_s))
        except NoAnswer as error:
            raise DrawingFailure(str(error)) from None
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise DrawingFailure(f"the answer is not that of a ComfyUI server: {error}") from None
        return DrawnImage(content, suffix_of(content), time.monotonic() - began)

    def _queue(self, nodes: dict[str, Any]) -> str:
        answer = self.server.send_patiently("/prompt", {"prompt": nodes})
        if answer.status != 200:
            raise DrawingFailure(answer.complaint)
        return str(parse_json(answer.content)["prompt_id"])

    def _wait(self, number: str, until: float) -> dict[str, Any]:
        """Return the outputs of a workflow when it is done, by node."""
        wait_s, longest_s = _LOOK_EVERY_S
        while time.monotonic() < until:
            answer = self.server.send_patiently(f"/history/{number}", None)
            entry = parse_json(answer.content).get(number) if answer.status == 200 else None
            if entry is not None:
                status = entry.get("status") or {}
                if status.get("status_str") == "error":
                    raise DrawingFailure(f"the workflow failed: {_why(status)}")
                return dict(entry["outputs"])
            time.sleep(wait_s)
            wait_s = min(longest_s, 1.5 * wait_s)
        raise NoAnswer("timeout", f"no image within {self.server.timeout_s:g} s; give a larger --timeout")

    def _fetch(self, outputs: dict[str, Any]) -> bytes:
        files = [file for output in outputs.values() for file in output.get("images", [])]
        saved = [file for file in files if file.get("type") == "output"] or files
        if len(saved) != 1:
            raise DrawingFailure(f"the workflow gave {len(saved)} images; it must save one")
        query = {key: str(saved[0].get(key, "")) for key in ("filename", "subfolder", "type")}
        answer = self.server.send_patiently(f"/view?{urlencode(query)}", None)
        if answer.status != 200:
            raise DrawingFailure(f"the image is not there ({answer.complaint})")
        return answer.content


def _why(status: dict[str, Any]) -> str:
    for message in status.get("messages", []):
        if isinstance(message, list) and len(message) == 2 and message[0] == "execution_error":
            details = message[1]
            return plain(f"{details.get('node_type')}: {details.get('exception_message')}".strip())[:300]
    return "it does not say why"


def _is_node(node: Any) -> bool:
    return (
        isinstance(node, dict)
        and isinstance(node.get("class_type"), str)
        and isinstance(node.get("inputs"), dict)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _filled(value: Any, values: dict[str, Any]) -> Any:
    """Return an input with its placeholders filled; a placeholder alone becomes a number."""
    if not isinstance(value, str):
        return value
    for name, content in values.items():
        placeholder = f"%{name}%"
        if placeholder not in value:
            continue
        if content is None and not isinstance(value, Placeholder):
            raise UsageError(f"the workflow has {placeholder}, which has no value; give the option for it")
        if value.strip() == placeholder:
            return value.saved if content is None and isinstance(value, Placeholder) else content
        value = value.replace(placeholder, str(content))
    return value
