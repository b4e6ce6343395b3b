"""What changed in a swarm between two looks at it: pure, so that a page can say "what changed lately"."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from corolla.apps.status.facts import missing_blocks
from corolla.apps.status.reading import ModelStatus
from corolla.errors import as_ranges
from corolla.ids import Fingerprint, PeerId
from corolla.swarm.view import Health, ServerView

ChangeKind = Literal["joined", "left", "silent", "answers", "state", "moved", "health"]


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is different now."""

    at: float
    """Wall time at which it was noticed, not at which it happened."""
    kind: ChangeKind
    model: str
    peer: PeerId | None = None
    """The server that it is about; None: the model as a whole."""
    name: str = ""
    blocks: str = ""
    """Of the server, or those that are missing now."""
    before: str = ""
    now: str = ""
    """State, span or health, then and now."""


def find_changes(before: Sequence[ModelStatus], after: Sequence[ModelStatus], at: float) -> list[Change]:
    """All differences that a person would want to hear of, model by model."""
    old, new = ({status.entry.fingerprint: status for status in statuses} for statuses in (before, after))
    found: list[Change] = []
    for fingerprint in dict.fromkeys((*old, *new)):
        found += _of_model(old.get(fingerprint), new.get(fingerprint), fingerprint, at)
    return found


def _of_model(old: ModelStatus | None, new: ModelStatus | None, fingerprint: Fingerprint, at: float) -> list[Change]:
    known = new or old
    assert known is not None, f"{fingerprint} is in one of them"
    model = known.entry.name
    servers_then = old.view.servers if old else {}
    servers_now = new.view.servers if new else {}
    found: list[Change] = []
    for peer in dict.fromkeys((*servers_then, *servers_now)):
        was, now = servers_then.get(peer), servers_now.get(peer)
        found += (_about(kind, model, was, now, at) for kind in _kinds(old, new, was, now))
    health = _health(old), _health(new)
    if health[0] != health[1]:
        missing = as_ranges(missing_blocks(new)) if new else ""
        found.append(Change(at, "health", model, blocks=missing, before=health[0], now=health[1]))
    return found


def _kinds(
    old: ModelStatus | None, new: ModelStatus | None, was: ServerView | None, now: ServerView | None
) -> Iterator[ChangeKind]:
    if was is None or now is None:
        yield "joined" if was is None else "left"
        return
    if (was.start, was.end) != (now.start, now.end):
        yield "moved"
    if was.announcement.state != now.announcement.state:
        yield "state"
    was_silent, is_silent = (status is not None and now.peer in status.silent for status in (old, new))
    if was_silent != is_silent:
        yield "silent" if is_silent else "answers"


def _about(kind: ChangeKind, model: str, was: ServerView | None, now: ServerView | None, at: float) -> Change:
    server = now or was
    assert server is not None, "a change is about a server that was there or is"
    then_and_now = {
        "moved": (_span(was), _span(now)),
        "state": (_state(was), _state(now)),
        "joined": ("", _state(now)),
    }.get(kind, ("", ""))
    return Change(at, kind, model, server.peer, server.announcement.name, _span(server), *then_and_now)


def _span(server: ServerView | None) -> str:
    return f"{server.start}:{server.end}" if server else ""


def _state(server: ServerView | None) -> str:
    return server.announcement.state if server else ""


def _health(status: ModelStatus | None) -> Health:
    return status.counted.health if status else "broken"
