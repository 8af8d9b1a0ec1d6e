"""Reads the files of Weights & Biases."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def stored(path: Path) -> Iterator[Any]:
    """Yield the records of an offline session. They are framed as in LevelDB's log, in blocks of 32 KiB after seven
    bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def history(path: Path) -> list[dict[str, Any]]:
    rows = [record.history for record in stored(path) if record.WhichOneof("record_type") == "history"]
    named = [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in row.item} for row in rows
    ]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in named]
