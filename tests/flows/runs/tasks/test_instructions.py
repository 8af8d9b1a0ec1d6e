"""Instructions with whole roles on real storage, evaluated on published prompts."""

import json

import pytest

from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create
from storage.maintenance.check import check
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from tba.tasks.instructions.task import PACKAGES
from tests.support.flows.live_roles import rows, run_all, settings
from tests.support.laptop import needs

pytestmark = needs(*PACKAGES)
KINDS = ["punctuation:no_comma", "length_constraints:number_words"]
PUBLISHED = [
    {"key": 3, "prompt": "Write words.", "instruction_id_list": ["format:newline"], "kwargs": [{}]},
    {
        "key": 4,
        "prompt": "Write hashtags.",
        "instruction_id_list": ["keywords:letter_frequency"],
        "kwargs": [{"letter": "#", "let_frequency": 4, "let_relation": "at least"}],  # the checker knows letters only
    },
    {"key": 5, "prompt": "No commas.", "instruction_id_list": [KINDS[0]], "kwargs": [{}]},
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("root")
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in PUBLISHED))
    options = {"kinds": KINDS, "constraints": [1, 2], "train_prompts": 40, "credit": "partial", "unfinished": "check"}
    changes = {
        "task.name": "instructions", "task.test": str(folder / "rows.jsonl"), "training.steps": 4, "sync.lag": 1,
        "task.options": {**options, "uncheckable": "leave-out"}, "search.max_prompt_tokens": 300,
        "search.max_response_tokens": 16,
    }  # fmt: skip
    run = create.start(settings(tiny_folder(folder / "policy"), **changes), str(folder), "instructions")
    run_all(run)
    return run


def test_a_run_ends_with_every_step_and_the_measures_of_the_task(finished: Run):
    assert rows(finished, "select count(*), max(step) from steps") == [(4, 4)]
    assert check(finished).ok
    assert {version.number for version in Evaluations(finished).done()} >= {0, 2}
    measured = rows(finished, "select distinct metric from evaluations where metric like 'sampled_%' order by 1")
    assert measured == [
        (f"sampled_{name}",) for name in ("distinct_right", "instruction_accuracy", "loose_accuracy", "strict_accuracy")
    ]


def test_the_parts_of_a_reward_say_which_constraints_hold(finished: Run):
    query = """
        select list_sort(list_distinct(flatten(list(map_keys(reward_parts))))),
               bool_and(reward = reward_parts['held']), bool_and(reward_parts['strict'] = (reward = 1)::double)
        from trajectories
    """
    assert rows(finished, query) == [(sorted(["constraints", "held", "strict", *KINDS]), True, True)]


def test_prompts_that_cannot_be_checked_are_left_out_and_told(finished: Run):
    found = rows(finished, "select prompt_id, metadata->>'key' from prompts where split = 'test' order by 1")
    assert found == [("test-00000", "3"), ("test-00002", "5")]
    (message,) = rows(finished, "select message from events where kind = 'prompts-left-out'")
    assert "1 of 3 rows of split 'test' made no prompt" in message[0]
