"""NVIDIA's GPUs for desktops and laptops.

Rates are multiprocessors x boost clock x operations of a multiprocessor and cycle, as NVIDIA's white papers
(Turing, GA102, Ada, RTX Blackwell) and its product pages have them: 1,024 in 16 bits with fp16 accumulation from Turing
to Blackwell, half of that with fp32 accumulation, and twice that in 8 bits; 256 in 16 bits of the GTX 16 series, which
has no tensor cores. Clocks of laptops are the highest that NVIDIA allows. Pascal computes in fp32.
"""

from __future__ import annotations

from vivace.foundation.hardware.chip import Chip

_CAPABILITIES = {"Blackwell": (12, 0), "Ada": (8, 9), "Ampere": (8, 6), "Turing": (7, 5), "Pascal": (6, 1)}


def _rtx(
    name: str,
    architecture: str,
    multiprocessors: int,
    boost_ghz: float,
    memory_gb: tuple[float, ...],
    bandwidth_gb_s: float,
    aliases: tuple[str, ...] = (),
) -> Chip:
    half = round(multiprocessors * boost_ghz * 1.024, 1)
    is_full_rate = name.startswith("TITAN")
    return Chip(
        name=name,
        architecture=architecture,
        capability=_CAPABILITIES[architecture],
        memory_gb=memory_gb,
        bandwidth_gb_s=bandwidth_gb_s,
        half=half,
        bf16=half if is_full_rate else half / 2,
        eight=2 * half,
        aliases=aliases,
        is_laptop=name.endswith("Laptop"),
    )


def _gtx(name: str, half: float, eight: float, memory_gb: tuple[float, ...], bandwidth_gb_s: float) -> Chip:
    architecture = "Turing" if " 16" in name else "Pascal"
    capability = _CAPABILITIES[architecture]
    return Chip(name, architecture, capability, memory_gb, bandwidth_gb_s, half, half, eight)


