"""Tasks from other packages: found by path or entry point, with their own options."""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.fakes import make_prompts
from tba.config import Config, TaskConfig, parse_known, parse_options, settings
from tba.errors import ConfigError
from tba.presets import PRESETS, preset, task_of
from tba.tasks.registry import OURS, find_task, get_task, grade, known_tasks, preset_of, rules
from tba.types import Response, Version

MODULE = """
from dataclasses import dataclass
from tba.config import Config, parse_options
from tba.types import Reward

class Short:
    name = "short"
    rules = {"short": lambda response, answer: len(response) < 5}

    def __init__(self, config):
        self.config = config

    def source(self, split):
        return ""

    def prompts(self, split, rows, tokenizer, *, max_tokens):
        return []

    def reward(self, prompt, response):
        return Reward(value=float(len(response.text) < 5))

class Incomplete:
    def __init__(self, config):
        pass

    def prompts(self, split, rows, tokenizer, *, max_tokens):
        return []

class Odd(Short):
    @staticmethod
    def preset():
        return {"training.steps": 3}

class Bare:
    name = "bare"

class Lost(Short):
    def __init__(self, config):
        self.judge = config.options["judge"]

    def preset(self):
        return Config()

class Careless(Short):
    @dataclass
    class Options:
        strict: bool = False

    def __init__(self, config):
        self.options = parse_options(self.Options, config)

    @staticmethod
    def preset():
        return Config().replace({"training.learning_rate": 1 / 0})

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working folder with a module whose name is unique to this test."""
    import sys

    monkeypatch.setattr(sys, "path", [it for it in sys.path if it])
    name = f"outside_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / name


@pytest.mark.parametrize("separator", [":", "."])
def test_a_task_is_found_by_the_path_of_its_class_in_the_working_folder(folder: Path, separator: str):
    task = get_task(f"{folder.name}{separator}Short")
    assert task.reward(make_prompts(1)[0], response("abc")).value == 1.0
    assert task.name == "short"


def test_a_task_is_found_as_an_entry_point_of_an_installed_package(folder: Path, monkeypatch: pytest.MonkeyPatch):
    installed = folder.parent / "brief-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: brief\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[tba.tasks]\nbrief = {folder.name}:Short\nmath = no.such:Thing\n")
    monkeypatch.syspath_prepend(folder.parent)
    assert get_task("brief").name == "short"
    assert get_task("math").name == "math"  # built-in tasks come first
    assert [*OURS] == [*known_tasks()][: len(OURS)] and known_tasks()[-1] == "brief"


def test_its_rules_serve_tba_grade(folder: Path):
    path = f"{folder.name}:Short"
    assert list(rules(path)) == ["short"]
    assert grade(path, "", "abc", "") == 1.0
    with pytest.raises(ConfigError, match="has no rules that grade a response by an answer"):
        grade(f"{folder.name}:Incomplete", "", "abc", "")


def test_without_a_preset_it_takes_the_defaults_of_all_settings(folder: Path):
    path = f"{folder.name}:Short"
    assert preset_of(path) == Config(task=TaskConfig(name=path))
    assert preset_of("gsm8k") == preset("gsm8k")


def test_a_preset_with_a_name_of_its_own_is_found_where_a_task_is_named(monkeypatch: pytest.MonkeyPatch):
    laptop = preset_of("redteam-laptop")
    assert laptop == preset("redteam-laptop") != preset_of("redteam")
    assert laptop.task.name == task_of("redteam-laptop") == task_of("redteam") == "redteam"
    assert {*PRESETS} <= {*known_tasks()} and len({*known_tasks()}) == len(known_tasks())
    monkeypatch.setitem(PRESETS, "few-sums", PRESETS["gsm8k"])
    assert rules("few-sums") == rules("gsm8k")
    assert grade("few-sums", "", "so it is 4", "4") == 1.0


