"""Who has only the protocol's page computes our fingerprints, passes our handshake, and hears what our client hears."""

import asyncio
import hashlib
import hmac
import json
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from corolla.client.hop import Hop, HopLimits, ServerLink
from corolla.errors import SessionLost, SwarmError
from corolla.ids import Fingerprint, PeerId, SessionId
from corolla.models.checkpoint import open_checkpoint
from corolla.models.fingerprint import _IRRELEVANT as LEFT_OUT
from corolla.models.fingerprint import fingerprint
from corolla.net import gate
from corolla.net.memory.loop import run_virtual
from corolla.net.streams import ByteStream, OnBytes, OnClosed
from corolla.net.swarm_key import parse_key
from corolla.wire import messages as wire
from corolla.wire.protocol import CONTROL_PROTOCOL, DATA_PROTOCOL
from corolla.wire.tensors import Buffer

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def test_a_fingerprint_by_the_pages_recipe_is_ours(tmp_path: Path) -> None:
    listed = PAGE[PAGE.index("The keys that change no logits:") :].split("```")[1].split()[1:]
    config = {
        "model_type": "llama", "num_hidden_layers": 2, "nothing": None, "Name": "é\x7f\U0001f600\n",
        "rope": {"base": 10000.0, "eps": 1e-05, "big": 1e16, "none": None, "list": [None, {"dtype": "x", "k": 1}]},
    }  # fmt: skip
    chance = random.Random(5)
    sides = [chance.choice([3, 40, 1024, 1025, 5000]) for _ in range(30)]
    tensors = {f"layers.{number}.w": ("F32" if side % 2 else "BF16", side) for number, side in enumerate(sides)}
    content = {name: chance.randbytes(side * (4 if kind == "F32" else 2)) for name, (kind, side) in tensors.items()}
    header, end = dict[str, Any](), 0
    for name, (kind, side) in tensors.items():
        header[name] = {"dtype": kind, "shape": [side], "data_offsets": [end, end := end + len(content[name])]}
    packed = json.dumps(header).encode()
    weights = len(packed).to_bytes(8, "little") + packed + b"".join(content.values())
    (tmp_path / "model.safetensors").write_bytes(weights)
    noise = dict.fromkeys(listed, "whatever") | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, **noise}))

    kept = {
        "model_type": "llama", "num_hidden_layers": 2, "Name": "é\x7f\U0001f600\n",
        "rope": {"base": 10000.0, "eps": 1e-05, "big": 1e16, "list": [None, {"k": 1}]},
    }  # fmt: skip
    shapes = [[name, kind, [side]] for name, (kind, side) in sorted(tensors.items())]
    canonical = json.dumps([kept, shapes], sort_keys=True, separators=(",", ":"))
    assert r'"Name":"\u00e9\u007f\ud83d\ude00\n"' in canonical
    assert '"base":10000.0,"big":1e+16,"eps":1e-05' in canonical
    outline = hashlib.sha256(canonical.encode()).digest()
    digest = hashlib.sha256(outline)
    for name in sorted(tensors, key=lambda name: hashlib.sha256(outline + name.encode()).digest())[:16]:
        room = len(content[name]) - 4096
        offset = int.from_bytes(outline[:8], "big") % (room + 1) if room >= 0 else 0
        digest.update(content[name][offset : offset + 4096])
    assert digest.hexdigest()[:32] == fingerprint(open_checkpoint(tmp_path))


class PaperStream:
    """One end of a stream on paper: what the gate writes, and what it hears."""

    def __init__(self, peer: PeerId) -> None:
        self.peer, self.pending_bytes = peer, 0
        self.written, self.is_closed = b"", False
        self.hear: OnBytes = lambda _data: None

    def start(self, on_bytes: OnBytes, on_closed: OnClosed) -> None:
        self.hear = on_bytes

    def write(self, parts: Sequence[Buffer]) -> None:
        self.written += b"".join(map(bytes, parts))

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def report_nonsense(self) -> None: ...


LINE = "corolla-swarm-key-1:" + bytes(range(32)).hex()
HEAD = b"corolla gate 1\n\0"


def proof(said_by: str, *fields: bytes) -> bytes:
    domain = f"corolla stream 1, the {said_by}".encode()
    message = b"".join(struct.pack(">I", len(part)) + part for part in (domain, *fields))
    return hmac.digest(bytes(range(32)), message, "sha256")


