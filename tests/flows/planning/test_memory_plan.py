"""Plans of memory: where roles are placed, whether they fit, and the settings that make them fit."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from flows.cli import build_parser, main
from flows.commands.arguments import read_changes
from flows.planning import fit_to_gpus, memory_plan, resolve, role_memory
from flows.planning.fit_to_gpus import fit, warning
from flows.planning.memory_plan import Gpus, fits, place
from flows.planning.model_sizes import KNOWN, find_model, find_policy
from flows.planning.nearest_settings import nearest
from flows.planning.plan_table import table
from flows.supervision.gpus import Devices
from tba.config import Config
from tba.errors import ConfigError
from tba.presets import preset
from tests.support.pages import PAGES, ROOT

SMALL, SINGLE, MANY = (Gpus.parse(it) for it in ("1x24", "1x80", "8x80"))


def fitted(config: Config, on: Gpus) -> Config:
    model = find_policy(config)
    assert model is not None
    changes = nearest(config, model, on)
    assert changes is not None, "\n".join(table(config, model, on))
    changed = config.replace(changes)
    assert fits(changed, model, on)
    return changed


# --- GPUs and places --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "24", "x24", "1x", "0x24", "1x0", "1x24GB", "-1x24", "one"])
def test_gpus_that_cannot_be_read_are_refused(text: str):
    with pytest.raises(ConfigError, match=rf"^--gpus must be a number of GPUs and the GiB of each, .*, got '{text}'$"):
        Gpus.parse(text)


@pytest.mark.parametrize(
    ("count", "searchers", "ranks", "per_engine"),
    [(1, 1, 1, 1), (1, 3, 1, 1), (2, 3, 1, 1), (4, 3, 1, 1), (8, 3, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (3, 1, 1, 2)],
)
def test_the_plan_places_roles_where_the_launcher_does(
    tmp_path: Path, count: int, searchers: int, ranks: int, per_engine: int
):
    changes = {"search.searchers": searchers, "training.ranks": ranks, "engine.tensor_parallel": per_engine}
    config = preset("gsm8k").replace(changes)
    uuids = [f"GPU-{i}" for i in range(count)]
    devices = Devices("run", folder=tmp_path, uuids=uuids, ranks=ranks, per_engine=per_engine)
    placed: list[list[str]] = [[] for _ in uuids]
    held = []
    for role in ("trainer", *(f"searcher-{i}" for i in range(searchers)), "evaluator"):
        held.append(devices.acquire(role.partition("-")[0]))
        for uuid in held[-1].uuids:
            placed[uuids.index(uuid)].append(role)
    for it in held:
        it.release()
    assert place(config, count) == placed


def test_too_few_gpus_are_told_by_the_setting_that_needs_them():
    with pytest.raises(ConfigError, match=r"^training\.ranks: the plan is for 1 GPU, got 2$"):
        place(preset("gsm8k").replace({"training.ranks": 2}), 1)
    with pytest.raises(ConfigError, match=r"^engine\.tensor_parallel: the plan is for 2 GPUs, got 4$"):
        place(preset("gsm8k").replace({"engine.tensor_parallel": 4}), 2)


def test_with_a_copy_of_the_weights_on_each_machine_the_plan_is_for_one_of_several():
    model, sixteen = KNOWN["Qwen/Qwen2.5-7B"], {"training.ranks": 16, "training.prompts_per_step": 16}
    with pytest.raises(ConfigError, match=r"^training\.ranks: the plan is for 8 GPUs, got 16$"):
        memory_plan.plan(preset("math").replace(sixteen), model, MANY)
    apart = preset("math").replace({**sixteen, "training.copy_per": "node"})
    together = preset("math").replace({**sixteen, "training.ranks": 8})
    plans = [memory_plan.plan(it, model, MANY) for it in (apart, together)]
    held = [[load.parts.get("weights and moments") for gpu in it.gpus for load in gpu.loads] for it in plans]
    assert held[0] == held[1] and any(held[0])
    assert plans[0].in_main_memory["trainer"] == plans[1].in_main_memory["trainer"]
    with pytest.raises(ConfigError, match=r"^training\.ranks: the plan is for 8 GPUs, got 12$"):
        memory_plan.plan(apart.replace({"training.ranks": 12}), model, MANY)


# --- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("gsm8k", SMALL), ("gsm8k", SINGLE), ("gsm8k", MANY), ("math", SINGLE), ("math", MANY), ("tldr", SMALL),
        ("tldr", SINGLE), ("tldr", MANY),
        ("redteam", SMALL), ("redteam", SINGLE), ("redteam", MANY),
    ],
    ids=lambda it: str(it),
)  # fmt: skip
def test_the_runs_of_the_paper_fit_with_the_settings_that_are_found(name: str, on: Gpus):
    fitted(preset(name), on)


def test_half_a_billion_parameters_are_trained_in_full_on_24_gigabytes():
    config = fitted(preset("math").replace({"model.path": "Qwen/Qwen2.5-0.5B"}), SMALL)
    assert config.model.lora_rank == 0 and config.model.dtype == "float32"


def test_one_and_a_half_billion_parameters_are_trained_with_adapters_on_24_gigabytes():
    config = fitted(preset("math").replace({"model.path": "Qwen/Qwen2.5-1.5B"}), SMALL)
    assert config.model.lora_rank and config.model.gpu_shifts and config.search.searchers == 1


def test_in_shifts_the_role_that_needs_most_counts_beside_what_others_keep():
    config, model = preset("gsm8k").replace({"model.gpu_shifts": True}), KNOWN["realtreetune/rho-1b-sft-GSM8K"]
    [gpu] = memory_plan.plan(config, model, SINGLE).gpus
    trainer, *others = gpu.loads
    assert trainer.parked == role_memory.CONTEXT
    assert all(load.parked == 2 * role_memory.CONTEXT + role_memory.GRAPHS for load in others)
    largest = max(others, key=lambda load: load.needed)
    assert largest.needed > trainer.needed, "its engine has the GPU to itself"
    kept = sum(load.parked for load in gpu.loads) - largest.parked
    assert gpu.needed == pytest.approx(largest.needed + kept)
    [at_once] = memory_plan.plan(preset("gsm8k"), model, SINGLE).gpus
    assert at_once.needed == pytest.approx(sum(load.needed for load in at_once.loads))


@pytest.mark.parametrize("name", ["training.ranks", "engine.tensor_parallel"])
def test_shifts_are_for_roles_with_a_single_gpu(name: str):
    with pytest.raises(ConfigError, match=rf"^{re.escape(name)} must be 1 where model\.gpu_shifts is set"):
        preset("gsm8k").replace({"model.gpu_shifts": True, name: 2})


def test_settings_that_fit_are_left_alone():
    config = preset("gsm8k")
    assert fit(config, "8x80") == (MANY, {})


def test_no_change_can_be_left_out():
    """Without any one of the changes the run would not fit, or its settings would exclude each other."""
    config, model = preset("math"), KNOWN["Qwen/Qwen2.5-7B"]
    changes = nearest(config, model, MANY)
    assert changes
    for left_out in changes.keys() - {"search.prompts_per_round"}:  # follows from the number of searchers
        rest = {name: value for name, value in changes.items() if name != left_out}
        with suppress(ConfigError):
            assert not fits(config.replace(rest), model, MANY), left_out


def test_changes_that_cost_only_time_come_before_those_of_what_is_learned():
    config, model = preset("gsm8k"), KNOWN["realtreetune/rho-1b-sft-GSM8K"]
    sizes = [12, 16, 24, 32, 40, 48, 64, 80]
    learned = [
        bool({"model.lora_rank", "model.dtype"} & set(nearest(config, model, Gpus(1, size * 2**30)) or ()))
        for size in sizes
    ]
    assert learned == sorted(learned, reverse=True) and learned[0] and not learned[-1]


def test_fewer_searchers_still_generate_what_a_step_in_lockstep_needs():
    config = fitted(preset("math"), MANY)
    assert config.search.searchers * config.search.prompts_per_round >= config.training.prompts_per_step


def test_settings_that_were_given_stay():
    config, model = preset("gsm8k"), KNOWN["realtreetune/rho-1b-sft-GSM8K"]
    for given in ("search.searchers", "engine.memory_fraction"):
        assert given in (nearest(config, model, SINGLE) or ())
        changes = nearest(config, model, SINGLE, keep={given})
        assert changes and given not in changes and fits(config.replace(changes), model, SINGLE)


def test_a_cache_of_a_given_size_counts_in_place_of_a_share():
    config, model = preset("gsm8k").replace({"engine.cache_gigabytes": 40.0}), KNOWN["realtreetune/rho-1b-sft-GSM8K"]
    parts = role_memory.engine(config, model, "searcher", total=MANY.size, roles=1, vllm=True)
    assert parts["vLLM"] == pytest.approx(40 * 2**30 + role_memory.least_engine(config, model), rel=0.01)
    assert "engine.memory_fraction" not in (nearest(config, model, SINGLE) or ())


def test_the_evaluator_scores_again_what_any_engine_but_the_trainers_own_generated():
    model = KNOWN["realtreetune/rho-1b-sft-GSM8K"]
    parts = {
        name: role_memory.evaluator(
            preset("gsm8k").replace({"engine.name": name}), model, total=1e12, roles=1, vllm=name == "vllm"
        )
        for name in ("vllm", "transformers", "elsewhere:Engine")
    }
    assert ["policy for exact log-probabilities" in it for it in parts.values()] == [True, False, True]


def test_a_run_that_is_planned_for_more_gpus_than_are_here_is_not_started(capsys: pytest.CaptureFixture[str]):
    assert main(["run", "gsm8k", "--gpus", "64x80"]) != 0
    assert "error: --gpus: roles may use" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [{"model.lora_rank"}, {"model.dtype"}])
def test_a_part_of_a_change_that_was_given_rules_the_change_out(kept: set[str]):
    model = KNOWN["realtreetune/rho-1b-sft-GSM8K"]
    smaller = Gpus(1, 12 * 2**30)
    assert nearest(preset("gsm8k"), model, smaller) is not None
    assert nearest(preset("gsm8k"), model, smaller, keep=kept) is None
    assert nearest(preset("gsm8k"), model, SMALL, keep={"training.ranks", "training.optimizer"})


def test_an_option_of_a_task_that_was_given_stays():
    config, model = preset("tldr"), KNOWN["mnoukhov/pythia410m-sft-tldr"]
    assert "task.options.dtype" in (nearest(config, model, SMALL) or ())
    assert "task.options.dtype" not in (nearest(config, model, SMALL, keep={"task.options.dtype"}) or ())


def test_a_model_that_cannot_be_named_on_the_hub_has_no_size():
    assert find_model("/data/none/here") is None


def test_a_run_for_which_nothing_fits_is_refused_with_the_numbers():
    with pytest.raises(ConfigError) as told:
        fit(preset("math"), "1x24")
    assert str(told.value).startswith("--gpus: the run does not fit on 1x24, nor with any settings")
    assert re.search(r"^  trainer \d+ GB: weights and moments 168 GB,", str(told.value), re.MULTILINE)


def test_a_policy_of_unknown_size_is_refused_and_one_that_a_task_makes_is_small():
    with pytest.raises(ConfigError, match=r"^--gpus: the size of the policy is unknown .*'somebody/unheard-of'"):
        fit(preset("gsm8k").replace({"model.path": "somebody/unheard-of"}), "1x24")
    assert fit(preset("quickstart"), "1x24") == (SMALL, {})


def test_an_engine_whose_share_is_too_small_for_its_weights_does_not_fit():
    config = preset("gsm8k").replace({"engine.memory_fraction": 0.02, "search.searchers": 1})
    model = KNOWN["realtreetune/rho-1b-sft-GSM8K"]
    assert 0.02 * MANY.size < role_memory.least_engine(config, model)
    assert not fits(config, model, MANY)
    assert any("its engine needs at least" in line for line in table(config, model, MANY))


# --- the GPUs of this machine -----------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the GPUs that this machine seems to have."""
    sizes: list[int] = []
    monkeypatch.setattr(fit_to_gpus, "usable", lambda config: [f"GPU-{i}" for i in range(len(sizes))])
    monkeypatch.setattr(fit_to_gpus, "memory_of", lambda uuids: sizes)
    yield sizes


