"""A learner that is spread over several processes, compared with a learner in one process. Gradients in double
precision, so that what differs by more than the order of a sum is seen."""

import json
from dataclasses import replace
from typing import get_args

import psutil
import pytest
import torch

from benchmarks.harness.tiny_models import tiny_folder, tiny_llama, tiny_policy, tiny_tokenizer
from tba.config import OptimizerName
from tba.distributed.sharding import save_without_weights, without_weights
from tba.errors import Damaged
from tba.models.policy import Policy
from tba.train.learner import Learner
from tba.train.training_state import TrainingState
from tests.support.models.families import FAMILIES, family_folder
from tests.support.sampled_parameters import sampled
from tests.support.tba.a_rank import precise_policy
from tests.support.tba.rank_batches import CLOSE, K, P, batch_at, config_of, copied, save, weights_of

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
    {
        "objective__name": "grpo",
        "training__groups_per_micro_batch": 2,
        "training__rate_by_effective_share": True,
        "objective__normaliser": "tokens",
    },
]


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
    parts, all_of_it = spread.ranks.parts, sum(it.numel() for it in weights_of(spread).values())
    held = sum(it.to_local().numel() for it in spread.policy.model.parameters())
    moments = sum(it.numel() for key, it in spread.state(step=1, sync=1).optimizer.items() if "exp_avg" in key)
    assert held <= 1.1 * all_of_it / parts and moments == 2 * held


def test_a_checkpoint_goes_on_bit_for_bit_with_as_many_ranks_and_alike_with_others(many, tmp_path):
    config = config_of(objective__reference_decay=0.5)
    spread, alone = many(config, precise_policy(tied=True)), Learner(config, precise_policy(tied=True))
    for step in (1, 2):
        spread.learn(step, batch_at(step))
        alone.learn(step, batch_at(step))
    for learner, name in ((spread, "spread"), (alone, "alone")):
        save(learner.state(step=2, sync=1), tmp_path / name)
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
    for path in sorted((tmp_path / "spread").glob("optimizer*"))[-1:]:
        path.unlink()
    with pytest.raises(Damaged, match=r"optimizer-0000|there are none"):
        TrainingState.load(tmp_path / "spread")


@pytest.mark.parametrize("name", sampled(get_args(OptimizerName)[1:], kept=["adamw-8bit"]))
def test_each_optimizer_steps_with_ranks_as_without_and_goes_on_from_what_any_number_stored(many, tmp_path, name):
    """No 8-bit block spans two rows, so the blocks are the same for any number of ranks."""
    config = config_of(training__optimizer=name, training__learning_rate=1e-2)
    spread, alone = many(config, wide_policy()), Learner(config, wide_policy())
    for step in (1, 2):
        for learner in (spread, alone):
            learner.learn(step, batch_at(step))
    save(spread.state(step=2, sync=1), tmp_path / "spread")
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
