"""The command `tba browse`: the address that it takes, and its end."""

import http.client
import signal
import socket
import subprocess
import sys

import pytest

from flows.cli import main
from storage.runs.run import Run


def test_a_port_that_is_in_use_is_named(finished: Run, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["browse", finished.url, "--port", str(port)]) == 2
    assert f"error: --port: {port} is in use" in capsys.readouterr().err
    assert main(["browse", finished.url, "--host", "no such host"]) == 2
    assert "error: --host:" in capsys.readouterr().err


def test_ctrl_c_ends_it(finished: Run):
    command = [sys.executable, "-m", "flows.cli", "browse", finished.url, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    said = process.stdout.readline()
    assert said.startswith("first at http://127.0.0.1:")
    port = int(said.split(":")[2].split("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/")  # before its first answer, the process might ignore signals
    assert connection.getresponse().read()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
    connection.close()
