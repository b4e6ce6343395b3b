"""`corolla doctor`: every finding says what it is and what to do; the exit code says whether something is bad."""

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from corolla.apps.cli import main as frame
from corolla.apps.cli.doctor import as_json_text, as_lines
from corolla.apps.doctor import examine as examining
from corolla.apps.doctor import machine
from corolla.apps.doctor.examine import Asked, examine
from corolla.apps.doctor.swarm import judge_clock, judge_round_trips
from corolla.errors import NoPeers
from corolla.ids import PeerId
from corolla.net.findings import Finding
from corolla.net.gate import GateConfig
from corolla.net.identity import load_or_create
from corolla.net.libp2p.config import NetworkConfig
from corolla.net.libp2p.transport import Libp2pTransport, open_transport
from corolla.net.memory.network import MemoryNetwork
from corolla.net.memory.transport import MemoryTransport, identity_of
from corolla.net.swarm_key import new_key


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


def write_key(path: Path, mode: int = 0o600) -> Path:
    path.write_text(new_key().line())
    path.chmod(mode)
    return path


# What each number means


@pytest.mark.parametrize(
    ("ahead_s", "state", "says"),
    [
        ([], "unsure", "no peer"),
        ([0.1, -0.2], "ok", "within 3 s"),
        ([0.1, -0.2, 50.0], "ok", "1 of 3 peers have theirs wrong"),
        ([30.0, 31.0, 0.0], "unsure", "30 s behind"),
        ([-30.0], "unsure", "30 s ahead"),
        ([100.0, 100.0], "bad", "100 s behind"),
    ],
)
def test_the_clock_is_judged_by_most_peers(ahead_s: list[float], state: str, says: str) -> None:
    finding = judge_clock(ahead_s)
    assert finding.state == state
    assert says in finding.text
    assert ("network time" in finding.next_step) == (says.endswith(("behind", "ahead")))
    assert bool(finding.next_step) == (state != "ok")


@pytest.mark.parametrize(
    ("seconds", "asked", "state", "says"),
    [
        ([], 0, "unsure", "no peer"),
        ([], 3, "bad", "none of 3"),
        ([0.001, 0.02, 0.3], 3, "ok", "1.0, 20.0, 300.0 ms"),
        ([0.001], 2, "unsure", "1 did not answer"),
    ],
)
def test_round_trips_say_near_middle_and_far(seconds: list[float], asked: int, state: str, says: str) -> None:
    finding = judge_round_trips(seconds, asked)
    assert finding.state == state
    assert says in finding.text
    assert bool(finding.next_step) == (state != "ok")


def test_a_loose_key_is_bad_and_two_good_ones_are_counted(tmp_path: Path) -> None:
    loose, good = write_key(tmp_path / "loose", 0o644), [write_key(tmp_path / name) for name in "ab"]
    finding, gate = machine.check_key([loose], [])
    assert (finding.state, gate) == ("bad", None)
    assert "chmod 600" in finding.text
    finding, gate = machine.check_key(good, [])
    assert finding.state == "ok"
    assert "2 swarm keys" in finding.text
    assert gate is not None
    assert len(gate.keys) == 2


def test_a_list_that_lets_nobody_in_is_pointed_out(tmp_path: Path) -> None:
    (tmp_path / "allow").write_text("# none yet\n")
    assert machine.check_key([], [tmp_path / "allow"])[0].state == "unsure"
    (tmp_path / "allow").write_text(identity_of("a").peer)
    assert "1 peers" in machine.check_key([], [tmp_path / "allow"])[0].text


