"""Send important events of a run to the address in $TBA_WEBHOOK, each as one POST of JSON.

The field `text` is a sentence, which Slack, Mattermost and similar programs show as it is. The address may contain a
secret. So it comes from the environment, and is neither stored nor logged.
"""

import json
import logging
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from storage.runs.run import Run
from tba.errors import ConfigError

log = logging.getLogger(__name__)

VARIABLE = "TBA_WEBHOOK"

FIRST_DELAY = 1.0  # seconds from the first try to the second; every further delay is twice as long

_TRIES, _TIMEOUT = 3, 10.0  # the timeout of a try is in seconds
_WAITING = 1000  # events that may wait to be sent; further events are dropped
_REDIRECTED = (301, 302, 303, 307, 308)
_PATIENCE = 15.0  # seconds to send the last events at the end


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a redirected POST would arrive as a GET without its body."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None: ...


_opener = urllib.request.build_opener(_Stays)


class NoWebhook:
    """Used if there is no address: drops all events."""

    def tell(self, kind: str, message: str, severity: str, data: Mapping[str, Any]) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Webhook:
    """Sends events from a thread of its own. `tell` never waits, and errors never reach the run."""

    def __init__(self, run: Run, address: str):
        self.run, self.address = run, address
        self._queue: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        self._told_trouble = False

    def tell(self, kind: str, message: str, severity: str, data: Mapping[str, Any]) -> None:
        body = {"text": f"{self.run.name}: {message}", "run": self.run.name, "url": self.run.url, "kind": kind}
        body |= {"severity": severity, "message": message, "data": dict(data)}
        try:
            self._queue.put_nowait(json.dumps(body, default=str).encode())
        except queue.Full:
            self._complain("the address answers too slowly, so some events are left out")

    def _work(self) -> None:
        while (body := self._queue.get()) is not None:
            self._post(body)

    def _post(self, body: bytes) -> None:
        request = urllib.request.Request(self.address, body, {"Content-Type": "application/json"})
        why = ""
        for number in range(_TRIES):
            try:
                with _opener.open(request, timeout=_TIMEOUT):
                    return
            except urllib.error.HTTPError as error:
                why = f"answers {error.code}" + (", a redirect" if error.code in _REDIRECTED else "")
                error.close()
            except (OSError, ValueError, HTTPException) as error:
                why = f"cannot be reached: {type(error).__name__}"
            if number < _TRIES - 1:
                time.sleep(FIRST_DELAY * 2**number)
        self._complain(why)

    def _complain(self, why: str) -> None:
        """Log a problem, but only the first one. The address itself is never logged."""
        if not self._told_trouble:
            log.warning("$%s: %s", VARIABLE, why)
        self._told_trouble = True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(_PATIENCE)


def open_webhook(run: Run) -> Webhook | NoWebhook:
    address = address_of_webhook()
    return Webhook(run, address) if address else NoWebhook()


def address_of_webhook() -> str | None:
    """Return the URL in $TBA_WEBHOOK, or None if it is not set. Raise ConfigError if it is not a valid HTTP URL."""
    address = os.environ.get(VARIABLE)
    try:
        parts = urlsplit(address or "")
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 80) > 0
    except ValueError:
        is_one = False
    if address and not is_one:
        raise ConfigError(f"${VARIABLE}: must be a URL with http or https, a host and, if given, a valid port")
    return address
