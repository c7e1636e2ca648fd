"""The status page in a real browser: it agrees with /metrics in every state of a server.

`HISTOSPEC_PICTURES=docs` saves a picture of each state there; `HISTOSPEC_PAGE_EPOCHS` makes the busy one busier.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterator
from decimal import ROUND_HALF_UP, Decimal
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from PIL import Image

from histospec.client import DraftClient, Response
from histospec.client.errors import HistoSpecError
from histospec.server.observability.health_hints import SCARCE_SHARE
from tests.support.busy import Run
from tests.support.programs import program
from tests.support.redis_processes import RedisProcess
from tests.support.servers import Server, Starter
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ViewportSize

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make setup does it)")

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
Scheme = Literal["light", "dark"]
WIDE: "ViewportSize" = {"width": 1280, "height": 900}
PHONE: "ViewportSize" = {"width": 375, "height": 740}
HOSTILE = "<img src=x onerror=alert(1)>"
EPOCHS = int(os.environ.get("HISTOSPEC_PAGE_EPOCHS", "4"))
PICTURES = os.environ.get("HISTOSPEC_PICTURES")

# The lowest contrast of any text with its background, computed as in WCAG 2.
CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length && (c.length < 4 || c[3] === 1)) return c;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll("body *")].filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.checkVisibility() && e.tagName !== "NOSCRIPT");
  return Math.min(...texts.map((e) => {
    const style = getComputedStyle(e);
    const pair = [light(parse(e.tagName === "text" ? style.fill : style.color)), light(behind(e))].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
  }));
}"""  # noqa: E501


class View:
    """The page of one server in one window. `errors`: what the browser reported."""

    def __init__(self, browser: "Browser", address: str, size: "ViewportSize", scheme: Scheme) -> None:
        self.context = browser.new_context(viewport=size, color_scheme=scheme)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        self._address = address
        self.look()

    def look(self) -> None:
        """Reloads the page, and waits until it shows numbers."""
        self.page.goto(f"http://{self._address}/")
        self.page.wait_for_selector("main[aria-busy=false]")

    def look_for(self, what: str, selector: str) -> None:
        """Reloads the page until the text appears: a server keeps an answer for a while."""

        def there() -> bool:
            self.look()
            return what in self.text(selector)

        eventually(there, f"no {what!r} in {selector}")

    def text(self, selector: str) -> str:
        return " ".join(self.page.inner_text(selector).split())

    def tile(self, name: str) -> str:
        return " ".join(self.text(f"#tile-{name} dd >> nth={i}") for i in (0, 1))

    def table(self, selector: str) -> dict[str, dict[str, str]]:
        """Returns the figures of its rows by the first line of their names, and by column."""
        return {
            row.locator("th").inner_text().split("\n")[0]: {
                cell.get_attribute("data-column") or "": " ".join(cell.inner_text().split())
                for cell in row.locator("td").all()
            }
            for row in self.page.locator(f"{selector} tbody tr").all()
        }

    def picture(self, name: str) -> None:
        if PICTURES:
            self.page.wait_for_timeout(300)
            picture = Image.open(io.BytesIO(self.page.screenshot(full_page=True))).convert("RGB")
            picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
                Path(PICTURES, f"status-{name}.png"), optimize=True
            )


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program("chromium"), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def view(browser: "Browser") -> Iterator[Callable[..., View]]:
    """Returns a function that opens the page of a server: `view(server, size, "dark")`."""
    views: list[View] = []

    def opened(server: Server, size: "ViewportSize" = WIDE, scheme: Scheme = "light") -> View:
        views.append(View(browser, server.http, size, scheme))
        return views[-1]

    yield opened
    for one in views:
        one.context.close()


@pytest.fixture(scope="module")
def busy(start_shared: Starter) -> Iterator[Server]:
    """Returns an idle server after two runs of some epochs, with one session still open."""
    server = start_shared("--shard-name", "shard-0", "--memory", "64MiB", "--disk", "1024GiB", name="busy")
    pause = 0.05 if PICTURES else 0.0
    with (
        DraftClient(server.endpoint, namespace="qwen3-8b-math", deadline=5.0) as client,
        DraftClient(server.endpoint, namespace="qwen3-8b-code", deadline=5.0) as other,
    ):
        client.step(client.open([[1, 2, 0]]), [[5]], max_tokens=0)
        math, code = Run(client), Run(other, problems=6)
        for epoch in range(EPOCHS):
            math.rolls_out(0.2, pause)
            if epoch % 2:
                code.rolls_out(0.1, pause)
        yield server


