"""The layout around every page of `tba browse`, and the headers of every answer."""

from typing import Any

from markupsafe import Markup

from flows.pages.browse.run_snapshot import RunSnapshot
from flows.pages.rendering import STYLE, digest, render

HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src {digest(STYLE)}; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer: a browser runs no script, fetches nothing, stores nothing and informs no other site."""


def show(snapshot: RunSnapshot, here: str, template: str, **variables: Any) -> Markup:
    """Return a page. `here` is its address, and `template` its file in templates/browse/."""
    return render(f"browse/{template}", run=snapshot.run, at=snapshot.at, here=here, **variables)
