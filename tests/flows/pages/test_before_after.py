"""The responses of the first and of the last scored version, in a report and in a terminal."""

import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from flows.orchestration.local_server import show_result
from flows.pages import before_after
from flows.pages.report.page import render
from storage import layout
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.evaluations import Evaluations
from tba.types import Example, Score, Version
from tests.support.builders import make_example
from tests.support.storage.synthetic import SyntheticRun, make_run, put

FIRST, MIDDLE, LAST = Version(0, 1), Version(1, 1), Version(2, 1)
HOSTILE = "</pre></section><script>alert(1)</script><b>\u202e\0\x1b[31m"


def scored(root: Path, **examples: list[Example]) -> Run:
    """Make a run whose versions `first`, `middle` and `last` have these examples."""
    run = SyntheticRun(str(root), "scored").run
    claim_attempt(run)
    for name, version in (("first", FIRST), ("middle", MIDDLE), ("last", LAST)):
        if name in examples:
            score = Score(version=version, step=2 * version.number, metric="greedy", value=0.5, n=1, seconds=0.0)
            Evaluations(run).write([score], examples[name])
    return run


def first(prompt_id: str = "test/0", **changes: Any) -> Example:
    return make_example(FIRST, prompt_id, **changes)


def last(prompt_id: str = "test/0", **changes: Any) -> Example:
    return make_example(LAST, prompt_id, step=4, **changes)


def section(page: str) -> str:
    return page.partition("Before and after</h2>")[2].partition("</section>")[0]


def texts(run: Run) -> list[tuple[str | None, ...]]:
    return [(it.before.prompt_id, it.before.response, it.after and it.after.response) for it in before_after.pairs(run)]


def test_the_first_and_the_last_scored_version_are_compared_prompt_by_prompt(tmp_path: Path):
    run = scored(
        tmp_path,
        first=[first("a", response="1"), first("b", response="2")],
        middle=[make_example(MIDDLE, "a", response="3")],
        last=[last("b", response="5"), last("a", response="4")],
    )
    assert texts(run) == [("a", "1", "4"), ("b", "2", "5")]


def test_versions_that_a_later_attempt_gave_up_are_not_compared(tmp_path: Path):
    """The first attempt went on to version 3, the second one from version 2 to version 4."""
    run = make_run(str(tmp_path))
    assert [(it.before.version, it.after and it.after.version) for it in before_after.pairs(run)] == [
        (Version(0, 1), Version(4, 2))
    ]


def test_while_one_version_is_scored_its_responses_stand_alone(tmp_path: Path):
    run = scored(tmp_path, first=[first(response="7")])
    assert texts(run) == [("test/0", "7", None)]
    assert "Before is version 0 (step 0)." in section(render(run)) and ">After" not in section(render(run))
    assert before_after.as_text(run).splitlines()[0].endswith("before is version 0 (step 0)")


def test_without_examples_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = scored(tmp_path, first=[], last=[])
    assert before_after.section(run) == "" and "Before and after" not in render(run)
    assert before_after.as_text(run) == ""
    show_result(run)
    assert "greedy responses" not in capsys.readouterr().out


def test_a_damaged_record_is_left_out_and_the_report_names_it(tmp_path: Path):
    run = scored(
        tmp_path, first=[first(response="1")], middle=[make_example(MIDDLE, response="3")], last=[last(response="4")]
    )
    put(run, layout.evaluation(LAST), b"{")
    assert texts(run) == [("test/0", "1", "3")]
    assert layout.evaluation(LAST) in render(run)


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_shows_both_responses_with_their_rewards(tmp_path: Path):
    run = scored(
        tmp_path,
        first=[first(prompt="1 + 2 =", response="wrong", answer="three", reward=0.25)],
        last=[last(prompt="1 + 2 =", response="right", answer="three", reward=0.75)],
    )
    shown = section(render(run))
    assert "Before is version 0 (step 0), after is version 2 (step 4)." in shown
    assert "<pre>1 + 2 =</pre>" in shown and "<span class='quoted'>three</span>" in shown
    before, after = re.findall(r"<span class='chip[^>]*>([^<]*)</span></p><pre class='response'>(\w+)</pre>", shown)
    assert (before, after) == (("0.25", "wrong"), ("0.75", "right"))


