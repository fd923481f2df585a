"""The live page in a real browser: it loads, the numbers move, the chat answers, and errors are told in words."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
from running import SMALL, Running, running, until
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="chromium and chromedriver are not installed")
PROMPT = "tell me something long"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    profile = tmp_path_factory.mktemp("profile")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=1280,900",
                 "--no-first-run", "--disable-extensions", f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER)))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Two run, two wait, more are refused; a step takes its time, so that there is something to see."""
    with running(attrs.evolve(SMALL, max_running=2, max_queued_requests=2, pool_tokens=8192)) as found:
        handle = found.engine.executor.model.register_forward_pre_hook(lambda *_: time.sleep(0.01))  # type: ignore[attr-defined]  # it is a torch module
        yield found
        handle.remove()


@pytest.fixture
def page(browser: webdriver.Chrome, server: Running) -> Iterator[Page]:
    server.settled()
    Page(browser).complaints()
    browser.get(f"{server.url}/")
    found = Page(browser)
    until(lambda: found.text("word") == "Idle:")
    yield found
    browser.get("about:blank")
    server.settled()


@attrs.frozen
class Page:
    """The page as a person sees it."""

    browser: webdriver.Chrome

    def at(self, name: str) -> Any:
        return self.browser.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return str(self.at(name).text)

    def all(self, selector: str) -> list[str]:
        """Texts of what a selector finds; none while the page is just replacing it."""
        try:
            return [found.text for found in self.browser.find_elements(By.CSS_SELECTOR, selector)]
        except StaleElementReferenceException:
            return []

    def ask(self, text: str, tokens: int = 24) -> None:
        """Type a message and send it with Enter; the likeliest tokens answer."""
        for name, value in (("limit", str(tokens)), ("heat", "0"), ("message", text)):
            self.browser.execute_script("arguments[0].value = arguments[1]", self.at(name), value)
        self.at("message").send_keys(Keys.ENTER)

    def shoot(self, path: Path) -> None:
        assert self.browser.save_screenshot(str(path))
        assert path.stat().st_size > 10_000

    def complaints(self) -> list[Any]:
        """What the browser's console has to say."""
        return [entry for entry in self.browser.get_log("browser")  # type: ignore[no-untyped-call]  # selenium's own omission
                if entry["level"] != "INFO"]


@contextmanager
def clients(server: Running, count: int, **fields: Any) -> Iterator[None]:
    """Streams under way, begun one after another, whose clients leave at the end."""
    with server.client() as client:
        streams: list[Any] = []
        for _ in range(count):
            health = server.engine.vitals.health
            busy = health.running + health.waiting
            streams.append(client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": PROMPT}], stream=True, max_tokens=2000, extra_body={"ignore_eos": True}, **fields,
            ))
            until(lambda: server.engine.vitals.health.running + server.engine.vitals.health.waiting > busy)  # noqa: B023  # it is called at once
        try:
            yield
        finally:
            for stream in streams:
                stream.close()


def test_the_page_loads_and_says_what_is_there(page: Page, tmp_path: Path) -> None:
    assert page.text("model") == "tiny"
    assert page.text("meaning") == "ready for work"
    assert page.text("pool-size") == "512 pages of 16 tokens"
    assert page.browser.title == "kvsched · tiny"
    assert page.all("#legend dt") == ["private", "cached, locked", "cached", "quarantined", "free"]
    assert page.text("running-none") == "Nothing is running."
    assert page.text("waiting-none") == "Nobody waits."
    page.shoot(tmp_path / "idle.png")
    assert page.complaints() == []


def test_the_numbers_move_while_requests_run_and_wait(page: Page, server: Running, tmp_path: Path) -> None:
    with clients(server, 4, user="<b>ada</b>"):
        until(lambda: len(page.all("#running li")) == 2 and len(page.all("#waiting li")) == 2)
        assert page.text("word") == "Live:"
        assert "the queue is full" in page.text("meaning")
        until(lambda: int(page.text("pages-private").split()[0]) > 0)
        assert page.at("bar").get_attribute("aria-label").startswith("Pages by bucket: private ")
        assert page.text("waiting-count") == "2 requests"
        assert page.all("#waiting .what") == ["all running places are taken", "waits behind the first in line"]
        assert all("of 2,000 tokens" in text or "prompt" in text for text in page.all("#running li"))
        names = [f"chat {key.removeprefix('chatcmpl-')[:8]}" for key in server.state.live]
        assert page.all("#running code") + page.all("#waiting code") == names
        first = page.browser.find_element(By.CSS_SELECTOR, "#running .track")
        seen = int(first.get_attribute("aria-valuenow") or 0)
        until(lambda: int(first.get_attribute("aria-valuenow") or 0) > seen)
        until(lambda: float(page.text("figure-rate")) > 0)
        assert "<b>ada</b>" in page.all("#running li")[0]  # what a client says is text here
        assert page.browser.find_elements(By.CSS_SELECTOR, "#running b") == []
        assert "promised to running requests" in page.text("promised")
        page.shoot(tmp_path / "busy.png")
    until(lambda: page.text("word") == "Idle:")
    assert page.all("#running li") == []
    assert page.complaints() == []


