"""The difference of two files of one size: the XOR of their bytes, in zstd. Where few weights differ it is small.

Neither way takes more memory than a piece or so.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from tba.errors import Damaged

SUFFIX = ".xor.zst"
"""Of what is stored in place of a file."""

_PIECE = 2**20  # bytes


def write(base: Path, file: Path, into: Path) -> None:
    """The difference of a file from a base of its size."""
    with base.open("rb") as old, file.open("rb") as new, pa.CompressedOutputStream(str(into), "zstd") as out:
        while piece := new.read(_PIECE):
            out.write(_xor(piece, old.read(len(piece))))


def apply(base: Path, difference: Path, into: Path) -> None:
    """The file again. Damaged if that is no difference of a file of the base's size; whether the file is the right one
    only its sha256 tells."""
    with base.open("rb") as old, pa.CompressedInputStream(str(difference), "zstd") as differing, into.open("wb") as new:
        while piece := old.read(_PIECE):
            try:
                change = differing.read(len(piece))
            except OSError as error:
                raise Damaged(f"{difference.name} cannot be decompressed: {error}") from None
            if len(change) != len(piece):
                raise Damaged(f"{difference.name} ends before its base does")
            new.write(_xor(piece, change))


def _xor(one: bytes, other: bytes) -> memoryview:
    return (np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)).data
