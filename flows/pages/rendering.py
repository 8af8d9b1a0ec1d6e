"""The one Jinja environment of all pages, and the style sheet that they share."""

import base64
import hashlib
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flows import escaping
from flows.pages import addresses, values

STYLE = files("flows.pages").joinpath("style.css").read_text(encoding="utf-8")


def digest(text: str) -> str:
    """Return the hash by which a content security policy names a script or a style sheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("flows.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.globals.update(
        address=addresses,
        shade=values.shade,
        shade_between=values.shade_between,
        shades=values.SHADES,
        style=Markup(STYLE),
        zip=zip,
    )
    made.filters.update(
        anchor=values.anchor,
        direction=values.direction,
        line=escaping.line,
        linked_page=addresses.linked_page,
        number=values.number,
        signed=values.signed,
        shown=escaping.shown,
        written=values.written,
    )
    return made


ENVIRONMENT = _environment()


def render(template: str, **variables: Any) -> Markup:
    """Render a template to HTML. Values are escaped, and a variable without a value is an error."""
    return Markup(ENVIRONMENT.get_template(template).render(variables))
