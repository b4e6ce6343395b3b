"""The whole front door: real servers, a real gateway, a real browser."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from corolla.apps.bench.setup import ONE_THREAD
from corolla.apps.processes import Child, Processes
from corolla.apps.warm import WarmStart

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a busy machine is slow, not wrong

START_TIMEOUT_S = 240.0
WAIT_MS = 120_000
LEAVES_WITHIN_S = 60.0


class Door:
    """A swarm of two servers and its gateway, as processes."""

    def __init__(self, processes: Processes, model: Path) -> None:
        self._processes = processes
        self._model = str(model)
        self._deadline = time.monotonic() + START_TIMEOUT_S
        first = self.start("attic", "0:6")
        address = first.wait_ready(self._deadline).addr
        second = self.start("cellar", "0:6", "--join", address)
        self.gateway = processes.start(
            "the gateway", "gateway", self._model, "--join", address, "--listen", "127.0.0.1:0", "--json"
        )
        self.servers = {"attic": first, "cellar": second}
        self.addresses = {"attic": address, "cellar": second.wait_ready(self._deadline).addr}
        assert self.gateway.process.stdout is not None
        self.url: str = json.loads(self.gateway.process.stdout.readline())["url"]

    def start(self, name: str, blocks: str, *options: str) -> Child:
        return self._processes.start(name, "serve", self._model, "--blocks", blocks, "--name", name, *options)


@pytest.fixture
def door(tiny: Path, warm: WarmStart) -> Iterator[Door]:
    with Processes(ONE_THREAD, popen=warm.popen) as processes:
        yield Door(processes, tiny)


def test_a_browser_chats_over_real_servers_and_sees_one_die(browser: "Browser", door: Door) -> None:
    from playwright.sync_api import expect

    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(door.url)
    expect(page.locator("#model")).to_have_value("tiny", timeout=WAIT_MS)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Longest answer, in tokens").fill("24")
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Done").click()
    page.get_by_label("Your message").fill("w5 w6 w7")
    page.keyboard.press("Enter")
    about = page.locator(".message.assistant[aria-busy=false] .about:visible")
    expect(about).to_contain_text("24 tokens", timeout=WAIT_MS)
    server = page.get_by_role("list", name="Route of this answer").locator("li span").inner_text()
    first = page.locator(".message.assistant .markdown").inner_text()

    door.servers[server].process.kill()
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("list", name="Route of this answer").locator("li span")).not_to_have_text(
        server, timeout=WAIT_MS
    )
    assert page.locator(".message.assistant .markdown").inner_text() == first

    page.get_by_role("link", name="Where the time went").click()
    expect(page.locator("#verdict")).to_contain_text("A token takes", timeout=WAIT_MS)
    page.get_by_role("link", name="Swarm").click()
    expect(page.get_by_role("row", name=server)).to_contain_text("no answer", timeout=WAIT_MS)
    expect(page.locator(".health")).to_have_text("fragile")
    [living] = door.addresses.keys() - {server}
    door.start("garage", "0:6", "--join", door.addresses[living])
    expect(page.get_by_role("row", name="garage")).to_contain_text("online", timeout=WAIT_MS)
    expect(page.locator(".health")).to_have_text("healthy", timeout=WAIT_MS)
    assert wrong == []

    door.gateway.process.send_signal(signal.SIGTERM)  # while the page still listens
    assert door.gateway.process.wait(LEAVES_WITHIN_S) == 0
    page.close()
