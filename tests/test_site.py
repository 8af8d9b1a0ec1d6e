"""The pages as a site: every link leads somewhere, nothing comes from another host, and it can be read from a disk."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Browser

from docs import site
from tests.support.browser import open_page
from tests.support.pages import ROOT, anchors

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href", "use": "href"}
FETCHED = ("stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload")
"""Values of `rel` with which a browser fetches the target of a `link` by itself."""


@dataclass
class Page(HTMLParser):
    """The addresses that a page loads, the targets of its links, and the anchors that links can lead to."""

    loads: list[str] = field(default_factory=list)
    leads: list[str] = field(default_factory=list)
    places: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.leads.append(found["href"])
        elif (where := found.get(LOADS.get(tag, ""))) and (tag != "link" or found.get("rel") in FETCHED):
            self.loads.append(where)
        self.loads += re.findall(r"url\((.*?)\)", found.get("style", ""))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site like `make docs`. Any warning is a failure."""
    if find_spec("material") is None:
        refuse = pytest.fail if os.environ.get("TBA_TESTS_NEED_SITE") else pytest.skip
        refuse("what the site is built with is not there: PYTHONPATH=.tba/docs, after `make docs`")
    folder = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run([sys.executable, "-m", "docs.site", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(folder: Path) -> dict[Path, Page]:
    found = {path: Page() for path in sorted(folder.rglob("*.html"))}
    for path, page in found.items():
        page.feed(path.read_text())
    return found


def test_every_page_is_there(pages: dict[Path, Page], folder: Path):
    assert {folder / Path(site.place(name)).with_suffix(".html") for name in site.pages()} <= pages.keys()


def test_nothing_is_loaded_from_another_host(pages: dict[Path, Page], folder: Path):
    assert [(path.name, it) for path, page in pages.items() for it in page.loads if urlsplit(it).netloc] == []
    for path in folder.rglob("*.css"):
        asked = ["".join(it).strip("\"'") for it in re.findall(r"url\((.*?)\)|@import (.*?);", path.read_text())]
        assert [(path.name, it) for it in asked if urlsplit(it).netloc] == []


def test_every_link_leads_to_a_place_that_is_there(pages: dict[Path, Page]):
    wrong = []
    for path, page in pages.items():
        for link in [*page.leads, *page.loads] if path.name != "404.html" else []:
            to = urlsplit(link)
            if not to.scheme and not to.netloc:
                target = (path.parent / unquote(to.path)).resolve() if to.path else path
                place = unquote(to.fragment)
                if not target.exists() or (place and target in pages and place not in pages[target].places):
                    wrong.append((path.name, link))
    assert wrong == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read_and_searched_from_a_disk(folder: Path, browser: Browser, dark: bool):
    with open_page(browser, dark=dark) as page:
        page.goto((folder / "index.html").as_uri())
        scheme = page.locator("body").get_attribute("data-md-color-scheme")
        assert scheme == ("slate" if dark else "default")
        assert page.locator("article img").first.bounding_box()
        page.locator("input[name=query]").click()
        page.keyboard.type("bounded age")
        page.locator(".md-search-result__item a").first.click()
        page.wait_for_url("**/concepts.html*")
        assert page.locator("h1").inner_text().startswith("Concepts")
        assert page.locator("figure.diagram svg").first.bounding_box()


# --- the copies of pages that the site is built from ------------------------------------------------------------------


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies")
    site.stage(folder)
    return folder / "docs"


def links(copies: Path) -> Iterator[tuple[Path, str, str]]:
    for page in copies.rglob("*.md"):
        if page.relative_to(copies).parts[0] != "files":
            for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", page.read_text()):
                path, _, anchor = link.partition("#")
                yield page, path, anchor


def test_every_link_of_a_copy_leads_to_a_copy(copies: Path):
    found = list(links(copies))
    assert len(found) > 100
    for page, path, _ in found:
        target = (page.parent / path).resolve()
        assert target.exists(), (page.name, path)
        assert target.is_relative_to(copies), (page.name, path)


def test_every_anchor_of_a_copy_is_a_heading_there(copies: Path):
    targets = [((page.parent / path) if path else page, anchor) for page, path, anchor in links(copies) if anchor]
    assert [(target.name, anchor) for target, anchor in targets if anchor not in anchors(target)] == []


def test_diagrams_are_part_of_their_page(copies: Path):
    shown = re.findall(r"!\[.*?\]\(.*?diagrams/.*?\)", "".join(page.read_text() for page in copies.rglob("*.md")))
    assert shown == []
    drawn = "".join(page.read_text() for page in copies.rglob("*.md")).count('<figure class="diagram">')
    assert drawn >= len(list((site.HERE / "diagrams").glob("*.svg")))


def test_a_file_or_folder_that_is_no_page_can_be_read_too(copies: Path):
    assert "victims.py" in (copies / "files/benchmarks/science/victims.py.md").read_text()
    assert site.target("../flows", "docs/sql.md", copies) == "files/flows.md"
    assert "## cli.py\n\n````py\n" in (copies / "files/flows.md").read_text()
