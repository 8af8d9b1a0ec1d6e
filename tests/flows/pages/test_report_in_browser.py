"""What a report can do in a real browser: its charts say what storage says, wherever they are looked at."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Locator
from playwright.sync_api import Page as Shown

import storage
from flows.pages.charts import Series, line_chart
from flows.pages.report import comparison
from flows.pages.report.document import document
from flows.pages.report.page import write
from flows.pages.tables import Table
from storage.runs.run import Run
from tba.errors import ConfigError
from tests.support.browser import open_page
from tests.support.storage.synthetic import SyntheticRun, make_run
from tests.support.storage.synthetic_forks import fork, go_on

HOSTILE = (
    "</pre></script><script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">\u202e"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture(scope="module")
def forked(finished: Run) -> Run:
    run = fork(finished, 2)
    go_on(run, 2)
    return run


@pytest.fixture(scope="module")
def address(finished: Run) -> str:
    return write(finished).as_uri()


@pytest.fixture
def shown(address: str, browser: Browser) -> Iterator[Shown]:
    with open_page(browser) as shown:
        shown.goto(address)
        yield shown


def chart(shown: Shown, title: str) -> Locator:
    return shown.locator("figure", has=shown.get_by_text(title, exact=True))


def point_at(shown: Shown, figure: Locator, share: float) -> None:
    """Move the mouse to a place between the ends of a chart's x axis."""
    figure.scroll_into_view_if_needed()
    box = figure.locator(".axis").bounding_box()
    assert box
    shown.mouse.move(box["x"] + share * box["width"], box["y"] - 40)


def told(figure: Locator) -> list[str]:
    return figure.locator(".readout").inner_text().splitlines()


def ticks(figure: Locator) -> list[str]:
    return figure.locator("text.tick:not([text-anchor=end])").all_text_contents()


@pytest.mark.parametrize(("width", "dark"), [(400, False), (1280, True)])
def test_it_is_as_wide_as_its_window_and_complains_of_nothing(address: str, browser: Browser, width: int, dark: bool):
    with open_page(browser, width=width, dark=dark) as shown:
        shown.goto(address)
        assert shown.inner_text("h1") == "first"
        assert shown.evaluate("document.documentElement.scrollWidth") <= width


def test_a_chart_that_is_pointed_at_says_what_storage_says(shown: Shown, finished: Run):
    loss = dict(storage.connect(finished).execute("select step, loss from steps").fetchall())
    figure = chart(shown, "Loss")
    for step in (1, 3, 8):  # of steps 1 to 8
        point_at(shown, figure, (step - 1) / 7)
        place, value = told(figure)
        assert place == f"step {step}"
        assert float(value) == pytest.approx(loss[step], rel=0.01)
    point_at(shown, chart(shown, "Scores of versions"), 0.99)
    assert told(chart(shown, "Scores of versions"))[1:] == [
        "greedy 0.75",
        "pass@4 0.875",
        "pass@16 0.938",
        "sampled 0.65",
    ]


def test_charts_of_steps_are_pointed_at_and_zoomed_together(shown: Shown):
    loss, reward = chart(shown, "Loss"), chart(shown, "Reward")
    before = ticks(loss)
    point_at(shown, loss, 0.4)
    assert reward.locator(".cross").get_attribute("visibility") == "visible"
    assert not reward.locator(".readout").is_visible()
    shown.mouse.down()
    point_at(shown, loss, 0.6)
    shown.mouse.up()
    assert ticks(loss) == ticks(reward) == ["4", "4.25", "4.5", "4.75", "5"]
    point_at(shown, loss, 0.99)
    assert told(loss)[0] == "step 5"
    shown.get_by_role("button", name="Reset zoom").click()
    assert ticks(loss) == before
    assert not shown.get_by_role("button", name="Reset zoom").is_visible()


def test_keys_go_from_point_to_point(shown: Shown):
    figure = chart(shown, "Loss")
    figure.focus()
    for _ in range(3):
        shown.keyboard.press("ArrowRight")
    assert told(figure)[0] == "step 4"
    shown.keyboard.press("ArrowLeft")
    assert told(figure)[0] == "step 3"


