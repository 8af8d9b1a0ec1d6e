"""`tba browse` in a real browser: pages fit their window, links lead on and back, and nothing in the pages runs."""

from pathlib import Path

import duckdb
import pytest
from playwright.sync_api import Browser

from flows.escaping import shown
from storage.runs.run import Run
from tests.support.browser import open_page
from tests.support.flows.site import Site, one, serve
from tests.support.storage.synthetic import STEPS, SyntheticRun

HOSTILE = (
    "</textarea></pre></title><script>document.title = 'owned'</script><img src=x onerror=alert(1)>'\"\u202ex\0y&amp;"
)


def test_a_text_is_shown_as_it_is_and_what_is_invisible_by_name():
    assert shown("a<b>&\u202eb\0\ud800") == (
        "a&lt;b&gt;&amp;<span class='odd'>U+202E</span>b<span class='odd'>U+0000</span><span class='odd'>U+D800</span>"
    )
    assert shown("é 漢字 🙂\n\tx") == "é 漢字 🙂\n\tx"


@pytest.mark.parametrize("dark", [False, True])
def test_pages_are_as_wide_as_their_window_and_complain_of_nothing(site: Site, browser: Browser, dark: bool):
    paths = ("/", "/steps", "/trajectories", "/step/7", "/trajectory/0/2/1", "/version/2", "/prompt?id=train/0",
             "/sql?query=from+draws")  # fmt: skip
    with open_page(browser, dark=dark) as page:
        for path in paths:
            page.goto(site.url + path)
            for width in (400, 1280):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            assert page.evaluate("getComputedStyle(document.body).maxWidth") == "1080px"  # the CSP permits the style


def test_a_reader_goes_from_a_choice_to_a_token_to_a_step_to_a_version_and_back(
    site: Site, browser: Browser, con: duckdb.DuckDBPyConnection
):
    with open_page(browser) as page:
        page.goto(site.url)
        page.get_by_role("link", name="Trajectories", exact=True).click()
        page.get_by_label("reward from").fill("1")
        page.get_by_label("drawn by a step").select_option("yes")
        page.get_by_role("button", name="Search").click()
        assert "reward >= 1" in page.locator("textarea").input_value()
        assert page.get_by_label("reward from").input_value() == "1"
        page.locator(".hits a").first.click()
        name = page.inner_text("h1").removeprefix("Trajectory ")
        reward, version = one(con, f"select reward, version_start from trajectories where trajectory_id = '{name}'")
        assert reward == 1
        token = page.locator(".t").first
        token.focus()
        assert "log-ratio" in page.evaluate("getComputedStyle(document.activeElement, '::after').content")
        (step,) = one(con, f"select min(step) from draws where trajectory_id = '{name}'")
        page.locator("table").first.get_by_role("link", name=str(step), exact=True).click()
        assert page.inner_text("h1") == f"Step {step}"
        assert page.locator(f"a[href='/trajectory/{name}']").count() > 0
        page.go_back()
        page.get_by_role("link", name=str(version), exact=True).first.click()
        assert page.inner_text("h1") == f"Version {version}"
        page.go_back()
        page.go_back()
        assert page.get_by_label("reward from").input_value() == "1"
        page.get_by_role("button", name="Run").click()
        assert page.locator("td a[href^='/trajectory/']").count() > 0


def test_what_a_model_writes_is_seen_and_never_runs(tmp_path: Path, browser: Browser):
    made = SyntheticRun(str(tmp_path), "nasty")
    made.says = HOSTILE
    run = made.finish().run
    doubled = HOSTILE.replace("'", "''")
    seen = HOSTILE.replace("\u202e", "U+202E").replace("\0", "U+0000")
    with serve(run) as site, open_page(browser) as page:
        for path in ("/step/7", "/trajectory/0/2/1", "/trajectories", "/version/0", site.link("/prompt", id="train/0"),
                     site.link("/trajectories", text=HOSTILE, where=f"response = '{HOSTILE}"),
                     site.link("/sql", query=f"select '{doubled}' as \"{HOSTILE[:20]}\"")):  # fmt: skip
            page.goto(site.url + path)
            assert page.title().endswith(" · nasty"), path
            assert page.locator("script, img").count() == 0
            assert seen[:60] in page.inner_text("body") or "where=" in path
        page.goto(f"{site.url}/trajectory/0/2/1")
        page.locator("summary", has_text="As text").click() if page.locator("summary").count() else None
        assert seen in page.inner_text("body")


def test_the_token_is_given_once_and_kept_by_the_browser(finished: Run, browser: Browser):
    with serve(finished, with_token=True) as site, open_page(browser) as page:
        page.goto(f"{site.url}/steps?token={site.door.token}")
        page.wait_for_url(f"{site.url}/steps")
        page.get_by_role("link", name=str(STEPS), exact=True).click()
        assert page.inner_text("h1") == f"Step {STEPS}"
        assert page.evaluate("document.cookie") == ""
