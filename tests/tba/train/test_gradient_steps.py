"""The gradient steps of a trainer: they follow the formulas, are recorded, and raise the reward."""
# Shapes: P prompts in the batch, K responses per prompt, T tokens of a response.

import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import tiny_folder, tiny_llama, tiny_tokenizer, trajectory
from tba.config import Config
from tba.fetched import Fetched
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.policy import Policy, PolicyScorer
from tba.objectives import OBJECTIVES
from tba.train.schedules import beta_at, learning_rate_at, reference_power_at
from tba.types import Draw, Prompt, Trajectory, Version
from tests.support.tba.trainers import RESPONSES, STEPS, Buffer, Journal, make, settings

# --- The gradient step, against the formulas ---


def plain_logp(model: torch.nn.Module, rows: Sequence[Trajectory], *, include_eos: bool, temperature: float) -> Tensor:
    """[B] log-probabilities of responses, computed row by row from all logits."""
    logps = []
    for row in rows:
        counted = row.response_tokens if include_eos else row.response_tokens[:-1]
        tokens_T = torch.tensor([*row.prompt_tokens, *counted])
        logps_TV = torch.log_softmax(model(tokens_T[None]).logits[0] / temperature, dim=-1)
        places = range(len(row.prompt_tokens), len(tokens_T))
        logps.append(torch.stack([logps_TV[t - 1, tokens_T[t]] for t in places]).sum())
    return torch.stack(logps)


def plain_loss(
    model: torch.nn.Module, config: Config, rows: Sequence[Trajectory], *, beta: float, power: float
) -> Tensor:
    """The population variance of log pi - power x log pi_ref - r / beta within each group, averaged over groups."""
    counted = [t.length if config.objective.include_eos else t.length - 1 for t in rows]
    logp_B = plain_logp(model, rows, include_eos=config.objective.include_eos, temperature=config.search.temperature)
    reward_B = torch.tensor([t.reward for t in rows], dtype=torch.float64)
    ref_B = torch.tensor([sum(t.ref_logps[:n]) for t, n in zip(rows, counted, strict=True)], dtype=torch.float64)
    return (logp_B - power * ref_B - reward_B / beta).view(-1, RESPONSES).var(dim=1, unbiased=False).mean()


def adamw_by_hand(config: Config, rewards: Mapping[int, float]) -> tuple[torch.nn.Module, list[dict[str, float]]]:
    """Compute the whole run by hand, from the equations of AdamW."""
    training, model = config.training, tiny_llama().double()
    parameters = list(model.parameters())
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    found = []
    for step in range(1, training.steps + 1):
        beta, rate = beta_at(step, config.objective), learning_rate_at(step, training)
        power = reference_power_at(step, config.objective)
        buffer = Buffer(Journal(), rewards)
        loss = plain_loss(model, config, buffer.trajectories(buffer.draw(step)), beta=beta, power=power)
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        scale = min(1.0, training.clip_norm / norm) if training.clip_norm else 1.0
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                m.mul_(training.adam_beta1).add_((1 - training.adam_beta1) * scale * g)
                v.mul_(training.adam_beta2).add_((1 - training.adam_beta2) * (scale * g).square())
                mean, square = m / (1 - training.adam_beta1**step), v / (1 - training.adam_beta2**step)
                p.sub_(rate * training.weight_decay * p).sub_(rate * mean / (square.sqrt() + training.adam_eps))
        found.append(
            {"loss": float(loss.detach()), "grad_norm": norm, "beta": beta, "lr": rate, "reference_power": power}
        )
    return model, found


