"""Difficulty of prompts in an earlier run, and the choice of prompts by a condition on it."""

from pathlib import Path

import pytest

import storage
from storage import layout
from storage.log.prompts import write_prompts
from storage.log.trajectories import Trajectories
from storage.queries.difficulty import ask
from storage.runs.run import Run
from tba.errors import ConfigError
from tests.support.builders import make_prompt, make_shard, make_trajectory

REWARDS = {"never": [0.0, 0.0], "half": [0.0, 1.0, 0.5, 1.0], "always": [1.0]}


@pytest.fixture
def earlier(tmp_path: Path) -> Run:
    run = Run.create(str(tmp_path), "earlier", config={}, sampler_sql="", code_version="")
    write_prompts(run, "train", [make_prompt(name, text=f"{name}?") for name in (*REWARDS, "untried")])
    write_prompts(run, "test", [make_prompt("half", text="another")])
    Trajectories(run).append(0, 0, make_shard(REWARDS))
    again = make_trajectory("always", tokens=(7, 8, 2), reward=1.0, round=1)
    Trajectories(run).append(0, 1, [again, make_trajectory("always", tokens=(7, 8, 2), round=1, slot=1)])
    return run


def test_each_prompt_to_train_on_is_told_of_once_also_where_nobody_tried_it(earlier: Run):
    query = """
        select prompt_id, text, tries, distinct_responses, reward_mean, reward_min, reward_max, reward_std, solve_rate,
          length_mean, finished_share
        from difficulty order by tries
    """
    with storage.connect(earlier) as con:
        assert con.execute(query).fetchall() == [
            ("untried", "untried?", 0, 0, *[None] * 7),
            ("never", "never?", 2, 2, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 1.0),
            ("always", "always?", 3, 2, 1.0, 1.0, 1.0, 0.0, 1.0, pytest.approx(10 / 3), 1.0),
            ("half", "half?", 4, 4, 0.625, 0.0, 1.0, pytest.approx(0.171875**0.5), 0.5, 4.0, 1.0),
        ]


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        ("solve_rate > 0 and solve_rate < 1", ["half"]),
        ("reward_mean < 1 -- and not those without any", ["never", "half"]),
        ("reward_mean < 1 or tries = 0", ["never", "half", "untried"]),
        ("prompt_id in (select prompt_id from trajectories where round = 1)", ["always"]),
    ],
)
def test_a_condition_chooses_among_ours_in_their_order(earlier: Run, where: str, chosen: list[str]):
    ours = [make_prompt(name, text=f"{name}?") for name in (*REWARDS, "untried")]
    known = ask(earlier.url, where, needed=1)
    assert [prompt.prompt_id for prompt in known.choose(ours)] == chosen
    assert [prompt.prompt_id for prompt in known.choose(ours[::-1])] == chosen[::-1]
    assert known.unknown(ours) == 0


def test_what_the_earlier_run_does_not_have_is_not_chosen(earlier: Run):
    ours = [make_prompt("half", text="half?"), make_prompt("half 2", text="half?"), make_prompt("never", text="half?")]
    known = ask(earlier.url, "true", needed=1)
    assert known.choose(ours) == ours[:1]
    assert known.unknown(ours) == 2
    assert known.tell(ours).endswith(f"1 of 3 here; 2 are left out that {earlier.url} does not have, by id and text")


def test_a_name_is_one_under_the_default_root(earlier: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TBA_ROOT", earlier.root)
    assert ask("earlier", "true", needed=1) == ask(earlier.url, "true", needed=1)


def test_fewer_prompts_than_are_needed_are_refused(earlier: Run):
    assert len(ask(earlier.url, "tries > 1", needed=3).chosen) == 3
    with pytest.raises(ConfigError, match=r"'tries > 1' holds for 3 of the 4 prompts of .*, and a round asks 4"):
        ask(earlier.url, "tries > 1", needed=4)


@pytest.mark.parametrize("key", [layout.RUN, layout.prompts("train")])
def test_a_run_that_cannot_be_read_is_named(earlier: Run, key: str):
    (Path(earlier.url) / key).write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match=rf"^search.prompts_from: .*{key}"):
        ask(earlier.url, "true", needed=1)
