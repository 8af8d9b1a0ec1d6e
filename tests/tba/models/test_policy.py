import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import EOS_ID, PAD_ID, response_logps, tiny_folder, tiny_policy, trajectory
from tba.batches.batching import collate
from tba.errors import ConfigError, Damaged, RunFailed
from tba.models.policy import Policy, PolicyScorer
from tba.models.pretrained import resolve_device
from tba.types import Version
from tests.support.models.policy_examples import prompt, response
from tests.support.nvidia import set_gpus


def change_weights(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.1)


def digest(policy: Policy) -> str:
    return policy.snapshot().sha256


def answer(status: int) -> Any:
    """Return an answer of the hub, with the parts that are read."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.fixture
def batch():
    return collate(fetched_of([trajectory()] * 2), responses_per_prompt=2, pad_id=PAD_ID, include_eos=True)


# --- Saving and loading ---


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_policy_loads_as_the_same_policy(tmp_path, batch, tied):
    policy = tiny_policy(tied=tied)
    policy.snapshot().save(tmp_path)
    loaded = Policy.load(tmp_path, device="cpu")
    assert digest(loaded) == digest(policy)
    logps = [response_logps(p.model, batch, temperature=0.7) for p in (loaded, policy)]
    assert torch.equal(*logps)
    assert loaded.tokenizer("1+2= x").input_ids == policy.tokenizer("1+2= x").input_ids
    assert loaded.tokenizer.eos_token_id == EOS_ID


def test_a_saved_folder_is_what_other_tools_expect(tmp_path):
    tiny_folder(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]


def test_weights_are_stored_in_the_dtype_asked_for_and_the_config_says_so(tmp_path):
    policy = tiny_policy()
    policy.snapshot().save(tmp_path, dtype="bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    assert policy.model.config.dtype != torch.bfloat16


def test_a_policy_loads_in_the_dtype_asked_for_without_dropout(tmp_path):
    policy = Policy.load(tiny_folder(tmp_path), dtype="bfloat16", device="cpu")
    assert policy.model.dtype == torch.bfloat16
    assert not any(module.training for module in policy.model.modules())
    assert all(parameter.requires_grad for parameter in policy.model.parameters())


def test_a_model_with_contradictory_sampling_settings_can_still_be_saved(tmp_path):
    folder = tiny_folder(tmp_path / "a")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "temperature": 0.6, "do_sample": False}))
    Policy.load(folder, device="cpu").snapshot().save(tmp_path / "b")
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text())["eos_token_id"] == EOS_ID


def test_a_folder_that_holds_no_policy_is_damaged(tmp_path):
    with pytest.raises(Damaged, match=f"cannot load a model from '{tmp_path}'"):
        Policy.load(tmp_path, device="cpu")
    folder = tiny_folder(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(Damaged, match="cannot load a model"):
        Policy.load(folder, device="cpu")


def test_weights_that_are_pickled_are_not_loaded(tmp_path):
    folder = tiny_folder(tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(Damaged, match="safetensors"):
        Policy.load(folder, device="cpu")


def test_a_folder_that_lacks_a_weight_is_damaged(tmp_path):
    folder = tiny_folder(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Damaged, match=r"for AutoModelForCausalLM it has no model\.norm\.weight"):
        Policy.load(folder, device="cpu")


@pytest.mark.parametrize("path", ["/no/such/folder", "no name of a repository!"])
def test_a_path_that_can_be_nothing_is_a_bad_setting(path):
    with pytest.raises(ConfigError, match=f"model.path: cannot load a model from '{path}'"):
        Policy.load(path, device="cpu")


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (lambda: LocalEntryNotFoundError("the hub does not answer"), RunFailed),
        (lambda: TimeoutError("timed out"), RunFailed),
        (lambda: HfHubHTTPError("busy", response=answer(503)), RunFailed),
        (lambda: HfHubHTTPError("slow down", response=answer(429)), RunFailed),
        (lambda: RepositoryNotFoundError("no such repository", response=answer(404)), ConfigError),
        (lambda: HfHubHTTPError("gated", response=answer(403)), ConfigError),
        (lambda: ValueError("unknown architecture"), ConfigError),
    ],
)
def test_trouble_on_the_way_to_the_hub_can_be_tried_again_and_its_refusals_cannot(monkeypatch, trouble, kind):
    def load(*_: object, **__: object) -> None:
        try:
            raise trouble()
        except Exception as cause:
            raise OSError("transformers says something") from cause

    monkeypatch.setattr(AutoConfig, "from_pretrained", load)
    with pytest.raises(kind, match="cannot load a model from 'some/model'"):
        Policy.load("some/model", device="cpu")


def test_a_damaged_file_that_the_hub_has_brought_is_named(tmp_path, monkeypatch):
    def load(*_: object, **__: object) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    (tiny_folder(tmp_path) / "config.json").write_bytes(b"[" * 100_000)
    monkeypatch.setattr(AutoConfig, "from_pretrained", load)
    monkeypatch.setattr("tba.models.pretrained.try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))
    fault = rf"config\.json is not readable JSON: it is nested too deeply; remove {tmp_path}, so that the model"
    with pytest.raises(ConfigError, match=f"^model.path: cannot load a model from 'some/model': {fault}"):
        Policy.load("some/model", device="cpu")


def test_an_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.dtype must be one of float32, bfloat16, got 'int4'"):
        Policy.load(tiny_folder(tmp_path), dtype="int4", device="cpu")


# --- Snapshots and digests ---


@pytest.mark.parametrize("tied", [True, False])
def test_a_snapshot_keeps_the_weights_of_its_moment(tmp_path, tied):
    policy = tiny_policy(tied=tied)
    before = digest(policy)
    snapshot = policy.snapshot()
    change_weights(policy)
    assert snapshot.sha256 == before != digest(policy)
    snapshot.save(tmp_path)
    assert digest(Policy.load(tmp_path, device="cpu")) == before


def test_a_snapshot_shares_no_weight_with_the_policy_and_carries_no_gradient(batch):
    policy = tiny_policy()
    response_logps(policy.model, batch, temperature=1.0).sum().backward()
    copied = policy.snapshot().model
    live = {tensor.data_ptr() for tensor in chain(policy.model.parameters(), policy.model.buffers())}
    assert not live & {tensor.data_ptr() for tensor in chain(copied.parameters(), copied.buffers())}
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in copied.parameters())


def test_a_snapshot_of_tied_weights_stays_tied():
    copied = tiny_policy(tied=True).snapshot().model
    assert copied.get_parameter("lm_head.weight") is copied.get_parameter("model.embed_tokens.weight")


def test_the_digest_changes_with_one_weight_and_with_nothing_else(batch):
    policy = tiny_policy()
    before = digest(policy)
    response_logps(policy.model, batch, temperature=1.0).sum().backward()
    assert digest(policy) == before == digest(tiny_policy())
    with torch.no_grad():
        next(policy.model.parameters()).view(-1)[0] += 1e-3
    assert digest(policy) != before


# --- Devices and tokens ---


def test_devices_are_resolved_and_impossible_ones_refused():
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match=r"model\.device: no such kind of device, got 'quantum'"):
        resolve_device("quantum")
    with pytest.raises(ConfigError, match="GPUs, got 'cuda:99'"):
        resolve_device("cuda:99")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU that is here")
def test_the_cpu_is_not_taken_in_silence_where_there_are_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    set_gpus(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=r"task\.options\.victim_device: this machine has NVIDIA GPUs, but torch "):
        resolve_device("auto", setting="task.options.victim_device")
    assert resolve_device("cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto").type == "cpu"


def test_padding_falls_back_to_eos_where_a_tokenizer_has_no_padding():
    policy = tiny_policy()
    assert policy.pad_id == PAD_ID
    policy.tokenizer.pad_token = None
    assert policy.pad_id == EOS_ID
    policy.tokenizer.eos_token = None
    assert policy.pad_id == 0


# --- The scorer ---


PROMPTS = [prompt(4, 5, 6), prompt(7), prompt(8, 9)]
RESPONSES = [
    [response(10, EOS_ID), response(*range(10, 40))],
    [response(EOS_ID), response(11)],
    [response(12, 13, 14), response(15, EOS_ID)],
]


@pytest.mark.parametrize("tokens_per_batch", [1, 40, 8192])
def test_the_scorer_gives_every_response_its_own_token_logps_however_it_batches(tokens_per_batch):
    policy = tiny_policy()
    scorer = PolicyScorer(policy, Version(0, 1), tokens_per_batch=tokens_per_batch)
    scored = scorer.token_logps(PROMPTS, RESPONSES, temperature=0.7)
    assert [[len(logps) for logps in group] for group in scored] == [[len(r.tokens) for r in g] for g in RESPONSES]
    for one, group, logps in zip(PROMPTS, RESPONSES, scored, strict=True):
        for answer, row in zip(group, logps, strict=True):
            sequence = torch.tensor([[*one.tokens, *answer.tokens]])
            with torch.no_grad():
                expected = torch.log_softmax(policy.model(input_ids=sequence).logits[0] / 0.7, dim=1)
            places = range(len(one.tokens) - 1, sequence.shape[1] - 1)
            by_hand = [float(expected[i, sequence[0, i + 1]]) for i in places]
            assert row == pytest.approx(by_hand, abs=1e-4)


def test_the_scorer_agrees_with_what_the_trainer_computes():
    policy = tiny_policy()
    scored = PolicyScorer(policy, Version(0, 1)).token_logps(PROMPTS, RESPONSES, temperature=0.7)
    rows = [
        trajectory(
            prompt_id=p.prompt_id,
            prompt_tokens=p.tokens,
            response_tokens=r.tokens,
            ref_logps=logps,
            finished=r.finished,
        )
        for p, group, scores in zip(PROMPTS, RESPONSES, scored, strict=True)
        for r, logps in zip(group, scores, strict=True)
    ]
    batch = collate(fetched_of(rows), responses_per_prompt=2, pad_id=policy.pad_id, include_eos=True)
    logp_B = response_logps(policy.model, batch, temperature=0.7)
    torch.testing.assert_close(logp_B, batch.ref_logp_B, rtol=1e-4, atol=1e-4)


def test_the_scorer_of_nothing_returns_nothing():
    assert PolicyScorer(tiny_policy(), Version(0, 1)).token_logps([], [], temperature=1.0) == []


def test_a_policy_path_may_be_a_string(tmp_path: Path):
    assert Policy.load(str(tiny_folder(tmp_path)), device="cpu").device == torch.device("cpu")
