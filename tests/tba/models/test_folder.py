"""What can be no policy is refused from its files, and what passes there and still is none when it is loaded."""

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AddedToken,
    BertConfig,
    BertForMaskedLM,
    CpmAntConfig,
    CpmAntForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForSequenceClassification,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.harness.tiny_models import tiny_folder, tiny_llama, tiny_policy, tiny_tokenizer
from tba.errors import ConfigError, Damaged
from tba.models.folder import check_folder, weight_files
from tba.models.policy import Policy
from tba.models.trainable import check_first_policy
from tests.support.faults.irregular import KINDS, Kind, put_irregular, within_patience

TINY: dict[str, Any] = {"vocab_size": 78, "pad_token_id": 0, "eos_token_id": 1}
BERT: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def t5(folder: Path) -> Path:
    config = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, **TINY)
    return saved(T5ForConditionalGeneration(config), folder)


def bert(folder: Path) -> Path:
    return saved(BertForMaskedLM(BertConfig(**BERT, **TINY)), folder)


def classifier(folder: Path) -> Path:
    return saved(LlamaForSequenceClassification(tiny_llama().config), folder)


def changed(folder: Path, **changes: Any) -> Path:
    """The tiny policy with other words in its config.json."""
    path = tiny_folder(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def quantised(folder: Path) -> Path:
    return changed(folder, quantization_config={"quant_method": "gptq", "bits": 4})


def pickled(folder: Path) -> Path:
    torch.save(load_file(tiny_folder(folder) / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def without(*names: str) -> Any:
    def make(folder: Path) -> Path:
        for name in names:
            (tiny_folder(folder) / name).unlink()
        return folder

    return make


def without_tokenizer(folder: Path) -> Path:
    tiny_llama().save_pretrained(folder)
    return folder


def pointer(folder: Path) -> Path:
    (tiny_folder(folder) / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 1234\n")
    return folder


def of_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = tiny_folder(folder) / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))
        return folder

    return make


def in_shards(folder: Path) -> Path:
    tiny_llama().save_pretrained(folder, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def without_a_shard(folder: Path) -> Path:
    next(in_shards(folder).glob("model-00001-of-*.safetensors")).unlink()
    return folder


REFUSED = {
    "t5": (t5, "t5 has an encoder and a decoder, and does not continue its prompt"),
    "bert": (bert, "a BertForMaskedLM is no causal language model"),
    "classifier": (classifier, "a LlamaForSequenceClassification is no causal language model"),
    "quantised": (quantised, r"its weights are quantised \(gptq\); save them as float32 or bfloat16"),
    "pickled": (pickled, r"no weights \(\*\.safetensors\), only pytorch_model\.bin, which is pickled"),
    "no weights": (without("model.safetensors"), r"no weights \(\*\.safetensors\)$"),
    "no tokenizer": (without_tokenizer, "no tokenizer"),
    "pointer": (pointer, "model.safetensors is a pointer of Git LFS: `git lfs pull` fetches the file itself"),
    "cut off": (of_bytes(lambda it: it[:-1]), r"model\.safetensors is incomplete: it has [\d,]+ bytes of [\d,]+$"),
    "cut off in its head": (of_bytes(lambda it: it[:100]), r"model\.safetensors is not a safetensors file"),
    "empty": (of_bytes(lambda it: b""), r"model\.safetensors is not a safetensors file"),
    "a web page": (of_bytes(lambda it: b"<!doctype html><html>"), r"model\.safetensors is not a safetensors file"),
    "no shard": (without_a_shard, r"model-00001-of-\d+\.safetensors is missing, although model\.safetensors\.index"),
    "no config": (without("config.json"), r"no config\.json that can be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_that_holds_no_policy_is_refused_by_what_is_found_and_does_not_load(tmp_path, name):
    make, fault = REFUSED[name]
    folder = make(tmp_path / "model")
    with pytest.raises(ConfigError, match=rf"^model\.path: '{folder}' holds no policy that can be trained: {fault}"):
        check_folder("model.path", folder, longest=8)
    with pytest.raises((Damaged, ConfigError)) as error:
        check_first_policy(Policy.load(folder, device="cpu"), longest=8)
    assert str(folder) in str(error.value) and len(str(error.value)) < 600


def test_a_policy_that_can_be_trained_is_not_refused(tmp_path):
    folder = tiny_folder(tmp_path)
    check_folder("model.path", folder, longest=1024)
    check_first_policy(Policy.load(folder, device="cpu"), longest=1024)


def test_weights_in_shards_are_not_refused_nor_for_what_else_is_in_the_folder(tmp_path):
    folder = in_shards(tmp_path)
    assert weight_files(folder) == sorted(folder.glob("model-*.safetensors")) and len(weight_files(folder)) > 1
    (folder / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    check_folder("model.path", folder, longest=1024)
    check_first_policy(Policy.load(folder, device="cpu"), longest=1024)


LENGTH = r"search\.max_prompt_tokens \+ search\.max_response_tokens must be <= {}, the length .* got {}$"


@pytest.mark.parametrize("nested", [False, True])
def test_prompts_and_responses_longer_than_the_positions_of_a_model_are_refused(tmp_path, nested):
    folder = changed(tmp_path, text_config={"max_position_embeddings": 100}) if nested else tiny_folder(tmp_path)
    room = 100 if nested else 1024
    check_folder("model.path", folder, longest=room)
    with pytest.raises(ConfigError, match=LENGTH.format(room, room + 1)):
        check_folder("model.path", folder, longest=room + 1)


def test_learned_positions_count_too(tmp_path):
    """GPT-2 has another name for how many there are."""
    folder = saved(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, **TINY)), tmp_path)
    for check in (
        lambda longest: check_folder("model.path", folder, longest=longest),
        lambda longest: check_first_policy(Policy.load(folder, device="cpu"), longest=longest),
    ):
        check(64)
        with pytest.raises(ConfigError, match=LENGTH.format(64, 65)):
            check(65)


@pytest.mark.parametrize("nested", [False, True])
def test_rows_so_long_that_those_beside_them_are_read_with_other_factors_are_refused(tmp_path, nested):
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 4}
    rope |= {"original_max_position_embeddings": 100, "long_factor": [4.0] * 4}
    changes = {"rope_parameters": {"full_attention": rope} if nested else rope}
    folder = changed(tmp_path, **({"text_config": changes} if nested else changes))
    other = r"search\.max_prompt_tokens \+ .* must be <= 100, got 101: .* with other factors \(longrope\)$"
    checks = [lambda longest: check_folder("model.path", folder, longest=longest)]
    if not nested:  # it is one of other names
        checks.append(lambda longest: check_first_policy(Policy.load(folder, device="cpu"), longest=longest))
    for check in checks:
        check(100)
        with pytest.raises(ConfigError, match=other):
            check(101)
    check_folder("model.path", changed(tmp_path, rope_parameters={**rope, "long_factor": [1.0] * 4}), longest=101)


def test_factors_by_their_names_of_old_are_found_too(tmp_path):
    rope = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    folder = changed(tmp_path, rope_parameters=None, rope_scaling=rope, original_max_position_embeddings=100)
    check_folder("model.path", folder, longest=100)
    with pytest.raises(ConfigError, match=r"must be <= 100, got 101: "):
        check_folder("model.path", folder, longest=101)


# --- What only shows once it is loaded ---


def test_a_model_that_looks_ahead_is_refused_whatever_it_calls_itself(tmp_path):
    folder = bert(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertLMHeadModel"]}))
    policy = Policy.load(folder, device="cpu")
    with pytest.raises(ConfigError, match=r"a BertLMHeadModel is no causal language model: .* depend on later tokens"):
        check_first_policy(policy, longest=8)
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": ["BertLMHeadModel"], "is_decoder": True})
    )
    check_first_policy(Policy.load(folder, device="cpu"), longest=8)


def test_a_model_that_takes_what_fills_a_row_for_no_token_is_refused(tmp_path):
    """On the right that changes what it predicts, though other tokens there do not."""
    config = CpmAntConfig(
        num_attention_heads=2, dim_head=8, dim_ff=32, num_hidden_layers=1, prompt_length=4, segment_types=8, **TINY,
        hidden_size=16,
    )  # fmt: skip
    policy = Policy.load(saved(CpmAntForCausalLM(config), tmp_path), device="cpu")
    with pytest.raises(ConfigError, match=r"a CpmAntForCausalLM is no causal language model: .* on later tokens"):
        check_first_policy(policy, longest=8)


def test_a_tokenizer_with_more_tokens_than_the_model_reads_is_refused_but_for_padding():
    policy = tiny_policy()
    policy.tokenizer.add_special_tokens({"pad_token": "<more>"})
    check_first_policy(policy, longest=8)
    assert policy.tokenizer.pad_token_id == 78 != policy.pad_id == policy.tokenizer.eos_token_id
    policy.tokenizer.add_tokens([AddedToken("<think>")])
    fault = "its tokenizer has a token '<think>' of number 79, but its embedding has only 78 rows"
    with pytest.raises(ConfigError, match=f"^model.path: .* cannot be trained: {fault}"):
        check_first_policy(policy, longest=8)


def test_a_policy_whose_responses_nothing_ends_is_refused():
    policy = tiny_policy()
    policy.tokenizer.eos_token = None
    check_first_policy(policy, longest=8)  # generation_config.json has one
    policy.model.generation_config.eos_token_id = None
    with pytest.raises(ConfigError, match=r"neither its tokenizer nor generation_config\.json has an end token"):
        check_first_policy(policy, longest=8)


def test_a_weight_of_another_shape_is_refused_by_its_name(tmp_path):
    folder = changed(tmp_path, intermediate_size=48)
    fault = r"mlp\.down_proj\.weight has the shape \(32, 64\), but config\.json says \(32, 48\)"
    with pytest.raises(Damaged, match=rf"cannot load a model from '{folder}': model\.layers\.0\.{fault}"):
        Policy.load(folder, device="cpu")


def test_a_tokenizer_that_cannot_be_read_is_told_of_as_one(tmp_path):
    for text in ("{}", "?"):
        (tiny_folder(tmp_path) / "tokenizer.json").write_text(text)
        with pytest.raises(Damaged, match=f"cannot load a model from '{tmp_path}': "):
            Policy.load(tmp_path, device="cpu")


DAMAGED = {
    "nested too deeply": (b"[" * 100_000, r"is not readable JSON: it is nested too deeply"),
    "objects nested too deeply": (b'{"a":' * 100_000, r"is not readable JSON: it is nested too deeply"),
    "cut off": (b'{"a": {"b": 1}, "c', r"is not JSON: Unterminated string"),
    "empty": (b"", r"is not JSON: Expecting value"),
    "a web page": (b"<!doctype html>", r"is not JSON: Expecting value"),
    "a list": (b"[]", r"holds a JSON list, not an object"),
    "a number": (b"7", r"holds a JSON int, not an object"),
    "nothing": (b"null", r"holds a JSON NoneType, not an object"),
    "not UTF-8": (b'{"a": "\xff"}', r"is not UTF-8: invalid start byte at byte 7"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), r"is not UTF-8: invalid start byte at byte 0"),
    "zeros": (bytes(4096), r"holds a NUL byte at byte 0"),
}
"""What a file that should hold an object of JSON holds, and what is said of it."""
OBJECTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "model.safetensors.index.json", "adapter_config.json", "chat_template.json",
)  # fmt: skip
TEXTS = ("chat_template.jinja", "additional_chat_templates/tools.jinja")


def refuses(folder: Path, fault: str) -> None:
    """Before anything starts, and where the policy is loaded after all."""
    with pytest.raises(ConfigError, match=rf"^model\.path: '{folder}' holds no policy that can be trained: {fault}"):
        within_patience(lambda: check_folder("model.path", folder, longest=8))
    with pytest.raises(Damaged, match=rf"^cannot load a model from '{folder}': {folder}/{fault}") as error:
        within_patience(lambda: Policy.load(folder, device="cpu"))
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("name", OBJECTS)
def test_a_damaged_file_of_a_model_is_refused_by_its_name(tmp_path: Path, name: str, damage: str):
    content, fault = DAMAGED[damage]
    (tiny_folder(tmp_path) / name).write_bytes(content)
    refuses(tmp_path, f"{re.escape(name)} {fault}")


@pytest.mark.parametrize("name", TEXTS)
def test_a_damaged_chat_template_is_refused_by_its_name(tmp_path: Path, name: str):
    (path := tiny_folder(tmp_path) / name).parent.mkdir(exist_ok=True)
    for content, fault in ((b"{{ \xff }}", "is not UTF-8: invalid start byte at byte 3"), (b"a\0", "holds a NUL byte")):
        path.write_bytes(content)
        refuses(tmp_path, f"{re.escape(name)} {fault}")


NAMES = [*OBJECTS, *TEXTS, "model.safetensors", "other.safetensors", "merges.txt"]


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "pipe") for name in NAMES), *product(("config.json", *TEXTS, "merges.txt"), KINDS[1:])]
)
def test_what_is_no_file_under_the_name_of_one_is_refused_and_nobody_waits_for_it(
    tmp_path: Path, name: str, kind: Kind
):
    (path := tiny_folder(tmp_path) / name).unlink(missing_ok=True)
    put_irregular(path, kind)
    nowhere = kind in ("link to nothing", "link to itself")
    if name == "merges.txt" and nowhere:
        check_folder("model.path", tmp_path, longest=8)
    else:
        refuses(tmp_path, rf"{re.escape(name)} is a {'link that leads nowhere' if nowhere else '.*, not a file'}$")


