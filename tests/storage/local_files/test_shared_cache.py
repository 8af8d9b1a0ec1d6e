"""Copies shared by the processes of a machine: made once, and never removed while in use."""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.harness.servers import Server
from storage.local_files.shared_cache import cache_folder, shared_copy
from storage.objects import manifest_folders
from storage.objects.open_store import open_store
from tba.errors import DeadlinePassed, Missing, StorageError
from tests.conftest import s3_root

pytestmark = pytest.mark.usefixtures("own_cache")


def whole(copy: Path) -> bool:
    return (copy / "data").is_file() and (copy / "data").read_bytes() == b"good"


def make(copy: Path) -> None:
    copy.mkdir()
    (copy / "data").write_bytes(b"good")


def ask(name: str, *, make: Callable[[Path], object] = make, deadline: float = 60.0) -> Path:
    return shared_copy("things", name, whole=whole, make=make, keep=2, deadline=deadline)


def test_a_copy_is_made_once_and_made_again_when_it_is_damaged():
    made: list[Path] = []

    def count(copy: Path) -> None:
        made.append(copy)
        make(copy)

    copy = ask("aa1", make=count)
    assert (ask("aa1", make=count), len(made)) == (copy, 1)
    (copy / "data").write_bytes(b"rot")
    assert (ask("aa1", make=count), len(made)) == (copy, 2)
    assert whole(copy)
    assert [path.name for path in copy.iterdir()] == ["data"]


def test_of_many_that_ask_at_once_one_makes_it():
    made: list[Path] = []

    def count(copy: Path) -> None:
        made.append(copy)
        make(copy)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: ask("aa1", make=count), range(16)))) == 1
    assert len(made) == 1


def test_a_copy_that_could_not_be_made_leaves_nothing(own_cache: Path):
    def fail(copy: Path) -> None:
        make(copy)
        raise Missing("it was removed while it was read")

    with pytest.raises(Missing):
        ask("aa1", make=fail)
    assert not list(own_cache.rglob("data"))
    assert whole(ask("aa1"))


def test_what_a_killed_process_left_is_swept_up_by_the_next_that_asks(own_cache: Path):
    for name in ("aa1", "bb2"):
        (cache_folder("things") / f".{name}.part").mkdir()
        (own_cache / "things" / f".{name}.part" / "data").write_bytes(b"half")
    ask("aa1")
    assert [path.parent.name for path in own_cache.rglob("data")] == ["aa1"]


def test_what_another_process_uses_is_kept_until_it_ends(own_cache: Path):
    user = (
        "import sys\n"
        "from tests.storage.local_files.test_shared_cache import ask\n"
        "ask('aa1'); print('has it', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", user], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdin
        process.stdout.readline()
        os.utime(own_cache / "things" / "aa1", (0, 0))
        for name in ("bb1", "cc1", "dd1", "ee1"):
            ask(name)
        assert sorted(path.name for path in (own_cache / "things").glob("[!.]*")) == ["aa1", "cc1", "dd1", "ee1"]
        process.stdin.close()
        process.wait()
    ask("ff1")
    assert sorted(path.name for path in (own_cache / "things").glob("[!.]*")) == ["dd1", "ee1", "ff1"]
    assert sorted(path.name for path in (own_cache / "things").glob(".*.used")) == [
        ".dd1.used",
        ".ee1.used",
        ".ff1.used",
    ]


def test_the_three_copies_that_were_given_last_are_kept_whatever_others_are_asked_for(own_cache: Path):
    """A copy in use survives while two others are made. A new request puts a copy among the last ones again."""

    def given() -> list[str]:
        return sorted(path.name for path in (own_cache / "things").glob("[!.]*"))

    for name in ("aa1", "bb1", "cc1", "aa1", "dd1"):
        shared_copy("things", name, whole=whole, make=make, keep=1)
    assert given() == ["aa1", "cc1", "dd1"]
    shared_copy("things", "ee1", whole=whole, make=make, keep=1)
    assert given() == ["aa1", "dd1", "ee1"]


def test_a_wait_for_another_process_has_a_deadline_and_says_for_what():
    with (cache_folder("things") / ".aa.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DeadlinePassed, match=r"waited 0\.2 s .*things/aa1"):
            ask("aa1", deadline=0.2)
        assert whole(ask("bb1"))
    assert whole(ask("aa1"))


def test_what_the_disk_refuses_names_the_copy(own_cache: Path):
    (cache_folder("things") / ".aa1.part").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="things/aa1"):
        ask("aa1")


def test_processes_that_load_versions_at_the_same_time_share_them(
    moto: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Four roles of a host at ten syncs, in a cache that keeps fewer versions than there are roles."""
    root = s3_root(moto, monkeypatch)
    store = open_store(root)
    for number in range(10):
        source = tmp_path / str(number)
        source.mkdir()
        for name in ("a", "b"):
            (source / name).write_bytes(b"%d" % number * 100_000)
        manifest_folders.publish(store, f"versions/{number:06d}-a0001/", source, {})
    role = (
        "import sys, time\n"
        "from storage.objects import manifest_folders\n"
        "from storage.objects.open_store import open_store\n"
        "store, fetched = open_store(sys.argv[1]), []\n"
        "fetch, store.download = store.download, lambda *a: (fetched.append(a), fetch(*a))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for number in range(10):\n"
        "    copy = manifest_folders.local_copy(store, f'versions/{number:06d}-a0001/', keep=2)\n"
        "    for _ in range(5):\n"
        "        assert {p.read_bytes() for p in copy.iterdir()} == {b'%d' % number * 100_000}\n"
        "        time.sleep(0.005)\n"
        "print(len(fetched))\n"
    )
    command = [sys.executable, "-c", role, root]
    roles = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
        for _ in range(4)
    ]
    for process in roles:
        assert process.stdout and process.stdout.readline() == "ready\n"
    outputs: list[str] = ["failed"] * 4

    def finish(place: int) -> None:
        outputs[place] = roles[place].communicate("go\n")[0]

    threads = [threading.Thread(target=finish, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.returncode for process in roles] == [0] * 4
    # A role that is two versions behind the others may find its version gone, and fetch it again.
    assert 20 <= sum(map(int, outputs)) < 40
