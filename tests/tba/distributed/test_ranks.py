"""A learner that is spread over several processes, compared with a learner in one process. Gradients in double
precision, so that what differs by more than the order of a sum is seen."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, get_args

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import (
    EOS_ID,
    PAD_ID,
    tiny_folder,
    tiny_llama,
    tiny_policy,
    tiny_tokenizer,
    trajectory,
)
from tba.batches.batching import Batch, collate, groups_at
from tba.config import Config, OptimizerName
from tba.distributed.ranks import ALONE, Ranks, join, leave, open_port, rows_of, shares
from tba.distributed.sharding import save_without_weights, without_weights
from tba.errors import Damaged, RunFailed
from tba.models.policy import Policy
from tba.train.leader import Followers, LeadingLearner, batch_of, batch_values
from tba.train.learner import Learner
from tba.train.training_state import TrainingState
from tests.support.models.families import FAMILIES, family_folder
from tests.support.sampled_parameters import sampled
from tests.support.tba.a_rank import precise_policy, sharded
from tests.support.tba.trainers import settings

SIZES = [2, 4]
P, K = 5, 3
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
OBJECTIVES = [
    {
        "objective__name": "trajectory-balance",
        "training__groups_per_micro_batch": 1,
        "training__checkpoint_activations": True,
    },
    {"objective__name": "tba-prime", "training__groups_per_micro_batch": 5, "training__clip_norm": 0.1},
    {"objective__name": "trajectory-balance", "objective__reference_reset": 2, "objective__reset_optimizer": True},
    {
        "objective__name": "kimi",
        "objective__reference_decay": 0.5,
        "training__groups_per_micro_batch": None,
        "training__tokens_per_micro_batch": 30,  # fewer than some groups have
    },
    {"objective__name": "grpo", "training__groups_per_micro_batch": 2, "objective__normaliser": "tokens"},
]


def config_of(**changes: Any) -> Config:
    return settings(
        **{
            "training__prompts_per_step": P,
            "training__responses_per_prompt": K,
            "search__initial_fill": P * K,
            **changes,
        }
    )


def batch_at(step: int) -> Batch:
    """Return a batch of groups of very different lengths."""
    chance = Random(step)
    rows = [
        trajectory(
            prompt_id=f"p{group}",
            prompt_tokens=(5, 6, *range(10, 10 + group)),
            response_tokens=(*(chance.randrange(10, 60) for _ in range(chance.randrange(1, 4 + 6 * group))), EOS_ID),
            reward=float(chance.random() < 0.5),
        )
        for group in range(P)
        for _ in range(K)
    ]
    same = [replace(row, ref_logps=(-1.5,) * row.length, behaviour_logps=(-1.0,) * row.length) for row in rows]
    return collate(fetched_of(same), responses_per_prompt=K, pad_id=PAD_ID, include_eos=True, by_token=True)


@pytest.fixture(scope="module", params=sampled(SIZES, kept=[2]))
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return a function that makes learners over several processes. This process is the first rank; the other ranks
    follow the newest learner."""
    size, scratch = request.param, tmp_path_factory.mktemp("ranks")
    os.environ["GLOO_SOCKET_IFNAME"] = "of-a-cluster"
    store = open_port(size)
    ranks: list[Ranks] = []

    with Followers([sys.executable, "-m", "tests.support.tba.a_rank", str(size)], size) as followers:

        def make(config: Config, policy: Policy, checkpoint: Path | None = None) -> LeadingLearner:
            save_without_weights(policy, scratch)

            def begin() -> LeadingLearner:
                if not ranks:
                    ranks.append(join(0, size, store))
                of = sharded(str(scratch), ranks[0], config, policy.model)
                return LeadingLearner(config, of, ranks[0], followers=followers, scratch=scratch, checkpoint=checkpoint)

            said = [store.port, config.to_dict(), str(scratch)]
            learner: LeadingLearner = followers.together("begin", begin, said)[0]
            if checkpoint:
                learner.restore(TrainingState.load(checkpoint, ranks[0]))
            return learner

        yield make
        leave()


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return dict(learner.snapshot().model.named_parameters())


def test_no_rank_listens_to_a_network(many):
    """Traffic between ranks is neither encrypted nor authenticated."""
    many(config_of(), precise_policy(tied=True))
    ours = [psutil.Process(), *psutil.Process().children()]
    heard = {it.laddr.ip for process in ours for it in process.net_connections("inet") if it.status == "LISTEN"}
    assert heard == {"127.0.0.1"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("changes", OBJECTIVES, ids=lambda it: "-".join(map(str, it.values()))[:40])
def test_steps_do_not_depend_on_the_number_of_ranks(many, changes, tied):
    config = config_of(**changes)
    alone, spread = Learner(config, precise_policy(tied=tied)), many(config, precise_policy(tied=tied))
    for step in range(1, 4):
        expected, found = alone.learn(step, batch_at(step)), spread.learn(step, batch_at(step))
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-6, abs=1e-7)
        assert [(it.slot, it.position) for it in found.outcomes] == [(it.slot, it.position) for it in expected.outcomes]
        for name in ("advantage", "logp", "ref_logp"):
            values = [[getattr(it, name) for it in learned.outcomes] for learned in (found, expected)]
            assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(weights_of(spread), weights_of(alone), **CLOSE)


