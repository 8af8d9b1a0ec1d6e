"""`tba export --query`: rows as a dataset, and the pairs and demonstrations that macros make."""

import random
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

import storage
from flows.cli import main
from storage.log.trajectories import Trajectories
from storage.runs.run import Run
from tests.support.builders import make_trajectory
from tests.support.storage.synthetic import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("root")))


def rows_of(run: Run) -> list[dict[str, object]]:
    with storage.connect(run) as con:
        return con.sql("from trajectories order by trajectory_id").to_arrow_table().to_pylist()


def exported(run: Run, query: str, folder: Path) -> list[dict[str, object]]:
    """Export a query, and return the rows of the file that the card names."""
    assert main(["export", run.url, "--query", query, str(folder)]) == 0
    _, front, _ = (folder / "README.md").read_text().split("---\n", 2)
    [only] = yaml.safe_load(front)["configs"]
    [split] = only["data_files"]
    assert split["split"] == "train"
    return pq.read_table(folder / split["path"]).to_pylist()


def test_a_dataset_has_the_rows_of_its_query_and_a_card_that_names_it(run: Run, tmp_path: Path):
    query = "select prompt, response, reward from trajectories order by trajectory_id"
    found = exported(run, query, tmp_path / "all")
    assert found == [{name: row[name] for name in ("prompt", "response", "reward")} for row in rows_of(run)]
    card = (tmp_path / "all" / "README.md").read_text()
    assert f"{len(found)} rows of the run `first`: task quickstart" in card and query in card
    assert "| reward | double |" in card
    assert str(tmp_path) not in card and run.url not in card


