"""NVIDIA's GPUs for workstations.

Rates are those of NVIDIA's data sheets, dense, or multiprocessors x boost clock x 1,024 where these print only figures
with sparsity. fp32 accumulation is as fast as fp16's here, unlike on GeForce.
"""

from __future__ import annotations

from vivace.foundation.hardware.chip import Chip

_CAPABILITIES = {"Blackwell": (12, 0), "Ada": (8, 9), "Ampere": (8, 6), "Turing": (7, 5), "Volta": (7, 0)}


def _rtx(
    name: str,
    architecture: str,
    half: float,
    memory_gb: tuple[float, ...],
    bandwidth_gb_s: float,
    aliases: tuple[str, ...] = (),
) -> Chip:
    capability = _CAPABILITIES[architecture]
    eight = half if architecture == "Volta" else 2 * half
    return Chip(name, architecture, capability, memory_gb, bandwidth_gb_s, half, half, eight, aliases)


WORKSTATION = (
    _rtx("RTX PRO 6000", "Blackwell", 503.8, (96,), 1792, ("RTX 6000 Pro", "RTX 6000 Blackwell")),
    _rtx("RTX PRO 5000", "Blackwell", 294.0, (48, 72), 1344, ("RTX 5000 Pro", "RTX 5000 Blackwell")),
    _rtx("RTX PRO 4500", "Blackwell", 220.0, (32,), 896, ("RTX 4500 Pro", "RTX 4500 Blackwell")),
    _rtx("RTX PRO 4000", "Blackwell", 187.0, (24,), 672, ("RTX 4000 Pro", "RTX 4000 Blackwell")),
    _rtx("RTX PRO 2000", "Blackwell", 92.0, (16,), 288, ("RTX 2000 Pro", "RTX 2000 Blackwell")),
    _rtx("RTX 6000 Ada", "Ada", 364.2, (48,), 960),
    _rtx("RTX 5880 Ada", "Ada", 277.2, (48,), 960, ("RTX 5880",)),
    _rtx("RTX 5000 Ada", "Ada", 261.1, (32,), 576),
    _rtx("RTX 4500 Ada", "Ada", 158.6, (24,), 432),
    _rtx("RTX 4000 Ada", "Ada", 106.9, (20,), 360, ("RTX 4000 SFF Ada",)),
    _rtx("RTX 2000 Ada", "Ada", 48.0, (16,), 224),
    _rtx("RTX A6000", "Ampere", 154.8, (48,), 768),
    _rtx("RTX A5500", "Ampere", 136.4, (24,), 768),
    _rtx("RTX A5000", "Ampere", 111.1, (24,), 768),
    _rtx("RTX A4500", "Ampere", 94.6, (20,), 640),
    _rtx("RTX A4000", "Ampere", 76.7, (16,), 448),
    _rtx("RTX A2000", "Ampere", 31.9, (6, 12), 288),
    _rtx("Quadro RTX 8000", "Turing", 130.5, (48,), 672, ("RTX 8000",)),
    _rtx("Quadro RTX 6000", "Turing", 130.5, (24,), 672),
    _rtx("Quadro RTX 5000", "Turing", 89.2, (16,), 448),
    _rtx("Quadro RTX 4000", "Turing", 57.0, (8,), 416),
    _rtx("TITAN V", "Volta", 110.0, (12,), 653),
)
