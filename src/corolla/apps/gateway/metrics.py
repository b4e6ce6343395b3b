"""What a gateway counts, for Prometheus: names end in their unit, `_total` counts up, labels have few values."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from corolla.apps.gateway.traces import Timing

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """One gateway's; nothing global, so that two in a process do not mix."""

    def __init__(self) -> None:
        disable_created_metrics()  # pyright: ignore[reportUnknownMemberType, reportPrivateImportUsage] - theirs
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "corolla_gateway_requests", "Requests answered.", ["endpoint", "status"], registry=registry
        )
        self.refusals = Counter(
            "corolla_gateway_refusals", "Requests that got an error, by its code.", ["code"], registry=registry
        )
        self.answers = Counter(
            "corolla_gateway_answers", "Answers that ended, and how.", ["model", "finish"], registry=registry
        )
        self.tokens = Counter(
            "corolla_gateway_tokens", "Tokens: of prompts, of prompts already held by the swarm, of answers.",
            ["model", "kind"], registry=registry,
        )  # fmt: skip
        self.steps = Counter("corolla_gateway_steps", "Passes through the swarm.", ["model"], registry=registry)
        self.recoveries = Counter(
            "corolla_gateway_recoveries", "Routes changed under way, because a server was lost or left.",
            ["model"], registry=registry,
        )  # fmt: skip
        self.step_s = Histogram(
            "corolla_gateway_step_seconds", "A pass of one new token through the swarm and back.",
            ["model"], registry=registry, buckets=SECONDS,
        )  # fmt: skip
        self.hop_s = Histogram(
            "corolla_gateway_hop_seconds", "At one server: waiting (queue), computing, sending (of the pass before).",
            ["model", "part"], registry=registry, buckets=SECONDS,
        )  # fmt: skip
        self.first_token_s = Histogram(
            "corolla_gateway_first_token_seconds", "From a request to the first token of its answer.",
            ["model"], registry=registry, buckets=SECONDS,
        )  # fmt: skip
        self.answer_s = Histogram(
            "corolla_gateway_answer_seconds", "From a request to the end of its answer.",
            ["model"], registry=registry, buckets=SECONDS,
        )  # fmt: skip

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(f"corolla_gateway_{name}", text, registry=self.registry).set_function(read)

    def watch_total(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A count that somebody else keeps, read when it is asked for."""
        self.registry.register(_Total(f"corolla_gateway_{name}", text, read))

    def saw_step(
        self, model: str, *, new_tokens: int, total_s: float, timings: Sequence[Timing], follows_decode: bool
    ) -> None:
        """A pass came round, with what each hop says of it, and of sending the one before: `follows_decode`, if that
        was one of this answer's single tokens."""
        self.steps.labels(model).inc()
        if new_tokens == 1:
            self.step_s.labels(model).observe(total_s)
            for timing in timings:
                self.hop_s.labels(model, "queue").observe(timing.queue_s)
                self.hop_s.labels(model, "compute").observe(timing.compute_s)
                if follows_decode:
                    self.hop_s.labels(model, "send").observe(timing.send_s)

    def saw_recoveries(self, model: str, count: int) -> None:
        if count:
            self.recoveries.labels(model).inc(count)

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class _Total(Collector):
    def __init__(self, name: str, text: str, read: Callable[[], float]) -> None:
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=self._read())
