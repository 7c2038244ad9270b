"""The schemes that `quantize` chooses from, by backend, the library that quantises."""

from __future__ import annotations

from vivace.machinery.quantization.optional_schemes import BITSANDBYTES, GGUF, SDNQ
from vivace.machinery.quantization.scheme import Scheme
from vivace.machinery.quantization.torchao_schemes import TORCHAO

SCHEMES: dict[tuple[str, str], Scheme] = {
    (backend, name): scheme
    for backend, schemes in {
        "torchao": TORCHAO,
        "bitsandbytes": BITSANDBYTES,
        "sdnq": SDNQ,
        "gguf": GGUF,
    }.items()
    for name, scheme in schemes.items()
}
"""By backend and name. To add a scheme, add an entry to its backend's table."""


def schemes_of(backend: str) -> list[str]:
    return [name for library, name in SCHEMES if library == backend]


def backends_of(name: str) -> list[str]:
    return [library for library, scheme in SCHEMES if scheme == name]


__all__ = ["SCHEMES", "Scheme", "backends_of", "schemes_of"]
