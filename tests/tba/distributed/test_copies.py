"""A learner whose ranks hold several copies of the weights, as on several machines with a copy each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tba.config import Config
from tba.errors import ConfigError
from tba.train.learner import Learner
from tba.train.training_state import TrainingState
from tests.support.tba.a_rank import begun, led, precise_policy
from tests.support.tba.rank_batches import CLOSE, batch_at, check_same, config_of, copied, save, weights_of

PPO = {"objective__name": "ppo", "training__clip_norm": 0.1, "objective__reference_reset": 2}
LORA = {"model__lora_rank": 3, "training__learning_rate": 1e-2, "objective__log_z": "learned"}


def alone(config: Config, steps: int) -> Learner:
    learner = Learner(config, precise_policy(config=config, tied=True))
    for step in range(1, steps + 1):
        learner.learn(step, batch_at(step))
    return learner


@pytest.mark.long
def test_two_copies_of_two_parts_take_the_steps_of_one_process_and_one_copy_is_stored(tmp_path: Path):
    config = config_of(**PPO)
    expected, parts = Learner(config, precise_policy(tied=True)), tmp_path / "parts"
    for name in ("parts", "scratch"):
        (tmp_path / name).mkdir()
    with led(4, parts=parts, each=2) as followers:
        spread = begun(followers, config, precise_policy(tied=True), tmp_path / "scratch")
        for step in range(1, 4):
            check_same(spread.learn(step, batch_at(step)), expected.learn(step, batch_at(step)))
        torch.testing.assert_close(weights_of(spread), weights_of(expected), **CLOSE)
        held = sum(it.to_local().numel() for it in spread.policy.model.parameters())
        assert 0.5 <= held / sum(it.numel() for it in expected.policy.model.parameters()) < 0.55
        state = spread.state(step=3, sync=1)
        stored = state.others()
        assert [it["name"] for it in stored] == ["optimizer-00001-of-00002.safetensors"]
        assert [path.name for path in parts.iterdir()] == ["optimizer-00001-of-00002.safetensors"]
        (tmp_path / "stored").mkdir()
        state.save(tmp_path / "stored")
        (parts / stored[0]["name"]).rename(tmp_path / "stored" / stored[0]["name"])
    save(expected.state(step=3, sync=1), tmp_path / "alone")
    found, wanted = (TrainingState.load(tmp_path / name) for name in ("stored", "alone"))
    for some, others in ((found.optimizer, wanted.optimizer), (found.auxiliary or {}, wanted.auxiliary or {})):
        torch.testing.assert_close(some, others, rtol=1e-6, atol=1e-9)
    assert found.reference and wanted.reference
    torch.testing.assert_close(found.reference, wanted.reference, **CLOSE)
    numbers = [
        sum(it.numel() for path in (tmp_path / name).glob("*.safetensors") for it in load_file(path).values())
        for name in ("stored", "alone")
    ]
    assert numbers[1] < numbers[0] < numbers[1] + 1.1 * torch.get_rng_state().numel()


@pytest.mark.long
@pytest.mark.parametrize("changes", [PPO, LORA], ids=["PPO", "adapters"])
def test_a_checkpoint_of_two_copies_of_two_parts_goes_on_in_every_shape(tmp_path: Path, changes: dict[str, Any]):
    config = config_of(**changes)
    for name in ("parts", "scratch"):
        (tmp_path / name).mkdir()
    expected = alone(config, 2)
    with led(4, parts=tmp_path / "parts", each=2) as followers:
        spread = begun(followers, config, precise_policy(config=config, tied=True), tmp_path / "scratch")
        for step in (1, 2):
            spread.learn(step, batch_at(step))
        save(spread.state(step=2, sync=1), tmp_path / "2x2")
        middle = copied(spread)
        third = spread.learn(3, batch_at(3))
        weights = weights_of(spread)
        again = begun(followers, config, middle(), tmp_path / "scratch", tmp_path / "2x2")
        assert again.learn(3, batch_at(3)) == third
        assert all(torch.equal(it, weights[name]) for name, it in weights_of(again).items())
    check_same(third, expected.learn(3, batch_at(3)))
    torch.testing.assert_close(weights, weights_of(expected), **CLOSE)
    before = "2x2"
    for copies, each in ((1, 2), (2, 1)):
        name = f"{copies}x{each}"
        with led(copies * each, parts=tmp_path / "parts", each=each) as followers:
            learner = begun(followers, config, middle(), tmp_path / "scratch", tmp_path / before)
            before = f"{name} after {before}"
            save(learner.state(step=2, sync=1), tmp_path / before)
            check_same(learner.learn(3, batch_at(3)), third)
            torch.testing.assert_close(weights_of(learner), weights, **CLOSE)


def test_ranks_that_would_divide_the_weights_differently_do_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = r"LOCAL_WORLD_SIZE must be equal on all machines where training\.copy_per is 'node', got 1 and 2"
    with pytest.raises(ConfigError, match=said), led(2, each=2, others=1):
        raise AssertionError("the ranks have joined")