def test_an_identity_is_looked_at_and_never_made(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    assert "--identity" in machine.check_identity(None).next_step
    assert machine.check_identity(path).state == "ok"
    assert not path.exists()
    identity = load_or_create(path)
    assert identity.peer in machine.check_identity(path).text
    path.chmod(0o644)
    assert machine.check_identity(path).state == "bad"


@pytest.mark.parametrize(("free", "state"), [(10 << 30, "ok"), (1 << 30, "unsure"), (1 << 20, "bad")])
def test_disk_and_memory_have_enough_little_and_too_little(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, state: str
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _path: type("Usage", (), {"free": free})())
    monkeypatch.setattr(machine, "free_memory", lambda: free)
    for finding in (machine.check_disk(tmp_path / "not" / "there" / "yet"), machine.check_memory()):
        assert finding.state == state
        assert bool(finding.next_step) == (state != "ok")


def test_the_disk_that_is_looked_at_is_the_one_where_models_will_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    root, ours = logging.getLogger(), logging.getLogger("corolla")
    before = root.handlers[:], root.level, ours.level
    try:
        for command in (["serve", str(tmp_path / "no-model")], ["doctor", "--listen", "127.0.0.1:0"]):
            frame.run([*command, "--cache-dir", str(elsewhere)])
            captured = capsys.readouterr()
            assert f"free in {elsewhere}" in captured.out + captured.err, command[0]
    finally:  # the next tests hear what they heard
        root.handlers[:], root.level = before[0], before[1]
        ours.setLevel(before[2])


def test_this_machine_says_how_much_memory_is_free_or_that_it_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:      1024 kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    assert machine.free_memory() == 1 << 20
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "none")
    finding = machine.check_memory()
    assert finding.state == "unsure"
    assert "--num-blocks" in finding.next_step


def test_lines_are_for_people_and_json_for_programs() -> None:
    findings = [Finding("clock", "ok", "well"), Finding("reach", "bad", "no", "open the port")]
    assert as_lines(findings).splitlines() == [
        "ok      clock  well",
        "bad     reach  no",
        "               → open the port",
    ]
    said = json.loads(as_json_text(findings))
    assert said["ok"] is False
    assert said["findings"][1] == {"check": "reach", "state": "bad", "text": "no", "next_step": "open the port"}


def test_a_bad_key_ends_with_1_before_the_network_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loose = write_key(tmp_path / "key", 0o644)
    assert frame.run(["doctor", "--json", "--swarm-key", str(loose)]) == 1
    said = json.loads(capsys.readouterr().out)
    assert {finding["check"] for finding in said["findings"]} == {"key", "identity", "disk", "memory"}


# The command, with a swarm in memory where it would have joined one


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> list[NetworkConfig]:
    """As what the doctor went into the network; it finds one peer there, who is listed or not."""
    seen: list[NetworkConfig] = []

    @asynccontextmanager
    async def opened(network: NetworkConfig) -> AsyncIterator[MemoryTransport]:
        seen.append(network)
        memory = MemoryNetwork(random.Random(1))
        async with memory.transport("there") as there, memory.transport("doctor") as doctor:
            there_too = there.addresses

            async def join(addresses: Sequence[str], *, timeout_s: float) -> None:
                if list(addresses) != ["/there"]:
                    raise NoPeers("nobody answers")
                await MemoryTransport.join(doctor, there_too, timeout_s=timeout_s)

            async def clock_ahead_s(_peer: PeerId, *, timeout_s: float) -> float:
                return 0.1 if timeout_s else 0.0

            vars(doctor).update(join=join, clock_ahead_s=clock_ahead_s)
            yield doctor

    monkeypatch.setattr(examining, "open_transport", opened)
    return seen


