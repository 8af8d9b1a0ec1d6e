"""The report is one file that says what storage says, for any run in any state."""

import math
import re
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flows.cli import main
from flows.pages.browse import overview
from flows.pages.browse.run_snapshot import RunSnapshot
from flows.pages.charts import Chart, Series
from flows.pages.markdown import last_scores, markdown
from flows.pages.rendering import STYLE
from flows.pages.report import samples
from flows.pages.report.curves import BY_VERSION, learning, score_charts
from flows.pages.report.page import render, write
from flows.pages.tables import Table
from flows.pages.values import number
from storage import layout
from storage.log.trajectories import Trajectories
from storage.queries.views import connect
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from tba.errors import ConfigError
from tba.types import Score, Version
from tests.support.builders import make_shard
from tests.support.storage.choosing import ONLY_SHORT, make_choosing_run
from tests.support.storage.synthetic import PROMPTS, SyntheticRun, copy_run, make_live_run, make_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture(scope="module")
def page(finished: Run) -> str:
    return write(finished).read_text()


SVG = "http://www.w3.org/2000/svg"  # the name of a format: nothing is fetched from there


class Page(HTMLParser):
    """A parser that fails on tags without an end, and collects the addresses that a browser would fetch."""

    VOID = ("meta", "link", "img", "br", "input")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        asked = [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self.fetched += [address for address in asked if not address.startswith("#")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None: ...

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_the_page_is_whole_and_fetches_nothing(page: str):
    assert Page(page).fetched == []
    assert not re.search(r"url\(|@import|https?://", page.replace(SVG, ""))


def test_the_page_has_every_section(page: str):
    assert Page(page).headings == [
        "Learning", "Data", "Speed", "Before and after", "Selection", "Trajectories", "Searchers", "Evaluations",
        "Kept versions", "Attempts", "Events", "Settings",
    ]  # fmt: skip


def test_every_chart_is_valid_svg_with_all_points_inside(page: str):
    charts = re.findall(r"<svg[^>]*role='img'.*?</svg></svg>", page, flags=re.S)
    assert len(charts) >= 8
    for chart in charts:
        plot = _plot(chart)
        left, top, width, height = map(float, plot.attrib["viewBox"].split())
        for line in plot.iter("polyline"):
            points = _points(line)
            assert points
            assert all(left <= x <= left + width and top <= -y <= top + height for x, y in points)


def _plot(chart: str) -> ElementTree.Element:
    plot = ElementTree.fromstring(chart).find("svg")
    assert plot is not None
    return plot


def _points(line: ElementTree.Element) -> list[tuple[float, ...]]:
    return [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]


def test_the_page_says_what_storage_says(page: str):
    for text in (
        "greedy, first → last",
        "0.250 → 0.750",
        "pass@4, first → last",
        "0.438 → 0.938",
        "8 of 8",
        "attempt 2 goes on after step 4",
        "sampling.recent_share",
    ):
        assert text in page


@pytest.mark.parametrize(
    ("sampler_sql", "marked"), [("", set()), (ONLY_SHORT, {("length", "trained"), ("length", "drawn")})]
)
def test_a_biased_choice_is_marked_and_a_fair_one_is_not(
    sampler_sql: str, marked: set[tuple[str, str]], tmp_path: Path
):
    page = write(make_choosing_run(str(tmp_path), sampler_sql=sampler_sql)).read_text()
    part = page.split("Selection</h2>")[1].split("<h2")[0]
    rows = re.findall(r"<tr class='warning'><td>(\w+)</td><td>(\w+)</td>", part)
    assert set(rows) == marked
    assert ("Marked differences are" if marked else "No difference is") in part
    assert re.findall(r"<b>(Relative frequency by \w+)</b>", part) == [
        f"Relative frequency by {it}" for it in ("length", "reward", "age")
    ]


def test_light_and_dark_are_both_styled(page: str):
    assert "prefers-color-scheme: dark" in page
    assert "color-scheme: light dark" in page


def test_scores_are_sorted_by_k(page: str):
    found = re.findall(r"<dt>([^<]+), first → last</dt>", page)
    assert found == ["greedy", "pass@4", "pass@16", "sampled"]


def test_what_a_task_measures_has_charts_of_its_own():
    metrics = ("greedy", "pass@4", "sampled", "greedy_kl", "sampled_kl", "greedy_win_rate")
    table = Table(["metric", "step", "value"], [(metric, step, 0.5) for metric in metrics for step in (0, 8)])
    labels = [re.findall(r"aria-label='([^']*)'", chart)[0] for chart in map(Chart.figure, score_charts(table))]
    assert labels == [
        "Scores of versions by step: greedy ends at 0.5; pass@4 ends at 0.5; sampled ends at 0.5",
        "kl by step: greedy ends at 0.5; sampled ends at 0.5",
        "win rate by step: greedy ends at 0.5",
    ]


def test_what_only_some_objectives_measure_has_a_chart_where_it_is_measured():
    names = ["step", "loss", "value_loss", "explained_variance"]
    none = Table(["version_step", "reward"], [])
    for columns, charts in ((names, 3), (names[:2], 1)):
        steps = Table(columns, [(step, 1.0, 0.5, 0.2)[: len(columns)] for step in range(1, 4)])
        assert (
            len([chart for chart in learning(steps, Table(["metric", "step", "value"], []), none) if chart.figure()])
            == charts
        )


def test_imported_responses_do_not_count_for_the_reward_of_a_version(tmp_path: Path):
    run, elsewhere = make_live_run(str(tmp_path)), layout.imported("0" * 64)
    with closing(connect(run)) as con:
        before = con.execute(BY_VERSION).fetchall()
    Trajectories(run).append(elsewhere, 0, make_shard({"train/0": [7.0, 7.0]}, searcher=elsewhere))
    with closing(connect(run)) as con:
        assert con.execute("select max(reward) from trajectories").fetchone() == (7.0,)
        assert con.execute(BY_VERSION).fetchall() == before


def test_what_is_invisible_in_a_text_is_shown_by_name(tmp_path: Path):
    made = SyntheticRun(str(tmp_path), "hidden")
    made.says = "3\u202e\0</pre>"
    made.begin().take_syncs(1, range(1, 2), made.buffer(1))
    with closing(connect(made.run)) as con:
        section = samples.section(con)
    assert "\u202e" not in section and "\0" not in section
    assert "3<span class='odd'>U+202E</span><span class='odd'>U+0000</span>&lt;/pre&gt;" in section


def test_every_line_of_a_chart_has_a_colour_however_many_there_are():
    chart = Chart("Accuracy", [Series(f"pass@{k}", [(0, 0.1), (1, k / 20)]) for k in range(1, 13)]).figure()
    lines, keys = re.findall(r"class='line (l\d+)'", chart), re.findall(r"class='key (k\d+)'", chart)
    assert len(lines) == len(keys) == 12
    assert all(f".{name} {{" in STYLE for name in lines)
    assert all(f".{name}::before {{" in STYLE for name in keys)


def test_the_report_lies_in_the_runs_folder_unless_told(finished: Run, tmp_path: Path):
    assert write(finished) == Path(finished.url) / "report.html"
    assert write(finished, str(tmp_path / "mine.html")) == tmp_path / "mine.html"
    with pytest.raises(ConfigError, match="nowhere"):
        write(finished, str(tmp_path / "nowhere" / "mine.html"))


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_the_report_of_a_remote_run_lies_in_the_working_directory(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run = Run.create(root, "far", config={"task": {"name": "quickstart"}}, sampler_sql="", code_version="")
    assert write(run) == Path("far-report.html")
    Page((tmp_path / "far-report.html").read_text())


def test_a_live_run_and_an_empty_one_can_be_reported(tmp_path: Path):
    live = Page(write(make_live_run(str(tmp_path))).read_text())
    assert "Learning" in live.headings
    empty = Run.create(str(tmp_path), "empty", config={}, sampler_sql="", code_version="")
    assert Page(write(empty).read_text()).headings == ["Settings"]


def test_a_measure_that_is_no_number_is_left_out_and_the_rest_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    made = SyntheticRun(str(tmp_path), "odd").begin()
    scores = [("greedy", 0.5), ("greedy_kl", math.inf), ("greedy_perplexity", math.nan)]
    Evaluations(made.run).write(
        [Score(version=Version(1, 1), step=2, metric=metric, value=it, n=1, seconds=0.0) for metric, it in scores]
    )
    snapshot = RunSnapshot(made.run, 20.0)
    assert main(["watch", made.run.url, "--once"]) == 0
    told = capsys.readouterr().out
    for said in (render(made.run), markdown(made.run), overview.page(snapshot), told):
        assert "0.5" in said
        assert "greedy_kl" not in said.split("Evaluations</h2>")[0]
    snapshot.close()
    assert "greedy 0.5" in last_scores(made.run)


def test_trajectories_are_chosen_from_more_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("storage.queries.views.memory_limit", lambda con: "64 MB")
    made = SyntheticRun(str(tmp_path), "wordy").begin()
    Trajectories(made.run).append(2, 0, make_shard({PROMPTS[0]: [0.0, 1.0] * 1000}, searcher=2, response="x" * 100_000))
    made.take_syncs(1, range(1, 3), made.buffer(1))
    with closing(connect(made.run)) as con:
        section = samples.section(con)
    assert section.count("<details class='sample'") > 8
    assert section.count("(94,000 characters more)") == 8


def test_names_are_escaped(finished: Run, tmp_path: Path):
    run = copy_run(finished, tmp_path)
    nasty = Run.create(
        str(tmp_path),
        "nasty",
        config={"task": {"name": "<script>alert(1)</script>"}},
        sampler_sql="",
        code_version="<b>",
    )
    page = write(nasty).read_text()
    assert "<script>alert" not in page
    assert "<b>" not in page.split("</header>")[0]
    Page(write(run).read_text())


# --- charts -----------------------------------------------------------------------------------------------------------


def test_a_chart_without_points_is_left_out():
    assert Chart("Loss", [Series("loss", [])]).figure() == ""
    assert Chart("Loss", [Series("loss", [(1, float("nan")), (2, float("inf"))])]).figure() == ""


def test_long_lines_are_thinned_to_means_within_a_band():
    points = [(float(x), float(x % 2)) for x in range(5000)]
    chart = Chart("Loss", [Series("loss", points)]).figure()
    plot = _plot(re.findall(r"<svg.*</svg>", chart)[0])
    [line], [band] = (list(plot.iter(tag)) for tag in ("polyline", "polygon"))
    heights = [y for _, y in _points(line)]
    assert len(heights) <= 240
    assert max(heights) - min(heights) < 0.05  # the values jump between 0 and 1, their means do not
    assert {y for _, y in _points(band)} == {0, 1}


def test_a_band_lies_around_its_points_and_a_level_goes_across():
    rate = Series("rate", [(0, 1.0), (1, 1.2)], errors=[0.5, 0.1])
    plot = _plot(re.findall(r"<svg.*</svg>", Chart("Rate", [rate], level=1.0, room=1.0).figure())[0])
    level, line = map(_points, plot.iter("polyline"))
    [band] = map(_points, plot.iter("polygon"))
    assert level == [(0, 1), (1, 1)]
    assert line == [(0, 1), (1, 1.2)]
    assert band == [(0, 1.5), (1, 1.3), (1, 1.1), (0, 0.5)]
    _, top, _, height = map(float, plot.attrib["viewBox"].split())
    assert top <= -2 and top + height >= 0


@pytest.mark.parametrize(
    "points",
    [
        [(3.0, 0.5)],
        [(0.0, 2.0), (1.0, 2.0)],
        [(0.0, -1e-9), (1.0, 1e-9)],
        [(0.0, 0.0), (9.0, 1e12)],
        [(0.0, 1.0), (1.0, 1.000001)],
    ],
)
def test_any_range_of_values_can_be_drawn(points: list[tuple[float, float]]):
    plot = _plot(re.findall(r"<svg.*</svg>", Chart("Loss", [Series("loss", points)]).figure())[0])
    _, top, _, height = map(float, plot.attrib["viewBox"].split())
    for line in plot.iter("polyline"):
        assert all(top <= -y <= top + height for _, y in _points(line))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1, "1"), (240, "240"), (0.05, "0.05"), (0.0003, "0.0003"), (3e-5, "3e-5"), (1234.5, "1234"),
        (-0.25, "-0.25"), (1e9, "1e9"), (0.123456, "0.123"), (12.345, "12.3"),
    ],
)  # fmt: skip
def test_numbers_are_short_and_readable(value: float, text: str):
    assert number(value) == text
