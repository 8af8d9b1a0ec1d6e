"""The simulation of a fleet stores real shards, admits them, and measures each line once."""

from pathlib import Path

import pytest

from benchmarks import fleet
from benchmarks.harness import rows


def test_a_small_fleet_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arguments = ["--searchers", "3", "--stored", "7", "--pace", "0.3", "--seconds", "2", "--sync", "0.2"]
    arguments += ["--rows", "8", "--out", str(tmp_path / "fleet.csv"), "--work", str(tmp_path)]
    fleet.main(arguments)
    [line] = rows.read(tmp_path / "fleet.csv", fleet.Line)
    assert (line.searchers, line.stored, line.rows) == (3, 7, 8)
    assert 0 < line.per_second <= 3 * 8 / 0.3 * 1.5
    assert line.of_linear == pytest.approx(line.per_second / (3 * 8 / 0.3), abs=1e-3)
    assert line.arrived > 0 and line.record_kb > 0 and line.syncs > 0
    monkeypatch.setattr(fleet, "measure", lambda *_: pytest.fail("this line was measured before"))
    fleet.main(arguments)
    assert len(rows.read(tmp_path / "fleet.csv", fleet.Line)) == 1
