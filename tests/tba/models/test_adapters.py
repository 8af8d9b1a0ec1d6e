"""Adapters, compared with the plain model with merged weights."""
# Shapes: O x I the weights W of a layer, R x I those of A, O x R those of B.

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.harness.tiny_models import tiny_folder, tiny_tokenizer
from tba.batches.logprobs import token_logps
from tba.batches.packing import can_pack
from tba.config import Config
from tba.errors import ConfigError, Damaged, Missing
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.adapters import adapted, files_sha256, merge, weights_of
from tba.models.policy import Policy, PolicyScorer
from tba.presets import preset
from tba.train.learner import Learner
from tba.train.moving_reference import MovingReference
from tba.types import Prompt, Version
from tests.support.models.adapter_examples import ALPHA, RANK, adapter_of, fresh, moved
from tests.support.models.families import FAMILIES, family_folder
from tests.support.models.policy_examples import response

TOKENS_BT = torch.tensor([[5, 9, 13, 7, 20, 4], [6, 9, 30, 7, 22, 1]])
MASK_BT = torch.tensor([[False, False, True, True, True, True]] * 2)
V0, V1 = Version(0, 1), Version(1, 1)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "base")


def effective(policy: Policy) -> nn.Module:
    """Return the plain model with weights W + (alpha / rank) B A, computed by hand."""
    assert policy.adapter
    found = weights_of(policy.model)
    model = Policy.load(policy.adapter.base, device="cpu").model
    with torch.no_grad():
        for name in adapted(policy.model):
            a_RI, b_OR = (found[f"base_model.model.{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
            model.get_submodule(name).weight += ALPHA / RANK * b_OR @ a_RI  # pyright: ignore
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS_BT).logits


def test_a_fresh_adapter_changes_nothing_and_is_the_same_for_the_same_seed(base):
    assert torch.equal(logits(fresh(base).model), logits(Policy.load(base, device="cpu").model))
    assert fresh(base).snapshot().sha256 == fresh(base).snapshot().sha256
    other = Policy.load_adapted(adapter_of(base), None, seed=2, device="cpu")
    assert other.snapshot().sha256 != fresh(base).snapshot().sha256


def test_the_model_is_the_plain_one_with_the_product_added_to_its_weights(base):
    policy = moved(base)
    expected = logits(effective(policy))
    assert not torch.allclose(expected, logits(Policy.load(base, device="cpu").model), atol=0.1)
    torch.testing.assert_close(logits(policy.model), expected, rtol=1e-4, atol=1e-4)
    merge(policy.model)
    torch.testing.assert_close(logits(policy.model), expected, rtol=1e-4, atol=1e-4)
    assert policy.model.state_dict().keys() == Policy.load(base, device="cpu").model.state_dict().keys()


def test_gradients_are_those_of_the_plain_models_weights_by_the_chain_rule(base):
    """dA = s Bt dW and dB = s dW At, with t for transposed. No other weights have a gradient."""
    policy = moved(base)
    plain = effective(policy)
    for model in (policy.model, plain):
        token_logps(model, TOKENS_BT, MASK_BT, temperature=0.7).sum().backward()
    found, scale = weights_of(policy.model), ALPHA / RANK
    for name in adapted(policy.model):
        a_RI, b_OR = (found[f"base_model.model.{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
        by_weight_OI = plain.get_submodule(name).weight.grad
        torch.testing.assert_close(a_RI.grad, scale * b_OR.T @ by_weight_OI, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(b_OR.grad, scale * by_weight_OI @ a_RI.T, rtol=1e-3, atol=1e-4)
    with_gradient = {name for name, it in policy.model.named_parameters() if it.grad is not None}
    assert len(found) == 2 * 7 * 2 and len(with_gradient) == len(found)


def test_the_model_stays_of_its_class_and_packs(base):
    model = moved(base).model
    assert (
        can_pack(model)
        and type(model).__name__ == "LlamaForCausalLM"
        and not any(it.training for it in model.modules())
    )


def test_what_is_stored_is_small_and_loads_with_peft_and_here(base, tmp_path):
    policy = moved(base)
    policy.snapshot().save(tmp_path / "version")
    assert {path.name for path in (tmp_path / "version").iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json"
    }  # fmt: skip
    stored = load_file(tmp_path / "version" / "adapter_model.safetensors")
    assert sum(it.numel() for it in stored.values()) == sum(
        RANK * (layer.in_features + layer.out_features) for layer in adapted(policy.model).values()
    )
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "version").eval()
    torch.testing.assert_close(logits(by_peft), logits(policy.model), rtol=1e-5, atol=1e-5)
    loaded = Policy.load_adapted(adapter_of(base), tmp_path / "version", device="cpu")
    assert torch.equal(logits(loaded.model), logits(policy.model))
    assert loaded.snapshot().sha256 == policy.snapshot().sha256
    loaded.snapshot().save(tmp_path / "again")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "version" / name).read_bytes()
    said = json.loads((tmp_path / "version" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (RANK, ALPHA, "some/model")


def test_what_is_stored_names_the_revision_of_the_base(base, tmp_path):
    """peft loads this revision of the base, and no other of the same name."""
    policy = fresh(base)
    for revision in (None, "v2"):
        replace(policy, adapter=replace(adapter_of(base), revision=revision)).snapshot().save(tmp_path)
        assert PeftConfig.from_pretrained(str(tmp_path)).revision == revision


def test_a_snapshot_stays_as_it_is_while_training_goes_on(base):
    policy = moved(base)
    snapshot = policy.snapshot()
    before = {name: it.clone() for name, it in snapshot.weights.items()}  # pyright: ignore
    with torch.no_grad():
        for weights in weights_of(policy.model).values():
            weights += 1
    assert all(torch.equal(it, before[name]) for name, it in snapshot.weights.items())  # pyright: ignore
    assert policy.snapshot().sha256 != snapshot.sha256


def test_an_adapter_is_put_on_no_other_base(base, tmp_path):
    moved(base).snapshot().save(tmp_path / "version")
    other = tiny_folder(tmp_path / "other", seed=1)
    with pytest.raises(
        ConfigError, match=r"model.path: the adapter in .* is for weights with sha256 .* some/model has"
    ):
        Policy.load_adapted(adapter_of(other), tmp_path / "version", device="cpu")


def test_an_adapter_is_put_on_no_base_that_computes_otherwise(base, tmp_path):
    """Older stored adapters name only the weights of their base."""
    policy, written = moved(base), base / "config.json"
    policy.snapshot().save(tmp_path / "version")
    earlier = {name: it.detach().contiguous() for name, it in weights_of(policy.model).items()}
    shutil.copytree(tmp_path / "version", tmp_path / "earlier")
    save_file(earlier, tmp_path / "earlier" / "adapter_model.safetensors", {"base_sha256": files_sha256(base)})
    said = json.loads(written.read_text())
    written.write_text(json.dumps({**said, "transformers_version": "another"}))
    assert Policy.load_adapted(adapter_of(base), tmp_path / "version", device="cpu")
    written.write_text(json.dumps({**said, "rms_norm_eps": 0.1}))
    with pytest.raises(ConfigError, match=r"model.path: the adapter in .* is for a config.json with sha256 .* has"):
        Policy.load_adapted(adapter_of(base), tmp_path / "version", device="cpu")
    assert Policy.load_adapted(adapter_of(base), tmp_path / "earlier", device="cpu")


def test_an_adapter_of_another_shape_or_a_broken_one_is_damaged(base, tmp_path):
    moved(base).snapshot().save(tmp_path / "version")
    for changes in ({"rank": 4}, {"targets": "q_proj"}):
        with pytest.raises(Damaged, match="is not one of rank"):
            Policy.load_adapted(adapter_of(base, **changes), tmp_path / "version", device="cpu")  # pyright: ignore
    (tmp_path / "version" / "adapter_model.safetensors").write_bytes(b"?")
    with pytest.raises(Damaged, match="cannot be read"):
        Policy.load_adapted(adapter_of(base), tmp_path / "version", device="cpu")


def test_a_damaged_file_of_an_adapter_or_of_its_base_is_named(base, tmp_path):
    moved(base).snapshot().save(tmp_path / "version")
    adapter = adapter_of(base)
    (tmp_path / "version" / "adapter_config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(Damaged, match=r"version: adapter_config\.json is not readable JSON: it is nested too"):
        adapter.read(tmp_path / "version")
    (base / "config.json").write_bytes(b"{")
    with pytest.raises(Damaged, match=r"base/config\.json is not JSON"):
        _ = adapter.bases
    with pytest.raises(Damaged, match=r"base: config\.json is not JSON"):
        adapter_of(base)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("targets", ["nothing_here", "lm_head", "embed_tokens"])
def test_layers_that_cannot_be_adapted_are_refused(base, targets):
    with pytest.raises(ConfigError, match=f"model.lora_targets: .*{targets}"):
        fresh(base, targets=targets)


@pytest.mark.filterwarnings("ignore:The following")
@pytest.mark.parametrize("family", ["mixtral", "qwen3, experts"])
def test_weights_of_experts_are_no_linear_layers(tmp_path, family):
    """peft would adapt them too, but in a form that neither peft nor vLLM can read."""
    folder = family_folder(tmp_path, FAMILIES[family])
    with pytest.raises(ConfigError, match=r"model.lora_targets: .* got 'all-linear', which names .*\.mlp\."):
        fresh(folder)
    assert len(adapted(fresh(folder, targets="q_proj,v_proj").model)) == 4


@pytest.mark.parametrize("targets", ["q_proj,v_prj", "q_proj,", "v_proj,proj", "q_proj,lin.v_proj"])
def test_a_name_that_is_no_layers_beside_others_that_are_is_refused(base, targets):
    with pytest.raises(ConfigError, match=f"model.lora_targets: no layer of 'some/model' is named .*, got '{targets}'"):
        fresh(base, targets=targets)


def test_names_of_layers_may_have_spaces_between_them_and_say_what_they_are_in(base):
    one, other = (fresh(base, targets=it) for it in ("q_proj, self_attn.v_proj", "q_proj,v_proj"))
    assert set(weights_of(one.model)) == set(weights_of(other.model))


def test_an_adapter_where_a_model_is_asked_for_is_refused(base, tmp_path):
    moved(base).snapshot().save(tmp_path / "version")
    config = tmp_path / "version" / "adapter_config.json"
    config.write_text(config.read_text().replace("some/model", str(base)))
    tiny_tokenizer().save_pretrained(tmp_path / "version")
    with pytest.raises(Damaged, match="cannot load a model from"):
        Policy.load(tmp_path / "version", device="cpu")


def test_a_generator_takes_adapter_after_adapter_into_the_model_that_it_has(base, tmp_path):
    folders = {version: tmp_path / str(version) for version in (V0, V1)}
    for seed, folder in enumerate(folders.values()):
        moved(base, seed=seed).snapshot().save(folder)
    generator = TransformersGenerator(device="cpu", max_response_tokens=8, adapter=adapter_of(base))
    prompt = Prompt(prompt_id="p", text="1+2=", tokens=(4, 13, 5, 17))
    seen = set[int]()
    for version, folder in folders.items():
        generator.adopt(folder, version)
        seen.add(id(generator.policy))
        groups = generate(generator, [prompt], [[1, 2, 3]], temperature=1.0)
        policy = Policy.load_adapted(adapter_of(base), folder, device="cpu")
        [expected] = PolicyScorer(policy, version).token_logps([prompt], groups, temperature=1.0)
        for answer, logps in zip(groups[0], expected, strict=True):
            assert answer.logps == pytest.approx(logps, abs=1e-4)
    assert len(seen) == 1
    with pytest.raises(Missing):
        generator.adopt(tmp_path / "gone", V1)


def test_a_scorer_of_an_adapter_may_keep_its_products_weights_in_bfloat16(base):
    prompt, group = Prompt(prompt_id="p", text="1+2=", tokens=(4, 13, 5, 17)), [response(6, 1), response(9, 10, 1)]
    scored = list[object]()
    for owns in (False, True):
        policy = moved(base)
        scorer = PolicyScorer(policy, V0, compute_dtype="bfloat16", owns=owns)
        assert (torch.bfloat16 in {it.dtype for it in policy.model.parameters()}) == owns
        scored.append(scorer.token_logps([prompt], [group], temperature=1.0))
    assert scored[0] == scored[1]


def test_a_moving_reference_shares_the_base_and_keeps_the_adapter(base):
    policy = moved(base)
    reference = MovingReference(policy.twin())
    before = logits(policy.model)
    ours, theirs = dict(reference.model.named_parameters()), dict(policy.model.named_parameters())
    assert {name for name in ours if ours[name] is not theirs[name]} == set(reference.tensors())
    assert len(reference.tensors()) == len(weights_of(policy.model))
    with torch.no_grad():
        for weights in weights_of(policy.model).values():
            weights += 1
    assert torch.equal(logits(reference.model), before)
    reference.follow(policy.model, decay=0)
    assert torch.equal(logits(reference.model), logits(policy.model))


def test_an_optimizer_holds_the_adapter_alone_also_of_a_value_model(base):
    policy = moved(base)
    learner = Learner(preset("quickstart").replace({"objective.name": "ppo"}), policy)
    [group] = learner.trained.optimizer.param_groups
    assert {id(it) for it in group["params"]} == {id(it) for it in weights_of(policy.model).values()}
    assert learner.auxiliary
    [group] = learner.auxiliary.optimizer.param_groups
    values: Any = learner.auxiliary.model
    held = [*weights_of(values.backbone).values(), *values.head.parameters()]
    assert {id(it) for it in group["params"]} == {id(it) for it in held}
    assert len(learner.auxiliary.tensors()) == len(held)  # its optimizer has no state yet
    assert not {id(it) for it in held} & {id(it) for it in policy.model.parameters()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.lora_alpha": 8.0}, "model.lora_alpha does not apply where model.lora_rank is 0"),
        ({"model.lora_targets": "q_proj"}, "model.lora_targets does not apply where model.lora_rank is 0"),
        ({"model.lora_rank": 8, "model.publish_dtype": "bfloat16"}, "model.publish_dtype must be model.dtype"),
        ({"model.lora_rank": 8, "sync.whole_every": 2}, "sync.whole_every must be 1"),
        ({"model.lora_rank": 8, "objective.reference_decay": 0.9}, "objective.reference_decay must be 0"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(changes: Mapping[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        Config().replace(changes)