def examined(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, dict[str, Any]]:
    """The exit code of `corolla doctor` with these options, and each finding by its check."""
    code = frame.run(["doctor", "--json", *map(str, options)])
    return code, {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_joined_it_tells_of_clock_reach_and_round_trips_under_the_options_of_the_server(
    networks: list[NetworkConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = load_or_create(tmp_path / "identity")
    places = ("--listen", "127.0.0.1:7", "--announce", "192.0.2.1:8")
    code, findings = examined(capsys, "--join", "/there", "--identity", tmp_path / "identity", *places)
    assert list(findings)[-5:] == ["listen", "join", "clock", "reach", "round trips"]
    assert {findings[check]["state"] for check in ("join", "clock", "reach", "round trips")} == {"ok"}
    assert code == int(any(finding["state"] == "bad" for finding in findings.values()))
    assert networks == [NetworkConfig(identity=ours, listen=("127.0.0.1:7",), announce=("192.0.2.1:8",))]


def test_who_cannot_join_hears_of_lists_of_peers_and_an_identity_is_not_made(
    networks: list[NetworkConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "identity"
    code, findings = examined(capsys, "--join", "/elsewhere", "--identity", path)
    assert (code, findings["join"]["state"], path.exists()) == (1, "bad", False)
    assert "pass the --identity that is on it" in findings["join"]["next_step"]
    load_or_create(path)
    code, findings = examined(capsys, "--join", "/elsewhere", "--identity", path)
    assert (code, findings["join"]["state"]) == (1, "bad")
    assert "--allow), whether 12D3Koo" in findings["join"]["next_step"]
    path.chmod(0o644)
    assert examined(capsys, "--identity", path)[1]["identity"]["state"] == "bad"
    assert [network.identity is None for network in networks] == [True, False, True]


# With a real swarm


async def doctor(boot: Libp2pTransport, **asked: Any) -> dict[str, Finding]:
    return by_check(await examine(Asked(join=boot.addresses, listen=("127.0.0.1:0",), **asked)))


def in_swarm(gate: GateConfig, scenario: Callable[[Libp2pTransport], Any]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await scenario(await stack.enter_async_context(open_transport(NetworkConfig(gate=gate))))

    asyncio.run(main())


@pytest.mark.slow
def test_in_a_healthy_swarm_nothing_is_bad_and_nothing_is_missing() -> None:
    async def scenario(boot: Libp2pTransport) -> None:
        findings = await doctor(boot)
        assert list(findings) == [
            "key",
            "identity",
            "disk",
            "memory",
            "listen",
            "join",
            "clock",
            "reach",
            "round trips",
        ]
        assert {findings[check].state for check in ("listen", "join", "clock", "reach", "round trips")} == {"ok"}

    in_swarm(GateConfig(), scenario)


@pytest.mark.slow
def test_in_a_private_swarm_the_key_decides_and_its_lack_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examining, "JOIN_TIMEOUT_S", 1.0)
    key, other = write_key(tmp_path / "key"), write_key(tmp_path / "other")

    async def scenario(boot: Libp2pTransport) -> None:
        assert (await doctor(boot, swarm_keys=[key]))["reach"].state == "ok"
        for keys in ([], [other]):
            findings = await doctor(boot, swarm_keys=keys)
            assert findings["join"].state == "bad"
            assert "private" in findings["join"].text
            assert "--swarm-key" in findings["join"].next_step
            assert "reach" not in findings

    gate = machine.check_key([key], [])[1]
    assert gate is not None
    in_swarm(gate, scenario)


@pytest.mark.slow
def test_where_a_list_of_peers_is_kept_the_doctor_comes_with_the_id_that_is_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examining, "JOIN_TIMEOUT_S", 1.0)
    ours = load_or_create(tmp_path / "identity")

    async def scenario(boot: Libp2pTransport) -> None:
        findings = await doctor(boot, identity=tmp_path / "identity")
        assert {findings[check].state for check in ("join", "clock", "reach", "round trips")} == {"ok"}
        assert (await doctor(boot))["join"].state == "bad"

    in_swarm(GateConfig(allowed=frozenset({ours.peer})), scenario)


@pytest.mark.slow
def test_a_wrong_announcement_and_a_taken_port_are_found() -> None:
    async def scenario(boot: Libp2pTransport) -> None:
        findings = await doctor(boot, announce=("127.0.0.1:9",))
        assert findings["reach"].state == "bad"
        assert "refused" in findings["reach"].text
        taken = boot.addresses[0].split("/")[4]
        findings = by_check(await examine(Asked(join=boot.addresses, listen=(f"127.0.0.1:{taken}",))))
        assert findings["listen"].state == "bad"
        assert taken in findings["listen"].text

    in_swarm(GateConfig(), scenario)


@pytest.mark.slow
def test_nobody_at_the_address_is_bad_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "JOIN_TIMEOUT_S", 1.0)
    started_at = time.monotonic()
    findings = by_check(
        asyncio.run(examine(Asked(join=[f"/ip4/127.0.0.1/tcp/9/p2p/{identity_of('x').peer}"], listen=("127.0.0.1:0",))))
    )
    assert findings["join"].state == "bad"
    assert time.monotonic() - started_at < 10
    alone = by_check(asyncio.run(examine(Asked(listen=("127.0.0.1:0",)))))
    assert alone["join"].state == "unsure"
