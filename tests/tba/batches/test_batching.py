from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import EOS_ID, PAD_ID, response_logps, tiny_llama, trajectory
from tba.batches.batching import collate, pad
from tba.errors import DataError
from tba.objectives import trajectory_balance
from tba.train.micro_batches import micro_batches

OPTIONS = {"responses_per_prompt": 2, "pad_id": PAD_ID, "include_eos": True}

tokens = st.lists(st.integers(2, 77), max_size=8)


@st.composite
def groups(draw, k: int = 3, least: int = 1):
    """Whole groups of k trajectories with responses and prompts of uneven lengths."""
    found = []
    for group in range(draw(st.integers(least, 4))):
        prompt = tuple(draw(tokens.filter(bool)))
        for _ in range(k):
            response = (*draw(tokens.filter(bool)), *draw(st.sampled_from([(), (EOS_ID,)])))
            logps = draw(st.lists(st.floats(-9, 0), min_size=len(response), max_size=len(response)))
            found.append(
                trajectory(
                    prompt_id=str(group),
                    prompt_tokens=prompt,
                    response_tokens=response,
                    ref_logps=tuple(logps),
                    reward=draw(st.floats(0, 1)),
                )
            )
    return found


@settings(max_examples=50, deadline=None)
@given(groups(), st.booleans())
def test_a_batch_holds_each_trajectory_in_order(trajectories, include_eos):
    batch = collate(fetched_of(trajectories), responses_per_prompt=3, pad_id=PAD_ID, include_eos=include_eos)
    assert batch.groups == len(trajectories) / 3
    assert batch.tokens_BT.shape == batch.response_mask_BT.shape == (len(trajectories), max(batch.lengths))
    for row, t in enumerate(trajectories):
        dropped = t.finished and not include_eos
        response = t.response_tokens[:-1] if dropped else t.response_tokens
        length = len(t.prompt_tokens) + len(response)
        assert batch.lengths[row] == length
        assert batch.tokens_BT[row, :length].tolist() == [*t.prompt_tokens, *response]
        assert (batch.tokens_BT[row, length:] == PAD_ID).all()
        assert batch.response_mask_BT[row].nonzero().flatten().tolist() == list(range(len(t.prompt_tokens), length))
        assert float(batch.ref_logp_B[row]) == pytest.approx(sum(t.ref_logps[: len(response)]), rel=1e-6, abs=1e-6)
        assert float(batch.reward_B[row]) == pytest.approx(t.reward)


# --- The EOS rule ---


@pytest.mark.parametrize(
    ("response", "included", "excluded"),
    [
        pytest.param((5, 6, EOS_ID), 3, 2, id="finished"),
        pytest.param((5, 6, 7), 3, 3, id="length limit reached"),
        pytest.param((EOS_ID,), 1, 0, id="EOS is the very first token"),
        pytest.param((*[5] * 127, EOS_ID), 128, 127, id="EOS is the last token that the limit allows"),
    ],
)
def test_what_counts_of_a_response(response, included, excluded):
    trajectories = [trajectory(response_tokens=response), trajectory()]
    for include_eos, counted in ((True, included), (False, excluded)):
        batch = collate(fetched_of(trajectories), **{**OPTIONS, "include_eos": include_eos})
        assert int(batch.response_mask_BT[0].sum()) == counted
        assert float(batch.ref_logp_B[0]) == -counted


# --- What an environment wrote ---

MASK = (True, True, False, False, True, True)
SAID = (5, EOS_ID, 7, 8, 9, EOS_ID)  # two turns of the policy, the environment's between


def of_turns(**changes):
    logps = {"ref_logps": (-1.0, -2.0, 0.0, 0.0, -4.0, -8.0), "behaviour_logps": (-0.5, -1.0, 0.0, 0.0, -2.0, -4.0)}
    return trajectory(**{"response_tokens": SAID, "loss_mask": MASK, **logps, **changes})


