"""What encoding an image costs: milliseconds, bytes and fidelity of each format, as `vivace serve` and Pillow write it.

    python -m benchmarks.encoding                         1024x1024, about a minute

Two images: one with the statistics of photographs (occluding shapes, textures whose amplitudes fall with frequency,
sensor noise) and uniform noise, which is the worst case and what random weights draw.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.command import run
from benchmarks.record_files import write_list
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.environment import Environment
from vivace.foundation.stats import median_interval
from vivace.measure.this_environment import environment
from vivace.serve.http.responses import encode_now
from vivace.serve.queue.jobs import Drawn

RECORD = Path(__file__).parents[1] / "results" / "encoding-cpu.json"
_SHAPES = 400
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "png, Pillow, level 1": ("PNG", {"compress_level": 1}),
    "png, Pillow, level 4": ("PNG", {"compress_level": 4}),
    "jpeg, 92, 4:4:4": ("JPEG", {"quality": 92, "subsampling": 0}),
    "webp, 90, method 4": ("WEBP", {"quality": 90, "method": 4}),
    "webp, 75, method 0": ("WEBP", {"quality": 75, "method": 0}),
    "webp, lossless": ("WEBP", {"lossless": True, "quality": 0, "method": 0}),
}
"""What is not chosen, and Pillow's defaults."""


class EncodingRow(Spec):
    """One way to write one image.

    Attributes:
        way: the format and its settings; "served" where `vivace serve` writes so.
        milliseconds: of each call.
        psnr_db: of the file's pixels; None where they are the image's own.
    """

    environment: Environment
    image: str
    size: tuple[int, int]
    way: str
    milliseconds: tuple[float, ...]
    num_bytes: int
    psnr_db: float | None

    @property
    def line(self) -> str:
        middle = median_interval([self.milliseconds])
        fidelity = "the same pixels" if self.psnr_db is None else f"{self.psnr_db:.1f} dB"
        return f"{self.image:8}{self.way:22}{middle.point:7.1f} ms {self.num_bytes / 1e6:6.2f} MB  {fidelity}"


def natural_image(size: int, seed: int = 0) -> Image.Image:
    """Return an image with the statistics of photographs: disks that hide each other, textures, noise."""
    chance = np.random.default_rng(seed)
    frequencies = np.fft.fftfreq(size)
    radius = np.hypot(frequencies[:, None], frequencies[None])
    radius[0, 0] = 1.0

    def texture(power: float) -> NDArray[np.float64]:
        field = np.fft.ifft2(np.fft.fft2(chance.standard_normal((size, size))) / radius**power).real
        return np.asarray((field - field.mean()) / field.std())

    pixels = np.zeros((size, size, 3))
    y, x = np.mgrid[:size, :size]
    for _ in range(_SHAPES):
        reach = min(0.02 / chance.random() ** 0.6, 0.5) * size
        centre, colour = chance.random(2) * size, chance.random(3) * 220 + 15
        pixels[(x - centre[0]) ** 2 + (y - centre[1]) ** 2 < reach**2] = colour
    brightness = 10 * texture(1.0)
    pixels += np.stack([brightness + 3 * texture(1.2) for _ in range(3)], -1)
    pixels += chance.standard_normal(pixels.shape)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def noise_image(size: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8))


def ways_of(image: Image.Image) -> dict[str, Callable[[], bytes]]:
    """Return what writes an image, by its name."""
    drawn = Drawn(image.tobytes(), *image.size, 0, {})
    served: dict[str, Callable[[], bytes]] = {
        f"{name}, served": lambda name=name: encode_now(drawn, name).data  # type: ignore[misc]
        for name in ("png", "jpeg", "webp")
    }

    def saved(format_: str, options: dict[str, Any]) -> bytes:
        file = io.BytesIO()
        image.save(file, format_, **options)
        return file.getvalue()

    return served | {name: lambda way=way: saved(*way) for name, way in _OTHERS.items()}


def measured(name: str, image: Image.Image, calls: int, here: Environment) -> list[EncodingRow]:
    """Measure every way, in turns, so that a slow phase of the machine meets all."""
    ways = ways_of(image)
    files = {way: write() for way, write in ways.items()}
    milliseconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(calls):
        for way, write in ways.items():
            began = time.perf_counter()
            write()
            milliseconds[way].append(round(1000 * (time.perf_counter() - began), 3))
    return [
        EncodingRow(
            environment=here,
            image=name,
            size=image.size,
            way=way,
            milliseconds=tuple(milliseconds[way]),
            num_bytes=len(files[way]),
            psnr_db=_psnr(image, files[way]),
        )
        for way in ways
    ]


def _psnr(image: Image.Image, file: bytes) -> float | None:
    read = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"), dtype=np.float64)
    error = float(((read - np.asarray(image)) ** 2).mean())
    return round(10 * math.log10(255**2 / error), 2) if error else None


@click.command()
@click.option("--size", type=click.IntRange(16, 8192), default=1024, show_default=True)
@click.option("--calls", type=click.IntRange(3), default=9, show_default=True, help="Of each way.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
def encoding(size: int, calls: int, record: Path) -> int:
    """Measure what encoding an image costs."""
    here = environment("cpu")
    images = {"natural": natural_image(size), "noise": noise_image(size)}
    rows = [row for name, image in images.items() for row in measured(name, image, calls, here)]
    write_list(record, [row.model_dump_json() for row in rows])
    for row in rows:
        click.echo(row.line)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(encoding))
