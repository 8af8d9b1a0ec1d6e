"""Every valid key with any content is stored exactly. Keys, prefixes and URLs that could lead elsewhere are refused."""

import os
import string
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.objects.open_store import open_store
from storage.objects.store import Entry, Store, check_key, check_prefix
from tba.errors import ConfigError, StorageError

only_local = pytest.mark.parametrize("root", ["local"], indirect=True)
# A store is shared by the examples of hypothesis; each example uses its own keys.
examples = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

parts = st.text(string.ascii_letters + string.digits + "_=.@+-", min_size=1, max_size=20).filter(
    lambda part: part[0] in string.ascii_letters + string.digits + "_"
)
keys = st.lists(parts, min_size=1, max_size=4).map("/".join)

NOT_KEYS = [
    *("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a/..", ".hidden", "a/.hidden"),
    *("a\\b", "a b", "a\nb", "a\n", "a\x00b", "ä", "a:b", "~", "*", "a" * 201, "/".join(["abcdefgh"] * 100)),
]


@pytest.mark.parametrize("key", NOT_KEYS)
@only_local
def test_a_key_that_could_lead_elsewhere_is_refused_everywhere(store: Store, key: str, tmp_path: Path):
    for use in (
        lambda: check_key(key),
        lambda: store.create(key, b""),
        lambda: store.read(key),
        lambda: store.read_many([key]),
        lambda: store.read_range(key, 0, 1),
        lambda: store.exists(key),
        lambda: store.upload(tmp_path, key),
        lambda: store.download(key, tmp_path / "x"),
        lambda: store.delete(key),
        lambda: store.read_tagged(key),
        lambda: store.replace(key, b"", tag=None),
        lambda: store.local_path(key),
    ):
        with pytest.raises(StorageError, match="not a key"):
            use()


@given(key=st.text(max_size=40))
def test_a_key_that_is_accepted_stays_inside_the_folder(key: str):
    try:
        check_key(key)
    except StorageError:
        return
    folder = Path("/store")
    assert Path(os.path.normpath(folder / key)) == folder / key
    assert (folder / key).is_relative_to(folder)
    assert all(part and not part.startswith(".") for part in key.split("/"))


@given(key=keys, cut=st.integers(0, 80))
def test_every_start_of_a_key_is_a_prefix(key: str, cut: int):
    assert check_prefix(key[:cut]) == key[:cut]


@pytest.mark.parametrize("prefix", ["/", "..", "../", "a/../", "a//", "/a", ".", "a/."])
@only_local
def test_a_prefix_that_could_lead_elsewhere_is_refused(store: Store, prefix: str):
    for look in (store.list, store.folders):
        with pytest.raises(StorageError, match="not a key"):
            look(prefix)


@pytest.mark.parametrize("url", ["", "gs://bucket/x", "http://host/x", "s3://", "s3://a b/c", "s3:///x"])
def test_a_url_that_is_no_store_is_refused(url: str):
    with pytest.raises(ConfigError):
        open_store(url)


def test_a_path_and_a_file_url_are_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("here").url == open_store(f"file://{tmp_path}/here").url == str(tmp_path / "here")


@examples
@given(key=keys)
def test_every_valid_key_is_a_name_of_its_own(store: Store, key: str):
    key = f"{os.urandom(8).hex()}/{key}"
    store.create(key, key.encode())
    assert store.read(key) == key.encode()
    assert [entry.key for entry in store.list(key)] == [key]


@examples
@given(data=st.binary(max_size=3000))
def test_a_round_trip_is_exact(store: Store, data: bytes):
    key = f"round/{os.urandom(8).hex()}"
    store.create(key, data)
    assert store.read(key) == data
    assert store.list("round/", after=key[:-1])[0] == Entry(key, len(data))
    store.delete(key)