def test_of_a_run_that_is_too_large_for_this_machine_a_warning_tells(machine: list[int]):
    machine.append(24 * 2**30)
    config = preset("gsm8k")
    assert fit(config, None) == (SMALL, {})
    assert re.match(r"by plan the run does not fit on 1x24; `--gpus here` .*:\nGPU 0: ", warning(config, SMALL))
    on, changes = fit(config, "here")
    assert on == SMALL and warning(config.replace(changes), on) == "" == warning(config, None)


def test_the_smallest_gpu_of_a_machine_counts(machine: list[int]):
    machine += [80 * 2**30, 24 * 2**30]
    assert fit(preset("redteam"), "here")[0] == Gpus(2, 24 * 2**30)


def test_a_machine_without_gpus_needs_no_plan(machine: list[int]):
    assert fit(preset("math"), None) == (None, {})
    assert warning(preset("math"), None) == ""
    with pytest.raises(ConfigError, match=r"^--gpus does not apply where model\.device is 'cpu', got '1x24'$"):
        fit(preset("gsm8k").replace({"model.device": "cpu"}), "1x24")
    with pytest.raises(ConfigError, match=r"^--gpus: there are no GPUs of known size on .*, got 'here'$"):
        fit(preset("math"), "here")


# --- commands ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_the_changes_and_what_each_role_takes(capsys: pytest.CaptureFixture[str]):
    assert main(["run", "gsm8k", "--gpus", "1x24", "--dry-run", "--set", "training.warmup_steps=40"]) == 0
    told = capsys.readouterr()
    assert re.search(r"^to fit on 1x24: .*search\.searchers=1", told.err, re.MULTILINE)
    assert re.search(r"^on 1x24 +GPU 0: [\d.]+ GB of 24\.5 GB, one role at a time, fits$", told.out, re.MULTILINE)
    for role in ("trainer", "searcher-0", "evaluator"):
        assert re.search(rf"^on 1x24 +{role} [\d.]+ GB: ", told.out, re.MULTILINE)