def percent(part: float, whole: float) -> str:
    share = part / whole
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.{1 if 0 < share < 0.9995 else 0}f} %"


def binary(size: float) -> str:
    """Returns whole KiB or tenths of a MiB; rounds halves up, as browsers do."""
    kilo = size < 1 << 20
    number = Decimal(int(size)) / (1 << (10 if kilo else 20))
    return f"{number.quantize(Decimal(1 if kilo else '0.1'), ROUND_HALF_UP)} {'K' if kilo else 'M'}iB"


def test_a_server_that_nobody_has_found_yet(start_server: Starter, view: Callable[..., View]) -> None:
    shown = view(start_server("--shard-name", "shard-0"))
    assert shown.text("#shard") == "shard-0"
    assert shown.text("#state") == "serving"
    assert shown.text("#about").startswith(f"HistoSpec {metadata.version('histospec')} · up for ")
    assert "Note: Nothing is connected" in shown.text("#hints")
    assert shown.tile("known") == "\u2013 none since the start"
    assert shown.tile("memory").endswith(" 0 % of 8 GiB")
    assert re.fullmatch(r"[\d.]+ KiB (< )?[\d.]+ % of [\d.]+ \w+; [\d.]+ \w+ free of [\d.]+ \w+", shown.tile("store"))
    assert shown.text("#lines") == "None since the start"
    assert shown.page.locator("#charts svg").count() == 6
    assert shown.errors == []
    shown.picture("empty")


