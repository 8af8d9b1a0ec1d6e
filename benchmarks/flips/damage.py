"""Plan damage: which byte of which stored object is changed, and how."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import pyarrow as pa
import pyarrow.parquet as pq

from storage import layout
from storage.objects import deltas
from storage.objects.open_store import open_store

FLIPS = ("bit", "byte", "character")
REMOVALS = ("removed", "cut in half", "doubled")
ALIKE = (b"0123456789", b"abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
"""Characters that look equally plausible in JSON."""


@dataclass(frozen=True)
class Damage:
    """A change of one object of a run. A removal has no offset."""

    run: str
    kind: str  # of the object
    key: str
    how: str
    part: str = ""  # of a Parquet object
    offset: int = 0
    old: int = 0
    new: int = 0

    def applied(self, data: bytes) -> bytes | None:
        """Return the damaged content, or None if the object is to be removed."""
        if self.how in REMOVALS:
            return {"removed": None, "cut in half": data[: len(data) // 2], "doubled": data + data}[self.how]
        return data[: self.offset] + bytes([self.new]) + data[self.offset + 1 :]

    def __str__(self) -> str:
        where = f"{self.kind}: {self.run}/{self.key}"
        if self.how in REMOVALS:
            return f"{where} {self.how}"
        how = f"bit {(self.old ^ self.new).bit_length() - 1}" if self.how == "bit" else self.how
        part = f" of the {self.part}" if self.part else ""
        return f"{where}, byte {self.offset}{part}: {self.old:#04x} -> {self.new:#04x}, {how}"


def plan_damage(root: str, names: Sequence[str], number: int, chance: random.Random, *, removals: bool) -> list[Damage]:
    """Choose `number` flips, or removals, spread evenly over the kinds of objects under a local root."""
    by_kind: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        for entry in open_store(layout.run_url(root, name)).list():
            if layout.is_part(entry.key) and entry.size and not entry.key.startswith((layout.LOGS, layout.REPORT)):
                by_kind.setdefault(kind_of(entry.key), []).append((name, entry.key))
    planned: list[Damage] = []
    for place, kind in enumerate(islice(cycle(sorted(by_kind)), number)):
        name, key = chance.choice(by_kind[kind])
        if removals:
            planned.append(Damage(name, kind, key, REMOVALS[(place + place // len(by_kind)) % len(REMOVALS)]))
        else:
            data = open_store(layout.run_url(root, name)).read(key)
            planned.append(_flip(Damage(name, kind, key, ""), data, chance))
    return planned


def kind_of(key: str) -> str:
    """Return the kind of an object: its folder, and which of the kinds of objects in the folder it is."""
    folder, _, name = key.partition("/")
    if name.endswith(layout.MANIFEST):
        return f"{folder}: manifests"
    if name.endswith(deltas.SUFFIX):
        return f"{folder}: differences"
    return f"{folder}: records" if folder == "compactions" and name.endswith(".json") else folder


def _flip(damage: Damage, data: bytes, chance: random.Random) -> Damage:
    parts = parquet_parts(data) if damage.key.endswith(".parquet") else {"": [(0, len(data))]}
    part = chance.choice(sorted(parts))
    sizes = [end - start for start, end in parts[part]]
    start, end = chance.choices(parts[part], sizes)[0]
    offset = chance.randrange(start, end)
    old = data[offset]
    alike = next((it for it in ALIKE if old in it), b"") if damage.key.endswith(".json") else b""
    how = chance.choice(FLIPS if alike else FLIPS[:2])
    others = {"bit": [old ^ 1 << bit for bit in range(8)], "byte": range(256), "character": alike}[how]
    new = chance.choice([byte for byte in others if byte != old])
    return replace(damage, how=how, part=part, offset=offset, old=old, new=new)


def parquet_parts(data: bytes) -> dict[str, list[tuple[int, int]]]:
    """Return the byte ranges of each part of a Parquet object. Any other object is one part without a name."""
    if data[-4:] != b"PAR1":
        return {"": [(0, len(data))]}
    metadata, size = pq.read_metadata(pa.BufferReader(data)), len(data)
    parts = {
        "magic": [(0, 4), (size - 4, size)],
        "length": [(size - 8, size - 4)],
        "footer": [(size - 8 - int.from_bytes(data[-8:-4], "little"), size - 8)],
    }
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            at = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
            end = at + column.total_compressed_size
            while at < end:
                page, header = _read_struct(data, at)
                parts.setdefault("page headers", []).append((at, page))
                at = page + header[3]  # compressed_page_size
                if at > page:
                    parts.setdefault("pages", []).append((page, at))
    return parts


def _read_struct(data: bytes, at: int) -> tuple[int, dict[int, int]]:
    """Return where a struct of Thrift's compact protocol ends, and its integers by field. It must not have lists; page
    headers have none."""
    field, integers = 0, dict[int, int]()
    while head := data[at]:
        at, kind = at + 1, head & 15
        if head >> 4:
            field += head >> 4
        else:
            at, field = _read_integer(data, at)
        if kind in (4, 5, 6):
            at, integers[field] = _read_integer(data, at)
        elif kind == 8:  # text or bytes; their length is not zigzag-encoded
            at, length = _read_varint(data, at)
            at += length
        elif kind == 12:
            at, _ = _read_struct(data, at)
        else:
            at += {1: 0, 2: 0, 3: 1, 7: 8}[kind]
    return at + 1, integers


def _read_integer(data: bytes, at: int) -> tuple[int, int]:
    at, value = _read_varint(data, at)
    return at, (value >> 1) ^ -(value & 1)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return at, value