def test_the_setting_for_a_task_does_not_take_a_preset_in_silence():
    with pytest.raises(
        ConfigError, match=r"task\.name must be the name of a task, got 'redteam-laptop', a preset of the"
    ):
        get_task("redteam-laptop")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nonsense", "redteam, instructions, verifiers, reasoning-gym, redteam-laptop"),
        ("nonsense", "task.name: unknown task 'nonsense'; known: quickstart, gsm8k, math"),
        ("no_such_module:Task", "'no_such_module:Task' cannot be loaded: ModuleNotFoundError: No module named"),
        ("{here}/reverse.py:Task", "task.name: unknown task '{here}/reverse.py:Task'"),
        ("{here}:Missing", "has no attribute 'Missing'"),
        ("{here}:number", "is 3, not a class"),
        ("{here}:Incomplete", "is not a task: it has no name, no source, no reward"),
        ("{here}:Bare", ":Bare' fails: TypeError: Bare() takes no arguments"),
        ("{here}:Lost", "KeyError: 'judge' ({file}, line {line})"),
        ("{here}:Careless", "TypeError: class Careless.Options must be decorated with @tba.config.settings"),
        (":", "cannot be loaded"),
    ],
)
def test_what_is_no_task_is_refused_by_what_it_lacks(folder: Path, name: str, says: str):
    with pytest.raises(ConfigError) as refused:
        get_task(name.format(here=folder.name))
    line = MODULE[: MODULE.index('options["judge"]')].count("\n") + 1
    assert says.format(here=folder.name, file=folder.with_suffix(".py"), line=line) in str(refused.value)


def test_a_preset_that_is_no_config_is_refused(folder: Path):
    with pytest.raises(ConfigError, match=r"preset\(\) of .* must return a tba.config.Config"):
        preset_of(f"{folder.name}:Odd")
    assert callable(find_task(f"{folder.name}:Odd"))


@pytest.mark.parametrize(
    ("name", "says"),
    [("Lost", "TypeError: Lost.preset() missing 1"), ("Careless", "ZeroDivisionError: division by zero")],
)
def test_a_preset_that_cannot_be_had_is_told(folder: Path, name: str, says: str):
    with pytest.raises(ConfigError) as refused:
        preset_of(f"{folder.name}:{name}")
    assert f"the static method preset() of '{folder.name}:{name}' fails: {says}" in str(refused.value)


# --- options ----------------------------------------------------------------------------------------------------------


@settings
class Options:
    judge: str
    samples: int = 5


def test_options_are_read_into_a_class_of_the_task():
    config = Config().replace({"task.options.judge": "here", "task.options": {"samples": "7"}})
    assert parse_options(Options, config.task) == Options(judge="here", samples=7)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "task.options.judge"),
        ({"judge": "x", "jugde": "y"}, "unknown setting 'task.options.jugde'"),
        ({"judge": "x", "samples": "many"}, "task.options.samples must be "),
    ],
)
def test_an_option_at_fault_is_named(options: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as refused:
        parse_options(Options, TaskConfig(options=options))
    assert says in str(refused.value)


@pytest.mark.parametrize("name", ["quickstart", "gsm8k", "tests.support.tba.turn_examples:Echo"])
def test_options_are_refused_for_a_task_without_them(name: str):
    with pytest.raises(ConfigError, match=rf"'task.options.colour': task '{name}' takes no options"):
        get_task(TaskConfig(name=name, options={"colour": "red"}))


def test_options_are_kept_with_a_run_and_in_whoever_looks_at_it():
    config = Config().replace({"task.options.judge": "here"})
    assert parse_known(config.to_dict()).task.options == {"judge": "here"}
    with pytest.raises(ConfigError, match=r"task.options is a section: name a setting in it, such as task.options"):
        config.replace({"task.options": "here"})


def response(text: str) -> Response:
    return Response(
        tokens=(5,), logps=(-1.0,), text=text, finished=True, temperature=1.0, top_p=1.0, seed=0,
        version_start=Version(0, 1), version_end=Version(0, 1), generate_seconds=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_a_built_in_task_is_not_looked_for_in_the_working_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = [*sys.path]
    find_task(name)
    assert sys.path == before
