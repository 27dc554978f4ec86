"""The exported page in headless Chromium classifies a dropped file and motion events as `muonssm predict` does.

Without Chromium or npm these tests are skipped and say so; see `tests/lab/report/test_page_in_browser.py`.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from muonssm.lab.activity import onnxruntime_web
from muonssm.lab.activity.export_onnx import Trained, new_folder
from muonssm.lab.activity.export_web import export_web
from muonssm.lab.activity.predict import predict
from muonssm.lab.activity.recordings import DamagedFileError
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.trainer import train
from muonssm.lab.report.colors import DARK, LIGHT, rgb
from tests.conftest import CHANNELS

from ..browser import open_browser
from ..report.test_page_in_browser import browser

pytestmark = pytest.mark.slow
TOLERANCE = 1e-5  # of probabilities, page against torch
ATTACK = "<img src=x onerror=alert(1)>"
# Drop a file, and wait for what the page makes of it.
DROP = """(async (name, text) => {
  const data = new DataTransfer(), status = document.getElementById("file-status");
  data.items.add(new File([text], name));
  status.textContent = "";
  document.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
  const result = document.getElementById("file-result");
  while (result.hidden && !status.classList.contains("wrong")) await new Promise(done => setTimeout(done, 5));
  return { status: status.textContent, rows: result.hidden ? null : readRows("file-windows") };
})(%s, %s)"""
READ_ROWS = """window.readRows = id => [...document.querySelectorAll(`#${id} tbody tr`)].map(row => ({
  samples: row.cells[0].textContent, label: row.cells[1].textContent, shown: row.cells[2].textContent,
  probability: Math.max(...JSON.parse(row.dataset.probabilities)),
}))"""
# Send motion events as a phone does; each is [seconds, x, y, z] in the units of the channels.
MOVE = """(async events => {
  for (const [seconds, ...values] of events) {
    const [x, y, z] = values.map((value, c) => value / SETTINGS.motion[c].scale);
    const event = new DeviceMotionEvent("devicemotion", { accelerationIncludingGravity: { x, y, z }, interval: 16 });
    Object.defineProperty(event, "timeStamp", { value: 1000 * seconds });
    window.dispatchEvent(event);
    while (live && live.samples.length) await new Promise(done => setTimeout(done));
  }
  while (live && live.work) await live.work;
  return { status: document.getElementById("live-status").textContent, rows: readRows("live-windows").reverse() };
})(%s)"""


@pytest.fixture(scope="module")
def runtime():
    """onnxruntime-web, from the cache or from npm."""
    browser()
    try:
        return onnxruntime_web.load()
    except onnxruntime_web.DownloadError as error:
        must = os.environ.get("MUONSSM_BROWSER", "") not in ("", "0") and "not installed" not in str(error)
        return pytest.fail(str(error)) if must else pytest.skip(str(error))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, changes):
    output = tmp_path_factory.mktemp("runs") / "run"
    train(Recipe.load("folder", [*changes, "training.epochs=2"]), output)
    recipe, metadata, model = RunFolder(output).load_model("activity")
    return Trained(recipe.task.data, metadata, model)


@pytest.fixture(scope="module")
def folder(trained, runtime, tmp_path_factory):
    """The exported page, in a folder whose name a URL has to escape."""
    path = tmp_path_factory.mktemp("pages") / "a page"
    with new_folder(path) as temporary:
        export_web(trained, temporary, runtime, f"Exercises {ATTACK}")
    return path


@pytest.fixture(scope="module")
def tab(folder, tmp_path_factory):
    """The page, opened as a file: no server."""
    with open_browser(tmp_path_factory.mktemp("browser")) as page:
        page.open((folder / "index.html").as_uri())
        wait_until_ready(page)
        yield page


def wait_until_ready(page):
    page.wait("document.body?.dataset.state !== undefined")
    assert page.evaluate("[document.body.dataset.state, document.getElementById('status').textContent]")[0] == "ready"
    page.evaluate(READ_ROWS)


def drop(page, name, text):
    return page.evaluate(DROP % (json.dumps(name), json.dumps(text)))


def assert_equal(rows, predictions):
    assert [row["samples"] for row in rows] == [f"{each.start} to {each.end}" for each in predictions]
    assert [row["label"] for row in rows] == [each.label for each in predictions]
    differences = [abs(row["probability"] - each.probability) for row, each in zip(rows, predictions, strict=True)]
    assert max(differences) <= TOLERANCE


def times_with_jitter(count, rate=60):
    return np.cumsum(np.random.default_rng(0).uniform(0.6, 1.4, count) / rate)


def variants(recording):
    """The same recording as several kinds of CSV file."""
    header, *lines = recording.read_text().splitlines()
    times = times_with_jitter(len(lines))
    in_ms = [f"{1e3 * t:.4f},{line}" for t, line in zip(times, lines, strict=True)]
    shuffled = [in_ms[i] for i in np.random.default_rng(1).permutation(len(in_ms))]
    dates = [f"2024-02-29T23:59:{i // 50:02}.{i % 50 * 20000:06}Z" for i in range(len(lines))]
    quoted = [f'"{d}";{line.replace(",", ";")};"a ""b"";c"' for d, line in zip(dates, lines, strict=True)]
    columns = [line.split(",") for line in lines]
    return {
        "published": recording.read_text(),
        "no-header": "\r\n".join(lines),
        "bom": "\ufeff" + recording.read_text() + "\n\n",
        "time": "\n".join([f"time_ms,{header}", *in_ms]),
        "shuffled-repeated": "\n".join([f"Timestamp (ms),{header}", *shuffled, *shuffled[:9]]),
        "dates": "\n".join([f"datetime;{header.replace(',', ';')};note", *quoted]),
        "short": "\n".join([header, *lines[:17]]),
        "other-columns": "\n".join(["acc_z,label,acc_x,acc_y", *(f"{z},w,{x},{y}" for x, y, z in columns)]),
        "number-formats": "\n".join([header, *(f" +{i}e-1 ,-1.,.{i}" for i in range(60))]),
    }


def damaged(recording):
    header, *lines = recording.read_text().splitlines()
    return {
        "empty": "",
        "header-alone": header,
        "one-sample": f"{header}\n{lines[0]}",
        "binary": "a\0b",
        "nan": f"{header}\n1,2,nan\n1,2,3",
        "too-large": f"{header}\n1,2,3e39\n1,2,3",
        "not-finite": f"{header}\n3.4e38,-3.4e38,3.4e38\n1,2,3",
        "underscore": f"{header}\n1,2,1_0\n1,2,3",
        "word": f"{header}\n1,2,three\n1,2,3",
        "missing": "acc_x,acc_y\n1,2\n3,4",
        "uneven": f"{header}\n1,2,3\n1,2",
        "twice": f"{header},acc_x\n1,2,3,4\n1,2,3,4",
        "columns": "1,2,3,4,5\n1,2,3,4,5",
        "quote": f'{header}\n"1,2,3\n1,2,3',
        "slow": f"time,{header}\n0,1,2,3\n0.02,1,2,3\n0.04,1,2,3\n1e6,1,2,3",
        "same-time": f"time,{header}\n5,1,2,3\n5,1,2,3",
        "no-such-date": f"time,{header}\n2024-02-30,1,2,3\n2024-03-01,1,2,3",
        "no-date": f"time,{header}\n2024-02-01,1,2,3\n,1,2,3",
        "attack": f"{ATTACK},acc_y,acc_z\n1,2,3\n1,2,3",
    }


def test_a_dropped_file_is_classified_as_predict_does(tab, trained, recordings, tmp_path):
    assert tab.evaluate("location.protocol") == "file:"
    for file in ("0-fast-0.csv", "1-still-1.csv"):
        for name, text in variants(recordings / file).items():
            path = tmp_path / f"{name}.csv"
            path.write_bytes(text.encode())
            dropped = drop(tab, path.name, text)
            assert dropped["rows"], f"{name}: {dropped['status']}"
            assert_equal(dropped["rows"], predict(trained.model, trained.config, trained.metadata, str(path)))
    assert tab.console == []


def test_damaged_files_are_refused_as_predict_does(tab, trained, recordings, tmp_path):
    for name, text in damaged(recordings / "0-fast-0.csv").items():
        path = tmp_path / f"{name}.csv"
        path.write_bytes(text.encode())
        with pytest.raises((DamagedFileError, ValueError)):
            predict(trained.model, trained.config, trained.metadata, str(path))
        dropped = drop(tab, path.name, text)
        assert dropped["rows"] is None, name
        assert dropped["status"].startswith(path.name)
    assert tab.console == []


def test_text_of_a_file_is_never_html(tab):
    dropped = drop(tab, f"{ATTACK}.csv", f"{ATTACK},b,c\n1,2,3\n4,5,6")
    assert dropped["status"].count(ATTACK) == 2
    assert tab.evaluate("document.images.length") == 0
    assert tab.evaluate("document.querySelector('h1').textContent") == f"Exercises {ATTACK}"
    assert not [address for address in tab.requests if not address.startswith(("file:", "blob:", "data:"))]
    assert tab.console == []


def test_motion_events_are_classified_as_the_same_recording(tab, trained, recordings, tmp_path):
    """Events at some 60 Hz, with jitter; a model at 50 Hz classifies windows as they end, one without, at Stop."""
    header, *lines = (recordings / "2-fast-1.csv").read_text().splitlines()
    samples = np.array([[float(cell) for cell in line.split(",")] for line in lines])
    times = times_with_jitter(len(samples))
    path = tmp_path / "moved.csv"
    np.savetxt(
        path, np.column_stack([times, samples]), delimiter=",", header=f"time,{header}", comments="", fmt="%.17g"
    )
    for rate in (None, 50.0):
        expected = predict(trained.model, trained.config, {**trained.metadata, "rate": rate}, str(path))
        assert len(expected) >= 3
        tab.evaluate(f"SETTINGS.rate = {json.dumps(rate)}")
        tab.evaluate("document.getElementById('live').click()")
        tab.wait("document.getElementById('live').textContent === 'Stop'")
        moved = tab.evaluate(MOVE % json.dumps(np.column_stack([times + 12.5, samples]).tolist()))
        if rate is None:
            assert moved["rows"] == []
            moved = tab.evaluate("stopLive().then(() => ({ rows: readRows('live-windows') }))")
        assert_equal(moved["rows"], expected)
    empty, without_acceleration = "{}", "{ rotationRate: { alpha: 1, beta: 2, gamma: 3 } }"
    for content, stops in ((empty, False), (without_acceleration, True)):
        event = f"new DeviceMotionEvent('devicemotion', {content})"
        assert tab.evaluate(f"window.dispatchEvent({event}) && live === null") is stops
    assert "must measure accelerationIncludingGravity.x" in tab.evaluate(
        "document.getElementById('live-status').textContent"
    )
    assert tab.evaluate("document.getElementById('live').textContent") == "Start"
    assert tab.console == []


@pytest.mark.parametrize(("dark", "colors"), [(False, LIGHT), (True, DARK)], ids=["light", "dark"])
def test_the_page_from_a_server_fits_a_phone(folder, recordings, tmp_path, dark, colors):
    handler = functools.partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, open_browser(tmp_path) as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for width in (1280, 390):
            page.open(f"http://127.0.0.1:{server.server_port}/", width=width, dark=dark)
            page.wait("location.protocol === 'http:'")
            wait_until_ready(page)
            assert drop(page, "a.csv", (recordings / "0-fast-0.csv").read_text())["rows"]
            page.evaluate("document.querySelector('details').open = true")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth && innerWidth") == width
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb{rgb(colors['page'])}"
            page.send("Page.navigate", url="about:blank")
            page.wait("location.protocol === 'about:'")
        server.shutdown()
        assert page.console == []


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_the_folder_is_a_few_static_files(folder, trained):
    names = sorted(path.name for path in Path(folder).iterdir())
    assert names == sorted([
        "index.html", "style.css", "recording.js", "classifier.js", "motion.js", "page.js", "model.js", "runtime.js",
        "ort.wasm.min.js",
    ])  # fmt: skip
    assert tuple(trained.metadata["channels"]) == CHANNELS
    page = (folder / "index.html").read_text()
    assert ATTACK not in page
    assert "http://" not in page
    assert "https://" not in page
