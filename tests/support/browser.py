"""A real browser for the tests: headless Chromium, whose pages may only fetch what a test serves.

Playwright is imported late, because a machine that checks a GPU may not have it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Route

_QUIET = ("disable-gpu", "disable-quic", "no-first-run", "disable-background-networking", "disable-component-update")
_DEADLINE = 20_000.0  # milliseconds, for everything that a test waits for
_HERE = ("127.0.0.1", "localhost", None)


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def launch() -> Iterator[Browser]:
    """Start Chromium. Without Chromium, skip the test, or fail it if TBA_TESTS_NEED_BROWSER is set."""
    path = chromium()
    if path is None:
        refuse = pytest.fail if os.environ.get("TBA_TESTS_NEED_BROWSER") else pytest.skip
        refuse("no Chromium here: apt-get install --no-install-recommends chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = [f"--{name}" for name in (*_QUIET, *(("no-sandbox",) if os.getuid() == 0 else ()))]
        browser = playwright.chromium.launch(executable_path=path, args=options, timeout=60_000)
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Browser, *, width: int = 1280, dark: bool = False, scripts: bool = True) -> Iterator[Page]:
    """Open an empty page. Its errors, warnings and requests to other sites fail the test at the end."""
    wrong: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            wrong.append(message.text)

    def guard(route: Route, request: Request) -> None:
        if urlsplit(request.url).hostname in _HERE:
            route.continue_()
        else:
            wrong.append(f"it asks for {request.url}")
            route.abort()

    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        java_script_enabled=scripts,
        accept_downloads=False,
    )
    context.set_default_timeout(_DEADLINE)
    context.route("**/*", guard)
    page = context.new_page()
    page.on("console", hear)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    try:
        yield page
    finally:
        context.close()
    assert wrong == []
