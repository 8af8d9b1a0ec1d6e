"""Reports in a real browser: wherever a reader points at a chart, it shows the values of storage."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, FloatRect, Locator
from playwright.sync_api import Page as Shown

import storage
from flows.pages.charts import Chart, Series
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
    box = _box(figure.locator("svg:visible > .axis"))
    shown.mouse.move(box["x"] + share * box["width"], box["y"] - 40)


def drag(shown: Shown, figure: Locator, start: float, end: float) -> None:
    point_at(shown, figure, start)
    shown.mouse.down()
    point_at(shown, figure, end)
    shown.mouse.up()


def told(figure: Locator) -> list[str]:
    return figure.locator(".readout").inner_text().splitlines()


def ticks(figure: Locator) -> list[str]:
    return figure.locator(".x > text:visible").all_text_contents()


def levels(figure: Locator) -> list[str]:
    return figure.locator(".y > text:visible").all_text_contents()


@pytest.mark.parametrize(("width", "dark"), [(400, False), (1280, True)])
def test_it_is_as_wide_as_its_window_and_complains_of_nothing(address: str, browser: Browser, width: int, dark: bool):
    with open_page(browser, width=width, dark=dark) as shown:
        shown.goto(address)
        assert shown.inner_text("h1") == "first"
        assert shown.evaluate("document.documentElement.scrollWidth") <= width


def test_a_chart_that_is_pointed_at_says_what_storage_says(shown: Shown, finished: Run):
    loss = dict(storage.connect(finished).execute("select step, loss from steps").fetchall())
    figure = chart(shown, "Loss")
    for step in (1, 3, 8):  # the axis has steps 1 to 8
        point_at(shown, figure, (step - 1) / 7)
        place, value = told(figure)
        assert place == f"step {step}"
        assert float(value) == pytest.approx(loss[step], rel=0.01)
    point_at(shown, chart(shown, "Scores of versions"), 0.99)
    assert told(chart(shown, "Scores of versions"))[1:] == [
        "greedy 0.75",
        "pass@4 0.875",
        "pass@16 0.9375",
        "sampled 0.65",
    ]


def test_charts_of_steps_are_pointed_at_and_zoomed_together(shown: Shown):
    loss, reward = chart(shown, "Loss"), chart(shown, "Reward")
    before = ticks(loss)
    point_at(shown, loss, 0.4)
    assert reward.locator("svg:visible .cross").get_attribute("visibility") == "visible"
    assert not reward.locator(".readout").is_visible()
    drag(shown, loss, 0.4, 0.6)
    assert ticks(loss) == ticks(reward) == ["4", "4.25", "4.5", "4.75", "5"]
    point_at(shown, loss, 0.99)
    assert told(loss)[0] == "step 5"
    shown.get_by_role("button", name="Reset zoom").click()
    assert ticks(loss) == before
    assert not shown.get_by_role("button", name="Reset zoom").is_visible()


def test_keys_go_from_point_to_point(shown: Shown):
    figure = chart(shown, "Loss")
    figure.locator("svg[role=img]:visible").focus()
    for _ in range(3):
        shown.keyboard.press("ArrowRight")
    assert told(figure)[0] == "step 4"
    shown.keyboard.press("ArrowLeft")
    assert told(figure)[0] == "step 3"


def test_time_is_what_the_trainer_worked(shown: Shown):
    """Each step takes half a second, whichever attempt took it and whenever."""
    shown.get_by_role("radio", name="time").check()
    figure = chart(shown, "Loss")
    point_at(shown, figure, 1.0)
    assert told(figure)[0] == "after 4 seconds"
    scores = chart(shown, "Scores of versions")
    assert ticks(scores) == ["0", "1", "2", "3"]
    point_at(shown, scores, 0.51)
    assert told(scores)[1] == "greedy 0.5"  # the score of step 4, which ended after 2 seconds


def test_a_line_can_be_left_out_and_seen_again(shown: Shown):
    figure = chart(shown, "Scores of versions")
    lines = figure.locator("polyline:visible")
    assert lines.count() == 4
    before = levels(figure)
    greedy = figure.get_by_role("button", name="greedy")
    greedy.click()
    assert lines.count() == 3
    assert figure.locator("polyline.l0:visible").count() == 0
    greedy.click()
    assert lines.count() == 4
    figure.get_by_role("button", name="sampled").click()
    assert levels(figure) != before  # the lowest line needs no room any more
    figure.get_by_role("button", name="sampled").click()
    assert levels(figure) == before


def test_smoothing_keeps_what_was_measured_in_sight(shown: Shown, finished: Run):
    figure = chart(shown, "Reward")
    shown.locator("#smooth").fill("0.5")
    point_at(shown, figure, 2 / 8)  # the axis has versions of steps 0 to 6 and batches of steps 1 to 8
    rewards = [
        r for (r,) in storage.connect(finished).execute("select reward_mean from steps order by step").fetchall()
    ]
    smooth = (0.5 * rewards[1] + 0.25 * rewards[0]) / 0.75
    assert told(figure)[1] == f"of batches {smooth:.4g} ({rewards[1]:.4g})"
    lines = figure.locator("polyline:visible")
    assert lines.evaluate_all("all => all.map(it => Number(getComputedStyle(it).opacity))") == [0.25, 1, 0.25, 1]


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


@pytest.mark.parametrize("scripts", [False, True])
def test_any_range_of_values_is_drawn_inside_its_plot(tmp_path: Path, browser: Browser, scripts: bool):
    """For all values and any number of points, each line reaches from one end of the x axis to the other."""
    ranges = [
        (0, 1),
        (-3e-7, 4e-7),
        (1e-9, 2e-9),
        (1e4, 3e6),
        (2, 2),
        (-40, -39.5),
        (1e-5, 2e-5),
        (1e9, 1.001e9),
        (0, 1e12),
    ]
    charts = [Chart(f"{low} to {high}", [Series("a", _zigzag(1200, low, high))]) for low, high in ranges]
    with open_page(browser, scripts=scripts) as shown:
        shown.goto(_page_of(charts, tmp_path))
        for (low, high), drawn in zip(ranges, charts, strict=True):
            figure = chart(shown, drawn.title)
            line, axis = (
                _box(figure.locator("svg[data-linked=step] .whole .line")),
                _box(figure.locator("svg[data-linked=step] .axis")),
            )
            assert line["x"] == pytest.approx(axis["x"], abs=2)
            assert line["width"] == pytest.approx(axis["width"], abs=4)
            top = _box(figure.locator("svg:visible .grid").last)["y"]
            assert top - 2 <= line["y"] <= line["y"] + line["height"] <= axis["y"] + 3
            assert line["height"] < 5 if low == high else line["height"] > 10


def test_a_zoomed_chart_shows_the_points_between_the_means(tmp_path: Path, browser: Browser):
    """For 1000 points that jump, the whole chart shows means with a band."""
    with open_page(browser) as shown:
        shown.goto(_page_of([Chart("Jumps", [Series("a", _zigzag(1000, 0, 3))])], tmp_path))
        figure = chart(shown, "Jumps")
        point_at(shown, figure, 0.5)
        assert "(0 … 3)" in told(figure)[1]
        assert figure.locator("polygon:visible").count() == 1
        drag(shown, figure, 0.5, 0.52)
        point_at(shown, figure, 0.5)
        assert told(figure)[1] in ("0", "2", "3")
        assert figure.locator("polygon:visible").count() == 0
        figure.locator("svg[role=img]:visible").dblclick()
        assert figure.locator("polygon:visible").count() == 1


def test_a_reader_sees_where_a_line_crosses_a_range_without_points(tmp_path: Path, browser: Browser):
    line = Series("score", [(0, 0.0), (100, 1.0)], marked=True)
    with open_page(browser) as shown:
        shown.goto(_page_of([Chart("Scores", [line])], tmp_path))
        figure = chart(shown, "Scores")
        drag(shown, figure, 0.4, 0.6)
        assert {"0.4", "0.5", "0.6"} <= set(levels(figure)) <= {"0.35", "0.4", "0.45", "0.5", "0.55", "0.6", "0.65"}


def _page_of(charts: list[Chart], folder: Path) -> str:
    empty = Table([], [])
    clock = list(range(1201)), [step / 2 for step in range(1201)]
    page = document(
        "comparison.html", "charts", {"Learning": charts}, [clock], names=[], damage=[], runs=empty, settings=empty
    )
    path = folder / "charts.html"
    path.write_text(page)
    return path.as_uri()


def _zigzag(count: int, low: float, high: float) -> list[tuple[float | None, float | None]]:
    return [(float(x), (low, high, (low + 2 * high) / 3)[x % 3]) for x in range(count)]


def _box(shape: Locator) -> FloatRect:
    box = shape.bounding_box()
    assert box
    return box


def test_without_scripts_pictures_and_trajectories_are_there(address: str, browser: Browser):
    with open_page(browser, scripts=False) as shown:
        shown.goto(address)
        assert shown.locator("figure svg polyline:visible").count() > 10
        assert shown.locator("details.sample").count() > 20
        assert shown.locator(".controls:visible").count() == 0


def test_what_a_model_writes_is_shown_and_never_run(tmp_path: Path, browser: Browser):
    made = SyntheticRun(str(tmp_path), "nasty")
    made.says = HOSTILE
    address = write(made.finish().run).as_uri()
    with open_page(browser) as shown:
        shown.goto(address)
        assert shown.title() == "nasty · TBA report"
        told = made.says.replace("\u202e", "U+202E")  # shown by name, because it would reverse the text after it
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
        for title in ("Loss", "log Z", "Score of versions: greedy"):  # the button hides the run in every chart
            assert chart(shown, title).locator("polyline.l0:visible").count() == 0
            assert chart(shown, title).locator("polyline.l1:visible").count() == 1
    with pytest.raises(ConfigError, match="twice"):
        comparison.render([finished, finished])


def test_a_run_without_steps_leaves_the_time_of_others_as_it_is(finished: Run, tmp_path: Path, browser: Browser):
    begun = SyntheticRun(str(tmp_path), "begun").begin().run
    path = comparison.write([begun, finished], str(tmp_path / "both.html"))
    with open_page(browser) as shown:
        shown.goto(path.as_uri())
        shown.get_by_role("radio", name="time").check()
        loss = chart(shown, "Loss")
        point_at(shown, loss, 1.0)
        assert told(loss)[0] == "after 4 seconds"
        scores = chart(shown, "Score of versions: greedy")
        dot, axis = _box(scores.locator("svg[data-linked=time] .dot.l0")), _box(scores.locator("svg:visible > .axis"))
        assert dot["x"] + dot["width"] / 2 == pytest.approx(axis["x"], abs=1.5)  # the dot is at 0


def test_a_fork_tells_where_it_comes_from_and_its_parent_of_it(finished: Run, forked: Run, browser: Browser):
    with open_page(browser) as shown:
        shown.goto(write(forked).as_uri())
        tree = shown.locator("ul.tree").first.inner_text()
        assert tree.splitlines()[0] == "first"
        assert "fork, from step 4 of first" in tree
        shown.goto(write(finished).as_uri())
        assert "fork, a fork of this run" in shown.locator("ul.tree").first.inner_text()
