"""Which role gets which GPU. Real processes hold real locks, but no GPU is needed."""

import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flows import cli
from flows.planning import resolve
from flows.roles.engines import starting, tell_start
from flows.supervision.background_supervisor import local_launcher
from flows.supervision.gpus import Devices, engine_start, usable
from flows.supervision.processes import LocalLauncher, NotNow, Role
from storage.runs.control import change_state
from storage.runs.events import Events, read_events
from storage.runs.run import Run
from tba.config import Config, VLLMEngine
from tba.errors import ConfigError, RunFailed
from tba.presets import preset
from tests.support.flows.device_holder import Hold
from tests.support.flows.roles import LIMITS, at_work, end_roles, script
from tests.support.waiting import until

ENTER = """
import time
from flows.supervision.gpus import engine_start

with engine_start() as roles:
    print(roles, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    config = preset("quickstart").replace(LIMITS)
    run = Run.create(str(tmp_path), "r", config=config.to_dict(), sampler_sql="select 1", code_version="test")
    change_state(run, desired="run", searchers=1)
    yield run
    end_roles(run)


def test_roles_take_free_devices_first_then_share_those_of_their_run(tmp_path: Path, hold: Hold):
    ours, theirs = (Devices(run, folder=tmp_path, uuids=["a", "b"]) for run in ("runs/ours", "runs/theirs"))
    first, second = hold(ours), hold(theirs)
    assert (first.uuids, second.uuids) == ("a", "b")
    assert hold(ours).uuids == "a"
    assert Devices("runs/third", folder=tmp_path, uuids=["a", "b"]).acquire("trainer") is None
    second.kill()
    assert hold(ours).uuids == "b"


def test_more_roles_than_devices_share_the_devices_except_the_trainers_whoever_hands_them_out(
    tmp_path: Path, hold: Hold
):
    kinds = ["trainer", "searcher", "searcher", "searcher", "evaluator"]
    holders = [hold(Devices("runs/ours", folder=tmp_path, uuids=["a", "b", "c"]), kind) for kind in kinds]
    assert [holder.uuids for holder in holders] == ["a", "b", "c", "b", "c"]
    holders[2].kill()
    assert hold(Devices("runs/ours", folder=tmp_path, uuids=["a", "b", "c"])).uuids == "c"


def test_a_role_is_shown_its_device_alone_and_holds_it_until_its_last_process_ends(run: Run, tmp_path: Path):
    devices = Devices(run.url, folder=tmp_path / "locks", uuids=["GPU-7"])
    launcher = LocalLauncher(run, command=script, devices=devices)
    life = launcher.start(Role("trainer"), 1)
    assert shown_to(run, "trainer") == "GPU-7"
    another = Devices("runs/another", folder=tmp_path / "locks", uuids=["GPU-7"])
    assert another.acquire("searcher") is None
    with pytest.raises(NotNow, match="every GPU"):
        LocalLauncher(run, command=script, devices=another).start(Role("evaluator"), 1)
    life.kill()
    until(lambda: life.poll() is not None)
    held = another.acquire("searcher")
    assert held is not None
    held.release()


def test_a_device_is_free_again_when_its_last_role_was_killed(tmp_path: Path, hold: Hold):
    first = Devices("runs/first", folder=tmp_path, uuids=["a"])
    holders = [hold(first), hold(first)]
    second = Devices("runs/second", folder=tmp_path, uuids=["a"])
    holders[0].kill()
    assert second.acquire("searcher") is None
    holders[1].kill()
    assert hold(second).uuids == "a"


# --- An engine on several GPUs --------------------------------------------------------------------------------------


def pairs(run: str, folder: Path, uuids: str) -> Devices:
    """Return the devices of a run whose engines need two devices each."""
    return Devices(run, folder=folder, uuids=list(uuids), per_engine=2)


@pytest.mark.parametrize(
    ("uuids", "expected"),
    [("abcde", ["a", "bc", "de", "bc"]), ("abcd", ["a", "bc", "db", "cd"]), ("ab", ["a", "ba", "ba", "ba"])],
)
def test_an_engine_takes_several_devices_free_ones_first_and_the_trainer_takes_one(
    tmp_path: Path, hold: Hold, uuids: str, expected: list[str]
):
    kinds = ["trainer", "searcher", "searcher", "evaluator"]
    assert [hold(pairs("runs/ours", tmp_path, uuids), kind).uuids for kind in kinds] == expected


def test_too_few_free_devices_are_not_kept(tmp_path: Path, hold: Hold):
    theirs = hold(Devices("runs/theirs", folder=tmp_path, uuids=["b"]))
    assert pairs("runs/ours", tmp_path, "ab").acquire("searcher") is None
    assert hold(Devices("runs/third", folder=tmp_path, uuids=["a", "b"])).uuids == "a"
    theirs.kill()


def test_two_runs_never_hold_what_both_of_them_wait_for(tmp_path: Path, hold: Hold):
    """The first trainer leaves room for its searchers, and the second run holds nothing while it waits."""
    assert hold(pairs("runs/first", tmp_path, "ab"), "trainer").uuids == "a"
    assert pairs("runs/second", tmp_path, "ab").acquire("trainer") is None
    assert hold(pairs("runs/first", tmp_path, "ab"), "searcher").uuids == "ba"


@pytest.mark.parametrize(
    ("uuids", "expected"), [("abcde", ["abc", "d", "e", "d"]), ("abc", ["abc", "a", "b", "c"]), ("ab", None)]
)
def test_a_trainer_takes_one_device_for_each_rank(tmp_path: Path, hold: Hold, uuids: str, expected: list[str] | None):
    ours = Devices("runs/ours", folder=tmp_path, uuids=list(uuids), ranks=3)
    if expected is None:
        assert ours.acquire("trainer") is None
        return
    assert [hold(ours, kind).uuids for kind in ("trainer", "searcher", "searcher", "evaluator")] == expected


def test_more_gpus_for_a_trainer_than_there_are_are_refused_where_it_is_to_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    config = preset("quickstart").replace({"training.ranks": 3})
    assert usable(config, ranks=3) == []  # without GPUs, ranks share the CPU
    monkeypatch.setattr("flows.supervision.gpus.nvidia_devices", lambda: ["a", "b"])
    with pytest.raises(ConfigError, match=r"training\.ranks: roles may use 2 GPUs .*, got 3"):
        resolve.resolve("quickstart", {"training.ranks": 3})
    with pytest.raises(ConfigError, match=r"training\.ranks: roles may use 2 GPUs .*, got 3"):
        local_launcher(run, config, generates=False)
    assert local_launcher(run, config, trains=False).devices.uuids == ["a", "b"]  # a machine for searchers alone


CONTEND = """
import sys
from pathlib import Path
from flows.supervision.gpus import Devices