@pytest.mark.parametrize(
    ("groups", "include_eos", "clip"), [(1, True, 0.0), (2, True, 0.0), (3, True, 0.0), (2, False, 0.0), (2, True, 3.0)]
)
def test_steps_are_adamw_on_trajectory_balance_however_the_batch_is_cut(tmp_path, groups, include_eos, clip):
    config = settings(
        training__steps=4,
        training__groups_per_micro_batch=groups,
        training__learning_rate=3e-3,
        training__schedule="linear",
        training__warmup_steps=2,
        training__stable_steps=None,
        training__decay_steps=0,
        training__adam_beta1=0.8,
        training__adam_beta2=0.95,
        training__adam_eps=1e-6,
        training__weight_decay=0.1,
        training__clip_norm=clip,
        objective__beta_start=0.5,
        objective__beta_end=0.1,
        objective__beta_target=4,
        objective__beta_stop=3,
        objective__target_temperature_start=2.0,
        objective__target_temperature_steps=2,
        objective__reference_temperature_end=1.2,
        objective__reference_temperature_steps=3,
        objective__include_eos=include_eos,
        search__temperature=0.7,
    )
    rewards = {1: 1.0, 2: 0.0, 3: 0.5, 4: 1.0}
    policy = Policy(tiny_llama().double(), tiny_tokenizer(), torch.device("cpu"))  # pyright: ignore[reportArgumentType]
    trainer, store = make(tmp_path, config, policy=policy, rewards=rewards)
    trainer.syncs.publish = lambda snapshot, sync: None  # float64 is no dtype to publish
    trainer.run()
    expected, found = adamw_by_hand(config, rewards)
    for (name, actual), wanted in zip(policy.model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    for record, wanted in zip(store.records, found, strict=True):
        assert {name: record.metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_with_any_objective_a_step_is_the_same_however_the_batch_is_cut(tmp_path, name):
    """The batch has responses of several lengths, and ratios that are not 1."""
    weights, stores = [], []
    for groups in (1, 3):
        chosen = {"objective__second_moment": 2.0} if name == "m2po" else {}  # the default would leave out all tokens
        config = settings(objective__name=name, training__steps=2, training__groups_per_micro_batch=groups, **chosen)
        policy = Policy(tiny_llama().double(), tiny_tokenizer(), torch.device("cpu"))  # pyright: ignore[reportArgumentType]
        trainer, store = make(tmp_path, config, policy=policy)
        trainer.syncs.publish = lambda snapshot, sync: None  # float64 is no dtype to publish
        trainer.run()
        weights.append([p.detach().clone() for p in policy.model.parameters()])
        stores.append(store)
    before = [p.double() for p in tiny_llama().parameters()]
    assert any(not torch.equal(one, other) for one, other in zip(weights[0], before, strict=True))
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    for one, other in zip(*(store.records for store in stores), strict=True):
        measured = {name for name in one.metrics if not name.startswith("seconds")}
        assert measured >= {"loss", "grad_norm", "log_ratio_mean", "equal_rewards"}
        for name in measured:
            assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-5, abs=1e-9)
        for ours, theirs in zip(one.outcomes, other.outcomes, strict=True):
            assert ours.advantage == pytest.approx(theirs.advantage, rel=1e-5, abs=1e-9)
            assert (ours.residual is None) == (theirs.residual is None) == (ours.log_z is None)


# --- Records ---


def test_what_a_step_found_is_in_its_record(tmp_path):
    trainer, store = make(tmp_path, settings(), rewards={1: 1.0, 2: 0.0})
    trainer.run()
    assert [record.step for record in store.records] == list(range(1, STEPS + 1))
    assert [record.sync for record in store.records] == [(step + 1) // 2 for step in range(1, STEPS + 1)]
    assert [record.version.number for record in store.records[:5]] == [0, 0, 1, 1, 2]
    for record in store.records:
        residuals = [o.residual for o in record.outcomes]
        assert [(o.slot, o.position) for o in record.outcomes] == [(d.slot, d.position) for d in record.draws]
        assert record.metrics["loss"] == pytest.approx(sum(r * r for r in residuals) / len(residuals), rel=1e-5)
        assert record.metrics["residual_abs"] == pytest.approx(sum(map(abs, residuals)) / len(residuals), rel=1e-5)
        ratios = [o.logp - o.ref_logp for o in record.outcomes]
        assert record.metrics["log_ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4, abs=1e-5)
        log_z = sum(o.log_z for o in record.outcomes) / len(record.outcomes)
        assert record.metrics["log_z"] == pytest.approx(log_z, rel=1e-5)
    assert [record.metrics["equal_rewards"] for record in store.records[:2]] == pytest.approx([1 / 3, 0.0])
    assert store.written == [dict(record.metrics) for record in store.records]


@pytest.mark.parametrize("objective", ["trajectory-balance", "ppo"])
def test_a_record_says_whether_a_gradient_was_clipped(tmp_path, objective):
    """It says so for the value model too, and says nothing for a skipped step."""
    steps = {}
    for name, norm in (("free", 0.0), ("plain", 1e9), ("clipped", 1e-6)):
        (tmp_path / name).mkdir()
        config = settings(objective__name=objective, training__clip_norm=norm, training__steps=4)
        trainer, store = make(tmp_path / name, config, rewards={1: 0.5, 3: math.nan})
        trainer.run()
        steps[name] = [{key: it for key, it in step.metrics.items() if "clipped" in key} for step in store.records]
    names = ["clipped", *(["value_clipped"] if objective == "ppo" else [])]
    assert steps["free"] == [{}] * 4
    for kind, value in (("plain", 0.0), ("clipped", 1.0)):
        of_it = dict.fromkeys(names, value)
        assert steps[kind] == [of_it, of_it, {}, of_it]


# --- Learning ---


class Lottery:
    """A buffer that fills itself: at each sync, with responses of the newest published version to one prompt. The
    reward of a response is its share of even tokens."""

    def __init__(self, folder: Path):
        reference = Policy.load(tiny_folder(folder), device="cpu")
        self.generator = TransformersGenerator(device="cpu", max_response_tokens=4)
        self.generator.adopt(folder, Version(0, 1))
        self.scorer = PolicyScorer(reference, Version(0, 1))
        self.prompt = Prompt(prompt_id="p", text="", tokens=(4, 13))
        self.newest: list[Trajectory] = []
        self.versions: list[int] = []
        self.adopting = threading.Lock()

    def publish(self, version: Version, *, folder: Path, **_: Any) -> None:
        with self.adopting:
            self.generator.adopt(folder, version)

    def sync(self, sync: int, *, step: int) -> int:
        with self.adopting:
            seeds = [range(1000 * sync, 1000 * sync + 32)]
            (responses,) = generate(self.generator, [self.prompt], seeds, temperature=1.0)
            ((*ref_logps,),) = self.scorer.token_logps([self.prompt], [responses], temperature=1.0)
            self.versions.append(responses[0].version_start.number)
        self.newest = [
            trajectory(
                prompt_tokens=self.prompt.tokens,
                response_tokens=r.tokens,
                ref_logps=logps,
                finished=r.finished,
                reward=sum(token % 2 == 0 for token in r.tokens) / 4,
            )
            for r, logps in zip(responses, ref_logps, strict=True)
        ]
        return 32

    def recorded(self, sync: int) -> bool:
        return True

    def waiting(self) -> int:
        return 0

    def queues(self) -> dict[str, Any]:
        return {}

    def restore(self, queues: Mapping[str, Any]) -> None: ...

    def draw(self, step: int) -> list[Draw]:
        return [
            Draw(step=step, slot=i, position=j, trajectory_id=f"{16 * i + j}", prompt_id="p", branch="recent",
                 weight=1.0, age=1)
            for i in range(2) for j in range(16)
        ]  # fmt: skip

    def fetch(self, draws: Sequence[Draw]) -> Fetched:
        return fetched_of([self.newest[int(draw.trajectory_id)] for draw in draws])


def test_the_reward_goes_up_while_versions_advance(tmp_path):
    config = settings(
        training__steps=40,
        training__prompts_per_step=2,
        training__responses_per_prompt=16,
        search__responses_per_prompt=16,
        search__initial_fill=32,
        training__learning_rate=5e-3,
        training__schedule="constant",
        training__stable_steps=None,
        training__decay_steps=0,
        objective__beta_start=0.1,
        objective__beta_end=0.1,
        sync__every=1,
        sync__checkpoint_every=100,
    )
    trainer, store = make(tmp_path, config, pause=0.05)
    lottery = Lottery(tmp_path / "start")
    trainer.ahead.buffer, trainer.syncs.versions.publish = lottery, lottery.publish
    trainer.run()
    rewards = [record.metrics["reward_mean"] for record in store.records]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:4]) / 4 + 0.2, rewards
    assert lottery.versions[-1] > 20
