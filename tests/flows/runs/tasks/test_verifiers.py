"""An environment of the library `verifiers` with a tool, with whole roles on real storage."""

import re
from itertools import groupby
from pathlib import Path

import pytest
import torch

pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed")

from benchmarks.harness.tiny_models import tiny_llama
from flows.commands import audit
from flows.planning import create
from storage.log.prompts import read_prompts
from storage.maintenance.check import check
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from tba.config import parse
from tba.models.policy import Policy
from tba.tasks.registry import get_task
from tests.support.flows.live_roles import rows, run_all, settings
from tests.support.flows.own_turns import OWN
from tests.support.tba.verifiers_examples import CALLS, CHARACTERS, calling_tokenizer, response_of

ENVIRONMENT_TURNS = "len(list_filter(list_zip(loss_mask, loss_mask[2:]), lambda pair: pair[1] and not pair[2]))"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run whose policy sometimes calls the tool, because each call is one token."""
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    model = tiny_llama(characters=CHARACTERS + "x" * len(CALLS))
    Policy(model, calling_tokenizer(), torch.device("cpu")).snapshot().save(folder)
    task = {"environment": "tests.support.tba.environments", "arguments": {"kind": "tools", "max_turns": 3}}
    changes = {
        "task.name": "verifiers", "task.options": task, "training.steps": 4, "search.max_prompt_tokens": 32,
        "search.max_response_tokens": 48, "search.top_p": 1.0, "search.temperature": 1.0,
        "training.prompts_per_step": 3, "search.prompts_per_round": 6, "sync.lag": 1,
    }  # fmt: skip
    run = create.start(settings(folder, **changes), str(tmp_path_factory.mktemp("root")), "tools")
    run_all(run)
    return run


def test_a_run_ends_with_every_step_and_every_score(finished: Run):
    assert rows(finished, "select count(*), max(step) from steps") == [(4, 4)]
    assert {version.number for version in Evaluations(finished).done()} >= {0, 2}
    assert check(finished).ok
    prompts = rows(finished, "select text, answer from prompts where split = 'train' order by prompt_id")
    assert prompts[0] == ("T:flip \nQ:0\nA:", "0") and len(prompts) == 6


def test_what_the_tool_said_and_the_template_around_it_is_masked_and_nothing_else_is(finished: Run):
    tokenizer, seen = calling_tokenizer(), set[int]()
    for tokens, mask in rows(
        finished, "select response_tokens, loss_mask from trajectories where loss_mask is not null"
    ):
        said = [token for token, own in zip(tokens, mask, strict=True) if own]
        heard = [token for token, own in zip(tokens, mask, strict=True) if not own]
        assert re.fullmatch(r"(\n(R:[01]+\n)+A:)+", tokenizer.decode(heard))
        seen.add(sum(text in CALLS for text in tokenizer.convert_ids_to_tokens(said)))
    assert len(seen) > 2


def test_the_environment_answers_once_less_than_the_library_counts_turns(finished: Run):
    found = rows(
        finished,
        f"select coalesce({ENVIRONMENT_TURNS}, 0) + 1, reward_parts['num_turns'], count(*) "
        "from trajectories group by all order by all",
    )
    assert [turns for turns, _, _ in found] == [1, 2, 3]
    assert all(turns == counted for turns, counted, _ in found)


def test_the_library_counts_the_calls_that_the_policy_wrote(finished: Run):
    for response, calls in rows(finished, "select response, reward_parts['flip_calls'] from trajectories"):
        assert calls == response.count("<tool_call>")


def test_only_what_the_policy_wrote_has_log_probabilities_and_is_counted_by_steps(finished: Run):
    for column in ("behaviour_logps", "ref_logps"):
        wrong = f"[1 for pair in list_zip({column}, loss_mask) if (pair[1] = 0) = pair[2]]"
        assert rows(finished, f"select sum(len({wrong})) from trajectories where loss_mask is not null") == [(0,)]
    own = f"coalesce({OWN}, length) - finished::int"
    counted = rows(
        finished,
        f"select any_value(tokens), sum({own}), sum(length - finished::int) "
        "from draws d join trajectories using (trajectory_id) join steps s on s.step = d.step group by d.step",
    )
    assert len(counted) == 4 and all(tokens == own < every for tokens, own, every in counted)


def test_a_step_can_be_taken_again(finished: Run):
    found = audit.audit(finished, 4, tolerance=0.01)
    assert [it for it in (*found.compared, *found.rows) if not it.agrees] == []


def test_every_round_scored_again_from_the_stored_prompt_gets_the_same_rewards(finished: Run):
    """A new task scores the stored responses. Their turns are the stored tokens, divided where the mask changes."""
    task, tokenizer = get_task(parse(finished.config).task), calling_tokenizer()
    prompts = {prompt.prompt_id: prompt for prompt in read_prompts(finished, "train")}
    stored = rows(finished, "select prompt_id, response_tokens, loss_mask, finished, reward from trajectories")
    asked = []
    for prompt_id, tokens, mask, ended, _ in stored:
        parts = groupby(zip(tokens, mask or [True] * len(tokens), strict=True), key=lambda pair: pair[1])
        turns = [tokenizer.decode([token for token, _ in part], skip_special_tokens=True) for _, part in parts]
        asked.append((prompts[prompt_id], response_of(*turns, finished=ended)))
    assert [it.value for it in task.rewards(asked)] == [reward for *_, reward in stored]


def test_the_query_of_the_documentation_shows_rewards_and_turns_by_version(finished: Run):
    section = (Path(__file__).parents[4] / "docs/tasks.md").read_text().partition("## Environments of verifiers")[2]
    found = rows(finished, section.partition("```sql\n")[2].partition("```")[0])
    assert len(found) > 1 and all(turns > 1 and calls > 0 for _, turns, calls in found)
