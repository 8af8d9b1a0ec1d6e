"""Writes samples in the text formats of Prometheus and OpenMetrics."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from flows.metrics.catalogue import METRICS
from flows.metrics.watched import Sample

PLAIN = "text/plain"


class _Samples:
    """A collector of `prometheus_client` with fixed samples."""

    def __init__(self, samples: Sequence[Sample]):
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        by_name: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in self._samples:
            by_name[sample[0].name].append(sample)
        for name in filter(by_name.__contains__, METRICS):
            metric, labels, _ = by_name[name][0]
            family: Callable[..., Metric] = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            made = family(name.removesuffix("_total"), metric.meaning, labels=list(labels))
            for _, own, value in by_name[name]:
                made.add_metric(list(own.values()), value)  # pyright: ignore[reportAttributeAccessIssue]
            yield made


def encode(samples: Sequence[Sample], accept: str = PLAIN) -> tuple[bytes, str]:
    """Return samples as text, and the type of that text. `accept` is the header of the request: a scraper that asks for
    OpenMetrics gets it."""
    registry = CollectorRegistry()
    registry.register(_Samples(samples))  # pyright: ignore[reportArgumentType]
    encoder, kind = choose_encoder(accept)
    return encoder(registry), kind