GEFORCE = (
    _rtx("RTX 5090", "Blackwell", 170, 2.407, (32,), 1792),
    _rtx("RTX 5090 D", "Blackwell", 170, 2.407, (32, 24), 1792),
    _rtx("RTX 5080", "Blackwell", 84, 2.617, (16,), 960),
    _rtx("RTX 5070 Ti", "Blackwell", 70, 2.452, (16,), 896),
    _rtx("RTX 5070", "Blackwell", 48, 2.512, (12,), 672),
    _rtx("RTX 5060 Ti", "Blackwell", 36, 2.572, (8, 16), 448),
    _rtx("RTX 5060", "Blackwell", 30, 2.497, (8,), 448),
    _rtx("RTX 5050", "Blackwell", 20, 2.572, (8,), 320),
    _rtx("RTX 5090 Laptop", "Blackwell", 82, 2.160, (24,), 896),
    _rtx("RTX 5080 Laptop", "Blackwell", 60, 2.287, (16,), 896),
    _rtx("RTX 5070 Ti Laptop", "Blackwell", 46, 2.220, (12,), 672),
    _rtx("RTX 5070 Laptop", "Blackwell", 36, 2.347, (8,), 384),
    _rtx("RTX 5060 Laptop", "Blackwell", 26, 2.497, (8,), 384),
    _rtx("RTX 5050 Laptop", "Blackwell", 20, 2.662, (8,), 384),
    _rtx("RTX 4090", "Ada", 128, 2.520, (24,), 1008),
    _rtx("RTX 4090 D", "Ada", 114, 2.520, (24,), 1008),
    _rtx("RTX 4080 Super", "Ada", 80, 2.550, (16,), 736),
    _rtx("RTX 4080", "Ada", 76, 2.505, (16,), 717),
    _rtx("RTX 4070 Ti Super", "Ada", 66, 2.610, (16,), 672),
    _rtx("RTX 4070 Ti", "Ada", 60, 2.610, (12,), 504),
    _rtx("RTX 4070 Super", "Ada", 56, 2.475, (12,), 504),
    _rtx("RTX 4070", "Ada", 46, 2.475, (12,), 504),
    _rtx("RTX 4060 Ti", "Ada", 34, 2.535, (8, 16), 288),
    _rtx("RTX 4060", "Ada", 24, 2.460, (8,), 272),
    _rtx("RTX 4090 Laptop", "Ada", 76, 2.040, (16,), 576),
    _rtx("RTX 4080 Laptop", "Ada", 58, 2.280, (12,), 432),
    _rtx("RTX 4070 Laptop", "Ada", 36, 2.175, (8,), 256),
    _rtx("RTX 4060 Laptop", "Ada", 24, 2.370, (8,), 256),
    _rtx("RTX 4050 Laptop", "Ada", 20, 2.370, (6,), 192, ("RTX 4050",)),
    _rtx("RTX 3090 Ti", "Ampere", 84, 1.860, (24,), 1008),
    _rtx("RTX 3090", "Ampere", 82, 1.695, (24,), 936),
    _rtx("RTX 3080 Ti", "Ampere", 80, 1.665, (12,), 912),
    _rtx("RTX 3080", "Ampere", 70, 1.710, (10, 12), 912),
    _rtx("RTX 3070 Ti", "Ampere", 48, 1.770, (8,), 608),
    _rtx("RTX 3070", "Ampere", 46, 1.725, (8,), 448),
    _rtx("RTX 3060 Ti", "Ampere", 38, 1.665, (8,), 448),
    _rtx("RTX 3060", "Ampere", 28, 1.777, (12, 8), 360),
    _rtx("RTX 3050", "Ampere", 20, 1.777, (8, 6), 224),
    _rtx("RTX 3080 Ti Laptop", "Ampere", 58, 1.590, (16,), 512),
    _rtx("RTX 3080 Laptop", "Ampere", 48, 1.710, (8, 16), 448),
    _rtx("RTX 3070 Ti Laptop", "Ampere", 46, 1.485, (8,), 448),
    _rtx("RTX 3070 Laptop", "Ampere", 40, 1.620, (8,), 448),
    _rtx("RTX 3060 Laptop", "Ampere", 30, 1.703, (6,), 336),
    _rtx("RTX 3050 Ti Laptop", "Ampere", 20, 1.695, (4,), 192),
    _rtx("RTX 3050 Laptop", "Ampere", 16, 1.740, (4, 6), 192),
    _rtx("TITAN RTX", "Turing", 72, 1.770, (24,), 672),
    _rtx("RTX 2080 Ti", "Turing", 68, 1.635, (11,), 616),
    _rtx("RTX 2080 Super", "Turing", 48, 1.815, (8,), 496),
    _rtx("RTX 2080", "Turing", 46, 1.800, (8,), 448),
    _rtx("RTX 2070 Super", "Turing", 40, 1.770, (8,), 448),
    _rtx("RTX 2070", "Turing", 36, 1.710, (8,), 448),
    _rtx("RTX 2060 Super", "Turing", 34, 1.650, (8,), 448),
    _rtx("RTX 2060", "Turing", 34, 1.680, (6, 12), 336),
    _rtx("RTX 2080 Super Laptop", "Turing", 48, 1.560, (8,), 448),
    _rtx("RTX 2080 Laptop", "Turing", 46, 1.590, (8,), 384),
    _rtx("RTX 2070 Super Laptop", "Turing", 40, 1.380, (8,), 448),
    _rtx("RTX 2070 Laptop", "Turing", 36, 1.440, (8,), 384),
    _rtx("RTX 2060 Laptop", "Turing", 30, 1.560, (6,), 336),
    # dp4a makes 8 bits twice as fast as fp16 here.
    _gtx("GTX 1660 Ti", 10.9, 21.8, (6,), 288),
    _gtx("GTX 1660 Super", 10.1, 20.2, (6,), 336),
    _gtx("GTX 1660", 10.1, 20.2, (6,), 192),
    _gtx("GTX 1650 Super", 8.9, 17.8, (4,), 192),
    _gtx("GTX 1650", 6.0, 12.0, (4,), 192),
    # Pascal: fp16 is 1/64 of fp32; dp4a is four times fp32.
    _gtx("GTX 1080 Ti", 11.4, 45.4, (11,), 484),
    _gtx("GTX 1080", 8.9, 35.5, (8,), 320),
    _gtx("GTX 1070 Ti", 8.2, 32.7, (8,), 256),
    _gtx("GTX 1070", 6.5, 25.9, (8,), 256),
    _gtx("GTX 1060", 4.4, 17.5, (6, 3), 192),
    _gtx("GTX 1050 Ti", 2.2, 8.6, (4,), 112),
)
