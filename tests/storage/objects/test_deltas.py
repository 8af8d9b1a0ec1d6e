"""The difference between two files of the same size, and the file made again from it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.objects import deltas
from tba.errors import Damaged

PIECE = 64


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "PIECE_BYTES", PIECE)


def files(folder: Path, base: bytes, file: bytes) -> tuple[Path, Path, Path, Path]:
    (folder / "base").write_bytes(base)
    (folder / "file").write_bytes(file)
    return folder / "base", folder / "file", folder / "difference", folder / "again"


def there_and_back(folder: Path, base: bytes, file: bytes) -> bytes:
    """Make and apply a difference. Return its stored bytes, in the format of docs/storage.md."""
    old, new, difference, again = files(folder, base, file)
    deltas.write(old, new, difference)
    deltas.apply(old, difference, again)
    assert again.read_bytes() == file
    with pa.CompressedInputStream(str(difference), "zstd") as stored:
        assert stored.read() == bytes(a ^ b for a, b in zip(base, file, strict=True))
    return difference.read_bytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_comes_back_whatever_it_and_its_base_are(
    small: None, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    base = data.draw(st.binary(max_size=3 * PIECE))
    other = st.binary(min_size=len(base), max_size=len(base))
    file = data.draw(st.one_of(st.just(base), st.just(bytes(255 - it for it in base)), other))
    there_and_back(tmp_path_factory.mktemp("pair"), base, file)


def test_weights_of_which_few_changed_take_a_small_part_of_their_bytes(tmp_path: Path):
    """The files are larger than one piece, and their size is odd."""
    chance = np.random.default_rng(0)
    base = chance.integers(0, 2**16, 2**21 + 9, dtype=np.uint16)
    file = base ^ (chance.random(len(base)) < 0.01)
    stored = there_and_back(tmp_path, base.tobytes() + b"!", file.astype(np.uint16).tobytes() + b"?")
    assert len(stored) < 0.02 * base.nbytes


@pytest.mark.parametrize("rot", [lambda data: b"no zstd at all", lambda data: data[: len(data) // 2], lambda data: b""])
def test_what_is_no_difference_of_this_size_is_refused(small: None, tmp_path: Path, rot):
    old, new, difference, again = files(tmp_path, bytes(range(200)), bytes(range(1, 201)))
    deltas.write(old, new, difference)
    difference.write_bytes(rot(difference.read_bytes()))
    with pytest.raises(Damaged, match="difference"):
        deltas.apply(old, difference, again)