@pytest.mark.parametrize(
    ("finished", "include_eos", "counted", "ref_logp"),
    [(True, True, [2, 3, 6, 7], -15.0), (True, False, [2, 3, 6], -7.0), (False, False, [2, 3, 6, 7], -15.0)],
)
def test_only_what_the_policy_wrote_counts_and_only_the_last_end_token_can_be_left_out(
    finished, include_eos, counted, ref_logp
):
    rows = [of_turns(finished=finished), trajectory()]
    batch = collate(fetched_of(rows), **{**OPTIONS, "include_eos": include_eos}, by_token=True)
    assert batch.response_mask_BT[0].nonzero().flatten().tolist() == counted
    assert batch.response_mask_BT[1].nonzero().flatten().tolist() == [2, 3, 4][: 3 if include_eos else 2]
    assert batch.tokens_BT[0, : batch.lengths[0]].tolist() == [4, 13, *SAID][: batch.lengths[0]]
    assert float(batch.ref_logp_B[0]) == ref_logp
    assert batch.ref_logp_BT is not None and batch.behaviour_logp_BT is not None
    assert float(batch.ref_logp_BT[0].sum()) == ref_logp and float(batch.behaviour_logp_BT[0].sum()) == ref_logp / 2
    assert batch.ref_logp_BT[0].nonzero().flatten().tolist() == counted


def test_log_probabilities_stored_of_what_the_environment_wrote_change_nothing_and_those_of_the_policy_do():
    def tensors(**changes):
        batch = collate(fetched_of([of_turns(**changes), trajectory()]), **OPTIONS, by_token=True)
        return [it.tolist() for it in vars(batch).values() if isinstance(it, torch.Tensor)]

    changed = [(-1.0, -2.0, -9.0, float("nan"), -4.0, -8.0), (-1.0, -2.0, 0.0, 0.0, -4.5, -8.0)]
    for name in ("ref_logps", "behaviour_logps"):
        plain = tensors(**{name: (-1.0, -2.0, 0.0, 0.0, -4.0, -8.0)})
        assert tensors(**{name: changed[0]}) == plain
        assert tensors(**{name: changed[1]}) != plain


def test_a_mask_that_is_true_everywhere_is_no_mask():
    masked, plain = (
        collate(fetched_of([of_turns(loss_mask=mask), of_turns()]), **OPTIONS, by_token=True)
        for mask in ((True,) * 6, None)
    )
    for name, value in vars(plain).items():
        same = torch.equal(getattr(masked, name), value) if isinstance(value, torch.Tensor) else True
        assert same, name


def test_a_mask_of_another_length_is_refused_by_trajectory():
    damaged = of_turns(trajectory_id="0/7/3", loss_mask=MASK[:-1])
    with pytest.raises(DataError, match="'0/7/3': 6 response tokens, but 5 entries of the loss mask"):
        collate(fetched_of([of_turns(), damaged]), **OPTIONS)


# --- Groups ---


@settings(max_examples=30, deadline=None)
@given(groups(least=2), st.integers(1, 5))
def test_micro_batches_are_whole_groups_that_make_up_the_batch(trajectories, size):
    options = {"responses_per_prompt": 3, "pad_id": PAD_ID, "include_eos": True, "by_token": True}
    batch = collate(fetched_of(trajectories), **options)
    parts = list(micro_batches(batch, most_groups=size, most_tokens=None, packs=False))
    assert [part.first_slot for part in parts] == list(range(0, batch.groups, size))
    assert sum(part.batch.groups for part in parts) == batch.groups
    for first, part, *_ in parts:
        some = fetched_of(trajectories[first * 3 : (first + size) * 3])
        expected = collate(some, **options)
        assert part.lengths == expected.lengths
        tensors = [name for name, value in vars(expected).items() if isinstance(value, torch.Tensor)]
        assert len(tensors) == 6
        for name in tensors:
            assert torch.equal(getattr(part, name), getattr(expected, name)), name


def uneven_trajectories(prompts: int):
    return [
        trajectory(
            prompt_id=str(p),
            prompt_tokens=tuple(range(4, 5 + p)),
            response_tokens=(*range(20 + p, 22 + p + 2 * j), EOS_ID),
            ref_logps=(-0.5 * p,) * (3 + 2 * j),
            reward=float(j % 2),
        )
        for p in range(prompts)
        for j in range(3)
    ]


