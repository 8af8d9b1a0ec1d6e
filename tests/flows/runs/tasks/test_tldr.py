"""Summaries from start to end: a tiny policy learns from a tiny reward model on S3, and a gold model measures it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.servers import Server
from benchmarks.harness.tiny_models import EOS, tiny_folder
from flows.planning import create, resolve
from storage.maintenance.check import check
from storage.runs.run import Run
from tba.models.judge import Judge
from tests.conftest import s3_root
from tests.support.flows.live_roles import SMALL, rows, run_all, upload
from tests.support.models.judges import classifier

MEASURES = ("diluted_perplexity", "kl", "perplexity", "win_rate")


def posts(folder: Path, split: str, n: int) -> Path:
    """Write rows like those of the original data, one of them far too long."""
    found = [
        {
            "query": f"SUBREDDIT: r/pens\n\nPOST: I lost {i} {split} pens.\n\nTL;DR:",
            "reference_response": f" {i} pens<|endoftext|>",
            "query_token": [1] * 9,
        }
        for i in range(n)
    ]
    found.append({"query": "And then? " * 99 + "\n\nTL;DR:", "reference_response": " no end<|endoftext|>"})
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, found)))
    return folder / f"{split}.jsonl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tldr")
    tiny_folder(folder / "policy")
    for seed, name in enumerate(("reward", "gold")):
        classifier(folder / name, "decoder", 1, seed=seed, positions=256)
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path, moto: Server, cache: Path) -> Iterator[Run]:
    changes = {
        "model.path": str(folder / "policy"),
        "task.train": str(posts(folder, "train", 20)),
        "task.test": str(posts(folder, "test", 8)),
        "search.searchers": 1,
        "search.max_prompt_tokens": 64,
        "search.max_response_tokens": 24,
        "search.responses_per_prompt": 8,
        "search.top_p": 1.0,
        "training.responses_per_prompt": 8,
        "training.steps": 6,
        "training.learning_rate": 5e-3,
        "evaluation.every": 99,
        "evaluation.samples": 4,
    }
    others = ("objective.", "evaluation.pass_at", "evaluation.solved_at")
    small = {key: value for key, value in SMALL.items() if not key.startswith(others)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TBA_CACHE", str(cache))
        judges = s3_root(moto, patch)
        upload(folder / "reward", f"{judges}/reward")
        options = {"reward_model": f"{judges}/reward", "gold_model": str(folder / "gold"), "device": "cpu"}
        config = resolve.resolve("tldr", {**small, **changes, "task.options": options})
        run = create.start(config, str(folder / "root"), "tldr")
        run_all(run)
        yield run


def test_a_run_leaves_nothing_out_but_posts_that_are_too_long(finished: Run):
    assert check(finished).ok
    assert rows(finished, "select split, count(*) from prompts group by 1 order by 1") == [("test", 8), ("train", 20)]
    assert rows(finished, "select bool_and(prompt like '%TL;DR:') from trajectories") == [(True,)]


def test_rewards_are_the_scores_that_the_reward_model_gives_to_post_summary_and_end(finished: Run, folder: Path):
    found = rows(finished, "select distinct on (prompt, response, finished) prompt, response, finished, reward, "
                           "reward_parts['score'], reward_parts['finished'] from trajectories")  # fmt: skip
    assert {finished for _, _, finished, *_ in found} == {True, False}
    judge = Judge.load("reward", folder / "reward", device="cpu")
    scores = judge.logits([prompt + response + EOS * ended for prompt, response, ended, *_ in found])[:, 0].tolist()
    for (_, _, ended, reward, raw, told), score in zip(found, scores, strict=True):
        assert raw == pytest.approx(score, abs=1e-4)
        assert reward == (raw if ended else -1.0)
        assert told == ended
    assert max(scores) - min(scores) > 0.1


def test_every_evaluation_holds_what_the_task_measures_of_both_sets(finished: Run):
    found = rows(finished, "select version, list(metric order by metric) from evaluations group by 1 order by 1")
    sets = ("greedy", "sampled")
    wanted = sorted([*sets, *(f"{of}_{name}" for of in sets for name in MEASURES)])
    assert found == [(0, wanted), (3, wanted)]


def measured(run: Run, version: int) -> dict[str, float]:
    return dict(rows(run, f"select metric, value from evaluations where version = {version}"))


def test_the_kl_divergence_of_both_sets_is_0_before_training_and_not_after(finished: Run):
    before, after = measured(finished, 0), measured(finished, 3)
    for of in ("greedy", "sampled"):
        assert abs(before[f"{of}_kl"]) < 1e-3
        assert after[f"{of}_kl"] > 0.05


def test_measures_are_in_their_possible_ranges(finished: Run):
    for version in (0, 3):
        found = measured(finished, version)
        for of in ("greedy", "sampled"):
            assert 0 <= found[f"{of}_win_rate"] <= 1
            assert 1 < found[f"{of}_diluted_perplexity"] < found[f"{of}_perplexity"]
        assert (found["greedy_win_rate"] * 8) % 1 == (found["sampled_win_rate"] * 32) % 1 == 0