def test_all_of_a_view_is_loaded_by_datasets(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    for query in (
        "from trajectories order by trajectory_id",
        "from steps order by step",
        "from draws order by step, slot, trajectory_id",
    ):
        folder = tmp_path / query.split()[1]
        exported(run, query, folder)
        loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"), split="train")
        with storage.connect(run) as con:
            found = con.sql(query).to_arrow_table().to_pylist()
        assert len(loaded) == len(found) > 0
        same = [name for name in found[0] if not isinstance(found[0][name], list | float)]
        assert [[row[name] for name in same] for row in loaded] == [[row[name] for name in same] for row in found]


def test_maps_are_lists_of_keys_and_values(run: Run, tmp_path: Path):
    found = exported(run, "select map {'a': 1.5, 'b': 2.5} as \"the map\", [1, 2] as l", tmp_path / "maps")
    assert found == [{"the map": [{"key": "a", "value": 1.5}, {"key": "b", "value": 2.5}], "l": [1, 2]}]


def test_rows_come_in_groups_that_fit_into_memory_and_in_their_order(run: Run, tmp_path: Path):
    exported(run, "select i, repeat('x', 40000) as long from range(5000) t(i)", tmp_path / "long")
    file = pq.ParquetFile(tmp_path / "long" / "data" / "train-00000-of-00001.parquet")
    assert file.metadata.num_row_groups == 3
    assert file.read(["i"])["i"].to_pylist() == list(range(5000))


def test_a_card_shows_any_names_and_queries_as_they_are(run: Run, tmp_path: Path):
    query = 'select 1 as "a|b" -- ``` and {rows}\n'
    exported(run, query, tmp_path / "résumé")
    card = (tmp_path / "résumé" / "README.md").read_text(encoding="utf-8")
    assert "# résumé\n" in card and f"````sql\n{query.strip()}\n````" in card and "| a\\|b | integer |" in card


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run with two rounds of groups of eight. They have few texts, some with several rewards or cut off."""
    config = {"task": {"name": "quickstart"}}
    run = Run.create(str(tmp_path_factory.mktemp("root")), "many", config=config, sampler_sql="", code_version="t")
    chance = random.Random(0)
    for seq in range(2):
        Trajectories(run).append(
            0,
            seq,
            [
                make_trajectory(
                    f"train/{slot // 8}",
                    tokens=(slot, seq),
                    reward=chance.choice([0.0, 0.5, 1.0]),
                    round=seq,
                    slot=slot,
                    response=chance.choice("abc"),
                    finished=chance.random() < 0.7,
                    version=chance.randrange(3),
                )
                for slot in range(8 * 12)
            ],
        )
    return run


def test_pairs_are_the_best_whole_text_and_the_worst_of_each_group_that_are_far_enough_apart(
    answered: Run, tmp_path: Path
):
    groups: defaultdict[str, defaultdict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows_of(answered):
        groups[str(row["group_id"])][str(row["response"])].append(row)
    expected: dict[str, tuple[float, float]] = {}
    for name, texts in groups.items():
        means = {text: fmean(it["reward"] for it in rows) for text, rows in texts.items()}
        whole = [means[text] for text, rows in texts.items() if any(it["finished"] for it in rows)]
        if whole and max(whole) - min(means.values()) >= 0.25:
            expected[name] = (max(whole), min(means.values()))
    assert 8 < len(expected) < len(groups) == 24
    found = exported(answered, "from preferences(0.25)", tmp_path / "pairs")
    assert [pair["group_id"] for pair in found] == sorted(expected)
    for pair in found:
        texts = groups[str(pair["group_id"])]
        chosen, rejected = (texts[str(pair[name])] for name in ("chosen", "rejected"))
        assert pair["chosen"] != pair["rejected"] and any(it["finished"] for it in chosen)
        rewards = tuple(fmean(it["reward"] for it in rows) for rows in (chosen, rejected))
        assert (pair["chosen_reward"], pair["rejected_reward"]) == rewards == expected[str(pair["group_id"])]
        everything = [it for rows in texts.values() for it in rows]
        assert pair["version_start"] == min(it["version_start"] for it in everything)
        assert {it["prompt_id"] for it in everything} == {pair["prompt_id"]}
    with storage.connect(answered) as con:
        assert all(chosen > rejected for chosen, rejected in con.sql(
            "select chosen_reward, rejected_reward from preferences(0)"
        ).fetchall()), "equals are none"  # fmt: skip
        assert not con.sql("from preferences(1.5)").fetchall()


def test_demonstrations_are_what_was_rewarded_enough_each_once(run: Run):
    good = [row for row in rows_of(run) if row["reward"] == 1.0 and row["finished"]]
    with storage.connect(run) as con:
        found = con.sql("select prompt_id, response, copies, version_start from demonstrations(1)").fetchall()
    assert {(prompt, response) for prompt, response, *_ in found} == {(it["prompt_id"], it["response"]) for it in good}
    assert len({it[:2] for it in found}) == len(found) and sum(copies for *_, copies, _ in found) == len(good)
    for prompt, response, _, first in found:
        same = [it["version_start"] for it in good if (it["prompt_id"], it["response"]) == (prompt, response)]
        assert first == min(map(int, map(str, same)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--query", "select * from nothing"], "nothing"),
        (["--query", "from trajectories where false"], "--query: there are no such rows"),
        (["--query", "select 1 as a, 2 as a"], "names more than one column"),
        (["--query", "create table t (i int)"], "--query: the last statement has no rows"),
        (["--query", "select interval 1 day as i"], "--query: 'i' is of type INTERVAL, which no dataset has"),
        (["--query", "select [map {1: 2}] as m"], "--query: 'm' is of type MAP(INTEGER, INTEGER)[], which no dataset"),
        (["--query", "from steps", "--adapter"], "--adapter does not apply to --query"),
        (["--query", "from steps", "--attempt", "1"], "--attempt does not apply to --query"),
    ],
)
def test_what_is_no_dataset_is_refused_and_leaves_nothing(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
):
    assert main(["export", run.url, *arguments, str(tmp_path / "new" / "out")]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_a_new_folder_here_is_refused_before_anything_is_written(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name, says in (
        ("s3://bucket/x", "DIR: must be a folder on this machine"),
        (".", "DIR: . is a mount point"),
        ("/", "DIR: / is a mount point"),
    ):
        assert main(["export", run.url, "--query", "from steps", name]) == 2
        assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
