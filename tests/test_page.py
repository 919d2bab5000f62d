"""The page about a plan: it says what the simulator says, and in a browser it can be looked at and walked through."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import remat
from browser import PROGRAM, Browser, chromium
from remat.chains import Chain, Stage, Tape
from remat.cli import main
from remat.plans import Plan
from remat.schedules import Record, Store

CHAIN = Chain.repeat(Stage(32 * 1024, (Tape(88 * 1024, 32 * 1024, forward_s=1e-3, backward_s=2e-3),), 1e-3), 200)


def written(made: Plan, path: Path, measured: Any = None) -> dict[str, Any]:
    made.plot(path, measured)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


class Measured:
    timeline = ((0.1, 1000), (0.4, 3 * 2**20), (0.9, 0))


def test_it_says_what_the_simulator_says(tmp_path: Path) -> None:
    made = remat.plan(CHAIN, "3MiB")
    data = written(made, tmp_path / "plan.html", Measured())
    assert max(data["curve"]["bytes"]) == data["curve"]["bytes"][data["peak_bucket"]] == made.peak_bytes
    assert data["curve"]["end"] == pytest.approx(made.seconds)
    assert data["actions"][data["peak_bucket"]].startswith("record")
    assert max(data["measured"]["bytes"]) == 3 * 2**20
    assert data["measured"]["end"] == pytest.approx(0.9)
    kept = [action for action in made.schedule if isinstance(action, Store | Record)]
    assert len(data["bars"]) == len(kept)
    assert all(0 <= bar["start"] <= bar["end"] <= made.seconds * (1 + 1e-9) for bar in data["bars"])
    assert {bar["bytes"] for bar in data["bars"] if bar["kind"] == "carry"} == {32 * 1024}
    assert data["tradeoff"]["chosen"] == [3 * 2**20, made.seconds]
    best = [seconds for budget, seconds in data["tradeoff"]["points"] if budget <= 3 * 2**20]
    assert min(best) == pytest.approx(made.seconds, rel=0.01)


def test_kept_tapes_are_as_large_as_the_simulator_has_them(tmp_path: Path) -> None:
    whole = Tape(5, entering_bytes=2, leaving_bytes=3)
    chain = Chain(((Stage(4, (whole,)), 3), (Stage(6, (Tape(7, entering_bytes=6),)), 2)), 8, caller_keeps_carry=False)
    made = remat.plan(chain, 10_000, "keep-all")
    (bar,) = written(made, tmp_path / "plan.html")["bars"]
    assert (bar["name"], bar["kind"]) == ("tapes of stages 0 to 4", "tape")
    assert bar["bytes"] == 3 * 5 + 2 * 7 + 2 + 3 + 3 + 6 + 6  # tapes; of carries 0 to 4 what the larger claim keeps


def test_a_long_chain_makes_a_small_page(tmp_path: Path) -> None:
    made = remat.plan(Chain.repeat(CHAIN.stage(0), 2500), "2MiB", "hsm")
    data = written(made, tmp_path / "plan.html")
    assert (tmp_path / "plan.html").stat().st_size < 400_000
    single = [bar for bar in data["bars"] if bar["kind"] != "crowd"]
    assert len(single) == 400
    counts = [re.match(r"(\d+) carries and (\d+) ranges", b["name"]) for b in data["bars"] if b["kind"] == "crowd"]
    counted = sum(int(found[1]) + int(found[2]) for found in counts if found)
    assert counted + 400 == sum(isinstance(action, Store | Record) for action in made.schedule)


def test_names_cannot_break_it_and_nothing_is_fetched(tmp_path: Path) -> None:
    evil = "</script><script>document.title='broken'</script>"
    chain = Chain.repeat(Stage(0, (Tape(0, forward_s=0, backward_s=0, name=evil),), 0), 3)  # a page of zeros, too
    data = written(remat.plan(chain, 10), tmp_path / "plan.html")
    assert evil in data["bars"][0]["name"]
    assert data["tradeoff"] is None
    text = (tmp_path / "plan.html").read_text()
    assert evil not in text
    assert re.findall(r"https?://[\w./]+", text) == ["http://www.w3.org/2000/svg"]
    assert "{{" not in text.replace(json.dumps(data), "")


# ---- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("Chromium is not installed")
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    remat.plan(CHAIN, "3MiB").plot(path, Measured())
    return f"file://{path}"


TIP = "document.getElementById('tip')"


def tip(browser: Browser) -> str | None:
    """The tooltip's text, if it is shown."""
    return browser.ask(f"{TIP}.hidden ? null : {TIP}.textContent")  # type: ignore[no-any-return]


