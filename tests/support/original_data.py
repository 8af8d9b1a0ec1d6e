"""The original data of tasks, which is not part of the repository."""

import os
from pathlib import Path

import pytest


def original_data(name: str) -> Path:
    """Return a file or folder of original data, such as `gsm8k` or `math500/test.jsonl`. Skip the test if the data is
    not there.

    The data is in the folder that $TBA_TESTS_DATA names. If the variable is not set, the data is in `shared/data` of
    any folder that contains this file."""
    named = os.environ.get("TBA_TESTS_DATA")
    folders = [Path(named)] if named else [parent / "shared" / "data" for parent in Path(__file__).resolve().parents]
    for folder in folders:
        if (path := folder / name).exists():
            return path
    pytest.skip(f"the original data is not here: {named or 'shared/data'}/{name}")
