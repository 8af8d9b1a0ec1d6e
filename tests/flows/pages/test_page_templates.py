"""Templates of pages: each can be read, and all escape what they show."""

import jinja2
import pytest

from flows.pages import rendering

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
