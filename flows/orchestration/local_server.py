"""A Prefect server with workers for as long as a command runs: `python -m flows.stack quickstart`.

    python -m flows.stack TASK [KEY=VALUE …]     run the deployment tba/TASK to its end
    python -m flows.stack -- COMMAND …           run any command that uses the server
    python -m flows.stack --keep                 keep the server running until Ctrl-C

The server has its own home folder, database (SQLite) and port, so it does not interfere with another server, and it
sends no data anywhere. At the end everything is stopped in order: runs are cancelled, which stops their roles, then
the workers are stopped, then the server.
"""

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flows.orchestration.prefect_api import PrefectApi
from flows.pages.markdown import Publications, table, where_next
from flows.supervision.interfaces import Event
from flows.supervision.processes import tail
from flows.supervision.terminal import Display, ending_on_sigterm
from storage.layout import RUN, run_url
from storage.objects import strict_json
from storage.objects.open_store import open_store
from storage.runs.events import ROUTINE, EventReader
from storage.runs.lease_watch import LeaseWatch
from storage.runs.run import Run, default_root
from tba.config import parse
from tba.errors import DeadlinePassed, RunFailed, TBAError
from tba.presets import PRESETS
from tba.runtime.waiting import looks

POOLS = ("tba", "gpu-search", "gpu-train")
START_DEADLINE = 180.0  # seconds; the first start also creates the database
CANCEL_DEADLINE = 60.0
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class Stack:
    """A context in which the Prefect server behind `api` is running, the work pools exist, the deployments of
    prefect.yaml are registered, and workers wait for runs. A command needs the variables in `environment` to use the
    server."""

    def __init__(
        self,
        home: Path,
        *,
        pools: Sequence[str] = ("tba",),
        ui: bool = True,
        tell: Callable[[str], None] = lambda line: None,
        variables: Mapping[str, str] | None = None,
    ):
        self.home, self.pools, self.ui, self.tell = home.absolute(), pools, ui, tell
        self.variables = dict(variables or {})
        self.logs = self.home / "logs"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.api = PrefectApi(port=0, password=f"tba:{secrets.token_urlsafe(16)}")

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
        return inherited | {
            "PREFECT_API_URL": self.api.url,
            "PREFECT_HOME": str(self.home),
            # Starting a deployment runs code, so other users of this machine and web pages must not have access.
            "PREFECT_SERVER_API_AUTH_STRING": self.api.password,
            "PREFECT_API_AUTH_STRING": self.api.password,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.api.address,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "TBA_HOME": os.environ.get("TBA_HOME") or os.getcwd(),
            **self.variables,
        }

    def __enter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            self.start_server()
            self.deploy()
            self.start_workers(*self.pools)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start_server(self) -> None:
        """Start the server. A server that is started again keeps its port."""
        self.api.port = self.api.port or _free_port()
        self.tell("starting the Prefect server")
        command = ["server", "start", "--host", "127.0.0.1", "--port", str(self.api.port)]
        self.start("server", [*command, "--ui" if self.ui else "--no-ui"])
        self.wait_for("server", self.api.is_healthy)

    def deploy(self) -> None:
        """Create the work pools, and register the deployments of prefect.yaml."""
        self.tell("registering deployments")
        for pool in POOLS:
            self.api.make_pool(pool)
        command = ["deploy", "--all", "--prefect-file", str(prefect_file())]
        result = subprocess.run(
            prefect_command(*command), env=self.environment, cwd=prefect_file().parent, capture_output=True, text=True
        )
        (self.logs / "deploy.log").write_text(result.stdout + result.stderr)
        if result.returncode:
            raise RunFailed(f"`prefect deploy --all` failed:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")

    def start_workers(self, *pools: str) -> None:
        self.tell(f"starting workers for {', '.join(pools)}")
        for pool in pools:
            self.start(f"worker-{pool}", ["worker", "start", "--pool", pool, "--type", "process", "--name", pool])
        for pool in pools:
            self.wait_for(f"worker-{pool}", lambda pool=pool: self.api.has_worker(pool))

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start a command of Prefect in a session of its own, so that Ctrl-C in the terminal reaches only this process.
        If this process ignores SIGINT, as in a background shell, the command would inherit this, and a worker could
        not be stopped. So the default handler is restored first."""
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                prefect_command(*arguments),
                env=self.environment | {"PYTHONSAFEPATH": "1"},  # like -P, but child processes inherit it
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process

    def wait_for(self, name: str, ready: Callable[[], bool]) -> None:
        for _ in looks(START_DEADLINE, every=0.2):
            if ready():
                return
            self.check()
        log = self.logs / f"{name}.log"
        raise DeadlinePassed(
            f"Prefect's {name} is not ready after {START_DEADLINE:.0f} s; {log} ends with:\n{tail(log, 20)}"
        )

    def check(self) -> None:
        """Raise RunFailed if a process of the stack has ended by itself."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                log = self.logs / f"{name}.log"
                raise RunFailed(
                    f"Prefect's {name} ended with exit code {process.returncode}; {log} ends with:\n{tail(log, 20)}"
                )

    def run_deployment(self, deployment: str, parameters: Mapping[str, Any]) -> str:
        """Request a flow run with the command line of Prefect, as a person would. Return the id of the flow run."""
        name = f"{deployment.partition('/')[2]}-{time.time_ns():x}"
        options = [part for key, value in parameters.items() for part in ("--param", f"{key}={json.dumps(value)}")]
        command = prefect_command("deployment", "run", deployment, "--flow-run-name", name, *options)
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=START_DEADLINE)
        if result.returncode:
            raise RunFailed(f"Prefect refused to run {deployment}:\n{result.stdout.strip()}\n{result.stderr.strip()}")
        self.tell(result.stdout.strip())
        return self.api.flow_run_named(name)

    # Stopping

    def stop(self) -> None:
        """Cancel all runs, then stop the workers and the server, even if the wait for the runs is interrupted."""
        try:
            with suppress(OSError):
                self.cancel_runs()
        finally:
            for name in sorted(self.processes, key=lambda name: name == "server"):
                self.tell(f"stopping {name}")
                _end(self.processes.pop(name))

    def cancel_runs(self) -> None:
        """Cancel the flow runs that have not ended, so that their roles are stopped in order. Wait for them at most
        CANCEL_DEADLINE seconds."""
        if not self.processes or not self.api.is_healthy():
            return
        for flow_run in self.api.flow_runs("SCHEDULED", "PENDING", "PAUSED"):
            self.api.set_state(flow_run["id"], "CANCELLED")
        for flow_run in self.api.flow_runs("RUNNING"):
            self.tell(f"cancelling {flow_run['name']}")
            self.api.set_state(flow_run["id"], "CANCELLING")
        for _ in looks(CANCEL_DEADLINE, every=0.5):
            if not self.api.flow_runs("RUNNING", "CANCELLING"):
                break


