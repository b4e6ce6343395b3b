"""The pages in a real browser, over a swarm in memory: what people do, what goes wrong, and what strangers send."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from starlette.responses import JSONResponse

from corolla.apps.sim.toy_gateway import HELLO, ToyGateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # a busy machine is slow, not wrong

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
WAIT_MS = 60_000
"""A busy machine is slow, not wrong."""
PHONE = {"width": 360, "height": 740}


@pytest.fixture
def gateway() -> Iterator[ToyGateway]:
    with ToyGateway() as gateway:
        yield gateway


@contextmanager
def watched(context: BrowserContext, gateway: ToyGateway, *, allowed: str = r"(?!)") -> Iterator[Page]:
    """A page that asks nobody but the gateway and has no console errors but the `allowed` ones."""
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
    page.on("request", lambda asked: None if asked.url.startswith(gateway.url) else wrong.append(asked.url))
    yield page
    context.close()
    assert [text for text in wrong if not re.search(allowed, text)] == []


@contextmanager
def chat(browser: Browser, gateway: ToyGateway, *, allowed: str = r"(?!)") -> Iterator[Page]:
    with watched(browser.new_context(), gateway, allowed=allowed) as page:
        page.goto(gateway.url)
        expect(page.locator("#model")).to_have_value("toy", timeout=WAIT_MS)
        yield page


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def wait_for_answers(page: Page, count: int) -> None:
    """Until so many answers are complete."""
    expect(page.locator(".message.assistant[aria-busy=false] .about:visible")).to_have_count(count, timeout=WAIT_MS)


def wait_until(page: Page, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_MS / 1000
    while not is_so():
        assert time.monotonic() < deadline
        page.wait_for_timeout(50)


# --- chat


def test_an_answer_streams_and_says_how_fast_and_over_which_servers(browser: Browser, gateway: ToyGateway) -> None:
    gateway.serve("attic", "0:15")
    gateway.serve("cellar", "15:30")
    gateway.answer, gateway.held_after = "One two **three** four five", 3
    with chat(browser, gateway) as page:
        ask(page, "Count to five")
        answer = page.locator(".message.assistant")
        expect(answer.locator(".markdown")).to_have_text("One two")  # what has come is there before the rest comes
        expect(answer).to_have_attribute("aria-busy", "true")
        gateway.held_after = None
        wait_for_answers(page, 1)
        expect(answer.locator("strong")).to_have_text("three")
        expect(answer.locator(".about")).to_contain_text(re.compile(r"\d tokens/s.*first after"))
        expect(answer.get_by_role("list", name="Route of this answer").locator("li")).to_have_text(
            ["attic 0–14", "cellar 15–29"]
        )
        expect(page.get_by_role("status")).to_have_text("The answer is complete.")


def test_stop_keeps_what_was_said_and_hangs_up(browser: Browser, gateway: ToyGateway) -> None:
    gateway.answer, gateway.token_s = "word " * 500, 0.02
    with chat(browser, gateway) as page:
        ask(page, "Talk")
        expect(page.locator(".message.assistant .markdown")).to_contain_text("word word", timeout=WAIT_MS)
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("Stopped.", exact=True).first).to_be_visible()
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        expect(page.locator(".message.assistant .markdown")).to_contain_text("word word")
        wait_until(page, lambda: gateway.hang_ups == 1)
        gateway.answer, gateway.token_s = HELLO, 0.0
        ask(page, "And again")
        wait_for_answers(page, 1)


def test_escape_stops_too(browser: Browser, gateway: ToyGateway) -> None:
    gateway.answer, gateway.token_s = "word " * 500, 0.02
    with chat(browser, gateway) as page:
        ask(page, "Talk")
        expect(page.locator(".message.assistant .markdown")).to_contain_text("word word", timeout=WAIT_MS)
        page.keyboard.press("Escape")
        expect(page.locator(".message.assistant .note")).to_have_text("Stopped.")


def test_an_earlier_message_is_edited_and_what_came_after_it_is_gone(browser: Browser, gateway: ToyGateway) -> None:
    with chat(browser, gateway) as page:
        ask(page, "First")
        wait_for_answers(page, 1)
        ask(page, "Second")
        wait_for_answers(page, 2)
        page.locator(".message.user").first.get_by_role("button", name="Edit").click()
        field = page.get_by_label("Edit your message")
        expect(field).to_have_value("First")
        field.fill("Another first")
        page.get_by_role("button", name="Send again").click()
        wait_for_answers(page, 1)
        expect(page.locator(".message.user .text")).to_have_text(["Another first"])
        assert gateway.bodies[-1]["messages"] == [{"role": "user", "content": "Another first"}]


def test_regenerate_asks_the_same_again(browser: Browser, gateway: ToyGateway) -> None:
    with chat(browser, gateway) as page:
        ask(page, "Question")
        wait_for_answers(page, 1)
        gateway.answer = "Something else"
        page.get_by_role("button", name="Regenerate").click()
        expect(page.locator(".message.assistant .markdown")).to_have_text("Something else", timeout=WAIT_MS)
        assert gateway.bodies[0] == gateway.bodies[1]


def test_a_conversation_is_kept_in_the_browser_and_found_again(browser: Browser, gateway: ToyGateway) -> None:
    with chat(browser, gateway) as page:
        ask(page, "Remember this")
        wait_for_answers(page, 1)
        page.reload()
        expect(page.locator(".message.assistant .markdown")).to_have_text("Hello from the swarm.")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".message")).to_have_count(0)
        page.get_by_role("button", name="History").click()
        page.get_by_role("button", name="Remember this").first.click()
        ask(page, "More")
        wait_for_answers(page, 2)
        said = [message["content"] for message in gateway.bodies[-1]["messages"]]
        assert said == ["Remember this", HELLO, "More"]
        page.get_by_role("button", name="History").click()
        page.get_by_role("button", name="Delete: Remember this").click()
        expect(page.get_by_text("None yet.")).to_be_visible()


def test_an_answer_under_way_survives_leaving_the_page(browser: Browser, gateway: ToyGateway) -> None:
    gateway.answer, gateway.token_s = "word " * 500, 0.02
    with chat(browser, gateway, allowed="ERR_") as page:
        ask(page, "Talk")
        expect(page.locator(".message.assistant .markdown")).to_contain_text("word word", timeout=WAIT_MS)
        page.reload()
        expect(page.locator(".message.user .text")).to_have_text("Talk")
        expect(page.locator(".message.assistant .markdown")).to_contain_text("word word")
        expect(page.locator(".message.assistant .note")).to_have_text(re.compile("Stopped|broke off"))


def test_a_conversation_deleted_while_it_is_answered_stays_deleted(browser: Browser, gateway: ToyGateway) -> None:
    gateway.answer, gateway.token_s = "word " * 500, 0.02
    with chat(browser, gateway) as page:
        ask(page, "Forget this")
        expect(page.locator(".message.assistant .markdown")).to_contain_text("word word", timeout=WAIT_MS)
        page.get_by_role("button", name="History").click()
        page.get_by_role("button", name="Delete: Forget this").click()
        expect(page.get_by_text("None yet.")).to_be_visible()
        page.get_by_role("button", name="Close").click()
        expect(page.get_by_role("button", name="Stop")).to_be_hidden()
        page.reload()
        expect(page.locator("#model")).to_have_value("toy", timeout=WAIT_MS)
        expect(page.locator(".message")).to_have_count(0)


def test_a_failed_regeneration_keeps_the_answer_that_was_there(browser: Browser, gateway: ToyGateway) -> None:
    with chat(browser, gateway, allowed="503") as page:
        ask(page, "Hi")
        wait_for_answers(page, 1)
        gateway.refusal = JSONResponse({"error": {"message": "the swarm is full"}}, 503)
        page.get_by_role("button", name="Regenerate").click()
        expect(page.get_by_role("alert")).to_contain_text("the swarm is full")
        expect(page.locator(".message.assistant .markdown")).to_have_text("Hello from the swarm.")


def test_settings_reach_the_model(browser: Browser, gateway: ToyGateway) -> None:
    with chat(browser, gateway) as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Instructions for the model").fill("Be brief")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_role("button", name="Done").click()
        ask(page, "Hi")
        wait_for_answers(page, 1)
        assert gateway.bodies[-1]["messages"][0] == {"role": "system", "content": "Be brief"}
        assert gateway.bodies[-1]["temperature"] == 0.5
        assert "max_completion_tokens" not in gateway.bodies[-1]  # the gateway knows better


def test_what_a_model_writes_is_never_more_than_text(browser: Browser, gateway: ToyGateway) -> None:
    gateway.answer = (
        "See <script>alert(1)</script> <img src=x onerror=alert(2)> ![seen](https://evil.example/pixel.png) "
        "[bad](javascript:alert(3)) [data](data:text/html,x) [good](https://example.org/) "
        "<iframe src=https://evil.example></iframe> <form action=/x><button>b</button></form>\n\n"
        "```html\n<b onclick=alert(4)>code</b>\n```\n\n| a |\n|---|\n| <style>*{display:none}</style> |"
    )
    with chat(browser, gateway) as page:
        ask(page, "Attack")
        wait_for_answers(page, 1)
        shown = page.locator(".message.assistant .markdown")
        expect(
            shown.locator("script, img, iframe, form, style, object, svg, [onclick], [onerror], [style]")
        ).to_have_count(0)
        expect(shown.locator("a")).to_have_text(["good"])
        expect(shown.locator("a")).to_have_attribute("rel", "noopener noreferrer nofollow")
        expect(shown).to_contain_text("<script>alert(1)</script>")
        expect(shown.locator("pre")).to_have_text("<b onclick=alert(4)>code</b>")


def test_a_cut_off_answer_says_so(browser: Browser, gateway: ToyGateway) -> None:
    gateway.finish = "length"
    with chat(browser, gateway) as page:
        ask(page, "Long")
        expect(page.locator(".message.assistant .note")).to_contain_text("cut off at its longest length")


def test_missing_blocks_are_named_and_another_try_works(browser: Browser, gateway: ToyGateway) -> None:
    error = {"message": "no server serves blocks 4:6", "code": "missing_blocks", "blocks": [4, 5]}
    gateway.refusal = JSONResponse({"error": error}, 503, headers={"Retry-After": "5"})
    with chat(browser, gateway, allowed="503") as page:
        ask(page, "Hi")
        expect(page.get_by_role("alert")).to_contain_text("No server serves blocks 4–5 yet.")
        page.get_by_role("button", name="Try again").click()
        wait_for_answers(page, 1)
        expect(page.get_by_role("alert")).to_be_hidden()


def test_a_busy_gateway_says_when_to_come_back(browser: Browser, gateway: ToyGateway) -> None:
    gateway.refusal = JSONResponse({"error": {"message": "busy"}}, 429, headers={"Retry-After": "7"})
    with chat(browser, gateway, allowed="429") as page:
        ask(page, "Hi")
        expect(page.get_by_role("alert")).to_contain_text("Try again in 7 s")


def test_an_answer_that_breaks_off_is_kept_and_can_be_asked_for_again(browser: Browser, gateway: ToyGateway) -> None:
    gateway.breaks_after = 3
    with chat(browser, gateway) as page:
        ask(page, "Hi")
        expect(page.locator(".message.assistant .note")).to_have_text("The answer broke off.")
        expect(page.locator(".message.assistant .markdown")).to_contain_text("Hello")
        gateway.breaks_after = None
        page.get_by_role("button", name="Try again").click()
        wait_for_answers(page, 1)


def test_a_gateway_with_keys_asks_for_one(browser: Browser) -> None:
    with ToyGateway(api_key="right") as gateway, watched(browser.new_context(), gateway, allowed="401") as page:
        page.goto(gateway.url)
        page.get_by_label("Key", exact=True).fill("wrong")
        page.get_by_role("button", name="Use this key").click()
        expect(page.get_by_label("Key", exact=True)).to_have_value("wrong")  # asked again
        page.get_by_label("Key", exact=True).fill("right")
        page.get_by_role("button", name="Use this key").click()
        ask(page, "Hi")
        wait_for_answers(page, 1)
        page.goto(f"{gateway.url}/swarm")
        expect(page.locator(".model")).to_have_count(1)


# --- swarm


def test_the_swarm_page_lives_while_a_server_is_killed_and_another_joins(browser: Browser, gateway: ToyGateway) -> None:
    with watched(browser.new_context(), gateway) as page:
        page.goto(f"{gateway.url}/swarm")
        expect(page.get_by_text("No server serves this model yet")).to_be_visible()
        gateway.serve("attic", "0:15")
        gateway.serve("cellar", "15:30")
        loads: list[str] = []
        page.on("framenavigated", lambda frame: loads.append(frame.url))
        expect(page.locator(".health")).to_have_text("fragile", timeout=WAIT_MS)
        expect(page.get_by_role("row")).to_have_count(3)
        gateway.kill("cellar")
        expect(page.locator(".health")).to_have_text("broken", timeout=WAIT_MS)
        expect(page.locator(".verdict")).to_contain_text("No server serves blocks 15–29 yet")
        expect(page.get_by_text("corolla serve MODEL --blocks 15:30 --join ADDRESS")).to_be_visible()
        expect(page.get_by_role("row", name="cellar")).to_contain_text("no answer")
        gateway.serve("garage", "10:30")
        expect(page.locator(".health")).to_have_text("fragile", timeout=WAIT_MS)
        expect(page.get_by_role("img")).to_have_attribute(
            "aria-label", "Servers of each block: 0–9: one server, 10–14: 2 servers, 15–29: one server"
        )
        changes = page.locator("#changes li")
        expect(changes.nth(0)).to_contain_text("toy is fragile, was broken")
        expect(changes.nth(1)).to_contain_text("garage joined with blocks 10–29")
        expect(changes.nth(2)).to_contain_text("toy is broken: no server for blocks 15–29")
        expect(changes.nth(3)).to_contain_text("cellar does not answer")
        gateway.serve("shed", "0:30")
        expect(page.locator(".health")).to_have_text("healthy", timeout=WAIT_MS)
        assert loads == []


def test_a_large_swarm_stays_readable(browser: Browser, gateway: ToyGateway) -> None:
    state = json.loads(gateway.get("/api/v1/state"))
    [model] = state["models"]
    server = {
        "name": "", "state": "online", "dtype": "bfloat16", "quantization": None, "decode_tokens_per_s": 9.5,
        "free_cache_tokens": 100, "queue_s": 0.0, "rtt_s": 0.01, "version": "0.1.0", "is_silent": False,
    }  # fmt: skip
    spans = [(first % 25, first % 25 + 5) for first in range(600)]
    model["servers"] = [{**server, "peer": f"peer{n:08}", "blocks": f"{a}:{b}"} for n, (a, b) in enumerate(spans)]
    with watched(browser.new_context(), gateway) as page:
        body = f"event: state\ndata: {json.dumps(state)}\n\n"
        page.route("**/api/v1/events", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
        page.goto(f"{gateway.url}/swarm")
        expect(page.locator(".servers tbody tr")).to_have_count(50)
        expect(page.locator(".map .span").first).to_have_text("24 servers")
        page.get_by_role("button", name="Show all 600 servers").click()
        expect(page.locator(".servers tbody tr")).to_have_count(600)


def test_a_strangers_name_is_only_text(browser: Browser, gateway: ToyGateway) -> None:
    name = "<img src=x onerror=alert(1)>"
    gateway.serve(name, "0:30")
    with watched(browser.new_context(), gateway) as page:
        page.goto(f"{gateway.url}/swarm")
        expect(page.get_by_role("row").nth(1)).to_contain_text(name, timeout=WAIT_MS)
        expect(page.locator("main img")).to_have_count(0)


def test_the_page_says_when_the_gateway_is_gone_and_what_it_shows_then(browser: Browser) -> None:
    gateway = ToyGateway()
    with gateway, watched(browser.new_context(), gateway, allowed="ERR_|Failed to load") as page:
        gateway.serve("attic", "0:30")
        page.goto(f"{gateway.url}/swarm")
        expect(page.locator("#live")).to_have_text("Live", timeout=WAIT_MS)
        gateway.stop()
        expect(page.locator("#live")).to_have_text("Reconnecting…", timeout=WAIT_MS)
        expect(page.get_by_role("alert")).to_contain_text("What is shown was true", timeout=WAIT_MS)


# --- why is it slow


def test_an_answer_leads_to_where_its_time_went(browser: Browser, gateway: ToyGateway) -> None:
    gateway.serve("attic", "0:15")
    gateway.serve("cellar", "15:30")
    gateway.serve("garage", "0:30")
    gateway.answer, gateway.token_s = "word " * 30, 0.0
    with chat(browser, gateway) as page:
        ask(page, "Hi")
        wait_for_answers(page, 1)
        page.get_by_role("link", name="Where the time went").click()
        expect(page.locator("#verdict")).to_contain_text(re.compile(r"A token takes \d+ ms; most of it, .* is"))
        expect(page.get_by_role("heading", name="Runner-up")).to_be_visible()
        step = page.locator(".steps details").nth(1)
        step.locator("summary").focus()
        page.keyboard.press("Enter")
        expect(step.locator("tbody th").first).to_have_text("here")
        expect(step.locator("thead th")).to_have_text(["where", "on the wire", "queue", "compute", "send"])
        expect(step.locator("tbody th").last).to_have_text("rest")
        page.get_by_role("button", name="Show all 61 steps").click()
        expect(page.locator(".steps li")).to_have_count(61)


def test_without_answers_it_says_how_to_get_some(browser: Browser, gateway: ToyGateway) -> None:
    with watched(browser.new_context(), gateway) as page:
        page.goto(f"{gateway.url}/slow")
        expect(page.get_by_text("No answers yet")).to_be_visible()


# --- everybody


def test_the_pages_work_where_a_proxy_puts_them(browser: Browser) -> None:
    with ToyGateway(path="/friends") as gateway:
        gateway.serve("attic", "0:30")
        with chat(browser, gateway) as page:
            ask(page, "Hi")
            wait_for_answers(page, 1)
            page.get_by_role("link", name="Where the time went").click()
            expect(page.locator("#verdict")).to_contain_text("A token takes", timeout=WAIT_MS)
            page.get_by_role("link", name="Swarm").click()
            expect(page.locator("#live")).to_have_text("Live", timeout=WAIT_MS)
            page.get_by_role("link", name="corolla").click()
            expect(page.locator(".message.assistant .markdown")).to_have_text("Hello from the swarm.")


@pytest.mark.parametrize(("scheme", "rules"), [("light", "{}"), ("dark", "{runOnly: ['color-contrast']}")])
def test_every_page_passes_the_accessibility_check(
    browser: Browser, gateway: ToyGateway, scheme: Literal["light", "dark"], rules: str
) -> None:
    fill(gateway)
    context = browser.new_context(color_scheme=scheme, bypass_csp=True)  # the check itself is injected
    with watched(context, gateway) as page:
        visit_all(page, gateway, lambda: assert_accessible(page, rules))


def test_every_page_fits_a_phone(browser: Browser, gateway: ToyGateway) -> None:
    fill(gateway)
    with watched(browser.new_context(viewport=PHONE, has_touch=True, bypass_csp=True), gateway) as page:
        visit_all(page, gateway, lambda: assert_fits(page))
        assert_accessible(page)


def fill(gateway: ToyGateway) -> None:
    """Something of everything: servers alive, dead and alone, a conversation, traces."""
    gateway.serve("attic", "0:20")
    gateway.serve("a server with quite a long name, as people like to give them", "10:30")
    gateway.serve("cellar", "5:25")
    gateway.answer = (
        "# Title\n\nSome *text* with `code` and a [link](https://example.org/).\n\n```python\nprint('"
        + "x" * 200
        + "')\n"
        "```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> quoted\n\n1. one\n2. two " + "w" * 100
    )


def visit_all(page: Page, gateway: ToyGateway, check: Callable[[], None]) -> None:
    page.goto(gateway.url)
    expect(page.locator("#model")).to_have_value("toy", timeout=WAIT_MS)
    check()
    page.get_by_label("Your message").fill("Show me everything")
    page.get_by_role("button", name="Send", exact=True).click()
    wait_for_answers(page, 1)
    check()
    for button, end in (("Settings", "Done"), ("History", "Close")):
        page.get_by_role("button", name=button).click()
        check()
        page.get_by_role("button", name=end).click()
    gateway.kill("cellar")
    page.goto(f"{gateway.url}/swarm")
    expect(page.locator(".state.silent")).to_have_count(1, timeout=WAIT_MS)
    check()
    page.goto(f"{gateway.url}/slow")
    page.locator(".steps summary").first.click()
    check()


def assert_accessible(page: Page, rules: str = "{}") -> None:
    page.evaluate(AXE.read_text())
    found = page.evaluate(f"async () => (await axe.run({rules})).violations.map(v => [v.id, v.nodes.map(n => n.html)])")
    assert found == []


def assert_fits(page: Page) -> None:
    """Nothing sticks out to the right: what is wide scrolls in its own box."""
    wide = page.evaluate(
        "document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll('body *')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML.slice(0, 100))"
    )
    assert wide == []
    height = page.evaluate("innerHeight")
    send = page.locator("#send:visible")
    if send.count():
        box = send.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= height
