"""Digests of a model's weights, by which the ledger names the weights after a step. The kind of a digest is its prefix.

pieces:HEX  sha256 over a list of the sha256 of all pieces of all tensors; threads hash the pieces side by side
HEX         one sha256 over the bytes of all tensors, as older runs stored it
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

PIECES = "pieces:"
PIECE_BYTES = 2**26
"""Bytes of a piece, except of the last one of a tensor. Another value would make other digests of the same weights."""
_AT_ONCE = min(16, len(os.sched_getaffinity(0)))  # pieces that are hashed side by side


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the name, type, shape and bytes of each tensor."""
    hashed: dict[tuple[int, int], list[Future[Any]]] = {}  # by place in memory: tied tensors are read once
    total = hashlib.sha256()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for tensor in tensors.values():
            if (place := (tensor.data_ptr(), tensor.nbytes)) not in hashed:
                hashed[place] = [pool.submit(hashlib.sha256, piece) for piece in _pieces(tensor)]
        for name, tensor in sorted(tensors.items()):
            pieces = (job.result().hexdigest() for job in hashed[tensor.data_ptr(), tensor.nbytes])
            total.update(f"{_about(name, tensor)} {' '.join(pieces)}\n".encode())
    return PIECES + total.hexdigest()


def kind_of(stored: str | None) -> str:
    """Return the kind of a stored digest, `whole` or `pieces`. If there is no stored digest, or if this program does
    not know its kind, return the newest kind."""
    return "whole" if stored and ":" not in stored else "pieces"


def is_known(stored: str) -> bool:
    """True if this program can compute digests of the same kind as the stored one."""
    return ":" not in stored or stored.startswith(PIECES)


def whole_digest(tensors: Mapping[str, Tensor], *, of: str = "") -> str:
    """Return one sha256 over the name, type, shape and bytes of each tensor, in the order of their names. The text `of`
    is hashed first."""
    total = hashlib.sha256(of.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{_about(name, tensor)}\n".encode())
        total.update(_bytes(tensor).numpy().data)
    return total.hexdigest()


def _about(name: str, tensor: Tensor) -> str:
    return f"{name} {tensor.dtype} {list(tensor.shape)}"


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    return (piece.numpy().data for piece in _bytes(tensor).split(PIECE_BYTES))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
