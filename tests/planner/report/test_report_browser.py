"""The page in a real browser: no error, no request, nothing wider than a phone, a working timeline.

Chromium is driven over a pipe in its own protocol (null-terminated JSON), so that no driver and no
port is needed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys

import pytest

from foreplan.planner.report.html import render_report

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
]
#: Chromium reads commands from descriptor 3 and answers on 4.
LAUNCH = (
    "import os, sys; a, b = map(int, sys.argv[1:3]); os.dup2(a, 3); os.dup2(b, 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


class Browser:
    def __init__(self, profile):
        inner_read, self.write = os.pipe()
        self.read, inner_write = os.pipe()
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (inner_read, inner_write)]
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *map(str, ends), *command],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (inner_read, inner_write, *ends):
            os.close(fd)
        self.buffer, self.number, self.events, self.session = b"", 0, [], None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def message(self):
        while b"\0" not in self.buffer:
            received = os.read(self.read, 1 << 20)
            assert received, "chromium ended"
            self.buffer += received
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **parameters):
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.write, json.dumps(request).encode() + b"\0")
        while (answer := self.message()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path, width, *, dark=False):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1,
            mobile=width < 500,
        )  # fmt: skip
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            self.events.append(self.message())
        self.settle()

    def settle(self):
        self.eval("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def eval(self, code):
        answer = self.call(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self):
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [e["params"] for e in self.events if e["method"] in bad]

    def requests(self):
        sent = [e for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in sent]

    def close(self):
        self.call("Browser.close")
        self.process.wait(timeout=60)
        os.close(self.read)
        os.close(self.write)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    running = Browser(tmp_path_factory.mktemp("chromium"))
    yield running
    running.session = None
    running.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory, plan, verification, timeline, measured):
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(render_report(plan, verification, timeline, measured), encoding="utf-8")
    return file


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_no_error_no_request_no_overflow(browser, path, width, dark):
    browser.open(path, width, dark=dark)
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]
    assert browser.eval("document.documentElement.scrollWidth") <= width
    assert browser.eval("getComputedStyle(document.body).backgroundColor") == (
        "rgb(18, 21, 26)" if dark else "rgb(245, 246, 248)"
    )


PAINTED = """(() => {
  const c = document.querySelector("canvas[data-rank='1']");
  const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  const seen = new Set();
  for (let i = 0; i < d.length; i += 4) seen.add(d.slice(i, i + 3).join());
  return seen.size;
})()"""


def test_the_timeline_moves(browser, path):
    browser.open(path, 1280)
    assert browser.eval(PAINTED) > 3
    legend = "Array.from(document.querySelectorAll('#timeline .legend li'), e => e.textContent)"
    assert set(browser.eval(legend)) >= {"prefill", "decode", "send"}
    shown = "document.querySelector('#timeline .range').textContent"
    assert browser.eval(shown) == "0 to 771.9 ms"
    browser.eval("document.querySelector('button[data-move=in]').click()")
    browser.settle()
    assert browser.eval(shown) == "193 ms to 578.9 ms"
    browser.eval("document.querySelector('.drawing').focus()")
    for key in ("ArrowRight", "+"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    browser.settle()
    assert browser.eval(shown) == "385.9 ms to 578.9 ms"
    browser.eval("document.querySelector('button[data-move=all]').click()")
    browser.settle()
    assert browser.eval(shown) == "0 to 771.9 ms"


def test_the_tooltip_compares(browser, path):
    browser.open(path, 1280)
    box = browser.eval(
        "(() => { const c = document.querySelector(\"canvas[data-rank='0']\");"
        "c.scrollIntoView(); const r = c.getBoundingClientRect(); return [r.x, r.y]; })()"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 5, y=box[1] + 8)
    browser.settle()
    lines = browser.eval("document.querySelector('.tip').textContent").split("\n")
    assert lines[0] == "0prefill0.0 · predicted"
    assert lines[2] == "starts at 0, takes 21 ms"
    assert lines[3].startswith("measured: starts at 0")


def test_a_hostile_page_is_quiet(browser, tmp_path, make_plan, timeline):
    evil = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
    plan = make_plan(assumptions=[evil], rejected=[{"name": evil, "reason": evil}])
    file = tmp_path / "hostile.html"
    file.write_text(render_report(plan, None, timeline, None), encoding="utf-8")
    browser.open(file, 1280)
    assert browser.complaints() == []
    assert browser.requests() == [file.as_uri()]
    assert browser.eval("document.title") != "owned"


def test_long_names_fit_a_phone(browser, tmp_path, make_plan, plan):
    provenance = plan.provenance.model_dump(mode="json")
    provenance["profiles"] = {
        f"localhost/cpu:threads={n},isa=avx512_bf16": "ab" * 32 for n in (1, 2)
    }
    file = tmp_path / "names.html"
    file.write_text(render_report(make_plan(provenance=provenance)), encoding="utf-8")
    browser.open(file, 390)
    assert "isa=avx512_bf16" in browser.eval("document.body.textContent")
    assert browser.eval("document.documentElement.scrollWidth") <= 390