def test_the_numbers_are_those_of_metrics(busy: Server, view: Callable[..., View]) -> None:
    """After the load, /metrics is the same before and after the page, and agrees with it."""
    shown = view(busy)
    before = busy.metrics()
    shown.look()
    after = busy.metrics()

    def counted(samples: dict[str, float]) -> dict[str, float]:
        """Returns HistoSpec's metrics without those that the reading itself changes."""
        looking = ("_cpu_", "_engine_lock_", "_disk_free_")
        ours = (k for k in samples if k.startswith("histospec_") and not any(part in k for part in looking))
        names = {k: k.removeprefix("histospec_") for k in ours}
        return {name: samples[k] for k, name in names.items()}

    mine = counted(before)
    assert mine == counted(after)

    def total(name: str, label: str = "") -> float:
        return sum(value for key, value in mine.items() if key.startswith(f"{name}{{") and label in key)

    hits, misses = (total("problem_lookups_total", f'result="{result}"') for result in ("hit", "miss"))
    asked = total("drafts_total") + total("undrafted_tokens_total")
    drafted, accepted, written = (total(f"{name}_tokens_total") for name in ("draft", "accepted", "generated"))
    assert hits > 0 < misses
    assert 0.3 < accepted / drafted < 1
    assert mine["ingested_responses_total"] == 64 * EPOCHS + 24 * (EPOCHS // 2)
    known, acceptance, pace = percent(hits, hits + misses), percent(accepted, drafted), f"{written / asked:.2f}"
    assert shown.tile("known") == f"{known} since the start: {known} of {hits + misses:,.0f} sessions"
    assert shown.tile("accepted") == f"{acceptance} since the start: {acceptance} of {drafted:,.0f} tokens"
    assert shown.tile("steps") == f"{pace} since the start: {pace} in {asked:,.0f} steps"
    assert shown.tile("sessions") == "1 on 2 streams"
    assert (mine["sessions"], mine["streams"]) == (1, 2)
    size = mine["index_bytes"]
    assert shown.tile("memory").startswith(binary(size))
    assert shown.tile("memory").endswith(f" {percent(size, 64 << 20)} of 64 MiB")
    stored = mine["store_bytes"]
    assert shown.tile("store").startswith(f"{binary(stored)} {percent(stored, 1 << 40)} of 1024 GiB; ")
    full = stored / min(1 << 40, stored + after["histospec_disk_free_bytes"])  # not what others have on the disk
    meter = shown.page.locator("#tile-store meter")
    assert float(meter.get_attribute("value") or 0) == pytest.approx(full, abs=0.01)

    for source in ("history", "own", "siblings", "namespace", "twin", "model"):
        tried, right = (total(f"source_{n}_tokens_total", f'source="{source}"') for n in ("draft", "accepted"))
        figure = f"{percent(right, tried) if right else '0 %'} of {tried:,.0f}" if tried else "nothing drafted"
        assert shown.text(f"#source-{source}").endswith(figure)
    held = shown.table("#held")
    assert set(held) == {"qwen3-8b-math", "qwen3-8b-code"}
    assert sum(int(row["Tokens"].replace(",", "")) for row in held.values()) == mine["history_tokens"]
    assert [row["Newest epoch"] for row in held.values()] == [str(EPOCHS - 1), str(EPOCHS // 2 - 1)]
    gained = shown.table("#gained")
    assert gained.keys() == held.keys()
    for name, row in gained.items():
        run = f'namespace="{name}"'
        found, sessions = total("problem_lookups_total", f'{run},result="hit"'), total("problem_lookups_total", run)
        made, right, wrote = (total(f"{n}_tokens_total", run) for n in ("draft", "accepted", "generated"))
        empty, drafts = total("drafts_total", f'{run},result="empty"'), total("drafts_total", run)
        steps = drafts + total("undrafted_tokens_total", run)
        speedup = wrote / (steps + mine[f"verify_cost{{{run}}}"] * made)
        assert row == {
            figure: f"{text} {text}"  # all of it is within the last ten minutes
            for figure, text in {
                "Speed-up": f"{speedup:.2f} \N{MULTIPLICATION SIGN}", "Tokens per step": f"{wrote / steps:.2f}",
                "Acceptance rate": percent(right, made), "Empty drafts": percent(empty, drafts),
                "Cache hit rate": percent(found, sessions),
            }.items()
        } | {"Verify cost": "0.05"}  # fmt: skip
    # Of hints, the machine may cause two: it is busy, or its disk is nearly full.
    hints = shown.text("#hints")
    scarce = after["histospec_disk_free_bytes"] < SCARCE_SHARE * mine["disk_size_bytes"]
    assert ("The disk is nearly full" in hints) == scarce
    assert scarce or hints == "All is well" or "Drafts come late" in hints
    assert shown.errors == []
    shown.picture("busy")


def test_what_strangers_named_is_text(busy: Server, view: Callable[..., View]) -> None:
    with DraftClient(busy.endpoint, namespace=HOSTILE) as client:
        client.ingest([1], [Response([2, 3, 4])])
        shown = view(busy)
        shown.look_for(HOSTILE, "#held")
        client.drop_namespace()
    assert shown.page.locator("img").count() == 0
    assert shown.errors == []
    policy = shown.page.request.get(f"http://{busy.http}/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_dark(busy: Server, view: Callable[..., View]) -> None:
    light, dark = view(busy), view(busy, scheme="dark")
    colours = [v.page.evaluate("getComputedStyle(document.body).backgroundColor") for v in (light, dark)]
    assert colours == ["rgb(246, 247, 249)", "rgb(16, 20, 26)"]
    for shown in (light, dark):
        assert shown.page.evaluate(CONTRAST) >= 4.5
        assert shown.errors == []
    dark.picture("busy-dark")


def test_between_phone_and_desk_names_have_room(busy: Server, view: Callable[..., View]) -> None:
    shown = view(busy, {"width": 700, "height": 900})
    # In one call: the page may replace its rows between two.
    assert shown.page.evaluate("document.querySelector('#gained tbody th').getBoundingClientRect().width") > 150
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 700


def test_on_paper_it_is_light_and_whole(busy: Server, view: Callable[..., View]) -> None:
    shown = view(busy, scheme="dark")
    shown.page.emulate_media(media="print")
    assert shown.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(246, 247, 249)"
    assert shown.page.evaluate(CONTRAST) >= 4.5
    assert shown.page.evaluate("getComputedStyle(document.querySelector('.lines')).maxHeight") == "none"


def test_on_a_phone(busy: Server, view: Callable[..., View]) -> None:
    with DraftClient(busy.endpoint, namespace="x" * 128) as client:
        client.ingest([1], [Response([2])])
        shown = view(busy, PHONE)
        shown.look_for("x" * 128, "#held")
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        client.drop_namespace()
    shown.look()
    shown.picture("phone")
    assert shown.errors == []


def test_charts_are_read_by_pointer_and_keys(busy: Server, view: Callable[..., View]) -> None:
    shown = view(busy)
    reading, chart = shown.page.locator("#charts .reading >> nth=1"), shown.page.locator("#charts svg >> nth=1")
    eventually(lambda: chart.locator(".dot-0, .curve").count(), "no point")
    latest = reading.inner_text()
    chart.focus()
    chart.press("Home")
    assert re.fullmatch(r"\d\d:\d\d · .*", reading.inner_text())
    assert chart.locator(".cursor").count() == 1
    shown.page.keyboard.press("Tab")
    assert reading.inner_text() == latest
    chart.hover()
    assert chart.locator(".cursor").count() == 1
    assert "Tokens per step" in (chart.get_attribute("aria-label") or "")


def test_charts_break_where_nothing_was_measured(busy: Server, view: Callable[..., View]) -> None:
    shown = view(busy)
    status = json.loads(busy.get("/status")[1])
    # No sample between two runs of steps, one step alone, then no sample for five minutes.
    milliseconds: list[float | None] = [1, 2, 3, None, None, 2, 2, None, 4, None, 2, 3, 6, 2]
    minutes = [*range(11), 15, 16, 17]
    status["series"] = {name: [0] * len(minutes) for name in status["series"]} | {
        "time": [status["now"] - 60 * (minutes[-1] - minute) for minute in minutes],
        "draft_p50": [value and value / 1000 for value in milliseconds],
        "draft_p99": [value and value / 100 for value in milliseconds],
        "sessions": [None] * len(minutes),
    }
    shown.page.route("**/status", lambda route: route.fulfill(json=status))
    shown.look()
    chart = shown.page.locator("#charts svg >> nth=3")
    lines = [(path.get_attribute("d") or "").count("L") + 1 for path in chart.locator("path.curve-0").all()]
    assert lines == [3, 2, 3]
    assert chart.locator("circle.dot-0").count() == 2  # the single step, and the one before the five minutes
    assert chart.locator("path.curve-1").count() == 3
    levels = [text for text in chart.locator("text").all_text_contents() if "ms" in text]
    assert levels == [f"{level}\u00a0ms" for level in (0, 20, 40, 60)]
    assert (shown.page.locator("#charts svg >> nth=4").text_content() or "").endswith("no data yet")

    chart.focus()
    chart.press("ArrowLeft")
    reading = " ".join(shown.page.locator("#charts .reading >> nth=3").inner_text().split())
    assert re.fullmatch(r"\d\d:\d\d median 6.0 ms.*99th percentile 60 ms", reading)
    said = " ".join((chart.get_attribute("aria-label") or "").split())
    assert re.match(r"Draft time per batch: \d\d:\d\d, median 6.0 ms, 99th percentile 60 ms\. ", said)
    assert shown.errors == []


def test_a_server_that_goes_away_leaves_its_last_numbers(start_server: Starter, view: Callable[..., View]) -> None:
    server = start_server()
    shown = view(server)
    before = shown.text("#tiles")
    server.stop()
    shown.page.wait_for_selector("#away:not([hidden])")
    assert re.match(r"The server does not answer; the numbers below are from \d\d:\d\d:\d\d", shown.text("#away"))
    assert shown.text("#state") == "no answer"
    assert shown.text("#tiles") == before
    server.start()
    shown.page.wait_for_selector("#away", state="hidden")
    assert shown.text("#state") == "serving"


def test_a_server_whose_store_and_peer_are_away(
    start_server: Starter, view: Callable[..., View], own_redis: RedisProcess
) -> None:
    """In the first epoch, Redis dies and another shard does not answer: hints, shards and log lines show it."""
    url = f"redis://somebody:pa55word@{own_redis.where}"
    own_redis.client.acl_setuser("somebody", enabled=True, passwords=["+pa55word"], categories=["+@all"], keys=["*"])
    server = start_server("--shard-name", "shard-0", "--peers", "shard-1=127.0.0.1:1", env={"HISTOSPEC_STORE": url})
    with DraftClient(server.endpoint, namespace="qwen3-8b-math", deadline=5.0) as client:
        Run(client).rolls_out()
        own_redis.kill()
        with pytest.raises(HistoSpecError):
            client.ingest([1], [Response([2])])
        shown = view(server)
        shown.page.wait_for_selector("#shards .bad")
        errors = server.metrics()["histospec_store_errors_total"]
        assert errors >= 1
        assert shown.text("#state") == "serving, with faults"
        assert shown.page.locator("#tile-store meter").count() == 0  # Redis has no limit, and its disk is unknown
        hints = shown.text("#hints")
        assert "Broken: Not serving: shard-1" in hints
        assert re.search(rf"Broken: The store fails {errors:.0f} requests? failed in the last ten minutes", hints)
        assert "Note: qwen3-8b-math: probably the first epoch" in hints
        assert "the store is away" in shown.text("#lines")
        assert (
            shown.text("#shards")
            == "shard-0 (this shard) " + server.endpoint + " serving shard-1 127.0.0.1:1 does not answer"
        )
        status = server.get("/status")[1]
        assert "pa55word" not in status
        assert "somebody" not in status
        assert shown.errors == []
        shown.picture("degraded")
