"""Whether other peers can dial us: a few of them try, and what they found becomes one finding for people.

What is proven: at that moment a new TCP connection from the helper to the announced address met a listener that holds
this peer's identity. What is not: that everybody can, that it stays so, and that helpers tell the truth; so several
are asked, one success is enough, and what nobody could judge holds nothing up.
"""

import asyncio
import ipaddress
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from corolla.errors import HopFailed
from corolla.ids import PeerId
from corolla.net.findings import Finding
from corolla.net.reach import Verdict, ask
from corolla.net.streams import Transport

CHECK: Final = "reach"
MAX_HELPERS: Final = 3
"""Asked at once; when none of them can judge, the next ones are."""
MAX_ASKED: Final = 9

_CONCLUSIVE: Final = frozenset[Verdict]({"refused", "silent", "other", "loopback"})


@dataclass(frozen=True, slots=True)
class Report:
    """What one helper said."""

    seen_from: str | None
    verdicts: Mapping[str, Verdict]


async def check_reachable(
    transport: Transport, addresses: Sequence[str] | None = None, *, rng: random.Random | None = None
) -> Finding:
    """Have peers that we have met dial `addresses` (None: all that the transport tells others). Bounded in time.

    `bad`: no peer could; a server should not announce itself then. `unsure`: nobody was there who could judge.
    """
    wanted = transport.addresses if addresses is None else list(addresses)
    if not wanted:
        return Finding(CHECK, "bad", "this peer listens nowhere, so nobody can dial it", "pass --listen 0.0.0.0:PORT")
    helpers = transport.met_peers()
    (rng or random.Random()).shuffle(helpers)  # noqa: S311 (picks whom to ask)
    reports: list[Report] = []
    for start in range(0, min(len(helpers), MAX_ASKED), MAX_HELPERS):
        answers = await asyncio.gather(
            *(_ask_one(transport, helper, wanted) for helper in helpers[start : start + MAX_HELPERS])
        )
        reports += [report for report in answers if report is not None]
        if any(_can_judge(report) for report in reports):
            break
    return judge(wanted, reports)


def judge(addresses: Sequence[str], reports: Sequence[Report]) -> Finding:
    """One finding of all reports."""
    reached = [address for address in addresses if any(_says(report, address, "reached") for report in reports)]
    if reached:
        text = f"{_peers(sum('reached' in report.verdicts.values() for report in reports))} dialled back"
        return Finding(CHECK, "ok", f"{text} to {', '.join(reached)}")
    judging = [report for report in reports if _can_judge(report)]
    if not judging:
        return Finding(
            CHECK,
            "unsure",
            "no peer was there that could dial back" if not reports else "no peer could judge the addresses",
            "join a peer on another machine to have it checked" if not reports else "ask again in a minute",
        )
    return _unreachable(addresses, judging)


def _unreachable(addresses: Sequence[str], reports: Sequence[Report]) -> Finding:
    seen_from = next((report.seen_from for report in reports if report.seen_from), None)
    words = {word for report in reports for word in report.verdicts.values()}
    where, port = ", ".join(addresses), _port_of(addresses[0])
    outside = f"{seen_from}:{port}" if seen_from else f"HOST:{port}"
    if "silent" in words:
        text = f"{_peers(len(reports))} tried {where} and got no answer: something on the way drops connections"
        cure = f"open TCP port {port} in this machine's firewall and its network's, or forward it in the router"
    elif "other" in words:
        text = f"{_peers(len(reports))} tried {where}, and another peer or program answered"
        cure = f"see what else is reached at that port, and announce this peer's own: --announce {outside}"
    elif "refused" in words:
        text = f"{_peers(len(reports))} tried {where} and were refused: nothing listens there as seen from outside"
        cure = f"forward TCP port {port} of the router to this machine, or --announce the address that is forwarded"
    elif "private" in words:
        text = f"other peers see this machine at {seen_from}, but it announces {where}, of a private network"
        cure = f"forward TCP port {port} of the router to this machine and pass --announce {outside}"
    else:
        text = f"this peer listens at {where}, which only this machine can reach; other peers are elsewhere"
        cure = f"pass --listen 0.0.0.0:{port}"
    return Finding(CHECK, "bad", text, cure)


def _can_judge(report: Report) -> bool:
    """Whether this helper tried, or knows without trying, that it can or cannot."""
    words = set(report.verdicts.values())
    if words & (_CONCLUSIVE | {"reached"}):
        return True
    # A private address, and we come out of our network at a public one: nobody outside can use it. Between two
    # private networks the helper cannot know.
    return "private" in words and _is_public(report.seen_from)


def _is_public(address: str | None) -> bool:
    return address is not None and ipaddress.ip_address(address).is_global


def _says(report: Report, address: str, verdict: Verdict) -> bool:
    return report.verdicts.get(address) == verdict


async def _ask_one(transport: Transport, helper: PeerId, addresses: Sequence[str]) -> Report | None:
    try:
        return Report(*await ask(transport, helper, addresses))
    except HopFailed:
        return None  # a client, an older version, or gone


def _port_of(address: str) -> str:
    parts = address.split("/")
    return parts[parts.index("tcp") + 1] if "tcp" in parts[:-1] else "PORT"


def _peers(count: int) -> str:
    return f"{count} peer{'' if count == 1 else 's'}"
