"""The policy of a run: where its files come from, and which ones are refused before anything is trained."""

import shutil
from pathlib import Path

import pytest

from benchmarks.harness.tiny_models import tiny_folder, tiny_policy
from flows.planning import create, resolve
from flows.roles import wiring
from storage.local_files.shared_cache import cache_folder
from storage.weights.versions import Versions
from tba.errors import ConfigError, DeadlinePassed
from tba.models.policy import Policy
from tba.types import Version
from tests.support.flows.live_roles import SMALL, ended_at_once, live, rows, settings, upload
from tests.support.models.families import FAMILIES, family_folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


def test_more_tokens_than_the_policy_can_read_are_refused_before_anything_starts_and_by_the_trainer(policy, tmp_path):
    refusal = "must be <= 1024, the length that the policy can read, got 1036"
    changes = {**SMALL, "model.path": str(policy), "search.max_response_tokens": 1020}
    with pytest.raises(ConfigError, match=refusal):
        resolve.resolve("quickstart", changes)
    error = ended_at_once(resolve.resolve("quickstart", changes, runs_here=False), tmp_path)
    assert isinstance(error, ConfigError) and refusal in str(error)


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_policy_on_s3_is_fetched_without_its_pickles_once_per_run(root, policy, tmp_path):
    upload(policy, f"{root}/model")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    upload(tmp_path, f"{root}/model")
    config = settings(Path("x"), **{"model.path": f"{root}/model/", "limits.data_deadline": 0.5})
    run = create.start(config, root, "on-s3")
    (error,) = live(run, "trainer", wiring.run_trainer)
    assert isinstance(error, DeadlinePassed)  # nobody searches
    published = Policy.load(Versions(run).load(Version(0, 1)), device="cpu")
    assert published.snapshot().sha256 == Policy.load(policy, device="cpu").snapshot().sha256
    (copy,) = cache_folder("models").glob("[!.]*")
    assert not list(copy.glob("*.bin"))
    for name in ("config.json", "model.safetensors"):
        assert (copy / name).read_bytes() == (policy / name).read_bytes()


@pytest.mark.parametrize("root", ["moto"], indirect=True)
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors.index.json", b"[" * 100_000, "no readable model.safetensors.index.json there"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 3}}', "no readable model.safetensors.index.json there"),
        ("added_tokens.json", b"{", "added_tokens.json is not JSON"),
    ],
    ids=["deep", "wrong type", "cut off"],
)
def test_a_url_with_a_damaged_file_is_refused_by_its_name(root, policy, tmp_path, name, content, said):
    upload(policy, f"{root}/model")
    (tmp_path / name).write_bytes(content)
    upload(tmp_path, f"{root}/model", name)
    error = ended_at_once(settings(Path("x"), **{"model.path": f"{root}/model"}), root)
    assert isinstance(error, ConfigError)
    assert str(error).startswith("model.path: ") and said in str(error)


@pytest.mark.parametrize("root", ["moto"], indirect=True)
@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("model.safetensors",), "config.json"),
        (("config.json", "tokenizer.json"), "*.safetensors"),
        (("none",), "config"),
    ],
)
def test_a_url_without_a_policy_is_refused_by_what_it_lacks(root, policy, names, missing):
    upload(policy, f"{root}/model", *names)
    error = ended_at_once(settings(Path("x"), **{"model.path": f"{root}/model"}), root)
    assert isinstance(error, ConfigError)
    assert f"model.path: {root}/model is not a Hugging Face folder with safetensors: no {missing}" in str(error)


@pytest.mark.parametrize("root", ["local"], indirect=True)
def test_a_policy_in_parts_is_refused_unless_every_part_is_there(root, policy, tmp_path):
    parts = tmp_path / "parts"
    Policy.load(policy, device="cpu").snapshot().model.save_pretrained(parts, max_shard_size="20KB")
    first, *_ = sorted(parts.glob("*.safetensors"))
    first.unlink()
    error = ended_at_once(settings(Path("x"), **{"model.path": f"file://{parts}"}), root)
    assert isinstance(error, ConfigError) and f"no {first.name} there" in str(error)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("ftp://somewhere/model", "a store is a path, file://… or s3://…, got ftp://…"),
        (
            "/no/such/folder",
            "model.path must be an existing folder, a GGUF file or a name on the hub, got '/no/such/folder'",
        ),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path, says, tmp_path):
    """The trainer refuses it too: a folder may exist where a run is started, but not where its roles run."""
    config = resolve.resolve("quickstart", {"model.path": path, **SMALL}, runs_here=False)
    error = ended_at_once(config, tmp_path)
    assert isinstance(error, ConfigError) and str(error) == says


def test_a_folder_that_can_be_no_policy_is_refused_before_anything_starts_and_by_the_trainer(policy, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(policy / name, tmp_path)
    with pytest.raises(ConfigError, match=rf"^model\.path: '{tmp_path}' holds no policy .*: no tokenizer$"):
        settings(tmp_path)
    elsewhere = resolve.resolve("quickstart", {"model.path": str(tmp_path), **SMALL}, runs_here=False)
    error = ended_at_once(elsewhere, tmp_path / "root")
    assert isinstance(error, ConfigError) and str(error).startswith("model.path: cannot load a model from")


def test_a_policy_that_no_run_can_train_is_refused_by_the_trainer(tmp_path):
    policy = tiny_policy()
    policy.tokenizer.add_tokens(["<think>"])
    policy.snapshot().save(tmp_path / "policy")
    error = ended_at_once(settings(tmp_path / "policy"), tmp_path / "root")
    assert isinstance(error, ConfigError) and "token '<think>' of number 78, but its embedding has only" in str(error)


@pytest.mark.parametrize(("family", "told"), [("gpt-oss", ["its attention needs s_aux"]), ("gemma3", [])])
def test_a_trainer_that_pads_says_so_and_why(tmp_path, family, told):
    folder = family_folder(tmp_path / "policy", FAMILIES[family])
    run = create.start(settings(folder, **{"limits.data_deadline": 0.5}), str(tmp_path / "root"), "padded")
    (error,) = live(run, "trainer", wiring.run_trainer)
    assert isinstance(error, DeadlinePassed)  # nobody searches
    found = rows(run, "select message, data ->> 'why' from events where kind = 'trainer-pads'")
    assert [why for _, why in found] == told
    assert all(why in message for message, why in found)
