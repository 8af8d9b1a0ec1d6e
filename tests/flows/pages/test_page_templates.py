"""Templates of pages: each can be read, all escape what they show, and a wheel has them."""

import tomllib
from pathlib import Path

import jinja2
import pytest

import flows
from flows.pages import rendering

PACKAGE = Path(flows.__file__).parent
PROJECT = PACKAGE.parent / "pyproject.toml"
NASTY = "<b>'\"&"


def test_every_template_can_be_read():
    names = rendering.ENVIRONMENT.list_templates()
    assert len(names) > 20
    for name in names:
        rendering.ENVIRONMENT.get_template(name)


@pytest.mark.parametrize("template", ["base.html", "charts/picture.svg"])  # with any ending of the name
def test_a_template_escapes_what_it_shows(template: str):
    made = rendering.ENVIRONMENT.overlay(loader=jinja2.DictLoader({template: "{{ text }}|{{ text|line }}"}))
    assert made.get_template(template).render(text=NASTY) == "|".join(["&lt;b&gt;&#39;&#34;&amp;"] * 2)


def test_a_name_without_a_value_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="message"):
        rendering.render("browse/refusal.html")


def test_a_wheel_has_every_file_that_pages_are_made_of():
    listed = tomllib.loads(PROJECT.read_text())["tool"]["setuptools"]["package-data"]["flows"]
    packed = {path for pattern in listed for path in PACKAGE.glob(pattern) if path.is_file()}
    needed = {path for path in (PACKAGE / "pages").rglob("*") if path.suffix in (".html", ".svg", ".css", ".js")}
    assert needed and needed == packed