def prefect_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prefect", "--no-prompt", *arguments]


def prefect_file() -> Path:
    return Path(__file__).parents[2] / "prefect.yaml"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to stop with SIGINT, then with SIGTERM, then kill its whole process group."""
    for number, patience in ((signal.SIGINT, 15.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number) if number == signal.SIGKILL else process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return


# --- the command ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    options, command = command_line().parse_args(words[:split]), words[split + 1 :]
    if options.task and options.task not in PRESETS:
        print(f"error: TASK must be one of {', '.join(PRESETS)}, got {options.task!r}", file=sys.stderr)
        return 2
    if not (options.task or command):
        options.keep = True
    try:
        with ending_on_sigterm(), Stack(Path(options.home), ui=not options.no_ui, tell=_tell) as stack:
            _tell(
                f"the server is at {stack.api.address}, its password {stack.api.password}, its logs are in {stack.logs}"
            )
            code = 0
            if command:
                code = subprocess.run(command, env=stack.environment).returncode
            elif options.task:
                code = run_task(stack, options.task, options.parameters)
            if options.keep:
                stay(stack)
            return code
    except (TBAError, OSError, subprocess.TimeoutExpired) as error:  # OSError: the server no longer answers
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.stack",
        description="Start a Prefect server and a worker, run a deployment or a command with them, and stop them.",
        epilog="python -m flows.stack -- COMMAND … runs any command with PREFECT_API_URL set",
    )
    parser.add_argument("task", nargs="?", metavar="TASK", help="run the deployment tba/TASK to its end")
    parser.add_argument(
        "parameters", nargs="*", metavar="KEY=VALUE", type=_parameter, help="parameters of the deployment"
    )
    parser.add_argument("--home", default=".tba/prefect", help="folder of the server's database and logs (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the server running afterwards, until Ctrl-C")
    parser.add_argument("--no-ui", action="store_true", help="start the server without its web pages")
    return parser


def _parameter(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE. The value is JSON if it can be parsed as such, else text."""
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, such as steps=100, got {text!r}")
    try:
        return key, strict_json.loads(value)
    except strict_json.DoubledKey as error:
        raise argparse.ArgumentTypeError(f"{key}: {error}, got {value!r:.200}") from None
    except ValueError:
        return key, value