def test_time_is_what_the_trainer_worked(shown: Shown):
    """Half a second a step, whoever took it and whenever."""
    shown.get_by_label("time").check()
    figure = chart(shown, "Loss")
    point_at(shown, figure, 1.0)
    assert told(figure)[0] == "after 4 seconds"
    scores = chart(shown, "Scores of versions")
    assert ticks(scores) == ["0", "1", "2", "3"]
    point_at(shown, scores, 0.51)
    assert told(scores)[1] == "greedy 0.5"  # of step 4, after 2 seconds


def test_a_line_can_be_left_out_and_seen_again(shown: Shown):
    figure = chart(shown, "Scores of versions")
    assert figure.locator("polyline").count() == 4
    greedy = figure.get_by_role("button", name="greedy")
    greedy.click()
    assert figure.locator("polyline").count() == 3
    assert figure.locator("polyline.l0").count() == 0
    greedy.click()
    assert figure.locator("polyline").count() == 4


def test_smoothing_keeps_what_was_measured_in_sight(shown: Shown, finished: Run):
    figure = chart(shown, "Reward")
    shown.locator("#smooth").fill("0.5")
    point_at(shown, figure, 2 / 8)  # of versions of steps 0 to 6 and batches of 1 to 8
    rewards = [
        r for (r,) in storage.connect(finished).execute("select reward_mean from steps order by step").fetchall()
    ]
    smooth = (0.5 * rewards[1] + 0.25 * rewards[0]) / 0.75
    assert told(figure)[1] == f"of batches {smooth:.3f} ({rewards[1]:.1f})".replace("0.400", "0.4")
    assert figure.locator("polyline.raw").count() == 2


def test_trajectories_are_searched_chosen_and_ordered(shown: Shown, finished: Run):
    samples = shown.locator("details.sample:visible")
    con = storage.connect(finished)
    assert samples.count() > 20
    shown.locator("#which").select_option("high")
    shown.locator("#order").select_option("oldest")
    rewards = samples.evaluate_all("all => all.map(it => [Number(it.dataset.reward), Number(it.dataset.step)])")
    assert {reward for reward, _ in rewards} == {1.0}
    assert [step for _, step in rewards] == sorted(step for _, step in rewards)
    shown.locator("#which").select_option("never")
    drawn = {it for (it,) in con.execute("select distinct trajectory_id from draws").fetchall()}
    found = {text.split(" · ")[0] for text in shown.locator("details.sample p.note").all_text_contents()}
    assert found
    assert not found & drawn
    shown.locator("#which").select_option("all")
    name = "1/2/"
    shown.locator("#words").fill(f"{name} searcher")
    assert samples.count() > 0
    assert all(name in text for text in samples.locator("p.note").all_text_contents())
    assert shown.locator("#found").inner_text().startswith(f"{samples.count()} of ")
    samples.first.click()
    assert samples.first.locator("pre.response").is_visible()


def test_the_script_draws_every_chart_as_python_does(tmp_path: Path, browser: Browser):
    """Whatever the range of values, and however many points."""
    ranges = [(0, 1), (0.25, 0.75), (-3e-7, 4e-7), (1e4, 3e6), (2, 2), (0.5, 0.5), (-40, -39.5), (1e-5, 2e-5)]
    drawn = [
        line_chart(f"Chart {n} of {count}", [Series("a", _zigzag(count, *span)), Series("b", _zigzag(3, *span), True)])
        for n, span in enumerate(ranges)
        for count in (1, 2, 18, 239, 1200)
    ]
    level = [Series("rate", _zigzag(5, 0.5, 2), marked=True, errors=[0.1] * 5)]
    drawn.append(line_chart("Rate", level, x_name="tokens", level=1.0, room=0.5))
    empty = Table([], [])
    page = document(
        "comparison.html", "charts", [([0, 1], [0.0, 1.0])], names=[], damage=[], runs=empty, settings=empty,
        groups={"Learning": drawn},
    )  # fmt: skip
    address = tmp_path / "charts.html"
    address.write_text(page)
    seen: list[list[list[list[str]]]] = []
    for scripts in (False, True):
        with open_page(browser, scripts=scripts) as shown:
            shown.goto(address.as_uri())
            seen.append([_inside(figure) for figure in shown.locator("figure svg").all()])
    assert len(seen[0]) == len(drawn)
    for figure, (without, within) in enumerate(zip(*seen, strict=True)):
        assert [it[:3] for it in without] == [it[:3] for it in within], figure
        for mine, its in zip(without, within, strict=True):
            assert [float(it) for it in mine[3:]] == pytest.approx([float(it) for it in its[3:]], abs=0.11), figure


