import pytest

from tba.config import TrainingConfig
from tba.objectives import TrajectoryBalance
from tba.presets import preset
from tba.train.schedules import beta_at, learning_rate_at, reference_power_at

GSM8K = TrajectoryBalance(beta_start=0.014, beta_end=0.004, beta_target=500, beta_stop=500)


@pytest.mark.parametrize(
    ("step", "beta"), [(1, 0.014), (250, 0.00902), (499, 0.00404), (500, 0.004), (501, 0.004), (10_000, 0.004)]
)
def test_beta_falls_in_a_line(step, beta):
    assert beta_at(step, GSM8K) == pytest.approx(beta, rel=1e-12)


@pytest.mark.parametrize(("step", "beta"), [(1, 1.0), (31, 0.77734375), (32, 0.05), (128, 0.05), (256, 0.05)])
def test_beta_jumps_to_its_end_where_it_stops_before_its_target(step, beta):
    assert beta_at(step, preset("tldr").objective) == pytest.approx(beta, rel=1e-12)


def test_beta_is_constant_by_default():
    assert {beta_at(step, preset("quickstart").objective) for step in (1, 2, 100)} == {0.05}


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (1, 0.02), (25, 0.5), (50, 1), (399, 1), (400, 1), (550, 0.8535533905932737), (700, 0.5), (1000, 0), (2000, 0),
    ],
)  # fmt: skip
def test_warmup_stable_decay(step, factor):
    training = TrainingConfig(
        learning_rate=1e-5, schedule="warmup-stable-decay", warmup_steps=50, stable_steps=350, decay_steps=600
    )
    assert learning_rate_at(step, training) == pytest.approx(1e-5 * factor, abs=1e-19)


@pytest.mark.parametrize(("steps", "peak"), [(400, 190), (1000, 790), (211, 1), (210, 0), (80, 0)])
def test_stable_steps_that_are_not_set_take_what_warmup_and_decay_leave(steps, peak):
    training = preset("quickstart").replace({"training.steps": steps}).training
    assert training.peak_steps == peak
    assert learning_rate_at(10 + peak, training) == pytest.approx(2e-4)
    assert learning_rate_at(110 + peak, training) == pytest.approx(1e-4)
    assert learning_rate_at(210 + peak, training) == 0


@pytest.mark.parametrize(("step", "factor"), [(1, 255 / 256), (128, 0.5), (256, 0), (300, 0)])
def test_a_linear_schedule_reaches_zero_at_the_last_step(step, factor):
    assert learning_rate_at(step, preset("tldr").training) == pytest.approx(3e-6 * factor, abs=1e-19)


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        ("linear", 5, 0.5), ("linear", 10, 1), ("linear", 60, 0.5), ("linear", 110, 0),
        ("constant", 5, 0.5), ("constant", 10, 1), ("constant", 1000, 1),
    ],
)  # fmt: skip
def test_every_schedule_warms_up_when_asked(schedule, step, factor):
    training = TrainingConfig(steps=110, learning_rate=0.1, schedule=schedule, warmup_steps=10)
    assert learning_rate_at(step, training) == pytest.approx(0.1 * factor)


def test_a_warmup_as_long_as_the_run_ends_without_dividing_by_zero():
    training = TrainingConfig(steps=10, schedule="linear", warmup_steps=10)
    assert learning_rate_at(10, training) == 0


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="count from 1, got 0"):
        beta_at(0, GSM8K)
    with pytest.raises(ValueError, match="count from 1, got 0"):
        learning_rate_at(0, TrainingConfig())


REDTEAM = TrajectoryBalance(
    beta_start=0.05,
    beta_end=0.05,
    target_temperature_start=2.0,
    target_temperature_steps=500,
    reference_temperature_end=1.2,
    reference_temperature_steps=2000,
)


@pytest.mark.parametrize(
    ("step", "temperature", "gamma"),
    [(1, 2, 1), (251, 1.5, 1.025), (501, 1, 1.05), (1001, 1, 1.1), (2001, 1, 1.2), (10_000, 1, 1.2)],
)
def test_the_target_cools_and_the_reference_counts_less(step, temperature, gamma):
    assert REDTEAM.target_temperature_at(step) == pytest.approx(temperature, rel=1e-12)
    assert beta_at(step, REDTEAM) == pytest.approx(0.05 * temperature, rel=1e-12)
    assert reference_power_at(step, REDTEAM) == pytest.approx(1 / (gamma * temperature), rel=1e-12)


def test_without_temperatures_the_reference_counts_once_exactly():
    assert {reference_power_at(step, GSM8K) for step in (1, 2, 499, 10_000)} == {1.0}
    assert not GSM8K.tempers and REDTEAM.tempers
