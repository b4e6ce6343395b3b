"""Signed records in hivemind's Kademlia DHT, and the DHT's own ping.

A record lies under its key as subkey = peer id, value = signed blob (`net/records.py`); `check.py` judges each one,
`kept.py` holds those that we keep for others, `net/readings.py` says whom to ask. Searches and calls are hivemind's;
where a record is stored and read, the proof that somebody else holds it, bounds, and the repair of one fault that ends
the connection to the daemon are ours.
"""

import asyncio
import logging
import random
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from corolla.clock import WallClock
from corolla.errors import BadInput, SwarmError
from corolla.ids import PeerId
from corolla.net.gate import GateConfig
from corolla.net.identity import Identity, peer_id_bytes, peer_id_from_bytes
from corolla.net.libp2p.callers import Callers
from corolla.net.libp2p.check import RecordCheck, harden
from corolla.net.libp2p.control import Control
from corolla.net.libp2p.lean import Hivemind, hivemind
from corolla.net.libp2p.process import OwnProcess
from corolla.net.libp2p.sealed import CallRefused, CallSeal
from corolla.net.libp2p.traffic import DhtTraffic
from corolla.net.readings import Readings
from corolla.net.records import (
    MAX_LIFETIME_S,
    REPLICAS,
    Record,
    RecordRejected,
    sign_record,
    verify_record,
)

log = logging.getLogger(__name__)

RPC_TIMEOUT_S: Final = 3.0
LOOKUP_TIMEOUT_S: Final = 10.0
"""Of one put or get: a lookup that meets a dead peer waits one RPC_TIMEOUT_S for it."""
START_TIMEOUT_S: Final = 10.0
_OPEN: Final = GateConfig()
_REFUSED: Final = re.compile(rf"{CallRefused.__name__}\('(.*)'\)")
"""How the other side's refusal arrives: hivemind sends an exception's `repr`."""


@dataclass(frozen=True, slots=True)
class DhtPing:
    """One answered ping."""

    rtt_s: float
    clock_ahead_s: float
    """How far the other's wall clock is ahead of ours, give or take half a round trip."""