@pytest.mark.parametrize(("width", "height", "dark"), [(1280, 900, False), (400, 780, False), (1280, 900, True)])
def test_it_looks_right(browser: Browser, page: str, width: int, height: int, dark: bool) -> None:
    browser.window(width, height, dark=dark)
    browser.open(page)
    assert browser.complaints == []
    assert browser.requests == [page]
    assert browser.ask("document.documentElement.scrollWidth") <= width
    for picture in ("memory", "kept", "tradeoff"):
        left, right = browser.ask(
            f"(() => {{ const box = document.getElementById('{picture}').getBoundingClientRect();"
            "return [box.left, box.right]; })()"
        )
        assert 0 <= left < right <= width
        assert right - left > 0.8 * width
    paper, ink = browser.ask(
        "['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name]"
        ".match(/\\d+/g).map(Number).reduce((a, b) => a + b) / 3)"
    )
    assert (paper < 40) if dark else (paper > 220)
    assert abs(paper - ink) > 180


def test_the_pointer_shows_what_it_is_on(browser: Browser, page: str) -> None:
    browser.window(1280, 2800)
    browser.open(page)
    boxes = browser.ask(
        "[...document.querySelectorAll('.bar')].map(node => { const box = node.getBoundingClientRect();"
        "return [box.left + box.width / 2, box.top + box.height / 2, node.getAttribute('aria-label')]; })"
    )
    assert tip(browser) is None
    shown = set()
    for x, y, label in boxes:
        browser.point(x, y)
        text = tip(browser)
        assert text is not None
        shown.add(text.splitlines()[0])
        assert len(text.splitlines()) == 3
        if label.startswith("carry"):
            assert re.fullmatch(r"carry \d+\n32 KiB\nfrom .* to .* m?s, for .* m?s", text)
    assert {"carry 20", "tapes of stages 0 to 4"} <= shown
    assert len(shown) > 0.8 * len(boxes)  # where bars lie on each other, the smallest is meant
    browser.point(5, 5)
    assert tip(browser) is None


def test_the_pointer_reads_the_curves(browser: Browser, page: str) -> None:
    browser.window(1280, 2800)
    browser.open(page)
    for picture, expected in (
        ("memory", r"[\d.]+ [KM]iB at .*\n\w+ .*\nmeasured: .*"),
        ("tradeoff", r"[^$]*iteration"),
    ):
        x, y = browser.ask(
            f"(() => {{ const box = document.getElementById('{picture}').getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        browser.point(x, y)
        assert re.fullmatch(expected, tip(browser) or "")


def test_the_keyboard_reaches_everything(browser: Browser, page: str) -> None:
    browser.window(1280, 900)
    browser.open(page)
    browser.press("Tab")  # memory, at its peak
    assert "2.97 MiB" in (tip(browser) or "")
    browser.press("ArrowLeft")
    value = "document.activeElement.getAttribute('aria-valuetext')"
    assert browser.ask(value) == tip(browser)
    browser.press("Escape")
    assert tip(browser) is None
    browser.press("Tab")  # the bars
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown"):
        browser.press(key)
        seen.append((tip(browser) or "").splitlines()[0])
        assert browser.ask("document.activeElement.getAttribute('aria-label')").startswith(seen[-1])
    assert seen[0] == seen[2] != seen[1]
    assert seen[4] == seen[2]
    browser.press("Tab")  # the trade-off, at this plan
    assert browser.ask(value).startswith("this plan\n3 MiB")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, chain = tmp_path / "plan.html", tmp_path / "chain.json"
    assert main(["report", str(path), "--steps", "20", "--carry", "1KiB", "--tape", "4KiB", "--budget", "16KiB"]) == 0
    assert capsys.readouterr().out == f"{path}: 20 stages within 16 KiB, for a browser\n"
    assert "20 stages within 16 KiB" in path.read_text()
    short = Chain.repeat(CHAIN.stage(0), 20)
    chain.write_bytes(short.to_json())
    assert main(["report", str(path), "--chain", str(chain)]) == 0
    knee = remat.tradeoff(short).knee[0]
    assert f'"budget_bytes":{knee}' in path.read_text()
