"""The proofs on the DHT's messages, without a network: bound to method, peers, bytes and time, good once."""

from dataclasses import dataclass
from typing import Any

import pytest

from corolla.net.gate import GateConfig
from corolla.net.identity import from_seed
from corolla.net.libp2p.lean import hivemind
from corolla.net.libp2p.sealed import MAX_NONCES, WINDOW_S, Call, CallRefused, CallSeal, SeenNonces
from corolla.net.swarm_key import MAX_KEYS, SwarmKey

OURS, NEXT, THEIRS = (SwarmKey(letter * 32) for letter in (b"o", b"n", b"t"))
ALICE, BOB, EVE = (from_seed(letter * 32).peer for letter in (b"a", b"b", b"e"))
CALL = Call("DHTProtocol.rpc_find", ALICE, BOB)


@dataclass
class Clock:
    now: float = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def seal(clock: Clock, *keys: SwarmKey, allowed: Any = None) -> CallSeal:
    return CallSeal(BOB, GateConfig(keys=keys, allowed=allowed), clock)


def find_request(*keys: bytes) -> Any:
    return hivemind().dht_pb2.FindRequest(keys=keys)


def signed(clock: Clock, key: SwarmKey = OURS) -> Any:
    request = find_request(b"a key")
    seal(clock, key).sign_request(CALL, request)
    return request


def test_a_members_request_is_taken_and_its_answer_believed() -> None:
    clock = Clock()
    alice, bob = seal(clock, OURS), seal(clock, NEXT, OURS)
    request = find_request(b"a key")
    alice.sign_request(CALL, request)
    key = bob.check_request(CALL, type(request).FromString(request.SerializeToString()))
    assert key == OURS
    response = hivemind().dht_pb2.FindResponse(results=[hivemind().dht_pb2.FindResult(value=b"found")])
    bob.sign_response(CALL, key, request, response)
    alice.check_response(CALL, request, type(response).FromString(response.SerializeToString()))


def test_of_several_keys_one_that_both_have_is_enough_and_more_than_any_peer_has_prove_nothing() -> None:
    clock, request = Clock(), find_request(b"a key")
    alice, bob = seal(clock, THEIRS, OURS), seal(clock, NEXT, OURS)
    alice.sign_request(CALL, request)
    assert bob.check_request(CALL, request) == OURS
    response = hivemind().dht_pb2.FindResponse()
    bob.sign_response(CALL, OURS, request, response)
    alice.check_response(CALL, request, response)
    many = signed(clock)
    many.auth.signature *= MAX_KEYS + 1
    with pytest.raises(CallRefused, match="private"):
        bob.check_request(CALL, many)


@pytest.mark.parametrize(
    "call",
    [
        Call("DHTProtocol.rpc_store", ALICE, BOB),
        Call(CALL.method, EVE, BOB),
        Call(CALL.method, ALICE, EVE),
        Call(CALL.method, BOB, ALICE),
    ],
)
def test_a_request_said_by_or_to_somebody_else_is_refused(call: Call) -> None:
    """Also when it was caught by a thief of Bob's identity, whom Alice took for him, and is passed on."""
    clock = Clock()
    with pytest.raises(CallRefused, match="private"):
        seal(clock, OURS).check_request(call, signed(clock))


def test_a_request_without_proof_with_another_key_or_changed_is_refused() -> None:
    clock = Clock()
    bob, changed = seal(clock, OURS), signed(clock)
    changed.keys.append(b"another key")
    later = signed(clock)
    later.auth.time += 1
    for request in (find_request(b"a key"), signed(clock, THEIRS), changed, later):
        with pytest.raises(CallRefused, match="private"):
            bob.check_request(CALL, request)


def test_a_request_is_good_once() -> None:
    clock = Clock()
    bob, request = seal(clock, OURS), signed(clock)
    assert bob.check_request(CALL, request) == OURS
    for _ in range(2):
        clock.now += WINDOW_S / 2
        with pytest.raises(CallRefused, match="sent before"):
            bob.check_request(CALL, request)
    clock.now += WINDOW_S
    with pytest.raises(CallRefused, match="clocks"):
        bob.check_request(CALL, request)


@pytest.mark.parametrize("skew_s", [-WINDOW_S + 1, WINDOW_S - 1])
def test_clocks_that_differ_within_bounds_are_tolerated_and_a_replay_still_is_not(skew_s: float) -> None:
    ours, theirs = Clock(), Clock(Clock().now + skew_s)
    bob, request = seal(ours, OURS), signed(theirs)
    assert bob.check_request(CALL, request) == OURS
    while ours.now < theirs.now + WINDOW_S + 10:
        ours.now += 10
        with pytest.raises(CallRefused):
            bob.check_request(CALL, request)


@pytest.mark.parametrize("off_s", [-WINDOW_S - 1, WINDOW_S + 1, float("nan"), float("inf")])
def test_a_time_too_far_off_is_refused(off_s: float) -> None:
    clock = Clock()
    with pytest.raises(CallRefused, match="clocks"):
        seal(clock, OURS).check_request(CALL, signed(Clock(clock.now + off_s)))


def test_an_answer_that_proves_nothing_or_answers_another_request_is_refused() -> None:
    clock = Clock()
    alice, bob, mallory = seal(clock, OURS), seal(clock, OURS), seal(clock, THEIRS)
    request, other = signed(clock), signed(clock)
    response = hivemind().dht_pb2.FindResponse
    bare, theirs, misplaced, changed = response(), response(), response(), response()
    mallory.sign_response(CALL, THEIRS, request, theirs)
    bob.sign_response(CALL, OURS, other, misplaced)
    bob.sign_response(CALL, OURS, request, changed)
    changed.results.add(value=b"forged")
    for answer in (bare, theirs, misplaced, changed):
        with pytest.raises(CallRefused, match="does not prove"):
            alice.check_response(CALL, request, answer)


def test_the_list_is_checked_before_the_proof() -> None:
    clock = Clock()
    with pytest.raises(CallRefused, match="list"):
        seal(clock, OURS, allowed=frozenset({EVE})).check_request(CALL, signed(clock))
    assert seal(clock, allowed=frozenset({ALICE})).check_request(CALL, find_request()) is None


def test_what_is_remembered_is_bounded_and_forgotten_in_time() -> None:
    seen = SeenNonces(limit=3)
    assert [seen.note(nonce, 0) for nonce in (b"a", b"b", b"a", b"c", b"d")] == [True, True, False, True, False]
    assert seen.note(b"d", 2 * WINDOW_S + 1)
    assert seen.note(b"a", 2 * WINDOW_S + 1)
    assert MAX_NONCES * 16 < 10 << 20
