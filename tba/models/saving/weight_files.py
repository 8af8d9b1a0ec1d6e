"""Writes tensors as safetensors files, in one pass over their bytes: each piece is converted, hashed, written, and
compared with the file of another version while it is in the processor's cache. Files are written side by side.

The files are those that `safetensors` writes for the same tensors. That library would hold all converted weights in
memory, write one file after the other, and leave the files to be read again for their digests.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tba.models.file_checks import INDEX
from tba.models.folder import tensor_places

FILE_BYTES = 2**30
"""Largest size of a file with weights, unless a single tensor is larger. A smaller model is one file."""
PIECE_BYTES = 2**20
"""Bytes that are converted, hashed and written at a time: few enough for the cache of a processor."""
_AT_ONCE = min(16, len(os.sched_getaffinity(0)))  # files that are written side by side
_SERIAL = 2**15 - 2**6  # elements that torch converts in the calling thread: each file has a thread already
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
}  # fmt: skip
_BITS: Mapping[int, type[np.integer[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Stored(NamedTuple):
    """A tensor, and the dtype in which it is stored."""

    tensor: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize


@dataclass
class Written:
    """The digests of files that were written, and how much of their content is new."""

    sha256s: dict[str, str] = field(default_factory=dict)  # by name of the file
    changed_share: float | None = None  # elements whose bits differ from the version compared with; None without one


def write_model(folder: Path, weights: Mapping[str, Stored], *, before: Path | None = None) -> Written:
    """Write the weights of a model as model.safetensors or, if they are larger than FILE_BYTES, as several files and
    their index, as transformers names them. `before` is a folder with the files of an earlier version, with which each
    weight is compared."""
    files = _split(weights)
    old = places_in(before) if before else None
    with ThreadPoolExecutor(min(_AT_ONCE, len(files))) as pool:
        jobs = {
            name: pool.submit(write_tensors, folder / name, {it: weights[it] for it in names}, {"format": "pt"}, old)
            for name, names in files.items()
        }
        results = {name: job.result() for name, job in jobs.items()}
    elements = sum(it.tensor.numel() for it in weights.values())
    if len(files) > 1:
        where = {it: name for name, names in files.items() for it in names}
        sizes = {"total_parameters": elements, "total_size": sum(it.nbytes for it in weights.values())}
        (folder / INDEX).write_text(
            json.dumps({"metadata": sizes, "weight_map": where}, indent=2, sort_keys=True) + "\n"
        )
    changed = sum(it for _, it in results.values())
    return Written({name: digest for name, (digest, _) in results.items()}, changed / elements if before else None)


class Place(NamedTuple):
    """Where a tensor is stored."""

    file: Path
    start: int
    nbytes: int


def write_tensors(
    path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str], old: Mapping[str, Place] | None = None
) -> tuple[str, int]:
    """Write a safetensors file. Return its sha256, and the number of elements whose bits differ from those at the
    places in `old`; an element without such a place differs."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    digest, changed = sha256(), 0
    with path.open("wb", buffering=0) as file:
        digest.update(header := _header(order, tensors, metadata))
        _write(file.fileno(), header)
        for name in order:
            before = _Before(old.get(name) if old else None, tensors[name])
            for piece in _pieces(tensors[name]):
                digest.update(piece)
                _write(file.fileno(), piece)
                changed += before.count_changed(piece) if old is not None else 0
    return digest.hexdigest(), changed


def _split(weights: Mapping[str, Stored]) -> dict[str, Sequence[str]]:
    """Return the names of the files, each with the names of its weights, in the order of the weights."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, stored in weights.items():
        if groups[-1] and size + stored.nbytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += stored.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05}-of-{len(groups):05}.safetensors": names for n, names in enumerate(groups, 1)}


def _header(order: Sequence[str], tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        dtype, shape = _NAMES[tensors[name].dtype], list(tensors[name].tensor.shape)
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(stored: Stored) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, piece by piece, in the dtype in which it is stored."""
    flat = stored.tensor.detach().contiguous().reshape(-1)
    converts = flat.dtype != stored.dtype
    length = PIECE_BYTES // stored.dtype.itemsize
    room = torch.empty(min(length, flat.numel()) if converts else 0, dtype=stored.dtype)
    for piece in flat.split(length):
        if converts:
            for source, target in zip(piece.split(_SERIAL), room[: piece.numel()].split(_SERIAL), strict=True):
                target.copy_(source)
            piece = room[: piece.numel()]
        yield piece.view(torch.uint8).numpy().data


def _write(file: int, data: bytes | memoryview) -> None:
    """Write all of the data. On a disk that is nearly full, one call writes only a part of the data, and only the next
    call fails."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def places_in(folder: Path) -> dict[str, Place]:
    """Return where each tensor in the safetensors files of a folder is stored, by name."""
    return {
        name: Place(path, start, end - start)
        for path in sorted(folder.glob("*.safetensors"))
        for name, (start, end) in tensor_places(path).items()
    }


class _Before:
    """The bytes of a tensor in an earlier version, which are read along with the new bytes."""

    def __init__(self, place: Place | None, stored: Stored):
        self.bits = _BITS[stored.dtype.itemsize]
        self.left = None
        if place and place.nbytes == stored.nbytes and place.nbytes:
            self.left = np.memmap(place.file, self.bits, "r", place.start, (stored.tensor.numel(),))

    def count_changed(self, piece: memoryview) -> int:
        new = np.frombuffer(piece, self.bits)
        if self.left is None:
            return len(new)
        old, self.left = self.left[: len(new)], self.left[len(new) :]
        return int(np.count_nonzero(old != new))
