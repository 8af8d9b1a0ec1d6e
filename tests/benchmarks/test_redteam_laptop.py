"""The study of red-teaming with real models: which settings its sweeps choose, and what it shows of the rows."""

import json

from benchmarks.science import redteam_laptop as study
from tba.presets import preset

STEPS = 60


def row(
    name: str, rate: float, beta: float, success: float, diversity: float, *, seed: int = study.TUNING_SEED
) -> study.Row:
    run = study.make_run(name, seed, rate, beta, STEPS)
    return study.Row(
        **vars(run), success=success, success_geometric=0.1, diversity=diversity, reward=-1.0, generated=10,
        distinct=2, seconds=1.0, curve=f"0:0.1:0.9 20:{success}:{diversity}",
    )  # fmt: skip


def swept(name: str) -> list[study.Row]:
    """Return the rows of a whole sweep. The second one is the best, and the third one is as good."""
    scores = [(0.9, 0.1), (0.6, 0.5), (0.5, 0.6), (0.1, 0.9)]
    runs = study.sweep(name, STEPS)
    return [row(name, run.rate, run.beta, *score) for run, score in zip(runs, scores, strict=True)]


def test_a_sweep_chooses_success_times_diversity_and_among_equals_the_smaller_rate():
    rows = swept("TBA")
    rates, betas = study.RATES, study.ARMS["TBA"].betas
    assert study.next_run(rows[:-1], ["TBA"], [0], STEPS) == rows[-1].key
    assert study.next_run(rows, ["TBA"], [0], STEPS) == study.make_run("TBA", 0, rates[0], betas[1], STEPS)
    assert study.next_run(rows, ["TBA"], [], STEPS) is None
    assert study.next_run(rows, ["TBA", "GRPO"], [0], STEPS) == study.sweep("GRPO", STEPS)[0]


def test_the_settings_of_every_arm_are_settings_of_the_preset():
    for name in study.ARMS:
        for run in study.sweep(name, STEPS):
            config = preset(study.PRESET).replace({**json.loads(run.settings), "training.steps": STEPS})
            assert config.evaluation.every * config.sync.every == study.EVALUATED
            assert config.training.responses_per_prompt == study.ATTACKS


def test_rows_become_a_table_and_a_chart_with_the_start():
    rows = swept("TBA") + [row("TBA", 1e-5, 0.3, 0.5 + seed / 10, 0.7, seed=seed) for seed in (0, 1, 2)]
    table = list(study.markdown(rows))
    assert "| start | | | 3 | 0.100 ± 0.000 | | 0.900 ± 0.000 | | |" in table
    assert any(line.startswith("| TBA | 1e-05 | 0.3 | 3 | 0.600 ± 0.058 |") for line in table)
    assert "| TBA | 1e-05 | 0.3 | 0.600 | 0.500 | 0.300 |" in table
    drawn = study.picture(rows)
    assert ">TBA<" in drawn and ">start<" in drawn
    assert study.picture(swept("TBA")) == ""
