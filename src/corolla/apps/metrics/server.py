"""`corolla serve --metrics`: what a server has done and holds, for Prometheus; whether it is well, for who keeps it up.

Steps are told as they end, on the device thread; all else is read off the server when Prometheus asks. The page has
its own thread and port: whoever may read numbers need not be a peer.
"""

import json
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer

from corolla.apps.metrics.dht import DhtMetrics
from corolla.errors import BadInput
from corolla.net.libp2p.addresses import HostPort
from corolla.net.libp2p.traffic import DhtTraffic
from corolla.net.libp2p.transport import Libp2pTransport
from corolla.server.handler import Handler
from corolla.server.hosted import StepJob
from corolla.server.kv import PAGE_TOKENS

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

REQUEST_TIMEOUT_S: Final = 10.0
MAX_CALLERS: Final = 16
"""At a time, each with a thread; whoever comes beside them finds the connection closed."""
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ServerMetrics:
    """One server's; `registry` has them."""

    def __init__(
        self,
        handler: Handler,
        traffic: DhtTraffic | None = None,
        turned_away: Callable[[], Mapping[str, int]] = dict[str, int],
    ) -> None:
        """`turned_away`: streams of others that were not taken, by why (`Libp2pTransport.turned_away`)."""
        disable_created_metrics()  # pyright: ignore[reportUnknownMemberType, reportPrivateImportUsage]
        self.registry = CollectorRegistry()
        self._handler = handler
        self._turned_away = turned_away
        self._steps = Counter(
            "corolla_server_steps", "Steps computed: of prompts, or of one token.", ["kind"], registry=self.registry
        )
        self._tokens = Counter(
            "corolla_server_tokens", "Positions computed, of all rows.", ["kind"], registry=self.registry
        )
        self._queue_s = Histogram(
            "corolla_server_queue_seconds", "How long a step waited for the device.",
            ["kind"], registry=self.registry, buckets=SECONDS,
        )  # fmt: skip
        self._compute_s = Histogram(
            "corolla_server_compute_seconds", "How long the blocks took for a step.",
            ["kind"], registry=self.registry, buckets=SECONDS,
        )  # fmt: skip
        self._send_s = Histogram(
            "corolla_server_send_seconds", "From the end of a step's compute until the network had its result.",
            ["kind"], registry=self.registry, buckets=SECONDS,
        )  # fmt: skip
        self.registry.register(self)
        if traffic is not None:
            self.registry.register(DhtMetrics("corolla_server", traffic))

    def saw_step(self, job: StepJob) -> None:
        """A step has been computed. On the device thread."""
        kind = "prefill" if job.is_prefill else "decode"
        self._steps.labels(kind).inc()
        self._tokens.labels(kind).inc(job.new_tokens * job.step.hidden.shape[0])
        self._queue_s.labels(kind).observe(job.queue_s)
        self._compute_s.labels(kind).observe(job.compute_s)
        self._send_s.labels(kind).observe(job.send_s)

    def collect(self) -> Iterable[Metric]:
        """What the server holds now, and what it has counted itself."""
        handler = self._handler
        pool, counters, facts = handler.pool, handler.counters, handler.runner.facts
        total_tokens = pool.total_pages * PAGE_TOKENS
        yield _gauge("cache_tokens", "KV cache in all, in positions.", total_tokens)
        yield _gauge("cache_used_tokens", "Of it, leased to sessions.", total_tokens - pool.free_tokens)
        yield _gauge("sessions", "Sessions held.", len(handler.sessions))
        yield _gauge("first_block", "First block hosted.", facts.start)
        yield _gauge("blocks", "Blocks hosted.", facts.end - facts.start)
        yield _gauge("expected_queue_seconds", "How long a step would wait that came now.", handler.queue_s)
        yield _gauge("in_flight_bytes", "Of steps that have come and are not computed.", handler.bytes_in_flight)
        yield _gauge("journal_bytes", "Kept of what sessions pushed on.", handler.journals.total_bytes)
        yield _gauge("journal_bytes_at_most", "What may be kept of it.", handler.journals.max_bytes)
        yield _counter("journals_shed", "Times a session gave up some of that for others.", handler.journals.num_shed)
        yield _gauge("leaving", "1 while the server drains.", int(handler.is_leaving))
        yield _counter("sessions_opened", "Sessions opened.", counters.sessions_opened)
        yield _counter("links_down", "Times the next server of a route was out of reach.", counters.links_down)
        yield _counter_by("refusals", "What was refused, by code.", "code", dict(counters.refusals))
        yield _counter_by(
            "announcements_rejected", "Announcements of others dropped when the swarm was read, by why.", "why",
            dict(counters.announcements_rejected),
        )  # fmt: skip
        yield _counter_by(
            "streams_turned_away", "Streams of others that were not taken, by why.", "why", self._turned_away()
        )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"corolla_server_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"corolla_server_{name}", text, value=value)


def _counter_by(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"corolla_server_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


class _Server(ThreadingWSGIServer):
    address_family = socket.AF_INET

    def __init__(self, *args: Any, **options: Any) -> None:
        self._places = threading.BoundedSemaphore(MAX_CALLERS)
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Request(WSGIRequestHandler):
    """Logs nothing; who says nothing does not keep its thread."""

    timeout: ClassVar[float] = REQUEST_TIMEOUT_S  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def metrics_page(address: HostPort, handler: Handler, transport: Libp2pTransport) -> Generator[None]:
    """`http://ADDRESS/metrics`, `/health` and `/ready` while the block lasts. Raises BadInput when it cannot be had."""
    metrics = ServerMetrics(handler, transport.dht_traffic, lambda: transport.turned_away)
    kind = _Server6 if address.kind == "ip6" else _Server
    try:
        server = make_server(address.host, address.port, _pages(metrics.registry, handler), kind, _Request)
    except OSError as fault:
        raise BadInput(f"cannot listen on {address.host}:{address.port}: {fault.strerror or fault}") from fault
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    handler.on_step = metrics.saw_step
    try:
        yield
    finally:
        handler.on_step = None
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def _pages(registry: CollectorRegistry, handler: Handler) -> "WSGIApplication":
    metrics = cast("WSGIApplication", make_wsgi_app(registry))

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                return metrics(environ, start_response)
            case "/health":
                status, said = "200 OK", {"status": "ok"}
            case "/ready":
                lacking = _lacking(handler)
                status = "503 Service Unavailable" if lacking else "200 OK"
                said = {"status": "not ready", "lacking": lacking} if lacking else {"status": "ready"}
            case _:
                status, said = "404 Not Found", {"status": "there are /metrics, /health and /ready here"}
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(said).encode()]

    return answer


def _lacking(handler: Handler) -> str | None:
    """Why a new session would be refused, if it would."""
    if handler.is_leaving:
        return "this server is leaving"
    if handler.is_away:
        return "this server is moving to other blocks"
    return None