def test_a_dialer_by_the_pages_recipe_passes_the_gate_and_one_without_the_key_does_not() -> None:
    assert r'"corolla gate 1\n\0"' in PAGE
    assert "`corolla stream 1, the listener` (or `…, the dialer`" in PAGE

    async def dial(forge: Callable[[bytes], bytes]) -> tuple[bool, bool]:
        own, taken = gate.Gate(PeerId("listener"), gate.GateConfig(keys=(parse_key(LINE),))), list[ByteStream]()
        stream, ours = PaperStream(PeerId("dialer")), bytes(31) + b"D"
        own.let_in(stream, CONTROL_PROTOCOL, taken.append)
        await asyncio.sleep(0)
        stream.hear(HEAD + ours)
        await asyncio.sleep(0.1)
        theirs, count, theirs_proof = stream.written[:32], stream.written[32], stream.written[33:]
        fields = (CONTROL_PROTOCOL.encode(), b"dialer", b"listener", ours, theirs)
        assert (count, theirs_proof) == (1, proof("listener", *fields))
        stream.hear(forge(proof("dialer", *fields)))
        await asyncio.sleep(0.1)
        return bool(taken), stream.is_closed

    assert run_virtual(dial(lambda good: good)) == (True, False)
    assert run_virtual(dial(lambda good: good[:-1] + bytes([good[-1] ^ 1]))) == (False, True)


def test_our_dialer_takes_a_listener_by_the_pages_recipe() -> None:
    async def scenario() -> None:
        own = gate.Gate(PeerId("dialer"), gate.GateConfig(keys=(parse_key(LINE),)))
        stream, theirs = PaperStream(PeerId("listener")), bytes(31) + b"L"
        passing = asyncio.ensure_future(own.pass_out(stream, DATA_PROTOCOL))
        await asyncio.sleep(0.1)
        assert (stream.written[:16], len(stream.written)) == (HEAD, 48)
        fields = (DATA_PROTOCOL.encode(), b"dialer", b"listener", stream.written[16:], theirs)
        another_keys = bytes(32)
        stream.hear(theirs + b"\x02" + another_keys + proof("listener", *fields))
        await asyncio.wait_for(passing, 1)
        assert stream.written[48:] == proof("dialer", *fields)

    run_virtual(scenario())


def test_the_page_lists_the_keys_that_a_fingerprint_leaves_out() -> None:
    listed = PAGE[PAGE.index("The keys that change no logits:") :].split("```")[1].split()[1:]
    assert sorted(listed) == sorted(LEFT_OUT)


# --- what a client hears

SESSION, SERVER = SessionId(bytes(16)), PeerId("server")


class Link:
    """A control stream to a server, on paper."""

    peer, error, limits = SERVER, None, HopLimits(dial_timeout_s=5, open_timeout_s=20)

    def add(self, hop: Hop) -> None: ...

    def drop(self, hop: Hop) -> None: ...

    def send(self, _message: wire.AnyMessage) -> None: ...

    def learn_terms(self, _ask: wire.Open, _opened: wire.Opened) -> None: ...

    def terms_for(self, _ask: wire.Open) -> None: ...


class Ears:
    """A session that notes what reaches it."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_fault(self, hop: Hop, error: SwarmError) -> None:
        self.heard.append("lost" if isinstance(error, SessionLost) else "fault")

    def on_progress(self, hop: Hop) -> None:
        self.heard.append("progress")

    def on_output(self, hop: Hop, output: wire.Output) -> None: ...

    def on_drain(self, hop: Hop, deadline_s: float) -> None: ...

    def on_false_alarm(self, hop: Hop) -> None: ...


def opened(version: int) -> wire.Opened:
    return wire.Opened(session=SESSION, route_version=version, max_chunk_tokens=1, window_bytes=1)


def refused(version: int, step_no: int | None) -> wire.Refused:
    return wire.Refused(session=SESSION, route_version=version, step_no=step_no, code="overloaded", text="full")


def test_control_messages_count_and_are_ignored_as_the_page_says() -> None:
    async def scenario() -> None:
        ears = Ears()
        hop = Hop(cast("ServerLink", Link()), SESSION, 0, 4, ears)
        ask = wire.Open(
            session=SESSION, route_version=1, fingerprint=Fingerprint("f" * 32), start=0, end=4, max_tokens=8,
            upstream=PeerId("client"), wire_dtype="float32",
        )  # fmt: skip
        opening = asyncio.ensure_future(hop.open(ask))
        await asyncio.sleep(0.1)
        for of_another_version in (
            opened(0),
            refused(0, 3),
            wire.HopLost(session=SESSION, peer=SERVER),
            wire.LinkDown(session=SESSION, peer=SERVER),
        ):
            hop.hear(of_another_version)
        await asyncio.sleep(0.1)
        assert (opening.done(), ears.heard) == (False, [])
        hop.hear(opened(1))
        await opening
        hop.hear(refused(1, None))  # no `open` waits
        assert ears.heard == []
        hop.hear(opened(1))
        hop.hear(refused(1, 3))
        hop.hear(wire.HopLost(session=SESSION, route_version=1, peer=SERVER))
        hop.hear(wire.LinkDown(session=SESSION, route_version=1, peer=SERVER))
        hop.hear(wire.Close(session=SESSION))
        assert ears.heard == ["progress", "fault", "fault", "fault", "lost"]

    run_virtual(scenario())
