"""The settings, commands and links of the pages exist."""

import re
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from docs import build, reference, site
from flows.cli import build_parser
from flows.commands.arguments import read_changes
from tba.config import Config
from tba.presets import PRESETS
from tba.tasks.registry import OURS, preset_of
from tests.support.pages import IDS, PAGES, ROOT, anchors

SETTINGS = Config().to_dict()
SECTIONS = [name for name, section in SETTINGS.items() if isinstance(section, dict)]
A_SETTING = re.compile(rf"(?<![\w./-])({'|'.join(SECTIONS)})\.([a-z][a-z0-9_]*)")
IN_WORDS = re.compile(r"`(tba [^`]+)`")
A_COMMAND = re.compile(r"`(tba (?:run|fork) [^`]+)`|^(?:    )?(tba (?:run|fork) (?:.*\\\n)*.*)$", re.MULTILINE)
KNOWN = [page for page in PAGES if page.name != "extending.md"]
"""The pages that name only existing settings and commands. The examples of docs/extending.md add new ones, and
tests/flows/runs/test_extending.py runs them."""
FORKED = "quickstart"  # the task of the run that the pages fork


def commands() -> list[str]:
    """Return the `tba run` and `tba fork` commands of all pages, except those with placeholders."""
    found = [inline or block for page in PAGES for inline, block in A_COMMAND.findall(page.read_text())]
    joined = [re.sub(r"\s*\\?\n\s*", " ", it) for it in found]
    bare = {re.sub(r"\s+#.*|\s{3,}\w.*", "", it) for it in joined}  # without the remark beside the command
    return sorted(it for it in bare if not re.search(r"\[--|…|TASK", it))


@pytest.mark.parametrize("page", KNOWN, ids=[page.name for page in KNOWN])
def test_every_setting_that_a_page_names_exists(page: Path):
    named = {(section, name) for section, name in A_SETTING.findall(page.read_text()) if name not in ("md", "py")}
    known = {name: {it.name for kind in reference.kinds(name) for it in fields(kind)} for name in SECTIONS}
    assert [it for it in named if it[1] not in known[it[0]]] == []


@pytest.mark.parametrize("command", commands())
def test_the_settings_of_a_command_on_a_page_are_accepted_together(command: str):
    options = build_parser().parse_args(shlex.split(command)[1:])
    task = getattr(options, "task", FORKED)
    steps = getattr(options, "steps", None)
    if task in (*OURS, *PRESETS):
        preset_of(task).replace({**read_changes(options), **({"training.steps": steps} if steps else {})})


@pytest.mark.parametrize("page", KNOWN, ids=[page.name for page in KNOWN])
def test_a_command_in_a_sentence_exists(page: Path):
    """Each option belongs to the command. In place of a command, there may be a placeholder in capitals or a path."""
    for command in IN_WORDS.findall(page.read_text()):
        name, *arguments = shlex.split(command)[1:]
        known = reference.parsers()
        if name in known:
            options = {it for action in known[name]._actions for it in action.option_strings}
            assert [it for it in arguments if it.startswith("-") and it.strip("[]") not in options] == [], command
        else:
            assert name.isupper() or "/" in name, command


def test_the_site_leads_to_every_page():
    """It leads to no other page. Only kubernetes.md may be missing."""
    nav = (ROOT / "docs/site.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", nav, flags=re.MULTILINE)
    assert sorted({*named} - {"kubernetes.md"}) == sorted({site.place(it) for it in site.pages()} - {"kubernetes.md"})
    assert len(named) == len({*named})


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_of_a_page_leads_somewhere(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize(
    ("page", "made"),
    [
        (build.SETTINGS, reference.settings),
        (build.COMMANDS, reference.commands),
        (build.MONITORING, reference.metrics),
        (build.CHOOSING, build.tables),
    ],
)
def test_a_generated_page_says_what_the_code_says(page: Path, made: Callable[[], str]):
    assert build.made(page) == made(), "python -m docs.build makes it again"


def test_the_chart_of_the_study_of_old_data_shows_its_rows():
    assert build.CHART.read_text() == build.chart(), "python -m docs.build makes it again"


def test_every_section_and_setting_says_what_it_is():
    for name in SECTIONS:
        kinds = reference.kinds(name)
        assert all(reference.meanings(kind)[""] for kind in kinds)
        assert [it.name for kind in kinds for it in fields(kind) if not reference.meaning(kinds, it.name)] == []


def test_there_are_commands_to_try():
    assert len(commands()) > 15