def gradient_of(trajectories, groups_per_micro_batch: int) -> torch.Tensor:
    """Of the batch's loss, accumulated over micro-batches."""
    model = tiny_llama().double()
    batch = collate(fetched_of(trajectories), responses_per_prompt=3, pad_id=PAD_ID, include_eos=True)
    for _, part, *_ in micro_batches(batch, most_groups=groups_per_micro_batch, most_tokens=None, packs=False):
        logp_PK = response_logps(model, part, temperature=0.7).view(-1, 3)
        loss = trajectory_balance(logp_PK, part.ref_logp_B.view(-1, 3), part.reward_B.view(-1, 3), beta=0.5)
        (loss.value * part.groups / batch.groups).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("groups_per_micro_batch", [1, 2, 3])
def test_any_split_that_keeps_groups_whole_gives_the_same_gradient(groups_per_micro_batch):
    trajectories = uneven_trajectories(5)
    whole, split = gradient_of(trajectories, 5), gradient_of(trajectories, groups_per_micro_batch)
    assert whole.abs().max() > 0.01
    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-11)


def regrouped(prompts: int) -> list:
    """The same rows with the groups laid out across each other, as if they were [K, P] instead of [P, K]."""
    trajectories = uneven_trajectories(prompts)
    order = [p * 3 + j for j in range(3) for p in range(prompts)]
    return [trajectory_as_one_prompt(trajectories[i]) for i in order]


def trajectory_as_one_prompt(t):
    return trajectory(
        prompt_id="one",
        prompt_tokens=t.prompt_tokens,
        response_tokens=t.response_tokens,
        ref_logps=t.ref_logps,
        reward=t.reward,
    )


def test_a_wrong_grouping_changes_the_gradient_of_several_prompts_but_not_of_one():
    torch.testing.assert_close(gradient_of(regrouped(1), 1), gradient_of(uneven_trajectories(1), 1))
    assert (gradient_of(regrouped(2), 2) - gradient_of(uneven_trajectories(2), 2)).abs().max() > 0.01


def test_a_group_of_two_prompts_is_refused_by_name():
    trajectories = [trajectory(), trajectory(), trajectory(prompt_id="a"), trajectory(prompt_id="b")]
    with pytest.raises(DataError, match=r"rows of group 1 \(rows 2 to 3\) must have the same prompt, got 'a', 'b'"):
        collate(fetched_of(trajectories), **OPTIONS)


def test_half_a_group_is_refused():
    with pytest.raises(DataError, match="whole groups of 2 trajectories, got 3"):
        collate(fetched_of([trajectory()] * 3), **OPTIONS)


def test_an_empty_batch_is_refused():
    with pytest.raises(DataError, match="got 0"):
        collate(fetched_of([]), **OPTIONS)


@pytest.mark.parametrize("k", [1, 0, -2])
def test_fewer_than_two_responses_per_prompt_are_refused(k):
    with pytest.raises(ValueError, match=f"responses_per_prompt must be >= 2, or nothing is learned, got {k}"):
        collate(fetched_of([trajectory()]), **{**OPTIONS, "responses_per_prompt": k})


# --- Malformed trajectories ---


def test_missing_reference_logps_are_refused_by_trajectory():
    damaged = trajectory(trajectory_id="0/7/3", ref_logps=(-1.0,))
    with pytest.raises(DataError, match="'0/7/3': 3 response tokens, but 1 reference"):
        collate(fetched_of([trajectory(), damaged]), **OPTIONS)


def test_missing_logps_of_the_sampler_are_refused_where_they_are_needed():
    damaged = trajectory(trajectory_id="0/7/3", behaviour_logps=(-1.0,))
    with pytest.raises(DataError, match="'0/7/3': 3 response tokens, but 1 log-probabilities from the time"):
        collate(fetched_of([trajectory(), damaged]), **OPTIONS, by_token=True)
    without = replace(fetched_of([trajectory()] * 2), behaviour_logps=None)
    collate(without, **OPTIONS)
    with pytest.raises(DataError, match="fetched without the log-probabilities"):
        collate(without, **OPTIONS, by_token=True)


def test_a_finished_response_without_tokens_is_refused():
    damaged = trajectory(trajectory_id="0/7/3", response_tokens=(), finished=True)
    with pytest.raises(DataError, match="'0/7/3': finished, but without an EOS token"):
        collate(fetched_of([trajectory(), damaged]), **{**OPTIONS, "include_eos": False})


def test_an_empty_prompt_is_refused_because_nothing_predicts_the_first_token():
    with pytest.raises(DataError, match="row 1: a prompt needs at least 1 token"):
        pad([(4,), ()], [(5,), (5,)], pad_id=PAD_ID)
