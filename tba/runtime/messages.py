"""Messages between the processes of a role. A message is JSON, followed by the bytes of arrays of numbers. A child
process gets its messages through pipes."""

import fcntl
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import numpy as np

_HEAD = 8  # bytes for the length of each of the two parts of a message
_PIPE = 1 << 20  # bytes that a pipe can hold, so that most messages are written in one piece
_F_SETPIPE_SZ = 1031

Numbers = Sequence["np.ndarray"]


def pack(said: Any, numbers: Numbers = ()) -> bytes:
    shapes = [[array.dtype.str, array.shape] for array in numbers]
    head = json.dumps([said, shapes]).encode()
    data = b"".join(array.tobytes() for array in numbers)
    return len(head).to_bytes(_HEAD) + len(data).to_bytes(_HEAD) + head + data


def unpack(message: bytes | memoryview) -> tuple[Any, Numbers]:
    """Return what `pack` has packed. The arrays share the memory of the message."""
    head, _ = _lengths(message)
    said, shapes = json.loads(bytes(message[2 * _HEAD : 2 * _HEAD + head]))
    numbers, at = [], 2 * _HEAD + head
    for dtype, shape in shapes:
        import numpy as np  # here, because a process that gets no numbers may not need it

        numbers.append(np.frombuffer(message, dtype, int(np.prod(shape)), at).reshape(shape))
        at += numbers[-1].nbytes
    return said, numbers


def _lengths(message: bytes | memoryview) -> tuple[int, int]:
    head, data = (int.from_bytes(message[at : at + _HEAD]) for at in (0, _HEAD))
    return head, data


def send(pipe: BinaryIO | Any, said: Any, numbers: Numbers = ()) -> None:
    pipe.write(pack(said, numbers))
    pipe.flush()


def receive(pipe: BinaryIO | Any) -> tuple[Any, Numbers] | None:
    """Return the next message. Return None at the end of the pipe, even if the pipe ends within a message."""
    sizes = pipe.read(2 * _HEAD)
    if len(sizes) < 2 * _HEAD:
        return None
    length = sum(_lengths(sizes))
    body = pipe.read(length)
    return unpack(sizes + body) if len(body) == length else None


def widen(pipe: Any) -> None:
    if sys.platform == "linux":
        with suppress(OSError):  # the user's limit is lower: messages are then written in more pieces
            fcntl.fcntl(pipe, _F_SETPIPE_SZ, _PIPE)


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return standard input and output as the pipes of orders and answers. From then on, everything that other code
    prints to standard output goes to standard error."""
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return orders, answers
