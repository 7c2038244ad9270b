"""What `quantize` chooses from: how weights are stored in fewer bits, and by which library."""

from __future__ import annotations

from vivace.quantization.bitsandbytes_schemes import BITSANDBYTES
from vivace.quantization.gguf_schemes import GGUF
from vivace.quantization.modelopt_schemes import MODELOPT
from vivace.quantization.quanto_schemes import QUANTO
from vivace.quantization.scheme import Scheme
from vivace.quantization.sdnq_schemes import SDNQ
from vivace.quantization.torchao_schemes import TORCHAO

SCHEMES: dict[tuple[str, str], Scheme] = {
    (backend, name): scheme
    for backend, schemes in {
        "torchao": TORCHAO,
        "bitsandbytes": BITSANDBYTES,
        "quanto": QUANTO,
        "sdnq": SDNQ,
        "gguf": GGUF,
        "modelopt": MODELOPT,
    }.items()
    for name, scheme in schemes.items()
}
"""By backend and name. To add one: an entry in its library's table."""


def schemes_of(backend: str) -> list[str]:
    return [name for library, name in SCHEMES if library == backend]


def backends_of(name: str) -> list[str]:
    return [library for library, scheme in SCHEMES if scheme == name]


__all__ = ["SCHEMES", "Scheme", "backends_of", "schemes_of"]