devices = Devices(sys.argv[1], folder=Path(sys.argv[2]), uuids=list("abcdefgh"), per_engine=8)
for _ in sys.stdin:
    held = devices.acquire("searcher")
    print(len(held.uuids) if held else 0, flush=True)
    sys.stdin.readline()
    if held:
        held.release()
    print("released", flush=True)
"""


def test_if_runs_take_devices_at_once_one_gets_all_and_the_others_get_none(tmp_path: Path):
    command, piped = [sys.executable, "-c", CONTEND], subprocess.PIPE
    with ExitStack() as started:
        runs = [
            started.enter_context(
                subprocess.Popen([*command, run, str(tmp_path)], stdin=piped, stdout=piped, text=True)
            )
            for run in ("runs/one", "runs/two")
        ]
        for _ in range(100):
            assert sorted(say_to_all(runs, "take")) == ["0", "8"]
            say_to_all(runs, "release")


def say_to_all(runs: "list[subprocess.Popen[str]]", word: str) -> list[str]:
    """Send a word to all runs, and return their answers."""
    for run in runs:
        assert run.stdin is not None
        run.stdin.write(f"{word}\n")
        run.stdin.flush()
    return [run.stdout.readline().strip() for run in runs if run.stdout is not None]


def test_a_role_with_an_engine_is_shown_all_of_its_devices(run: Run, tmp_path: Path):
    devices = Devices(run.url, folder=tmp_path / "locks", uuids=["GPU-1", "GPU-2", "GPU-3"], per_engine=2)
    launcher = LocalLauncher(run, command=script, devices=devices)
    lives = [launcher.start(Role("trainer"), 1), launcher.start(Role("searcher"), 1)]
    assert shown_to(run, "trainer") == "GPU-1"
    assert shown_to(run, "searcher-000") == "GPU-2,GPU-3"
    another = Devices("runs/another", folder=tmp_path / "locks", uuids=["GPU-1", "GPU-2", "GPU-3"], per_engine=2)
    with pytest.raises(NotNow, match=r"needs 2 GPUs \(engine\.tensor_parallel\)"):
        LocalLauncher(run, command=script, devices=another).start(Role("searcher"), 1)
    for life in lives:
        life.kill()
        until(lambda life=life: life.poll() is not None)


def test_more_gpus_for_an_engine_than_there_are_are_refused_before_anything_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("flows.supervision.gpus.nvidia_devices", lambda: ["a", "b"])
    wide = {"engine.tensor_parallel": 3}
    root, name = str(tmp_path / "root"), ["--name", "r", "--set", "engine.tensor_parallel=3"]
    for dry in (["--dry-run"], []):
        assert cli.main(["run", "quickstart", "--root", root, *name, *dry]) == cli.BAD_USAGE
        said = capsys.readouterr().err
        assert "error: engine.tensor_parallel: roles may use 2 GPUs of" in said and "got 3" in said
    assert not Path(root).exists()
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: roles may use 2 GPUs .*, got 3"):
        local_launcher(run, preset("quickstart").replace(wide))
    local_launcher(run, preset("quickstart").replace(wide), generates=False)  # as on a machine for trainers alone
    assert resolve.resolve("quickstart", wide, runs_here=False).engine.tensor_parallel == 3
    assert usable(resolve.resolve("quickstart", {"engine.tensor_parallel": 2}), 2) == ["a", "b"]
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: roles may use 0 GPUs .*, got 2"):
        usable(Config().replace({"model.device": "cpu"}), 2)


# --- Engines that share a GPU -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("roles", [1, 2, 3, 5, 9])
def test_engines_that_share_a_gpu_fit_beside_each_other_and_leave_each_role_its_part(roles: int):
    engines = [VLLMEngine().fraction(roles)] * roles
    assert sum(engines) == pytest.approx(0.6)
    assert all(fraction < 1 / roles for fraction in engines)
    assert VLLMEngine(memory_fraction=0.4).fraction(roles) == 0.4


@pytest.fixture
def enter(tmp_path: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Yield a function that starts a process which, to others, looks like a starting engine on the given devices."""
    processes: list[subprocess.Popen[str]] = []

    def start(shown: str) -> "subprocess.Popen[str]":
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": shown, "TBA_LOCK_DIR": str(tmp_path)}
        command = [sys.executable, "-c", ENTER]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def told(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_an_engine_knows_how_many_roles_share_its_gpu(
    tmp_path: Path, hold: Hold, enter: Callable[[str], "subprocess.Popen[str]"]
):
    for kind in ("trainer", "searcher", "searcher", "evaluator"):
        hold(Devices("runs/ours", folder=tmp_path, uuids=["a", "b"]), kind)
    assert told(enter("a")) == 1
    assert told(enter("b")) == 3
    assert told(enter("c")) == 1, "which no launcher has given to anybody"


def test_an_engine_reports_its_share_of_memory_and_its_profile(
    run: Run, tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TBA_LOCK_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a")
    for kind in ("trainer", "searcher", "evaluator"):
        hold(Devices("runs/ours", uuids=["a"]), kind)
    resolved = {
        "dtype": "bfloat16", "quantization": "fp8_per_channel", "model_runner": 2, "async_scheduling": True,
        "compilation": "VLLM_COMPILE", "cuda_graphs": "FULL_AND_PIECEWISE",
    }  # fmt: skip
    with engine_start() as roles:
        tell_start(VLLMEngine(profile="fast"), Events(run, "searcher-000", 1), roles, resolved, on_cpu=False)
    tell_start(VLLMEngine(), Events(run, "evaluator", 1), 1, resolved | {"quantization": None}, on_cpu=True)
    event, on_cpu = sorted(read_events(run), key=lambda it: it["role"], reverse=True)
    assert event["message"] == (
        "vLLM takes 0.2 of the memory of its GPU, which 3 roles share; profile fast: bfloat16 with linear layers in "
        "fp8_per_channel, model runner 2, asynchronous scheduling, compilation VLLM_COMPILE, CUDA graphs "
        "FULL_AND_PIECEWISE"
    )
    assert event["data"] == {"fraction": pytest.approx(0.2), "profile": "fast", **resolved}
    assert on_cpu["message"].startswith("vLLM starts on the CPU; profile default: bfloat16, model runner 2, ")
    assert on_cpu["data"]["fraction"] is None


def test_an_engine_that_takes_shifts_has_the_gpu_to_itself(hold: Hold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TBA_LOCK_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a")
    for kind in ("trainer", "searcher", "evaluator"):
        hold(Devices("runs/ours", uuids=["a"]), kind)
    with starting(preset("gsm8k")) as roles:
        assert roles == 3
    with starting(preset("gsm8k").replace({"model.gpu_shifts": True})) as roles:
        assert roles == 1


def test_on_several_gpus_the_one_that_most_roles_share_counts(
    tmp_path: Path, hold: Hold, enter: Callable[[str], "subprocess.Popen[str]"]
):
    for kind in ("trainer", "searcher", "evaluator"):
        hold(pairs("runs/ours", tmp_path, "abc"), kind)
    assert told(enter("b,c")) == 2


def test_engines_start_on_a_gpu_one_after_the_other(enter: Callable[[str], "subprocess.Popen[str]"]):
    first = enter("a,b")
    told(first)
    second = enter("b,c")
    told(enter("d"))  # starts while the second engine still waits
    assert second.poll() is None and not has_said(second)
    first.send_signal(signal.SIGKILL)
    assert told(second) == 1


def has_said(process: "subprocess.Popen[str]") -> bool:
    """Return True if the process says anything within a second, which would be enough time."""
    return bool(select.select([process.stdout], [], [], 1.0)[0])


def shown_to(run: Run, role: str) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES of a role at work."""
    pid = at_work(run, role)[role].pid
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(it.split("=", 1) for it in variables if "=" in it)["CUDA_VISIBLE_DEVICES"]


def test_a_link_that_somebody_put_there_does_not_open_our_files_or_folders_to_everybody(tmp_path: Path):
    own, ours, locks = tmp_path / "own", tmp_path / "ours", tmp_path / "locks"
    own.write_text("private")
    own.chmod(0o600)
    ours.mkdir(0o700)
    Devices("first", folder=locks, uuids=["GPU-0"]).acquire("searcher")
    assert stat.S_IMODE(locks.stat().st_mode) == 0o1777
    assert {stat.S_IMODE(path.stat().st_mode) for path in locks.iterdir()} == {0o666}
    (locks / "taking.lock").unlink()
    (locks / "taking.lock").symlink_to(own)
    with pytest.raises(RunFailed, match=r"taking\.lock of a GPU cannot be opened"):
        Devices("second", folder=locks, uuids=["GPU-0"]).acquire("searcher")
    (tmp_path / "linked").symlink_to(ours)
    Devices("third", folder=tmp_path / "linked", uuids=["GPU-0"]).acquire("searcher")
    assert (own.read_text(), stat.S_IMODE(own.stat().st_mode)) == ("private", 0o600)
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700
