"""The difference of two files of one size: the XOR of their bytes, in zstd. Where few weights differ it is small.

In each piece of it first bytes of every four come first, then all second ones, and so on: of a weight that changed a
little most of the high bytes are 0, and lie together. Neither way takes more memory than a piece or so.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa

from tba.errors import Damaged

SUFFIX = ".xor.zst"
"""Of what is stored in place of a file."""

_PIECE = 2**22  # bytes: a part of the format
_WIDTH = 4  # likewise


def write(base: Path, file: Path, into: Path) -> None:
    """The difference of a file from a base of its size."""
    with base.open("rb") as old, file.open("rb") as new, pa.CompressedOutputStream(str(into), "zstd") as out:
        while piece := new.read(_PIECE):
            xor = np.frombuffer(piece, np.uint8) ^ np.frombuffer(old.read(len(piece)), np.uint8)
            even = len(xor) // _WIDTH * _WIDTH
            out.write(np.concatenate([xor[:even].reshape(-1, _WIDTH).T.ravel(), xor[even:]]))


def apply(base: Path, difference: Path, into: Path) -> None:
    """The file again. Damaged if that is no difference of a file of the base's size; whether the file is the right one
    only its sha256 tells."""
    with base.open("rb") as old, pa.CompressedInputStream(str(difference), "zstd") as differing, into.open("wb") as new:
        while piece := old.read(_PIECE):
            try:
                xor = np.frombuffer(differing.read(len(piece)), np.uint8)
            except OSError as error:
                raise Damaged(f"{difference.name} cannot be decompressed: {error}") from None
            if len(xor) != len(piece):
                raise Damaged(f"{difference.name} ends before its base does")
            even = len(xor) // _WIDTH * _WIDTH
            xor = np.concatenate([xor[:even].reshape(_WIDTH, -1).T.ravel(), xor[even:]])
            new.write((xor ^ np.frombuffer(piece, np.uint8)).data)
