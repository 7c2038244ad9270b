"""A ComfyUI node that draws through a vivace server: copy this folder into ComfyUI/custom_nodes.

`vivace serve MODEL` draws; this sends the prompt, and an image and mask to edit if they are connected. It needs nothing
that ComfyUI does not have.
"""

import base64
import io
import json
import urllib.error
import urllib.request
import uuid

import numpy as np
import torch
from PIL import Image

_TIMEOUT_S = 600


class VivaceServer:
    """Draw, or edit a connected image, through the OpenAI images API of `vivace serve`.

    IMAGE is a float tensor [batch, height, width, 3] in 0 to 1, MASK one [batch, height, width]; 1 is repainted.
    """

    CATEGORY = "vivace"
    FUNCTION = "draw"
    RETURN_TYPES = ("IMAGE",)
    DESCRIPTION = "Draws through a vivace server, or edits the connected image there."

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - the name that ComfyUI asks for
        return {
            "required": {
                "server": ("STRING", {"default": "http://127.0.0.1:8000"}),
                "prompt": ("STRING", {"multiline": True}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**32 - 1, "control_after_generate": True}),
                "width": (
                    "INT",
                    {"default": 0, "min": 0, "max": 4096, "step": 8, "tooltip": "0: the server's"},
                ),
                "height": (
                    "INT",
                    {"default": 0, "min": 0, "max": 4096, "step": 8, "tooltip": "0: the server's"},
                ),
                "steps": ("INT", {"default": 0, "min": 0, "max": 1000, "tooltip": "0: the server's"}),
                "count": ("INT", {"default": 1, "min": 1, "max": 10}),
            },
            "optional": {
                "image": ("IMAGE",),
                "mask": ("MASK",),
                "strength": (
                    "FLOAT",
                    {"default": 0.0, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip": "0: the server's"},
                ),
                "negative_prompt": ("STRING", {"multiline": True, "default": ""}),
                "lora": ("STRING", {"default": "", "tooltip": "a name in the server's --loras folder"}),
                "lora_scale": ("FLOAT", {"default": 1.0, "min": -4.0, "max": 4.0, "step": 0.05}),
                "api_key": ("STRING", {"default": ""}),
            },
        }

    def draw(
        self, server, prompt, seed, width, height, steps, count, image=None, mask=None, strength=0.0,
        negative_prompt="", lora="", lora_scale=1.0, api_key="",
    ):  # fmt: skip
        if bool(width) != bool(height):
            raise ValueError("give width and height, or 0 for both: the server's size")
        if mask is not None and image is None:
            raise ValueError("a mask says what of an image is repainted; connect the image, too")
        fields = {"prompt": prompt, "seed": seed, "n": count, "response_format": "b64_json"}
        if width:
            fields["size"] = f"{width}x{height}"
        if steps:
            fields["num_inference_steps"] = steps
        if negative_prompt:
            fields["negative_prompt"] = negative_prompt
        if lora:
            fields["loras"] = [{"name": lora, "scale": lora_scale}]
        base = server.rstrip("/").removesuffix("/v1") + "/v1/images/"
        if image is None:
            body, kind = json.dumps(fields).encode(), "application/json"
            answer = _post(base + "generations", body, kind, api_key)
        else:
            files = {"image": _png(image)}
            if mask is not None:
                files["mask"] = _png(mask)
            if strength:
                fields["strength"] = strength
            body, kind = _form(fields, files)
            answer = _post(base + "edits", body, kind, api_key)
        images = [Image.open(io.BytesIO(base64.b64decode(each["b64_json"]))) for each in answer["data"]]
        arrays = [np.asarray(each.convert("RGB"), dtype=np.float32) / 255 for each in images]
        return (torch.from_numpy(np.stack(arrays)),)


def _png(pixels):
    """Return the first image of a batch, [height, width, 3], or the first mask, [height, width], as a PNG file."""
    array = (pixels[0].clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def _form(fields, files):
    boundary = uuid.uuid4().hex
    body = bytearray()
    for name, value in fields.items():
        text = value if isinstance(value, str) else json.dumps(value)
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n'.encode()
    for name, content in files.items():
        heading = (
            f'Content-Disposition: form-data; name="{name}"; filename="{name}.png"\r\nContent-Type: image/png'
        )
        body += f"--{boundary}\r\n{heading}\r\n\r\n".encode() + content + b"\r\n"
    return bytes(body + f"--{boundary}--\r\n".encode()), f"multipart/form-data; boundary={boundary}"


def _post(url, body, kind, key):
    headers = {"content-type": kind} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = text[:200]
        raise RuntimeError(f"the server answered {error.code}: {text}") from None
    except OSError as error:
        raise RuntimeError(
            f"no vivace server answers at {url}: {error}; start one with `vivace serve MODEL`"
        ) from None


NODE_CLASS_MAPPINGS = {"VivaceServer": VivaceServer}
NODE_DISPLAY_NAME_MAPPINGS = {"VivaceServer": "vivace server"}