class Dht:
    """This peer's DHT node: `Records`, pings, and whom it has met. `async with` starts and ends it."""

    def __init__(
        self,
        control_path: Path,
        identity: Identity,
        wall_time: WallClock,
        *,
        is_client: bool,
        gate: GateConfig = _OPEN,
    ) -> None:
        self._process = OwnProcess()
        self._control_path = control_path
        self._identity = identity
        self._wall_time = wall_time
        self._is_client = is_client
        self._seal = CallSeal(identity.peer, gate, wall_time)
        self._callers = Callers(Control(control_path))
        self._p2p: Any = None
        self._node: Any = None
        self.traffic = DhtTraffic()
        self._readings = Readings(random.Random())  # noqa: S311 (fairness)
        self._has_met_others = False
        """Whether another peer was ever there: until then publishing to ourselves is all there is to do."""
        self._has_read_back = False
        """Whether since we joined, or rejoined, another peer has shown a record of ours that it said it keeps."""

    async def __aenter__(self) -> Self:
        lib = hivemind()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._start(lib)
        except (TimeoutError, OSError, *lib.call_errors) as fault:
            raise SwarmError(f"the DHT did not start: {_in_short(fault)}") from fault
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The node's handlers end with the daemon: taking them off one by one would wait on a dead one."""
        self._node.is_alive = False
        await self._p2p.shutdown()

    async def wait_broken(self) -> None:
        """Return when the connection that carries the DHT's calls has ended: nothing works after it."""
        await asyncio.wait(_connection_tasks(self._p2p), return_when=asyncio.FIRST_COMPLETED)

    async def put(self, key: str, value: bytes, lifetime_s: float) -> bool:
        is_kept = await self._put(key, value, lifetime_s)
        self.traffic.puts += 1
        self.traffic.failed_puts += not is_kept
        return is_kept

    async def _put(self, key: str, value: bytes, lifetime_s: float) -> bool:
        self._process.check()
        if not 0 < lifetime_s <= MAX_LIFETIME_S:
            raise BadInput(f"a record cannot live for {lifetime_s} s: more than 0 and at most {MAX_LIFETIME_S:.0f}")
        expires_at = self._wall_time() + lifetime_s
        blob = sign_record(self._identity, key, value, expires_at)
        self.traffic.bytes_put += len(blob)
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                self.met_peers()  # before a failing store drops them
                keepers = await self._store(key, blob, expires_at)
                if keepers and not self._has_read_back:
                    self._has_read_back = await self._is_shown(keepers, key, expires_at)
                    return self._has_read_back
                return bool(keepers) or not self._has_met_others
        except TimeoutError:
            log.warning("publishing took too long", extra={"key": key, "timeout_s": LOOKUP_TIMEOUT_S})
            return False

    async def get(self, key: str) -> list[Record]:
        self._process.check()
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                newest = await self._read(key)
        except TimeoutError:
            log.warning("reading records took too long", extra={"key": key, "timeout_s": LOOKUP_TIMEOUT_S})
            return []
        self.traffic.gets += 1
        now, records = self._wall_time(), list[Record]()
        for peer, entry in newest.items():
            try:
                blob = msgspec.msgpack.decode(entry.value, type=bytes)
                records.append(verify_record(key, peer, blob, now))
                self.traffic.records_read += 1
                self.traffic.bytes_read += len(blob)
            except RecordRejected as rejected:
                self.traffic.records_refused[rejected.flaw] += 1
                log.debug("record not believed", extra={"peer": peer, "flaw": rejected.flaw})
        return records

    async def ping(self, peer: PeerId) -> DhtPing:
        """Ask a DHT node whether it is there; each then knows the other. Raises SwarmError when it is not."""
        lib, protocol = hivemind(), self._node.protocol
        target = lib.PeerID(peer_id_bytes(peer))
        asked_at, asked_wall = asyncio.get_running_loop().time(), self._wall_time()
        try:
            request = lib.dht_pb2.PingRequest(peer=protocol.node_info)
            answer = await protocol.get_stub(target).rpc_ping(request, timeout=RPC_TIMEOUT_S)
            node_id = lib.DHTID.from_bytes(answer.peer.node_id)
        except (TimeoutError, AssertionError, *lib.call_errors) as fault:
            raise SwarmError(f"{peer} does not answer: {_in_short(fault)}") from fault
        rtt_s = asyncio.get_running_loop().time() - asked_at
        await protocol.update_routing_table(node_id, target, responded=True)
        self._node.blacklist.register_success(target)
        self._has_met_others = True
        return DhtPing(rtt_s, float(answer.dht_time) - (asked_wall + rtt_s / 2) if answer.dht_time else 0.0)

    async def explore(self) -> None:
        """After joining, and rejoining: meet the peers nearest to us, so that lookups start well. Bounded."""
        self._has_read_back = False
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                await self._node.find_nearest_nodes([self._node.node_id])
        except TimeoutError:
            log.debug("meeting the neighbours took too long")

    def met_peers(self) -> list[PeerId]:
        """The peers that this node knows now; one that stops answering is dropped."""
        known = [peer_id_from_bytes(peer.to_bytes()) for peer in self._node.protocol.routing_table.peer_id_to_uid]
        self._has_met_others = self._has_met_others or bool(known)
        return known

    async def _start(self, lib: Hivemind) -> None:
        self._p2p = await lib.P2P.replicate(lib.Multiaddr(f"/unix{self._control_path}"))
        self.traffic.count_calls(self._p2p)
        self._seal.put_around(self._p2p, self._callers.admit)
        _skip_cancelled_calls(self._p2p)
        for task in _connection_tasks(self._p2p):
            task.add_done_callback(_note_end)
        self._node = await lib.DHTNode.create(
            p2p=self._p2p,
            # The same place in the DHT after a restart: others' tables stay true.
            node_id=lib.DHTID.generate(source=peer_id_bytes(self._identity.peer)),
            client_mode=self._is_client,
            record_validator=RecordCheck(self._wall_time, self.traffic.records_refused),
            num_replicas=REPLICAS,
            wait_timeout=RPC_TIMEOUT_S,
            strict=False,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
        )
        harden(self._node.protocol, self._wall_time, random.Random(), self._callers.current)  # noqa: S311 (fairness)

    async def _store(self, key: str, blob: bytes, expires_at: float) -> list[Any]:
        """Keep the blob here and ask the nearest to the key to do so; those who said yes, by hivemind's peer ids."""
        lib, protocol = hivemind(), self._node.protocol
        key_id, value = lib.DHTID.generate(source=key), protocol.serializer.dumps(blob)
        protocol.storage.store(key_id, value, expires_at, subkey=self._identity.peer)
        untried, keepers = list((await self._find_nearest(key_id)).values()), list[Any]()
        while untried and len(keepers) < REPLICAS:  # each round asks others in the place of those who failed
            asked, untried = untried[: REPLICAS - len(keepers)], untried[REPLICAS - len(keepers) :]
            stores = [
                protocol.call_store(peer, [key_id], [value], [expires_at], subkeys=[self._identity.peer])
                for peer in asked
            ]
            answers = await asyncio.gather(*stores)
            keepers += [peer for peer, answer in zip(asked, answers, strict=True) if answer and all(answer)]
        return keepers

    async def _find_nearest(self, key_id: Any) -> dict[Any, Any]:
        """Peers that answer, by their DHT ids, the nearest to the key first, without one record on the way.

        Whoever is asked for the key itself answers with everything under it: with 200 records a put took 1.7 MB. The
        neighbouring id, which no record can have, has the same nearest peers.
        """
        neighbour = hivemind().DHTID(key_id ^ 1)
        nearest = (await self._node.find_nearest_nodes([neighbour], exclude_self=True))[neighbour]
        return {node_id: peer for node_id, peer in nearest.items() if peer not in self._node.blacklist}

    async def _read(self, key: str) -> dict[PeerId, Any]:
        """Each publisher's newest entry of all that we and those asked have; in it the encoded blob and its expiry."""
        lib = hivemind()
        key_id = lib.DHTID.generate(source=key)
        near = await self._find_nearest(key_id)
        num_nearer = sum(node_id ^ key_id < self._node.node_id ^ key_id for node_id in near)
        are_we_near = not self._is_client and num_nearer < REPLICAS
        asked = self._readings.choose_first(key, list(near.values()), are_we_near=are_we_near)
        others = [peer for peer in near.values() if peer not in asked]
        ours = _entries(self._node.protocol.storage.get(key_id))
        answers = await self._ask_all(asked, key_id)
        living = [None if answer is None else self._living(answer) for answer in answers]
        if others and self._readings.is_doubtful(key, living, ours):
            answers += await self._ask_all(others, key_id)
        newest = dict(ours)
        for peer, entry in (item for answer in answers for item in (answer or {}).items()):
            if peer not in newest or newest[peer].expiration_time < entry.expiration_time:
                newest[peer] = entry
        if any(answer is not None for answer in answers):
            self._readings.note(key, self._living(newest))
        return newest

    async def _ask_all(self, peers: list[Any], key_id: Any) -> list[dict[PeerId, Any] | None]:
        """What each of them has under the key, checked (`check.py`); None: no answer, and no other call for a while."""
        answers = await asyncio.gather(*(self._node._call_find_with_blacklist(peer, [key_id]) for peer in peers))
        return [_entries(answer[key_id][0]) if answer and key_id in answer else None for answer in answers]

    def _living(self, entries: dict[PeerId, Any]) -> list[PeerId]:
        now = self._wall_time()
        return [peer for peer, entry in entries.items() if entry.expiration_time > now]

    async def _is_shown(self, keepers: list[Any], key: str, expires_at: float) -> bool:
        """Read our record back: whether one of these peers really gives it out. Each answers with the whole key."""
        key_id = hivemind().DHTID.generate(source=key)
        for peer in keepers:
            answer = await self._node.protocol.call_find(peer, [key_id])
            found = answer[key_id][0] if answer else None
            entry = found.value.get(self._identity.peer) if found is not None else None
            if entry is not None and entry.expiration_time >= expires_at:
                return True
        return False


