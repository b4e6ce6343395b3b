"""What this peer lets into its part of the DHT, and what it believes of others' replies.

Every peer that stores and every reader checks every record: hivemind's stock validator lets anybody write unsigned
subkeys that live ten years. Two more doors are shut: one bad record in a reply would void all good ones, and what
was stored "in cache" would hide what is stored.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import msgspec

from corolla.clock import WallClock
from corolla.ids import PeerId
from corolla.net.libp2p.kept import KeptRecords, Source
from corolla.net.libp2p.lean import hivemind
from corolla.net.records import MAX_RECORD_BYTES, RecordRejected, check_times, claimed_key, open_record

log = logging.getLogger(__name__)

_MAX_CHECKED: Final = 4096
_ENCODING_BYTES: Final = 8


class RecordCheck:
    """What hivemind asks about each record that is to be stored or was read; the names are hivemind's."""

    def __init__(self, now: WallClock, refused: Counter[str] | None = None) -> None:
        """`refused`: counts what is refused, by flaw."""
        self._now = now
        self._refused = Counter[str]() if refused is None else refused
        # A reader asks several peers for the same hundreds of records, again and again; a signature costs 0.1 ms.
        self._open = lru_cache(maxsize=_MAX_CHECKED)(open_record)

    def validate(self, record: Any) -> bool:
        try:
            self._check(record.key, record.subkey, record.value, record.expiration_time)
        except RecordRejected as rejected:
            self._refused[rejected.flaw] += 1
            log.debug("record rejected", extra={"flaw": rejected.flaw})
            return False
        return True

    def sign_value(self, record: Any) -> bytes:
        """Signed already (`Dht.put`)."""
        return record.value

    def strip_value(self, record: Any) -> bytes:
        return record.value

    def _check(self, key_hash: bytes, encoded_subkey: bytes, encoded_blob: bytes, expires_at: float) -> None:
        peer, blob = _decode_subkey(encoded_subkey), _decode_blob(encoded_blob)
        key = claimed_key(blob)
        if hivemind().DHTID.generate(source=key).to_bytes() != key_hash:
            raise RecordRejected("wrong key", f"{key!r:.80} does not belong there")
        record = self._open(key, peer, blob)
        # An expired one passes: the clock of the peer that still keeps it may be behind, and readers drop it.
        check_times(record, self._now())
        if record.expires_at != expires_at:
            raise RecordRejected("expires too late", "the DHT was told another expiry than was signed")


def harden(protocol: Any, now: WallClock, rng: random.Random, source: Callable[[], Source | None]) -> None:
    """Bound what is kept, keep nothing as cache, and judge each record of a reply alone.

    `source`: who asks to store what is being stored; None: we ourselves.
    """
    protocol.storage = KeptRecords(now, rng, source)
    protocol.cache = KeptRecords(now, rng, source, max_in_all=0)

    def keep_valid(key: bytes, dictionary: Any) -> bool:
        with dictionary.freeze():
            for subkey, (value, expires_at) in list(dictionary.items()):
                encoded = protocol.serializer.dumps(subkey)
                if not protocol._validate_record(key, encoded, value, expires_at):
                    del dictionary[subkey]
        return True

    protocol._validate_dictionary = keep_valid


def _decode_subkey(encoded: bytes) -> PeerId:
    try:
        return PeerId(msgspec.msgpack.decode(encoded[: MAX_RECORD_BYTES + 1], type=str))
    except (msgspec.MsgspecError, UnicodeDecodeError) as fault:
        raise RecordRejected("wrong peer", "its subkey is no peer id") from fault


def _decode_blob(encoded: bytes) -> bytes:
    if len(encoded) > MAX_RECORD_BYTES + _ENCODING_BYTES:
        raise RecordRejected("too large", f"over {MAX_RECORD_BYTES} bytes")
    try:
        return msgspec.msgpack.decode(encoded, type=bytes)
    except msgspec.MsgspecError as fault:
        raise RecordRejected("malformed", "its value is no blob") from fault
