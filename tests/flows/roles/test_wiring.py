"""Settings reach the objects that are made from them."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create, resolve
from flows.roles import model_loading, prompt_intake, wiring
from flows.roles.buffer_process import make_buffer
from storage.runs.events import Events
from storage.runs.run import Run
from tba.config import parse
from tba.errors import ConfigError
from tba.models import policy
from tba.presets import preset
from tba.tasks.quickstart import Quickstart
from tba.types import Prompt, Version
from tests.support.flows.live_roles import rows


def test_the_replay_buffer_has_the_memory_the_disk_space_and_the_threads_of_the_settings(tmp_path: Path):
    limits = {"limits.memory_gb": 0.5, "limits.disk_gb": 0.25, "limits.draw_threads": 3}
    config = preset("quickstart").replace(limits)
    run = create.start(config, str(tmp_path), "first")
    buffer = make_buffer(run, config, 1, Events(run, "trainer", 1))
    assert buffer.payloads.limit == 500_000_000
    assert buffer.payloads.reader.copies.limit == 250_000_000
    assert buffer.index.tables.con.execute("select current_setting('threads')").fetchone() == (3,)


def test_the_trainer_writes_an_event_if_attention_takes_packed_rows_apart(tmp_path: Path):
    run = create.start(preset("quickstart"), str(tmp_path), "first")
    events = Events(run, "trainer", 1)
    for why in ("", "the kernel is not for this GPU"):
        learner = cast(Any, SimpleNamespace(padded_because="", attention_pads_because=why))
        wiring.tell_padding(learner, events)
    found = rows(run, "select message, data ->> 'why' from events where kind = 'attention-pads'")
    message = "attention reads packed rows in padded calls: the kernel is not for this GPU (docs/models.md)"
    assert found == [(message, "the kernel is not for this GPU")]


def test_scorers_of_searchers_and_the_evaluator_tell_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On this CPU, the model pads as if it were on a GPU without a kernel, and says in which format it computes."""
    monkeypatch.setattr(policy, "why_attention_pads", lambda model: f"autocast {torch.is_autocast_enabled('cpu')}")
    run = create.start(preset("quickstart"), str(tmp_path), "first")
    config = preset("quickstart").replace({"training.compute_dtype": "bfloat16"})
    load = wiring.scorers(config, None, Events(run, "evaluator", 1))
    for number in (0, 1):
        assert load(tiny_folder(tmp_path / "policy"), Version(number, 1)).attention_pads_because == "autocast True"
    found = rows(run, "select data ->> 'why' from events where kind = 'attention-pads'")
    assert found == [("autocast True",)]


def test_the_replay_buffer_evicts_as_the_settings_say(tmp_path: Path):
    changes = {"sampling.evict": "worst", "sampling.capacity": 9, "sampling.copies": "all"}
    config = preset("quickstart").replace(changes)
    run = create.start(config, str(tmp_path), "first")
    pool = make_buffer(run, config, 1, Events(run, "trainer", 1)).index.pool
    assert (pool.evict, pool.capacity, pool.copies) == ("worst", 9, "all")


def test_the_replay_buffer_draws_within_the_bounds_of_the_settings(tmp_path: Path):
    config = preset("quickstart").replace({"sampling.mean_reward_between": [0.25, 1]})
    run = create.start(config, str(tmp_path), "first")
    index = make_buffer(run, parse(Run.open(run.url).config), 1, Events(run, "trainer", 1)).index
    assert index.branches.mean_reward_between == (0.25, 1.0)


def test_an_initial_fill_for_which_there_are_too_few_prompts_is_refused():
    """A round asks each prompt only once. The four rounds of two searchers ask these 5 prompts only 14 times."""
    prompts = [Prompt(prompt_id=str(n), text=str(n), tokens=(2,)) for n in range(5)]
    bound = {"search.searchers": 2, "search.prompts_per_round": 8, "search.rounds_per_version": 2}
    config = resolve.resolve("quickstart", {**bound, "search.responses_per_prompt": 32, "search.initial_fill": 448})
    prompt_intake.check_fill(config, prompts)
    more = config.replace({"search.initial_fill": 449})
    with pytest.raises(ConfigError, match=r"search\.rounds_per_version: with 5 prompts, 2 round\(s\) of each .* 448 "):
        prompt_intake.check_fill(more, prompts)
    prompt_intake.check_fill(more.replace({"search.rounds_per_version": None}), prompts)


def test_a_base_that_several_roles_ask_for_at_once_is_made_by_one_of_them(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    made = list[Path]()

    def base_policy(self: Quickstart, folder: Path, **_: object) -> None:
        made.append(folder)
        time.sleep(0.2)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(Quickstart, "base_policy", base_policy)
    run = create.start(preset("quickstart"), str(tmp_path), "first")
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(model_loading.locate_base, run, parse(run.config), lambda status, **progress: None)
            for _ in "123"
        ]
        folders = {it.result() for it in asked}
    assert len(made) == 1 and [it.name for folder in folders for it in Path(folder).iterdir()] == ["config.json"]