COMMAND = re.compile(r"tba run (?:gsm8k|math|tldr|redteam)(?= |$)(?:[^`\n#]*\\\n)*[^`\n#]*--gpus[^`\n#]*", re.MULTILINE)


def test_every_command_of_the_pages_that_names_gpus_fits_on_them():
    found = [it for page in PAGES for it in COMMAND.findall((page).read_text())]
    assert len(found) > 4
    for command in found:
        words = command.replace("\\\n", " ").split()
        options = build_parser().parse_args(words[1:])
        changes = read_changes(options)
        config = resolve.resolve(options.task, changes, searchers=options.searchers, steps=options.steps)
        on, changed = fit(config, options.gpus, keep=changes)
        model = find_policy(config)
        assert on and model and fits(config.replace(changed), model, on), command


ROW = re.compile(r"^\| `tba run ([^`]+ --gpus [^`]+)` \| `([^`]+=[^`]*)` \|$", re.MULTILINE)


def test_the_page_tells_the_changes_that_are_made(capsys: pytest.CaptureFixture[str]):
    rows = ROW.findall((ROOT / "docs/gpus.md").read_text())
    assert len(rows) > 4
    for command, changes in rows:
        assert main(["run", *command.split(), "--dry-run"]) == 0
        assert capsys.readouterr().err.rstrip().endswith(f": {changes}")