def test_no_text_is_taken_for_markup_in_the_report(tmp_path: Path):
    nasty = {"prompt": HOSTILE, "response": HOSTILE, "answer": HOSTILE}
    page = render(scored(tmp_path, first=[first(HOSTILE, **nasty)], last=[last(HOSTILE, **nasty)]))
    assert "<script>alert" not in page and "<b>" not in section(page)
    assert not {"\u202e", "\0", "\x1b"} & {*page}
    assert section(page).count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 5


def test_a_reward_that_is_not_finite_is_shown(tmp_path: Path):
    run = scored(tmp_path, first=[first(reward=float("nan"))], last=[last(reward=float("inf"))])
    assert section(render(run)).count(">nan</span>") == 4
    assert "nan     3      nan" in before_after.as_text(run)


def test_a_report_shows_the_first_pairs_of_many_and_says_where_the_others_are(tmp_path: Path):
    many = [first(f"test/{n}", response=f"<{n}>") for n in range(60)]
    shown = section(render(scored(tmp_path, first=many)))
    assert re.findall(r"&lt;(\d+)&gt;", shown) == [str(n) for n in range(50)]
    assert "These are 50 of 60; the view <code>examples</code> has all." in shown


# --- the terminal -----------------------------------------------------------------------------------------------------


def test_the_end_of_a_run_prints_prompts_with_both_responses(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = scored(
        tmp_path,
        first=[first(response="4", reward=0.0), first("test/1", prompt="2+2=", answer="", reward=0.5)],
        last=[last(response="3", reward=1.0), last("test/1", prompt="2+2=", answer="", response="", reward=-0.5)],
    )
    show_result(run)
    assert (
        "greedy responses to held-out prompts: before is version 0 (step 0), after is version 2 (step 4)\n"
        "  prompt  answer  before  reward  after    reward\n"
        "  1+2=    3       4       0       3        1\n"
        "  2+2=            3       0.5     (empty)  −0.5\n"
        "\n"
    ) in capsys.readouterr().out


def test_at_most_ten_prompts_are_printed(tmp_path: Path):
    said = before_after.as_text(scored(tmp_path, first=[first(f"test/{n}", prompt=f"<{n}>") for n in range(12)]))
    assert re.findall(r"<(\d+)>", said) == [str(n) for n in range(10)]


@pytest.mark.parametrize("letter", ["a", "\N{CJK UNIFIED IDEOGRAPH-732B}"])  # one column wide, two columns wide
def test_long_texts_are_cut_to_lines_of_a_hundred_columns(letter: str, tmp_path: Path):
    long = f"start{letter * 3000}end"
    run = scored(tmp_path, first=[first(prompt=long, response=long, answer=long)], last=[last(response="3")])
    said = before_after.as_text(run).splitlines()
    assert max(map(cell_len, said)) in (99, 100)
    prompt, before, after = said[1:]
    assert re.match(rf"  1\. start{letter}+…{letter}+end   answer: start{letter}+…{letter}+end$", prompt)
    assert re.match(rf"       before      1  start{letter}+…{letter}+end$", before)
    assert after == "       after       1  3"


def test_of_a_prompt_of_several_lines_the_end_is_shown(tmp_path: Path):
    story = f"start{'a' * 60}\n{'b' * 60}\nHow many?"
    said = before_after.as_text(scored(tmp_path, first=[first(prompt=story, response="c" * 120)])).splitlines()
    assert re.match(r"  1\. …a+ ⏎ b{60} ⏎ How many\?   answer: 3$", said[1]) and len(said[1]) == 100


def test_a_text_of_several_lines_is_one_line_without_marks_of_the_chat_template(tmp_path: Path):
    prompt = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n1+2?\n\n<|im_end|>\n<|im_start|>assistant\n"
    run = scored(tmp_path, first=[first(prompt=prompt, response="\nThree.\r\n\n  That is\t3.\u2028\n", answer="")])
    assert before_after.as_text(run).splitlines()[1:] == [
        "  prompt           before               reward",
        "  Be kind. ⏎ 1+2?  Three. ⏎ That is 3.  1",
    ]


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path):
    nasty = {"prompt": HOSTILE, "response": HOSTILE, "answer": HOSTILE}
    said = before_after.as_text(scored(tmp_path, first=[first(**nasty)], last=[last(**nasty)]))
    assert all(it.isprintable() or it == "\n" for it in said)
    assert said.count("\N{REPLACEMENT CHARACTER}[31m") == 4