def _zigzag(count: int, low: float, high: float) -> list[tuple[float, float]]:
    return [(float(x), (low, high, (low + 2 * high) / 3)[x % 3]) for x in range(count)]


def _inside(svg: Locator) -> list[list[str]]:
    """Of each element of a picture its name, class and text, and its numbers."""
    shapes = svg.locator("> *:not(.cross):not(.selection)").evaluate_all(
        """all => all.map(it => [it.tagName, it.getAttribute("class"), it.tagName === "text" ? it.textContent : "",
        ...["x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "points"].flatMap(
            name => (it.getAttribute(name) ?? "").split(/[ ,]/).filter(Boolean))])"""
    )
    return sorted(shapes)


def test_without_scripts_pictures_and_trajectories_are_there(address: str, browser: Browser):
    with open_page(browser, scripts=False) as shown:
        shown.goto(address)
        assert shown.locator("figure svg polyline").count() > 10
        assert shown.locator("details.sample").count() > 20
        assert shown.locator(".controls:visible").count() == 0


def test_what_a_model_writes_is_shown_and_never_run(tmp_path: Path, browser: Browser):
    made = SyntheticRun(str(tmp_path), "nasty")
    made.says = HOSTILE
    address = write(made.finish().run).as_uri()
    with open_page(browser) as shown:
        shown.goto(address)
        assert shown.title() == "nasty · TBA report"
        told = made.says.replace("\u202e", "U+202E")  # by name: it would turn around what follows it
        assert shown.locator("pre.response").first.text_content() == told
        assert shown.locator("img").count() == 0


def test_a_script_that_got_into_the_page_would_not_run(address: str, browser: Browser):
    with closing(browser.new_page()) as shown:
        shown.goto(address)
        with pytest.raises(Error, match="Content Security Policy"):
            shown.add_script_tag(content="document.title = 'owned'")
        assert shown.title() == "first · TBA report"


def test_runs_are_compared_line_by_line(finished: Run, forked: Run, tmp_path: Path, browser: Browser):
    path = comparison.write([finished, forked], str(tmp_path / "both.html"))
    steps = {
        run.name: dict(storage.connect(run).execute("select step, loss from steps").fetchall())
        for run in (finished, forked)
    }
    with open_page(browser) as shown:
        shown.goto(path.as_uri())
        loss = chart(shown, "Loss")
        point_at(shown, loss, 1.0)
        said = dict(line.split(" ") for line in told(loss)[1:])
        assert {name: float(value) for name, value in said.items()} == {
            name: pytest.approx(of[8], rel=0.01) for name, of in steps.items()
        }
        loss.get_by_role("button", name="first", exact=True).click()
        for title in ("Loss", "log Z", "Score of versions: greedy"):  # in all of them
            assert chart(shown, title).locator("polyline.l0").count() == 0
            assert chart(shown, title).locator("polyline.l1").count() == 1
    with pytest.raises(ConfigError, match="twice"):
        comparison.render([finished, finished])


def test_a_run_without_steps_leaves_the_time_of_others_as_it_is(finished: Run, tmp_path: Path, browser: Browser):
    begun = SyntheticRun(str(tmp_path), "begun").begin().run
    path = comparison.write([begun, finished], str(tmp_path / "both.html"))
    with open_page(browser) as shown:
        shown.goto(path.as_uri())
        shown.get_by_label("time").check()
        loss = chart(shown, "Loss")
        point_at(shown, loss, 1.0)
        assert told(loss)[0] == "after 4 seconds"
        assert chart(shown, "Score of versions: greedy").locator("circle.d0").get_attribute("cx") == "52"  # at 0


def test_a_fork_tells_where_it_comes_from_and_its_parent_of_it(finished: Run, forked: Run, browser: Browser):
    with open_page(browser) as shown:
        shown.goto(write(forked).as_uri())
        tree = shown.locator("ul.tree").first.inner_text()
        assert tree.splitlines()[0] == "first"
        assert "fork, from step 4 of first" in tree
        shown.goto(write(finished).as_uri())
        assert "fork, a fork of this run" in shown.locator("ul.tree").first.inner_text()