@pytest.mark.parametrize("name", [*OBJECTS, "model.safetensors", "other.safetensors"])
def test_a_folder_under_the_name_of_a_file_is_refused(tmp_path: Path, name: str):
    (path := tiny_folder(tmp_path) / name).unlink(missing_ok=True)
    path.mkdir()
    refuses(tmp_path, rf"{re.escape(name)} is a folder, not a file$")


WRONG_TYPES = [
    ("added_tokens.json", {"<a>": "7"}, "must give a whole number for each token, got '7' for '<a>'"),
    ("config.json", {"architectures": [3]}, r"must have a list of names as `architectures`, got \[3\]"),
    ("config.json", {"architectures": 3}, "must have a list of names as `architectures`, got 3"),
    ("config.json", {"model_type": 3}, "must have a text as `model_type`, got 3"),
    ("model.safetensors.index.json", {"weight_map": {"a": 3}}, "must have names of files as `weight_map`, got"),
    ("model.safetensors.index.json", {"weight_map": []}, r"must have names of files as `weight_map`, got \[\]"),
]


@pytest.mark.parametrize(("name", "content", "fault"), WRONG_TYPES)
def test_a_value_of_a_type_that_nobody_reads_is_refused_by_file(tmp_path: Path, name: str, content: Any, fault: str):
    (tiny_folder(tmp_path) / name).write_text(json.dumps(content))
    refuses(tmp_path, f"{re.escape(name)} {fault}")


@pytest.mark.parametrize(
    "changes",
    [{"max_position_embeddings": "many"}, {"hidden_size": "wide"}, {"num_hidden_layers": []}, {"rope_parameters": 3}],
)
def test_a_value_that_transformers_cannot_use_is_damage_of_the_folder(tmp_path: Path, changes: dict[str, Any]):
    with pytest.raises((Damaged, ConfigError), match=str(tmp_path)):
        folder = changed(tmp_path, **changes)
        check_folder("model.path", folder, longest=8)
        Policy.load(folder, device="cpu")


def test_a_head_of_weights_that_is_nested_too_deeply_is_refused(tmp_path: Path):
    head = b"[" * 100_000
    (tiny_folder(tmp_path) / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file"):
        check_folder("model.path", tmp_path, longest=8)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_policy_that_predicts_no_numbers_is_refused_for_that(number: float):
    policy = tiny_policy()
    weight: Any = policy.model.get_parameter("model.layers.1.mlp.up_proj.weight")
    with torch.no_grad():
        weight[3] = number
    with pytest.raises(ConfigError, match=r"^model\.path: .* cannot be trained: its predictions are not finite"):
        check_first_policy(policy, longest=8)
