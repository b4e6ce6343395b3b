"""hivemind without its training code: quick, without a trace, and whole for whoever wants it."""

import json
from collections.abc import Callable
from subprocess import Popen
from typing import Any

import pytest

Script = Callable[[str], "Popen[str]"]


def outcome(process: "Popen[str]") -> Any:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    return json.loads(output)


def test_importing_loads_no_torch_and_leaves_logging_and_modules_as_they_were(python: Script) -> None:
    found = outcome(
        python("""
import json, logging, sys
from corolla.net.libp2p.lean import hivemind
lib = hivemind()
assert hivemind() is lib
lib.Multiaddr("/dns4/example.org/tcp/1"), lib.Multiaddr("/ip6/::1/tcp/1"), lib.Multiaddr("/unix/tmp/x")
print(json.dumps({
    "loaded": [name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "hivemind")],
    "warning": logging.getLevelName(logging.WARNING),
    "handlers": len(logging.getLogger("hivemind").handlers),
    "propagates": logging.getLogger("hivemind").propagate,
}))
""")
    )
    assert found == {"loaded": [], "warning": "WARNING", "handlers": 0, "propagates": True}


@pytest.mark.slow
def test_a_program_may_use_hivemind_itself_afterwards_or_before(python: Script) -> None:
    for program in (
        "from corolla.net.libp2p.lean import hivemind; hivemind(); import hivemind as theirs",
        "import hivemind as theirs; from corolla.net.libp2p.lean import hivemind",
    ):
        found = outcome(
            python(f"""
{program}
import json
from hivemind.dht import DHT
assert hivemind().DHTID.generate(source="x") == theirs.dht.node.DHTID.generate(source="x")
print(json.dumps([theirs.DHT is DHT, theirs.p2p.P2P.__name__, theirs.__version__]))
""")
        )
        assert found[:2] == [True, "P2P"]


@pytest.mark.slow
def test_another_layout_falls_back_to_the_ordinary_import(python: Script) -> None:
    """First one that is seen beforehand, then one that shows only while importing."""
    for sabotage in (
        'lean._LAYOUT = (*lean._LAYOUT, "no/such/file.py")',
        'lean._BARE = {"hivemind": (), "hivemind.utils": (), "hivemind.dht": ()}',
    ):
        found = outcome(
            python(f"""
import json, sys
from corolla.net.libp2p import lean
{sabotage}
print(json.dumps([lean.hivemind().P2P.__name__, "torch" in sys.modules]))
""")
        )
        assert found == ["P2P", True]
