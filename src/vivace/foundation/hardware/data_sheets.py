"""NVIDIA's GPUs by their data sheets: for servers, for desktops and laptops, for workstations.

Rates of GPUs for servers and workstations are those of NVIDIA's data sheets, without sparsity (which doubles the
figures that are printed largest); of the SXM module where a name does not say PCIe or NVL. Volta's tensor cores have
no 8 bits, and its other units are slower.

GeForce's are multiprocessors x boost clock x operations of a multiprocessor and cycle, as NVIDIA's white papers
(Turing, GA102, Ada, RTX Blackwell) and its product pages have them: 1,024 in 16 bits with fp16 accumulation from Turing
to Blackwell, half of that with fp32 accumulation, and twice that in 8 bits; 256 in 16 bits of the GTX 16 series, which
has no tensor cores. Clocks of laptops are the highest that NVIDIA allows. Pascal computes in fp32. Where a data sheet
of a workstation's prints only figures with sparsity, the same product is taken; there fp32 accumulation is as fast as
fp16's.
"""

from __future__ import annotations

from vivace.foundation.hardware.chip import Chip

_BLACKWELL, _HOPPER, _ADA, _AMPERE = "Blackwell", "Hopper", "Ada", "Ampere"

DATACENTER = (
    # Name, architecture, capability, GB, GB/s, 16 bits, 16 bits with fp32 accumulation, 8 bits.
    # B300: its int8 is slower than its 16 bits. Smallest memory that a vendor states.
    Chip("GB300", _BLACKWELL, (10, 3), (278,), 8000, 2500, 2500, 5000),
    Chip("B300", _BLACKWELL, (10, 3), (268,), 8000, 2250, 2250, 4500),
    Chip("GB200", _BLACKWELL, (10, 0), (186,), 8000, 2500, 2500, 5000),
    Chip("B200", _BLACKWELL, (10, 0), (180,), 8000, 2250, 2250, 4500),
    Chip("B100", _BLACKWELL, (10, 0), (180,), 8000, 1750, 1750, 3500),
    # DGX Spark: memory shared with the CPU.
    Chip("GB10", _BLACKWELL, (12, 1), (120,), 273, 125, 125, 250, aliases=("DGX Spark",), other_gb=(128,)),
    Chip("H200", _HOPPER, (9, 0), (141,), 4800, 989.5, 989.5, 1979),
    Chip("H200 NVL", _HOPPER, (9, 0), (141,), 4800, 835.5, 835.5, 1671),
    Chip("H100", _HOPPER, (9, 0), (80,), 3350, 989.5, 989.5, 1979),
    Chip("H100 PCIe", _HOPPER, (9, 0), (80,), 2000, 756.5, 756.5, 1513),
    Chip("H100 NVL", _HOPPER, (9, 0), (94,), 3900, 835.5, 835.5, 1671),
    Chip("H800", _HOPPER, (9, 0), (80,), 3350, 989.5, 989.5, 1979),
    Chip("H20", _HOPPER, (9, 0), (96, 141), 4000, 148, 148, 296),
    # Its name states the CPU's memory, 480 GB.
    Chip("GH200", _HOPPER, (9, 0), (96, 144), 4900, 989.5, 989.5, 1979, other_gb=(480, 120, 624)),
    Chip("L40S", _ADA, (8, 9), (48,), 864, 362, 362, 733),
    Chip("L40", _ADA, (8, 9), (48,), 864, 181, 181, 362),
    Chip("L20", _ADA, (8, 9), (48,), 864, 119.5, 119.5, 239),
    Chip("L4", _ADA, (8, 9), (24,), 300, 121, 121, 242.5),
    Chip("L2", _ADA, (8, 9), (24,), 300, 96.5, 96.5, 193),
    Chip("A100", _AMPERE, (8, 0), (40, 80), 2039, 312, 312, 624, aliases=("A100X",)),
    Chip("A800", _AMPERE, (8, 0), (40, 80), 2039, 312, 312, 624),
    Chip("A30", _AMPERE, (8, 0), (24,), 933, 165, 165, 330),
    Chip("A40", _AMPERE, (8, 6), (48,), 696, 149.7, 149.7, 299.3),
    Chip("A10", _AMPERE, (8, 6), (24,), 600, 125, 125, 250),
    Chip("A10G", _AMPERE, (8, 6), (24,), 600, 70, 70, 140),  # by AWS
    Chip("A16", _AMPERE, (8, 6), (16,), 200, 18, 18, 36),
    Chip("A2", _AMPERE, (8, 6), (16,), 200, 18, 18, 36),
    Chip("T4", "Turing", (7, 5), (16,), 320, 65, 65, 130, aliases=("T4G",)),
    Chip("V100", "Volta", (7, 0), (16, 32), 900, 125, 125, 125, aliases=("GV100",)),
    Chip("V100S", "Volta", (7, 0), (32,), 1134, 130, 130, 130),
    Chip("P100", "Pascal", (6, 0), (16, 12), 732, 21.2, 10.6, 21.2),
    Chip("P40", "Pascal", (6, 1), (24,), 346, 12, 12, 47),
)


_CAPABILITIES = {
    "Blackwell": (12, 0),
    "Ada": (8, 9),
    "Ampere": (8, 6),
    "Turing": (7, 5),
    "Volta": (7, 0),
    "Pascal": (6, 1),
}


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


def _professional(
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
    _professional("RTX PRO 6000", "Blackwell", 503.8, (96,), 1792, ("RTX 6000 Pro", "RTX 6000 Blackwell")),
    _professional("RTX PRO 5000", "Blackwell", 294.0, (48, 72), 1344, ("RTX 5000 Pro", "RTX 5000 Blackwell")),
    _professional("RTX PRO 4500", "Blackwell", 220.0, (32,), 896, ("RTX 4500 Pro", "RTX 4500 Blackwell")),
    _professional("RTX PRO 4000", "Blackwell", 187.0, (24,), 672, ("RTX 4000 Pro", "RTX 4000 Blackwell")),
    _professional("RTX PRO 2000", "Blackwell", 92.0, (16,), 288, ("RTX 2000 Pro", "RTX 2000 Blackwell")),
    _professional("RTX 6000 Ada", "Ada", 364.2, (48,), 960),
    _professional("RTX 5880 Ada", "Ada", 277.2, (48,), 960, ("RTX 5880",)),
    _professional("RTX 5000 Ada", "Ada", 261.1, (32,), 576),
    _professional("RTX 4500 Ada", "Ada", 158.6, (24,), 432),
    _professional("RTX 4000 Ada", "Ada", 106.9, (20,), 360, ("RTX 4000 SFF Ada",)),
    _professional("RTX 2000 Ada", "Ada", 48.0, (16,), 224),
    _professional("RTX A6000", "Ampere", 154.8, (48,), 768),
    _professional("RTX A5500", "Ampere", 136.4, (24,), 768),
    _professional("RTX A5000", "Ampere", 111.1, (24,), 768),
    _professional("RTX A4500", "Ampere", 94.6, (20,), 640),
    _professional("RTX A4000", "Ampere", 76.7, (16,), 448),
    _professional("RTX A2000", "Ampere", 31.9, (6, 12), 288),
    _professional("Quadro RTX 8000", "Turing", 130.5, (48,), 672, ("RTX 8000",)),
    _professional("Quadro RTX 6000", "Turing", 130.5, (24,), 672),
    _professional("Quadro RTX 5000", "Turing", 89.2, (16,), 448),
    _professional("Quadro RTX 4000", "Turing", 57.0, (8,), 416),
    _professional("TITAN V", "Volta", 110.0, (12,), 653),
)