def test_ranks_skip_a_step_alike_that_one_of_them_finds_not_finite(many):
    config = config_of(objective__reference_decay=0.5)
    alone, spread = Learner(config, precise_policy(tied=True)), many(config, precise_policy(tied=True))
    damaged = replace(batch_at(1), reward_B=batch_at(1).reward_B.clone())
    damaged.reward_B[-1] = torch.inf  # of one rank's group
    for step, batch in enumerate([batch_at(1), damaged, batch_at(2)], start=1):
        expected, found = alone.learn(step, batch), spread.learn(step, batch)
        assert bool(expected.skipped) == bool(found.skipped) == (step == 2)
        assert len(found.outcomes) == P * K
    torch.testing.assert_close(weights_of(spread), weights_of(alone), **CLOSE)


def test_ranks_compute_what_a_loaded_policy_does_where_attention_is_capped(many, tmp_path):
    folder = family_folder(tmp_path, FAMILIES["gemma2"])

    def loaded() -> Policy:
        policy = Policy.load(folder, device="cpu")
        return replace(policy, model=policy.model.double())  # pyright: ignore

    alone, spread = Learner(config_of(), loaded()), many(config_of(), loaded())
    expected, found = (it.learn(1, batch_at(1)).metrics["grad_norm"] for it in (alone, spread))
    assert found == pytest.approx(expected, rel=1e-6)


def test_every_rank_has_the_code_of_a_model_that_brings_its_own(tmp_path):
    folder = tiny_folder(tmp_path / "policy")
    for name, code in OWN.items():
        (folder / name).write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": OWN_CLASSES}
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "told").mkdir()
    save_without_weights(Policy.load(folder, device="cpu", trust_remote_code=True), tmp_path / "told")
    found = without_weights(tmp_path / "told", dtype=torch.float32, trust_remote_code=True)
    assert type(found.model).__name__ == "OwnForCausalLM" and all(it.is_meta for it in found.model.parameters())
    assert not any(it.training for it in found.model.modules()), "nothing is dropped"


OWN_CLASSES = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
OWN = {
    "configuration_own.py": """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
""",
    "modeling_own.py": """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
""",
}


def test_ranks_that_compute_in_bfloat16_keep_their_weights_in_float32(many):
    config, policy = config_of(training__compute_dtype="bfloat16", training__learning_rate=1e-6), tiny_policy()
    alone, spread, whole = Learner(config, tiny_policy()), many(config, tiny_policy()), Learner(config_of(), policy)
    found, expected, precise = (it.learn(1, batch_at(1)).metrics["grad_norm"] for it in (spread, alone, whole))
    assert found == pytest.approx(expected, rel=0.05) and found != pytest.approx(precise, rel=1e-6)
    weights = weights_of(spread)
    assert all(it.dtype == torch.float32 for it in weights.values())
    before = {name: it.detach() for name, it in tiny_policy().model.named_parameters()}
    moved = [float((it - before[name]).abs().mean()) for name, it in weights.items()]
    assert all(0 < it < 2e-6 for it in moved)  # too little for bfloat16


