"""Writes and applies the difference between two files of one size: the XOR of their bytes, compressed with zstd.

The difference is small if few weights differ. Files are processed in pieces of 1 MiB, so memory use is small for files
of any size.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from tba.errors import Damaged

SUFFIX = ".xor.zst"
"""Suffix of the name of a difference that is stored instead of a file."""

PIECE_BYTES = 2**20


def write(base: Path, file: Path, into: Path) -> None:
    """Write the difference between a file and a base of the same size to `into`."""
    with base.open("rb") as old, file.open("rb") as new, pa.CompressedOutputStream(str(into), "zstd") as out:
        while piece := new.read(PIECE_BYTES):
            out.write(_xor(piece, old.read(len(piece))))


def apply(base: Path, difference: Path, into: Path) -> None:
    """Write to `into` the file that follows from a base and a difference. Raise Damaged if the difference cannot be
    decompressed or is shorter than the base. Other damage is not noticed: the caller has to compare the sha256 of the
    result."""
    with base.open("rb") as old, pa.CompressedInputStream(str(difference), "zstd") as differing, into.open("wb") as new:
        while piece := old.read(PIECE_BYTES):
            try:
                change = differing.read(len(piece))
            except OSError as error:
                raise Damaged(f"{difference.name} cannot be decompressed: {error}") from None
            if len(change) != len(piece):
                raise Damaged(f"{difference.name} is shorter than its base")
            new.write(_xor(piece, change))


def _xor(one: bytes, other: bytes) -> memoryview:
    return (np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)).data