def _entries(found: Any) -> dict[PeerId, Any]:
    if found is None or not isinstance(found.value, hivemind().DictionaryDHTValue):
        return {}
    with found.value.freeze():  # what has expired by hivemind's clock may be alive by ours
        return dict(found.value.items())


def _skip_cancelled_calls(p2p: Any) -> None:
    """hivemind sets the result of a call that was cancelled a moment ago, which ends its reading task for good."""
    p2p._client.control._pending_calls = _LiveCalls()


def _connection_tasks(p2p: Any) -> "list[asyncio.Task[None]]":
    control = p2p._client.control
    return [control._read_task, control._write_task]


def _note_end(task: "asyncio.Task[None]") -> None:
    """`wait_broken` tells; here the fault is only taken, or asyncio would report it as lost."""
    log.debug("the DHT's connection ended", extra={"fault": None if task.cancelled() else str(task.exception())})


class _LiveCalls(dict[Any, "asyncio.Future[Any]"]):
    def __contains__(self, call: object) -> bool:
        return super().__contains__(call) and not self[call].done()


def _in_short(fault: BaseException) -> str:
    """On one line that can be printed: another peer may have written it."""
    text = (str(fault) or type(fault).__name__)[:200]
    refused = _REFUSED.fullmatch(text)
    return "".join(char if char.isprintable() else "?" for char in (refused[1] if refused else text))
