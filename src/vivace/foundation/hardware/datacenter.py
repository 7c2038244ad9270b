"""NVIDIA's GPUs for servers.

Rates are those of NVIDIA's data sheets, without sparsity (which doubles the figures that are printed largest); of the
SXM module where a name does not say PCIe or NVL. Volta's tensor cores have no 8 bits, and its other units are slower.
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