def test_the_chat_answers_in_pieces_and_remembers(page: Page, server: Running, tmp_path: Path) -> None:
    page.browser.execute_script(
        "window.pieces = 0; new MutationObserver(() => pieces++).observe(document.getElementById('talk'), {subtree: true, characterData: true})"
    )
    page.ask("hello", 40)
    until(lambda: any("cut at max tokens" in text for text in page.all("#talk .assistant")))
    assert page.browser.execute_script("return pieces") > 3
    assert page.all("#talk .user") == ["hello"]
    assert page.text("message") == ""
    prompt = server.engine.vitals.prompt_tokens
    page.ask("and again", 8)
    until(lambda: len(page.all("#talk .assistant small")) == 2)
    assert server.engine.vitals.prompt_tokens - prompt > len("hello") + 40  # the first turn went along
    assert "8 tokens" in page.all("#talk .assistant small")[1]
    assert "from the cache" in page.all("#talk .assistant small")[1]
    page.shoot(tmp_path / "chat.png")
    page.at("again").click()
    assert page.all("#talk div") == []
    assert page.complaints() == []


def test_the_stop_button_leaves(page: Page, server: Running) -> None:
    before = server.engine.vitals.totals["aborted"]
    assert not page.at("stop").is_enabled()
    page.ask("go on for ever", 2000)
    until(lambda: page.at("stop").is_enabled() and any(len(text) > 5 for text in page.all("#talk .assistant")))
    page.at("stop").click()
    until(lambda: any("stopped by you" in text for text in page.all("#talk .assistant")))
    until(lambda: server.engine.vitals.totals["aborted"] == before + 1)
    assert not page.at("stop").is_enabled()
    assert page.at("send").is_enabled()


def test_a_refusal_is_told_in_words(page: Page, server: Running, tmp_path: Path) -> None:
    with clients(server, 4):
        page.ask("is there room?", 4)
        until(lambda: page.all("#talk .problem"))
        (problem,) = page.all("#talk .problem")
        assert problem.startswith("The server is full. The queue is full (queue_requests)")
        assert "Try again in" in problem
        page.shoot(tmp_path / "refused.png")
    page.ask("is there room now?" * 1000, 4)
    until(lambda: len(page.all("#talk .problem")) == 2)
    assert "exceed the context limit" in page.all("#talk .problem")[1]
    page.ask("and now?", 4)
    until(lambda: page.all("#talk .assistant small"))


def test_a_server_that_is_gone_is_said_to_be_gone(browser: webdriver.Chrome) -> None:
    with running() as server:
        browser.get(f"{server.url}/")
        page = Page(browser)
        until(lambda: page.text("word") == "Idle:")
    until(lambda: page.text("word") == "No answer")
    assert "asking again in" in page.text("notice")
    assert not page.at("send").is_enabled()
    browser.get("about:blank")


@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1280, True)])
def test_it_fits_narrow_windows_and_dark_ones(page: Page, server: Running, tmp_path: Path, width: int, dark: bool) -> None:
    scheme = "dark" if dark else "light"
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    try:
        with clients(server, 3):
            until(lambda: page.all("#waiting li"))
            assert page.browser.execute_script("return document.documentElement.scrollWidth") <= width
            ground = page.browser.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, ground.removeprefix("rgb(").rstrip(")").split(","))) < 200) == dark
            page.shoot(tmp_path / f"{width}-{scheme}.png")
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_everything_can_be_reached_by_keyboard_and_has_a_name(page: Page) -> None:
    reached = []
    page.browser.execute_script("document.body.tabIndex = -1; document.body.focus()")
    for _ in range(20):
        page.browser.switch_to.active_element.send_keys(Keys.TAB)
        found = page.browser.switch_to.active_element
        if found.tag_name == "body":
            break  # past the last one
        reached.append(found.get_attribute("id") or found.text)
        assert found.accessible_name, reached
    assert [name for name in reached if name in ("again", "talk", "message", "limit", "heat", "send")] == ["again", "talk", "message", "limit", "heat", "send"]
    assert {"scheduler state", "metrics", "health", "ready"} <= set(reached)
