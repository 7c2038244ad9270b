"""A ComfyUI server as a side of a proof: queue a workflow, wait for it, fetch its one image."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
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
Place = tuple[str, str]
"""A node and one of its inputs."""
_PLACEHOLDERS = ("prompt", "seed", "width", "height", "steps", "guidance")
_TEXTS = ("text", "text_g", "text_l", "clip_l", "t5xxl", "prompt")
_SEEDS = ("seed", "noise_seed")


# The file is what ComfyUI saves with "Export (API)": nodes by number, each with its class and inputs. Placeholders in
# the inputs say where values go: %prompt%, %seed%, %width%, %height%, %steps%, %guidance%. Without them the sampler's
# inputs are used (seed or noise_seed, steps, cfg), the texts that its positive input comes from, and the empty latent's
# size.
class Workflow:
    """A workflow in ComfyUI's API format.

    Raises:
        UsageError: it is not such a file, or the inputs for prompt and seed are unknown.
    """

    def __init__(self, file: str) -> None:
        with reading(f"workflow {file}", UsageError, "save it with ComfyUI's “Export (API)”"):
            self._nodes = read_object(user_path(file))
            if not self._nodes or not all(_is_node(node) for node in self._nodes.values()):
                raise ValueError(
                    "it is not a workflow in the API format, which has class_type and inputs in each node"
                )
        self._has_placeholders = any(f"%{name}%" in _texts(self._nodes) for name in ("prompt", "seed"))
        self._places = {} if self._has_placeholders else self._find_places()
        missing = [name for name in ("prompt", "seed") if not self._has(name)]
        if missing:
            raise UsageError(
                f"workflow {file}: nothing says where {' and '.join(missing)} go; write "
                + " and ".join(f"%{name}%" for name in missing)
                + " in the inputs that take them"
            )

    def filled(self, prompt: str, seed: int, settings: ImageSettings) -> dict[str, Any]:
        """Return the workflow for one image. Settings that have no value stay as they are saved."""
        call = settings.call
        values = {
            "prompt": prompt,
            "seed": seed,
            "width": call.get("width"),
            "height": call.get("height"),
            "steps": call.get("num_inference_steps"),
            "guidance": call.get("guidance_scale"),
        }
        nodes = copy.deepcopy(self._nodes)
        for name, places in self._places.items():
            for node, key in places if values[name] is not None else ():
                nodes[node]["inputs"][key] = values[name]
        for node in nodes.values() if self._has_placeholders else ():
            node["inputs"] = {key: _replaced(value, values) for key, value in node["inputs"].items()}
        return nodes

    def _has(self, name: str) -> bool:
        return f"%{name}%" in _texts(self._nodes) if self._has_placeholders else bool(self._places.get(name))

    def _find_places(self) -> dict[str, list[Place]]:
        places: dict[str, list[Place]] = {name: [] for name in _PLACEHOLDERS}
        for number, node in self._nodes.items():
            inputs = node["inputs"]
            places["seed"] += [(number, key) for key in _SEEDS if _is_number(inputs.get(key))]
            if _is_number(inputs.get("steps")):
                places["steps"].append((number, "steps"))
            if _is_number(inputs.get("cfg")):
                places["guidance"].append((number, "cfg"))
            if "Latent" in node["class_type"] and all(_is_number(inputs.get(k)) for k in ("width", "height")):
                places["width"].append((number, "width"))
                places["height"].append((number, "height"))
            if isinstance(inputs.get("positive"), list):
                places["prompt"] += self._texts_before(inputs["positive"], set())
        places["prompt"] = list(dict.fromkeys(places["prompt"]))
        return places

    def _texts_before(self, link: Any, visited: set[str]) -> Iterator[Place]:
        """Yield the texts that feed an input: those of its linked node, else of the nodes before it."""
        number = str(link[0]) if isinstance(link, list) and link else ""
        if number in visited or number not in self._nodes:
            return
        visited.add(number)
        inputs = self._nodes[number]["inputs"]
        own = [(number, key) for key in _TEXTS if isinstance(inputs.get(key), str)]
        yield from own
        if not own:
            for value in inputs.values():
                yield from self._texts_before(value, visited)


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
        """Return one image."""
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
    """Return the message of the node that failed."""
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


def _texts(nodes: dict[str, Any]) -> str:
    """Return all texts in inputs, joined."""
    values = [value for node in nodes.values() for value in node["inputs"].values()]
    return "\n".join(value for value in values if isinstance(value, str))


def _replaced(value: Any, values: dict[str, Any]) -> Any:
    """Return an input with its placeholders filled; a placeholder alone becomes a number."""
    if not isinstance(value, str):
        return value
    for name, content in values.items():
        placeholder = f"%{name}%"
        if placeholder not in value:
            continue
        if content is None:
            raise UsageError(f"the workflow has {placeholder}, which has no value; give the option for it")
        if value.strip() == placeholder:
            return content
        if name != "prompt":
            value = value.replace(placeholder, str(content))
    return value.replace("%prompt%", str(values["prompt"]))
