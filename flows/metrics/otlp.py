"""Sends samples to a collector of OpenTelemetry, by OTLP over HTTP."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from flows.metrics.catalogue import METRICS
from flows.metrics.watched import Sample

log = logging.getLogger(__name__)

_UNITS = {"_seconds": "s", "_bytes": "By", "_ratio": "1"}


class Sender:
    """Sends the samples of one scrape after the other. A collector that does not answer is told of once."""

    def __init__(self, url: str, scrape: Callable[[], list[Sample]]):
        self.url, self.scrape = url, scrape
        self._exporter = OTLPMetricExporter(endpoint=url, timeout=10)
        self._began = time.time_ns()
        self._fails = False

    def send(self) -> bool:
        """Send the samples of one scrape. Return False if the collector did not take them."""
        data = encode(self.scrape(), began=self._began, now=time.time_ns())
        sent = self._exporter.export(data) is MetricExportResult.SUCCESS
        if not sent and not self._fails:
            log.warning("%s did not take the metrics; later failures are not reported", self.url)
        self._fails = not sent
        return sent

    def run(self, every: float) -> None:
        """Send samples every `every` seconds, until Ctrl-C."""
        next_time = time.monotonic()
        while True:
            self.send()
            next_time = max(next_time + every, time.monotonic())
            time.sleep(next_time - time.monotonic())

    def start(self, every: float) -> None:
        threading.Thread(target=self.run, args=(every,), daemon=True).start()


def encode(samples: Sequence[Sample], *, began: int, now: int) -> MetricsData:
    """Return samples as the data of OTLP. Times are nanoseconds since 1970; `began` is the time since which counters
    count for the collector. Names of counters lose `_total`, which a collector adds again for Prometheus."""
    points: defaultdict[str, list[NumberDataPoint]] = defaultdict(list)
    for metric, labels, value in samples:
        points[metric.name].append(NumberDataPoint(dict(labels), began if metric.is_counter else 0, now, value))
    found = [_metric(name, own) for name, own in points.items()]
    scope = ScopeMetrics(InstrumentationScope("tba"), found, schema_url="")
    resource = Resource({"service.name": "tba"})
    return MetricsData([ResourceMetrics(resource, [scope], schema_url="")])


def _metric(name: str, points: Sequence[NumberDataPoint]) -> Metric:
    metric, short = METRICS[name], name.removesuffix("_total")
    unit = next((unit for suffix, unit in _UNITS.items() if short.endswith(suffix)), "")
    counted = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    data = counted if metric.is_counter else Gauge(points)
    return Metric(short, metric.meaning, unit, data)
