"""Learners that are spread over several processes, with what is trained together with or in place of the policy's
weights: value models, a learned log Z, adapters; and objectives that need estimates from a whole batch."""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.harness.tiny_models import tiny_folder
from tba.models.policy import Policy
from tba.train.learner import Learned, Learner
from tba.train.training_state import TrainingState
from tests.support.models.adapter_examples import adapter_of, moved
from tests.support.sampled_parameters import sampled
from tests.support.tba.a_rank import precise_policy
from tests.support.tba.rank_batches import CLOSE, batch_at, check_same, config_of, copied, save, weights_of

BY_TOKENS = {"training__groups_per_micro_batch": None, "training__tokens_per_micro_batch": 30}
"""Micro-batches of fewer tokens than some groups have, so that ranks have different numbers of calls."""
LORA = {"model__lora_rank": 3, "training__learning_rate": 1e-2}
LOG_Z = {"objective__log_z": "learned", "objective__log_z_learning_rate": 0.05}
PPO = {"objective__name": "ppo", "objective__value_learning_rate": 1e-2}
VINE = {"objective__name": "vine-ppo", "objective__penalty": "none"}

CASES = {
    "log Z": {**LOG_Z, "training__groups_per_micro_batch": 1, "training__clip_norm": 1.0},
    "log Z by tokens": {**LOG_Z, **BY_TOKENS},
    "PPO": {**PPO, "training__groups_per_micro_batch": 2, "training__clip_norm": 0.1},
    "PPO by tokens": {**PPO, **BY_TOKENS, "training__checkpoint_activations": True},
    "PPO with few groups": {**PPO, "objective__penalty": "none", "training__computed_rows": "needed"},
    "PPO with a fused optimizer": {**PPO, "training__optimizer": "adamw-fused"},
    "PPO with 8 bits": {**PPO, "training__optimizer": "adamw-8bit"},
    "VinePPO": {**VINE, "training__groups_per_micro_batch": 2},
    "VinePPO with few groups": {**VINE, "training__computed_rows": "needed"},
    "PPO with a reference": {**PPO, "objective__reference_reset": 1},
    "sub-trajectories": {"objective__name": "subtrajectory-balance", **BY_TOKENS},
    "M2PO": {"objective__name": "m2po"},
    "adapters": {**LORA, "training__groups_per_micro_batch": 1, "training__checkpoint_activations": True},
    "adapters by tokens": {**LORA, **BY_TOKENS, "training__clip_norm": 0.1},
    "adapters and PPO": {**LORA, **PPO, "training__clip_norm": 0.1},
    "adapters, log Z and a reference": {**LORA, **LOG_Z, "objective__reference_reset": 2},
}


SHORT = ["log Z by tokens", "PPO", "VinePPO with few groups", "adapters and PPO"]


@pytest.mark.parametrize("case", sampled(CASES, kept=SHORT))
def test_steps_do_not_depend_on_the_number_of_ranks(many, tmp_path, case):
    config = config_of(**CASES[case])
    learners = {
        "alone": Learner(config, precise_policy(config=config, tied=True)),
        "spread": many(config, precise_policy(config=config, tied=True)),
    }
    before = {name: it.clone() for name, it in weights_of(learners["alone"]).items()}
    for step in range(1, 4):
        expected, found = (it.learn(step, batch_at(step)) for it in learners.values())
        check_same(found, expected)
    after = weights_of(learners["alone"])
    torch.testing.assert_close(weights_of(learners["spread"]), after, **CLOSE)
    assert any(not torch.equal(it, before[name]) for name, it in after.items())
    for name, learner in learners.items():
        save(learner.state(step=3, sync=1), tmp_path / name)
    check_same_states(*(TrainingState.load(tmp_path / name) for name in ("spread", "alone")))