def run_task(stack: Stack, task: str, changes: Sequence[tuple[str, Any]]) -> int:
    """Run the deployment tba/TASK, show its progress and then its result. Return the exit code."""
    parameters = {
        "run": f"{task}-{datetime.now():%Y%m%d-%H%M%S}",
        "root": default_root() if "://" in default_root() else str(Path(default_root()).absolute()),
        **dict(changes),
    }
    url = run_url(parameters["root"], parameters["run"])
    flow_run = stack.run_deployment(f"tba/{task}", parameters)
    state = follow(stack, flow_run, url)
    if state["type"] != "COMPLETED":
        print(f"\nthe run ended as {state['name']}: {state['message']}", file=sys.stderr)
        print(f"the log of the worker: {stack.logs / 'worker-tba.log'}", file=sys.stderr)
        return 1
    show_result(Run.open(url))
    return 0


def follow(stack: Stack, flow_run: str, url: str) -> dict[str, Any]:
    """Show a run, read from its storage, until its flow run has ended. Return the final state of the flow run."""
    state: dict[str, Any] = {}
    for _ in looks(START_DEADLINE, every=1.0):
        if open_store(url).exists(RUN):
            break
        stack.check()
        state = stack.api.state_of(flow_run)
        if state["type"] in FINAL:
            return state
    else:
        raise DeadlinePassed(
            f"there is still no run at {url} after {START_DEADLINE:.0f} s: the flow run is {state['name']}"
        )
    run, watch = Run.open(url), LeaseWatch()
    events = EventReader(run)
    with Display(run, parse(run.config)) as display:
        while True:
            stack.check()
            state = stack.api.state_of(flow_run)
            for event in events.new():
                if event["kind"] not in ROUTINE:
                    display.tell(Event(event["kind"], event["message"], event["severity"]))
            display.look(watch.observe(run))
            if state["type"] in FINAL:
                return state
            time.sleep(1.0)


def show_result(run: Run) -> None:
    from flows.pages import before_after
    from flows.pages.report import page

    scored = [published.row() for published in Publications(run).all() if published.scores]
    print(f"\nrun {run.name} has finished: {run.url}\n\n{table(scored)}\n", flush=True)
    if answers := before_after.as_text(run):
        print(f"{answers}\n")
    print(f"report: {page.write(run)}\n\nlook at it:\n{where_next(run)}")


def stay(stack: Stack) -> None:
    print("\nThe server and a worker keep running until Ctrl-C. To use them from another shell:\n")
    print(f"export PREFECT_API_URL={stack.api.url}\nexport PREFECT_API_AUTH_STRING={stack.api.password}")
    print(f"export PREFECT_HOME={stack.home}\n", flush=True)
    with suppress(KeyboardInterrupt):
        while True:
            stack.check()
            time.sleep(0.5)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
