"""The page in headless Chromium, as wide as a desktop and a phone: no error, no missing image, no sideways scrolling.

Without Chromium these tests are skipped; if MUONSSM_BROWSER is set (or, without it, CI), they fail instead.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from muonssm.lab.report.colors import DARK, LIGHT, rgb
from muonssm.lab.report.report import write_report

from .runs import make_everything

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--no-proxy-server",
    "--enable-logging=stderr", "--window-size=1400,1000",
)  # fmt: skip
WIDTHS = (1280, 390)
SECONDS = 240
# Open the page in frames of these widths and send back measurements once all images are decoded.
PROBE = """<!doctype html><meta charset="utf-8"><body><script>
const page = %s, errors = [];
const pictures = async inside => {
  const lost = [];
  for (const element of inside.querySelectorAll("img, image")) {
    const image = new Image();
    image.src = element.getAttribute("src") || element.getAttribute("href");
    try { await image.decode(); } catch (error) { lost.push(image.src.slice(0, 60)); continue; }
    if (!(image.naturalWidth > 0)) lost.push(image.src.slice(0, 60));
    if (element.tagName === "IMG" && !(element.naturalWidth > 0)) lost.push("shown: " + image.src.slice(0, 60));
  }
  return lost;
};
const look = width => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.onload = async () => {
    const inside = frame.contentDocument, root = inside.documentElement, style = getComputedStyle(inside.body);
    const boxes = [...inside.querySelectorAll("figure svg, figure img")].map(each => each.getBoundingClientRect());
    done({
      inner: frame.contentWindow.innerWidth, scroll: root.scrollWidth, background: style.backgroundColor,
      text: inside.body.innerText.length, count: inside.querySelectorAll("img, image").length,
      flat: boxes.filter(box => box.width < 20 || box.height < 20).length, drawn: boxes.length,
      lost: await pictures(inside),
    });
  };
  frame.srcdoc = page;
  document.body.append(frame);
});
Promise.all(%s.map(look)).then(found => fetch("/found", {method: "POST", body: JSON.stringify(found)}));
</script>"""


def browser():
    """Return the path of a browser; without one, skip the test, or fail if a browser is required."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path:
            return path
    must = os.environ.get("MUONSSM_BROWSER", os.environ.get("CI", ""))
    if must.lower() not in ("", "0", "false"):
        pytest.fail("there is no chromium, chromium-browser or google-chrome to open the page in")
    return pytest.skip("there is no chromium, chromium-browser or google-chrome to open the page in")


@contextmanager
def served(page):
    """Serve a page; yield its address and the queue of what it sends back."""
    found = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/" else 204)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page.encode() if self.path == "/" else b"")

        def do_POST(self):
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", found
        server.shutdown()


def look(text, folder, *flags):
    """Open a page; return the measurements at each of WIDTHS, and the lines of the browser's console."""
    # A </script> in the page must not end the probe's own script.
    page = json.dumps(text).replace("</", "<\\/").replace("<!--", "<\\!--")
    folder.mkdir()
    log = folder / "log.txt"
    command = [browser(), *FLAGS, *flags, f"--user-data-dir={folder / 'profile'}"]
    with served(PROBE % (page, list(WIDTHS))) as (address, answers), log.open("w") as errors:
        opened = subprocess.Popen([*command, address], stdout=errors, stderr=errors, start_new_session=True)
        try:
            found = answers.get(timeout=SECONDS)
        except queue.Empty:
            pytest.fail(f"the page did not load in {SECONDS} s: {log.read_text()[-2000:]}")
        finally:
            os.killpg(opened.pid, signal.SIGKILL)
            opened.wait()
    return found, [line for line in log.read_text(errors="replace").splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    browser()
    root = tmp_path_factory.mktemp("pages")
    return write_report(make_everything(root / "runs"), root / "all.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "colors"), [(1, LIGHT), (0, DARK)], ids=["light", "dark"])
def test_the_page_opens_without_error_and_fits(page, tmp_path, scheme, colors):
    found, console = look(page, tmp_path / "look", f"--blink-settings=preferredColorScheme={scheme}")
    assert console == []
    assert [each["inner"] for each in found] == list(WIDTHS)
    for each in found:
        assert each["scroll"] <= each["inner"]
        assert each["lost"] == []
        assert each["count"] >= 10
        assert each["flat"] == 0
        assert each["drawn"] >= 20
        assert each["text"] > 2000
        assert each["background"] == f"rgb{rgb(colors['page'])}"


@pytest.mark.slow
def test_a_broken_page_is_detected(page, tmp_path):
    """The same measurements find a broken image, a script (which the policy refuses) and a wide box."""
    broken = (
        '<p><img alt="x" src="data:image/png;base64,AAAA"></p><div style="width:600px">wide</div>'
        "<script>nothing.there()</script></body>"
    )
    found, console = look(page.replace("</body>", broken), tmp_path / "look")
    assert any("Content Security Policy" in line for line in console)
    assert [len(each["lost"]) for each in found] == [1, 1]
    assert [each["scroll"] <= each["inner"] for each in found] == [True, False]


def test_a_required_browser_that_is_missing_fails(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for variables, outcome in (
        ({}, pytest.skip.Exception),
        ({"CI": "true"}, pytest.fail.Exception),
        ({"MUONSSM_BROWSER": "1"}, pytest.fail.Exception),
        ({"CI": "true", "MUONSSM_BROWSER": "0"}, pytest.skip.Exception),
    ):
        with monkeypatch.context() as context:
            for name in ("CI", "MUONSSM_BROWSER"):
                context.delenv(name, raising=False)
            for name, value in variables.items():
                context.setenv(name, value)
            with pytest.raises(outcome, match="there is no chromium"):
                browser()
