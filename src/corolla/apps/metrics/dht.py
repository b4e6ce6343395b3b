"""What the hash table costs a peer, for Prometheus: a server's page and a gateway's have the same numbers."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from corolla.net.libp2p.traffic import DhtTraffic


class DhtMetrics(Collector):
    """Read off `traffic` whenever Prometheus asks; `prefix`: what the names begin with."""

    def __init__(self, prefix: str, traffic: DhtTraffic) -> None:
        self._prefix = prefix
        self._traffic = traffic

    def collect(self) -> Iterable[Metric]:
        traffic = self._traffic
        for name, text, value in (
            ("puts", "Records published.", traffic.puts),
            ("failed_puts", "Records published that no other peer kept.", traffic.failed_puts),
            ("gets", "Keys read.", traffic.gets),
            ("records_read", "Records read.", traffic.records_read),
            ("put_bytes", "Of records published, before copies.", traffic.bytes_put),
            ("read_bytes", "Of records read.", traffic.bytes_read),
            ("sent_bytes", "Of all calls: what left this peer.", traffic.bytes_sent),
            ("received_bytes", "Of all calls: what came to it.", traffic.bytes_received),
        ):
            yield CounterMetricFamily(f"{self._prefix}_dht_{name}", text, value=value)
        for name, text, label, counts in (
            ("calls_made", "Calls to other peers' parts of the table.", "kind", traffic.calls_made),
            ("calls_answered", "Calls of other peers, answered.", "kind", traffic.calls_answered),
            ("calls_refused", "Calls of other peers, refused.", "kind", traffic.calls_refused),
            ("records_refused", "Records of others, neither kept nor believed.", "flaw", traffic.records_refused),
        ):
            family = CounterMetricFamily(f"{self._prefix}_dht_{name}", text, labels=[label])
            for value, count in list(counts.items()):
                family.add_metric([value], count)
            yield family