def test_what_is_published_is_a_model_as_it_was(many, tmp_path):
    spread = many(config_of(), precise_policy(tied=True))
    snapshot = spread.snapshot()
    assert snapshot.sha256 == precise_policy(tied=True).snapshot().sha256
    snapshot.save(tmp_path)
    loaded = Policy.load(tmp_path, dtype="float32", device="cpu")
    assert loaded.model.get_input_embeddings().weight is loaded.model.get_output_embeddings().weight
    tokens = torch.tensor([[4, 5, 6]])
    expected = precise_policy(tied=True).model(tokens).logits.float()
    torch.testing.assert_close(loaded.model(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_each_rank_holds_its_part_alone(many):
    policy = precise_policy(tied=False)
    spread = many(config_of(), policy)
    assert all(it.is_meta for it in policy.model.parameters())
    spread.learn(1, batch_at(1))
    size, all_of_it = spread.ranks.size, sum(it.numel() for it in weights_of(spread).values())
    held = sum(it.to_local().numel() for it in spread.policy.model.parameters())
    moments = sum(it.numel() for key, it in spread.state(step=1, sync=1).optimizer.items() if "exp_avg" in key)
    assert held <= 1.1 * all_of_it / size and moments == 2 * held


def test_a_checkpoint_goes_on_bit_for_bit_with_as_many_ranks_and_alike_with_others(many, tmp_path):
    config = config_of(objective__reference_decay=0.5)
    spread, alone = many(config, precise_policy(tied=True)), Learner(config, precise_policy(tied=True))
    for step in (1, 2):
        spread.learn(step, batch_at(step))
        alone.learn(step, batch_at(step))
    for learner, name in ((spread, "spread"), (alone, "alone")):
        (tmp_path / name).mkdir()
        learner.state(step=2, sync=1).save(tmp_path / name)
    middle = copied(spread)

    def third_step(learner: Learner) -> dict[str, torch.Tensor]:
        learner.learn(3, batch_at(3))
        return weights_of(learner)

    expected, by_one = third_step(spread), Learner(config, middle())
    by_one.restore(TrainingState.load(tmp_path / "spread"))
    again = third_step(many(config, middle(), tmp_path / "spread"))
    assert all(torch.equal(it, expected[name]) for name, it in again.items())
    from_one = third_step(many(config, middle(), tmp_path / "alone"))
    for found in (from_one, third_step(by_one), third_step(alone)):
        torch.testing.assert_close(found, expected, **CLOSE)
    for path in list((tmp_path / "spread").glob("optimizer-*"))[1:]:
        path.unlink()
    with pytest.raises(Damaged, match="optimizer-0000"):
        TrainingState.load(tmp_path / "spread")


@pytest.mark.parametrize("name", sampled(get_args(OptimizerName)[1:], kept=["adamw-8bit"]))
def test_each_optimizer_steps_with_ranks_as_without_and_goes_on_from_what_any_number_stored(many, tmp_path, name):
    """No 8-bit block spans two rows, so the blocks are the same for any number of ranks."""
    config = config_of(training__optimizer=name, training__learning_rate=1e-2)
    spread, alone = many(config, wide_policy()), Learner(config, wide_policy())
    for step in (1, 2):
        for learner in (spread, alone):
            learner.learn(step, batch_at(step))
    (tmp_path / "spread").mkdir()
    spread.state(step=2, sync=1).save(tmp_path / "spread")
    middle = {key: it.clone() for key, it in weights_of(spread).items()}
    found, expected = TrainingState.load(tmp_path / "spread").optimizer, alone.state(step=2, sync=1).optimizer
    assert found.keys() == expected.keys() and any(key.endswith("_codes") for key in found) == (name == "adamw-8bit")
    for key, it in expected.items():
        differs = (found[key] != it).double().mean() if it.dtype == torch.uint8 else 0  # by the rounding of a sum
        assert found[key].shape == it.shape and differs < 1e-3
    spread.learn(3, batch_at(3))
    policy = wide_policy()
    policy.model.load_state_dict(middle, strict=False)
    again = many(config, policy, tmp_path / "spread")
    again.learn(3, batch_at(3))
    assert all(torch.equal(it, weights_of(spread)[key]) for key, it in weights_of(again).items())
    alone.learn(3, batch_at(3))
    torch.testing.assert_close(weights_of(spread), weights_of(alone), rtol=1e-6, atol=1e-9)


def wide_policy() -> Policy:
    """Return a policy with weights that are large enough for 8-bit moments."""
    return Policy(tiny_llama(width=64).double(), tiny_tokenizer(), torch.device("cpu"))  # pyright: ignore


def copied(learner: Learner) -> Callable[[], Policy]:
    """Return a function that makes copies of the learner's current policy."""
    weights = {name: it.clone() for name, it in weights_of(learner).items()}

    def make() -> Policy:
        policy = precise_policy(tied=True)
        policy.model.load_state_dict(weights, strict=False)
        return policy

    return make


RANK = [sys.executable, "-m", "tests.support.tba.a_rank", "3"]


@pytest.mark.parametrize(
    ("met", "raised", "says"),
    [
        pytest.param("RunFailed", RunFailed, "^no room$", marks=pytest.mark.long),
        ("ValueError", RunFailed, r"^rank 1 of the trainer \(pid \d+\): .*no room"),
    ],
)
def test_what_goes_wrong_at_another_rank_is_told_by_the_first(met, raised, says):
    with Followers(RANK, 2) as followers, pytest.raises(raised, match=says):
        followers.together("begin", lambda: "mine", [0, {"error": met}, ""])


def test_a_rank_that_is_killed_ends_what_the_others_do():
    with Followers(RANK, 3) as followers:
        os.kill(followers.all[1].process.pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match=r"^rank 2 of the trainer \(pid \d+\) has died \(SIGKILL\)$"):
            followers.together("begin", stuck, [0, {}, ""])


def test_a_rank_that_does_not_read_is_killed(monkeypatch):
    monkeypatch.setattr("tba.train.leader.START", 0.5)
    deaf = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with Followers(deaf, 2) as followers, pytest.raises(RunFailed, match=r"has died \(SIGKILL\)$"):
        followers.together("learn", lambda: "mine", numbers=[np.zeros(2**20)])


BREAKS = """
from tba.train.leader import follow
from tba.runtime.messages import take_pipes

class Learner:
    def state(self, **of):
        return self
    def save_optimizer(self, folder):
        raise OSError("no space")

follow(lambda said: Learner(), *take_pipes())
"""


def test_a_rank_that_cannot_store_its_part_says_so_and_ends():
    with Followers([sys.executable, "-c", BREAKS], 2) as followers:
        followers.together("begin", lambda: None)
        with pytest.raises(RunFailed, match=r"^rank 1 of the trainer \(pid \d+\): OSError: no space$"):
            followers.together("state", lambda: None, [1, 1, ""])
            assert followers.all[0].ended.wait(20)
            followers.order("learn")


HANGS = """
import logging, sys, time
from tba.train.leader import Followers
logging.basicConfig()
followers = Followers([sys.executable, "-c", sys.argv[1]], 2, grace=0.1)
time.sleep(1000)
"""
ENDS = """
import sys
from tba.runtime.messages import send
send(sys.stdout.buffer, {'error': 'ValueError', 'says': 'no room'})
"""


def test_a_trainer_that_waits_for_a_dead_rank_ends_and_says_what_that_died_of():
    ended = subprocess.run([sys.executable, "-c", HANGS, ENDS], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert re.search(r"ERROR.*rank 1 of the trainer \(pid \d+\): ValueError: no room; rank 0 did not", ended.stderr)


STORES = """
import sys, time
from tba.errors import RunFailed
from tba.train.leader import Followers
with Followers([sys.executable, "-c", sys.argv[1]], 2, grace=0.1) as followers:
    try:
        followers.answers()
    except RunFailed:
        time.sleep(3)
        print("stored", flush=True)
        followers.release()
        time.sleep(float(sys.argv[2]))
"""


@pytest.mark.long
@pytest.mark.parametrize(("leaves", "code"), [("0", 0), ("1000", 1)])
def test_a_trainer_that_knows_of_a_dead_rank_stores_what_it_has_before_it_ends(leaves, code):
    """It does not wait long for other ranks to leave with it."""
    ended = subprocess.run([sys.executable, "-c", STORES, ENDS, leaves], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (code, "stored\n")


def stuck() -> None:
    """Fail like a process group that has lost a rank."""
    raise RuntimeError("connection closed by peer")


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 9))
def test_every_group_is_one_ranks_and_none_has_many_more_than_another(costs, size):
    found = shares(costs, size)
    assert len(found) == size and sorted(group for groups in found for group in groups) == list(range(len(costs)))
    room = -(-len(costs) // size)
    assert max(map(len, found)) <= room
    loads = [sum(costs[group] for group in groups) for groups in found]
    if len(costs) >= size and len(costs) % size == 0:
        assert max(loads) - min(loads) <= max(costs) * room


@given(st.integers(1, 9), st.integers(1, 40))
def test_rows_are_divided_as_torch_divides_them(size, total):
    parts = torch.arange(total).chunk(size)
    expected = [part.tolist() for part in parts] + [[]] * (size - len(parts))
    assert [list(rows_of(rank, size, total)) for rank in range(size)] == expected


@given(st.lists(st.integers(0, P - 1), min_size=1, max_size=P, unique=True))
def test_a_share_is_the_batchs_own_rows(groups):
    batch = batch_at(1)
    part = groups_at(batch, groups)
    for n, group in enumerate(groups):
        for j in range(K):
            assert part.lengths[n * K + j] == batch.lengths[group * K + j]
            for name in ("tokens_BT", "response_mask_BT", "ref_logp_B", "reward_B", "behaviour_logp_BT"):
                assert torch.equal(getattr(part, name)[n * K + j], getattr(batch, name)[group * K + j])


@pytest.mark.parametrize("without", [{}, {"ref_logp_B": None, "ref_logp_BT": None}], ids=["all", "no reference"])
def test_a_batch_comes_through_a_pipe_as_it_was(without: dict[str, None]):
    batch = replace(batch_at(1), reference_power=0.3, **without)
    values, numbers = batch_values(batch)
    found = batch_of(values, numbers, torch.device("cpu"))
    for name in Batch.__dataclass_fields__:
        mine, theirs = getattr(found, name), getattr(batch, name)
        assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs


def test_alone_there_is_nothing_to_share():
    batch = batch_at(1)
    assert ALONE.share(batch).batch is batch and ALONE.most([3]) == [3] and ALONE.total({"loss": 2.0}) == {"loss": 2.0}
