import threading
import time

import pytest

from tba.errors import StorageError
from tba.runtime.background import Background


@pytest.fixture
def line():
    line = Background("line")
    yield line
    line.cancel()
    line.close()


def fail() -> None:
    raise StorageError("no store")


def test_jobs_are_done_in_order_and_finish_waits_for_all(line):
    done = []
    for number in range(5):
        line.submit(lambda number=number: done.append(number))
    line.finish()
    assert done == [0, 1, 2, 3, 4] and line.idle()


def test_a_job_that_fails_stops_all_behind_it_also_where_nobody_looked_in_between(line):
    done, gate = [], threading.Event()
    line.submit(gate.wait)
    line.submit(fail)
    gate.set()
    time.sleep(0.05)
    with pytest.raises(StorageError, match="no store"):
        line.submit(lambda: done.append("later"))
    with pytest.raises(StorageError, match="no store"):
        line.check()
    with pytest.raises(StorageError, match="no store"):
        line.finish()
    assert done == []


def test_a_job_behind_a_failing_one_is_never_begun(line):
    done, gate = [], threading.Event()
    line.submit(lambda: (gate.wait(), fail()))
    line.submit(lambda: done.append("behind"))
    gate.set()
    with pytest.raises(StorageError):
        line.finish()
    line.close()
    assert done == []


def test_at_most_one_job_waits_behind_the_one_that_is_being_done(line):
    gate = threading.Event()
    line.submit(gate.wait)
    line.submit(lambda: None)
    assert not line.idle()
    threading.Timer(0.2, gate.set).start()
    began = time.monotonic()
    line.make_room()
    assert time.monotonic() - began > 0.1


def test_what_has_not_begun_can_be_dropped(line):
    done, gate = [], threading.Event()
    line.submit(lambda: (gate.wait(), done.append("begun")))
    line.submit(lambda: done.append("waiting"))
    line.cancel()
    gate.set()
    line.close()
    assert done == ["begun"]