def check_same_states(found: TrainingState, expected: TrainingState) -> None:
    for some, others in ((found.optimizer, expected.optimizer), (found.auxiliary or {}, expected.auxiliary or {})):
        assert some.keys() == others.keys()
        for name, it in others.items():
            assert some[name].shape == it.shape
            if it.dtype != torch.uint8:  # the codes of 8-bit moments differ where a sum is rounded otherwise
                torch.testing.assert_close(some[name], it, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "case",
    sampled(["log Z", "PPO", "adapters and PPO", "adapters, log Z and a reference"], kept=["adapters and PPO"]),
)
def test_a_checkpoint_goes_on_with_any_number_of_ranks(many, tmp_path, case):
    config = config_of(**CASES[case])
    spread, alone = (make(config, precise_policy(config=config, tied=True)) for make in (many, Learner))
    for step in (1, 2):
        for learner in (spread, alone):
            learner.learn(step, batch_at(step))
    for learner, name in ((spread, "spread"), (alone, "alone")):
        save(learner.state(step=2, sync=1), tmp_path / name)
    middle = copied(spread)

    def third_step(learner: Learner) -> tuple[Learned, dict[str, Tensor]]:
        return learner.learn(3, batch_at(3)), weights_of(learner)

    expected, weights = third_step(spread)
    again, same_weights = third_step(many(config, middle(), tmp_path / "spread"))
    assert again == expected
    assert all(torch.equal(it, weights[name]) for name, it in same_weights.items())
    by_one = Learner(config, middle())
    by_one.restore(TrainingState.load(tmp_path / "spread"))
    for learner in (by_one, many(config, middle(), tmp_path / "alone")):
        learned, found = third_step(learner)
        check_same(learned, expected)
        torch.testing.assert_close(found, weights, **CLOSE)


def test_a_checkpoint_of_ranks_has_each_number_of_a_value_model_once(many, tmp_path):
    config = config_of(**PPO)
    spread, alone = many(config, precise_policy(tied=True)), Learner(config, precise_policy(tied=True))
    for learner, name in ((spread, "spread"), (alone, "alone")):
        learner.learn(1, batch_at(1))
        save(learner.state(step=1, sync=1), tmp_path / name)
    files = [[load_file(path) for path in (tmp_path / name).glob("*.safetensors")] for name in ("spread", "alone")]
    sizes = [sum(it.numel() for file in some for it in file.values() if it.ndim) for some in files]
    more = spread.ranks.parts - 1
    assert sizes[0] == sizes[1] + more * torch.get_rng_state().numel()
    held = [it.to_local().numel() for it in spread.auxiliary.model.parameters() if it.ndim]
    assert sum(held) <= 1.1 * sum(it.numel() for it in alone.auxiliary.model.parameters()) / spread.ranks.parts


def test_ranks_publish_the_adapter_folder_of_one_process(many, tmp_path):
    base = tiny_folder(tmp_path / "base")
    config = config_of(**LORA, model__path=str(base), model__lora_alpha=12.0)
    moved(base).snapshot().save(tmp_path / "alone")
    loaded = moved(base)
    loaded.model.double()  # pyright: ignore
    spread = many(config, loaded)
    snapshot = spread.snapshot()
    assert snapshot.weights.keys() and all(it.dtype == torch.float64 for it in snapshot.weights.values())
    for name, it in snapshot.weights.items():
        assert torch.equal(it.float(), moved(base).snapshot().weights[name])
    snapshot.save(tmp_path / "spread")
    assert snapshot.adapter == adapter_of(base)
    names = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert sorted(path.name for path in (tmp_path / "spread").iterdir()) == names
    configs = [(tmp_path / name / "adapter_config.json").read_bytes() for name in ("spread", "alone")]
    assert configs[0] == configs[1]
    again = Policy.load_adapted(adapter_of(base), tmp_path / "spread", device="cpu")
    assert again.snapshot().sha256 == moved(base).snapshot().sha256


def test_adapters_of_float32_train_on_a_base_of_bfloat16(many, tmp_path):
    base = tiny_folder(tmp_path / "base")
    config = config_of(
        **LORA, model__path=str(base), model__dtype="bfloat16", model__publish_dtype="bfloat16", model__lora_alpha=12.0
    )

    def policy() -> Policy:
        return Policy.load_adapted(adapter_of(base), None, seed=1, device="cpu", dtype="bfloat16")

    alone, spread = Learner(config, policy()), many(config, policy())
    expected, found = (it.learn(1, batch_at(1)).metrics["grad_norm"] for it in (alone, spread))
    assert found == pytest.approx(expected, rel=0.02)
    assert {it.dtype for it in weights_of(spread).values()} == {torch.float32}
    torch.testing.assert_close(weights_of(spread), weights_of(alone), rtol=0, atol=3e-2)
