"""The explorer of the docs in a browser: its maths against the library; mouse, touch and keys."""

import html
import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import sparsetopk as st
from scalars import PNorm, TwoSidedPNorm, operator_of, relaxed
from sparsetopk._numpy.hard import hard_mask

client = pytest.importorskip("websockets.sync.client")

EXPLORER = Path(__file__).parents[1] / "docs" / "explorer"
PAGE = (EXPLORER / "index.html").as_uri()
FILES = {path.as_uri() for path in EXPLORER.iterdir()}
DESKTOP, PHONE = (1280, 900), (390, 844)
START = "st.topk_mask([1.6, 0.7, 0.4, -0.3, 0.2, -1.1], k=2, lam=0.6, p=3/2)"


class Browser:
    """One page of a browser, driven over the DevTools protocol."""

    def __init__(self, socket):
        self.socket, self.session, self.last = socket, None, 0
        self.events, self.pressed = [], False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.last += 1
        message = {"id": self.last, "method": method, "params": params}
        self.socket.send(
            json.dumps(message | ({"sessionId": self.session} if self.session else {}))
        )
        while (answer := json.loads(self.socket.recv(60))).get("id") != self.last:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def wait_for(self, event):
        while not any(seen.get("method") == event for seen in self.events):
            self.events.append(json.loads(self.socket.recv(60)))

    def open(self, size=DESKTOP, hash=""):
        self.call("Page.navigate", url="about:blank")
        phone = size == PHONE
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **dict(zip(("width", "height"), size, strict=True)),
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.events.clear()
        self.call("Page.navigate", url=PAGE + hash)
        self.wait_for("Page.loadEventFired")

    def js(self, expression):
        """The value of an expression; it is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def centre(self, selector):
        """The middle of an element in the window, scrolled to if need be."""
        return self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )

    def mouse(self, kind, x, y):
        self.pressed = {"mousePressed": True, "mouseReleased": False}.get(kind, self.pressed)
        moved = kind == "mouseMoved" and not self.pressed
        held = {"button": "none" if moved else "left", "buttons": int(self.pressed)}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, clickCount=1, **held)

    def click(self, selector):
        at = self.centre(selector)
        self.mouse("mousePressed", *at)
        self.mouse("mouseReleased", *at)

    def key(self, name):
        codes = {"Tab": 9, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            key = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name]}
            self.call("Input.dispatchKeyEvent", type=kind, **key)

    def complaints(self):
        """What the console was told, and requests that go anywhere but to the files of the page."""
        wrong = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        urls = {event["params"]["request"]["url"].split("#")[0] for event in sent}
        elsewhere = {url for url in urls - FILES if not url.startswith("data:")}
        return [e for e in self.events if e.get("method") in wrong], elsewhere


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not on the path: the explorer was not opened in a browser")
    profile = tmp_path_factory.mktemp("profile")
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            port, path = _endpoint(profile / "DevToolsActivePort")
            url = f"ws://127.0.0.1:{port}{path}"
            with client.connect(url, max_size=None, proxy=None) as socket:
                yield Browser(socket)
        finally:
            process.terminate()


def _endpoint(file):
    """Where the browser listens, as soon as it says so."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if file.exists() and len(lines := file.read_text().split()) == 2:
            return lines
        time.sleep(0.05)
    raise TimeoutError("the browser does not listen")


@pytest.fixture
def page(browser):
    yield browser
    assert browser.complaints() == ([], set())


# What the page shows, as text that a reader, or a screen reader, gets.
SHOWN = """(() => {
  const labels = (selector) =>
    [...document.querySelectorAll(selector)].map((e) => e.getAttribute("aria-label"));
  const text = (id) => document.getElementById(id).textContent;
  const bars = [...document.querySelectorAll("#x [role=slider]")];
  return {
    x: bars.map((e) => Number(e.getAttribute("aria-valuenow"))),
    y: labels("#y [role=listitem]"),
    heights: [...document.querySelectorAll("#y .bar")].map((e) => Number(e.getAttribute("height"))),
    jacobian: labels("#jacobian [role=gridcell]"),
    dk: labels("#dk [role=listitem]"),
    dlam: labels("#dlam [role=listitem]"),
    sum: text("sum"), nonzeros: text("nonzeros"), python: text("python"), hash: location.hash,
  };
})()"""


def number(label):
    return float(label.split(" = ")[-1].split(",")[0].replace("−", "-"))


def shown_as_the_library_says(page):
    """What is shown, once it is seen to be what the call that the page prints returns."""
    shown = page.js(SHOWN)
    call, namespace = shown["python"], {"st": st}
    name, arguments = re.fullmatch(r"st\.(\w+)\((.*)\)", call).groups()
    y = eval(call, namespace)
    n = y.size
    numbers = {
        key: np.array([number(label) for label in shown[key]]) for key in ("y", "dk", "dlam")
    }
    np.testing.assert_allclose(numbers["y"], y, atol=5.1e-5)
    kinds = [label.split(", ")[1] for label in shown["y"]]
    np.testing.assert_array_equal([kind == "zero" for kind in kinds], y == 0)
    jacobian = np.array([number(label) for label in shown["jacobian"]]).reshape(n, n)
    expected = eval(f"st.{name}_jacobian({arguments})", namespace)
    np.testing.assert_allclose(jacobian, expected, rtol=6e-5, atol=5.1e-5)  # tiny ones: two digits
    for key in ("dk", "dlam"):
        expected = eval(f"st.{name}_jvp({arguments}, {key}=1.0)", namespace)
        np.testing.assert_allclose(numbers[key], expected, rtol=6e-5, atol=5.1e-5)
    np.testing.assert_allclose(number(shown["sum"]), y.sum(), atol=5.1e-4)
    assert shown["nonzeros"] == f"{np.count_nonzero(y)} of {n}"
    top = np.abs(y).max()
    if top > 0:  # the bars are as long as the numbers say
        heights = np.array(shown["heights"])
        np.testing.assert_allclose(heights / heights.max(), np.abs(y) / top, atol=1e-9)
    return shown


# ---- The maths ----

OPERATORS = (
    {"operator": "mask", "twoSided": False},
    {"operator": "mask", "twoSided": True},
    {"operator": "mag", "debias": True},
    {"operator": "mag", "debias": False},
)


def random_problem(rng, i):
    """Ties are exact, and so are zeros; entries are otherwise continuous, so that no case lies at a
    kink, where a Jacobian does not exist."""
    n = int(rng.integers(1, 13))
    x = rng.standard_normal(n)
    if rng.random() < 0.4:
        x = rng.choice(x, n) * rng.choice([-1, 1], n)
    if rng.random() < 0.2:
        x[rng.integers(n)] = 0.0
    closed_forms = [2.0, 1.5, 4 / 3]  # the others take the library ten times as long
    p = rng.choice(closed_forms if rng.random() < 0.8 else [1.2, 3.0, rng.uniform(1.1, 4.0)])
    lam = 0.0 if rng.random() < 0.15 else 10 ** rng.uniform(-3, 2)
    k = rng.integers(n + 1) if rng.random() < 0.4 else rng.uniform(0, n)
    return OPERATORS[i % 4] | {"x": x.tolist(), "p": float(p), "lam": lam, "k": float(k)}


def library(problem):
    """The same by the library: y, its derivatives, the threshold and what became of each entry."""
    x, k, lam, p = (problem[key] for key in ("x", "k", "lam", "p"))
    mask = problem["operator"] == "mask"
    options = {"two_sided": problem["twoSided"]} if mask else {"debias": problem["debias"]}
    options |= {"p": p}
    name = f"topk_{problem['operator']}"
    jvp = getattr(st, f"{name}_jvp")
    result = {
        "y": getattr(st, name)(x, k, lam, **options),
        "jacobian": getattr(st, f"{name}_jacobian")(x, k, lam, **options),
        "dk": jvp(x, k, lam, dk=1.0, **options),
        "dlam": jvp(x, k, lam, dlam=1.0, **options),
    }
    pull = np.cos(np.arange(len(x)))
    cotangents = getattr(st, f"{name}_vjp")(x, k, lam, dy=pull, **options)
    return result | {"pull": pull, "vjp": cotangents} | _solution(problem)


def _solution(problem):
    x, k, lam = (np.atleast_2d(problem[key]) for key in ("x", "k", "lam"))
    mask = problem["operator"] == "mask"
    size = x if mask else np.abs(x)
    if problem["lam"] == 0:
        selected = hard_mask(size, k)[0]
        inside, whole = (selected > 0) & (selected < 1), selected == 1
        at = np.sort(size[0])[::-1][min(int(problem["k"]), x.size - 1)]
        return {"size": size[0], "inside": inside, "whole": whole, "threshold": at}
    reg = (TwoSidedPNorm if problem.get("twoSided") else PNorm)(problem["p"])
    solved = relaxed(size, k, lam, operator_of(reg, "identity" if mask else "half_square"))
    blocks = solved.blocks
    # A block of one entry with weight 1 is an entry selected whole: the two meet at the boundary.
    whole = (blocks.weight[0] == 1) & (blocks.size[0] == 1)
    inside = solved.split.inside[0] & ~whole
    at = blocks.u[0][inside][0] if inside.any() else None  # no block: any value in a gap will do
    return {"size": size[0], "inside": inside, "whole": whole, "threshold": at}


def assert_close(actual, expected, floor, problem, what):
    """To 1e-8 of the largest entry, or to what rounding leaves where everything cancels."""
    actual, expected = np.asarray(actual, dtype=float), np.asarray(expected)
    error, largest = np.abs(actual - expected).max(), np.abs(expected).max()
    assert error <= 1e-8 * largest + floor, (what, error, largest, problem)


def test_equals_the_library_on_1000_random_cases(page):
    rng = np.random.default_rng(0)
    problems = [random_problem(rng, i) for i in range(1000)]
    page.open()
    results = json.loads(page.js(f"JSON.stringify({json.dumps(problems)}.map(relaxed.evaluate))"))
    seen = set()
    for problem, result in zip(problems, results, strict=True):
        ours = library(problem)
        steepest = 1e-13 * max(1.0, 1 / problem["lam"] if problem["lam"] else 0.0)
        for key in ("y", "jacobian", "dlam"):
            assert_close(result[key], ours[key], steepest, problem, key)
        assert_close(result["dk"], ours["dk"], 0.0, problem, "dk")
        pull, (in_x, in_k, in_lam) = ours["pull"], ours["vjp"]
        assert_close(pull @ np.array(result["jacobian"]), in_x, 100 * steepest, problem, "vjp in x")
        if ours["inside"].any():  # else the derivative in k is one-sided
            assert_close(pull @ np.array(result["dk"]), in_k, 100 * steepest, problem, "vjp in k")
        assert_close(pull @ np.array(result["dlam"]), in_lam, 100 * steepest, problem, "vjp in lam")
        check_threshold(problem, result, ours)
        seen |= set(result["kind"]) | features(problem)
    assert seen == {
        "zero",
        "whole",
        "fractional",
        "hard",
        "k = 0",
        "k = n",
        "tie",
        "n = 1",
        "n = 12",
    }


def features(problem):
    x, k = problem["x"], problem["k"]
    return {
        name
        for name, holds in {
            "hard": problem["lam"] == 0,
            "k = 0": k == 0,
            "k = n": k == len(x),
            "tie": len(set(x)) < len(x),
            f"n = {len(x)}": len(x) in (1, 12),
        }.items()
        if holds
    }


def check_threshold(problem, result, ours):
    """The threshold, the interval around it and the kinds fit each other and the library."""
    kind, size = np.array(result["kind"]), ours["size"]
    np.testing.assert_array_equal(kind == "fractional", ours["inside"], str(problem))
    np.testing.assert_array_equal(kind == "whole", ours["whole"], str(problem))
    if ours["threshold"] is not None:
        rounding = (
            1e-13 if problem["operator"] == "mask" else 0.0
        )  # that of a difference, x - lam d
        expected = pytest.approx(ours["threshold"], rel=1e-8, abs=rounding)
        assert result["threshold"] == expected, problem
    slack = 1e-9 * (1 + problem["lam"])
    assert (size[kind == "zero"] <= result["from"] + slack).all(), problem
    assert (size[kind == "whole"] >= result["to"] - slack).all(), problem
    between = size[kind == "fractional"]
    assert (between >= result["from"] - slack).all(), problem
    assert (between <= result["to"] + slack).all(), problem


# ---- The page ----


@pytest.mark.parametrize("operator", ["mask", "two-sided", "debiased", "biased"])
def test_dragging_a_bar_moves_x_and_all_that_follows(page, operator):
    page.open(hash=f"#x=1.6,0.7,0.4,-0.3,0.2,-1.1&k=2.5&lam=0.6&p=3/2&operator={operator}")
    before = shown_as_the_library_says(page)
    x, y = page.centre("#x [aria-label=x3] .knob")
    page.mouse("mouseMoved", x, y)
    page.mouse("mousePressed", x, y)
    page.mouse("mouseMoved", x + 4, y - 20)
    during = shown_as_the_library_says(page)
    page.mouse("mouseMoved", x + 200, y - 60)  # outside its column: the bar keeps the pointer
    assert page.centre("#x [aria-label=x3] .knob")[1] == pytest.approx(y - 60, abs=1)
    page.mouse("mouseReleased", x + 200, y - 60)
    after = shown_as_the_library_says(page)
    page.mouse("mouseMoved", x, y)
    assert page.js(SHOWN)["x"] == after["x"]
    assert before["x"][2] < during["x"][2] < after["x"][2]
    assert before["y"] != during["y"] != after["y"]
    for now in (during, after):
        assert now["x"][:2] + now["x"][3:] == before["x"][:2] + before["x"][3:]


def test_a_drag_goes_on_while_the_page_grows(page):
    page.open()
    x, y = page.centre("#x [aria-label=x3] .knob")
    page.mouse("mousePressed", x, y)
    height = page.js("document.querySelector('main').clientHeight")
    page.js("document.getElementById('python').style.fontSize = '60px'")  # as if it had more lines
    page.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.js("document.querySelector('main').clientHeight") > height
    page.mouse("mouseMoved", x, y + 50)
    page.mouse("mouseReleased", x, y + 50)
    assert page.centre("#x [aria-label=x3] .knob")[1] == pytest.approx(y + 50, abs=1)


def test_a_bar_stays_within_its_limits(page):
    page.open()
    x, y = page.centre("#x [aria-label=x1] .knob")
    page.mouse("mousePressed", x, y)
    for to, limit in ((1, 3.0), (899, -3.0)):
        page.mouse("mouseMoved", x, to)
        assert shown_as_the_library_says(page)["x"][0] == limit
    page.mouse("mouseReleased", x, 899)


def test_keys_move_a_bar(page):
    page.open()
    page.key("Tab")
    assert page.js("document.activeElement.textContent") == "Documentation"
    for _ in range(2):
        page.key("Tab")
    assert page.js("document.activeElement.getAttribute('aria-label')") == "x2"
    steps = {"ArrowUp": 0.75, "ArrowRight": 0.8, "ArrowDown": 0.75, "ArrowLeft": 0.7}
    steps |= {"PageUp": 1.2, "PageDown": 0.7, "Home": -3.0, "End": 3.0}
    for key, expected in steps.items():
        page.key(key)
        assert shown_as_the_library_says(page)["x"] == [1.6, expected, 0.4, -0.3, 0.2, -1.1]
    said = page.js("document.activeElement.getAttribute('aria-valuetext')")
    assert said == "3.00, y is 1.0000, whole"


@pytest.mark.parametrize(
    ("slider", "keys", "part"),
    [
        ("k", ["ArrowRight"], "k=2.05"),
        ("k", ["End"], "k=6,"),
        ("k", ["Home"], "k=0,"),
        ("lam", ["End"], "lam=100,"),
        ("lam", ["Home"], "lam=0,"),
        ("lam", ["Home", "ArrowRight"], "lam=0.001,"),
        ("p", ["Home"], "p=1.1)"),
        ("p", ["End"], "p=4)"),
        ("n", ["End"], "0.9, -0.6, 1.2, 0.0, -1.7, 0.5]"),
        ("n", ["Home"], "[1.6, 0.7, 0.4]"),
    ],
)
def test_sliders(page, slider, keys, part):
    page.open()
    page.js(f"document.getElementById('{slider}').focus()")
    for key in keys:
        page.key(key)
    assert part in shown_as_the_library_says(page)["python"]


def test_a_slider_follows_the_mouse(page):
    page.open()
    x, y = page.centre("#k")
    page.mouse("mousePressed", x, y)
    page.mouse("mouseReleased", x, y)
    assert "k=3," in shown_as_the_library_says(page)["python"]


def test_taking_entries_away_keeps_k_within_them(page):
    page.open(hash="#x=1,2,3,0.5,-1&k=5&lam=0.5&p=2&operator=mask")
    page.js("document.getElementById('n').focus()")
    page.key("Home")
    call = "st.topk_mask([1.0, 2.0, 3.0], k=3, lam=0.5, p=2)"
    assert shown_as_the_library_says(page)["python"] == call
    page.key("End")
    assert shown_as_the_library_says(page)["x"][:5] == [1, 2, 3, 0.5, -1]


@pytest.mark.parametrize(
    ("operator", "name", "option"),
    [
        ("two-sided", "mask", ", two_sided=True"),
        ("debiased", "mag", ""),
        ("biased", "mag", ", debias=False"),
    ],
)
def test_the_operator_is_chosen_by_a_click(page, operator, name, option):
    page.open()
    page.click(f"input[value={operator}]")
    call = shown_as_the_library_says(page)["python"]
    assert call == START.replace("_mask", f"_{name}").replace("3/2)", f"3/2{option})")


def test_buttons(page):
    page.open()
    for i, p in enumerate(("1.2", "4/3", "3/2", "2", "3")):
        page.click(f"#norms button:nth-child({i + 1})")
        assert shown_as_the_library_says(page)["python"].endswith(f"p={p})")
    calls = (
        "st.topk_mask([3.0, 1.0, 0.4, 1.4], k=2, lam=1, p=4/3)",
        "st.topk_mask([1.0, 1.0, 1.0, 0.0], k=2, lam=0.5, p=2)",
        "st.topk_mask([0.45, 0.3, 0.2, -0.5], k=2, lam=1, p=4/3)",
        "st.topk_mag([-2.2, 1.1, 0.9, -0.7, 0.3, -0.1], k=2, lam=0.3, p=2)",
    )
    for i, call in enumerate(calls):
        page.click(f"#presets button:nth-child({i + 1})")
        assert shown_as_the_library_says(page)["python"] == call
        assert page.js("document.getElementById('note').textContent")


def test_ties_of_the_hard_mask_go_to_the_lowest_index(page):
    page.open(hash="#x=1,1,1,0&k=2&lam=0&p=2&operator=mask")
    labels = shown_as_the_library_says(page)["y"]
    assert [number(label) for label in labels] == [1, 1, 0, 0]


def test_the_address_holds_the_state(page):
    hash = "#x=0.1,-2,3,1.25&k=1.5&lam=0.02&p=1.7&operator=biased"
    page.open(hash=hash)
    call = "st.topk_mag([0.1, -2.0, 3.0, 1.25], k=1.5, lam=0.02, p=1.7, debias=False)"
    assert shown_as_the_library_says(page)["python"] == call
    page.js("document.querySelector('[aria-label=x1]').focus()")
    page.key("ArrowUp")
    page.js("new Promise((done) => setTimeout(done, 400))")
    assert page.js("location.hash") == hash.replace("=0.1,", "=0.15,")
    for hash in ("#x=1,2", "#x=1,2,9&k=1&lam=1&p=2&operator=mask", "#x=1,2,3&k=4&lam=1&p=2", "#hm"):
        page.open(hash=hash)
        assert shown_as_the_library_says(page)["python"] == START


def test_links_of_the_docs_show_what_they_hold(page):
    text = html.unescape((EXPLORER.parent / "explorer.md").read_text())
    hashes = re.findall(r'href="explorer/index\.html(#[^"]*)"', text)
    assert len(hashes) > 3
    for hash in hashes:
        page.open(hash=hash)
        shown = shown_as_the_library_says(page)
        x, k, lam, p, _ = (part.split("=")[1] for part in hash[1:].split("&"))
        assert shown["x"] == [float(entry) for entry in x.split(",")]
        assert f"k={k}, lam={lam}, p={p}" in shown["python"]


def test_cells_of_the_jacobian_are_read_by_pointing_and_by_keys(page):
    page.open()
    readout = "document.getElementById('readout').textContent"
    jacobian = eval(START.replace("_mask", "_mask_jacobian"), {"st": st})
    page.mouse("mouseMoved", *page.centre("#jacobian [aria-label^='dy2/dx3 ']"))
    assert page.js(readout).startswith("∂y₂ / ∂x₃")
    assert number(page.js(readout)) == pytest.approx(jacobian[1, 2], rel=1e-4)
    page.mouse("mouseMoved", 5, 5)
    page.js("document.querySelector('#jacobian [tabindex=\"0\"]').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.key(key)
    assert page.js(readout).startswith("∂y₃ / ∂x₂")
    assert number(page.js(readout)) == pytest.approx(jacobian[2, 1], rel=1e-4)


def touch(page, kind, *point):
    points = [dict(zip("xy", point, strict=True))] if point else []
    page.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)


def test_a_finger_drags_a_bar_and_does_not_scroll(page):
    page.open(PHONE)
    before = shown_as_the_library_says(page)
    x, y = page.centre("#x [aria-label=x2] .knob")
    touch(page, "touchStart", x, y)
    for step in range(1, 8):
        touch(page, "touchMove", x, y + 8 * step)
    during = shown_as_the_library_says(page)
    touch(page, "touchEnd")
    assert page.centre("#x [aria-label=x2] .knob")[1] == pytest.approx(y + 56, abs=1)
    assert during["x"][1] < before["x"][1]
    assert during["x"][:1] + during["x"][2:] == before["x"][:1] + before["x"][2:]
    assert page.js("scrollY") == 0


@pytest.mark.parametrize("n", [3, 6, 12])
def test_a_phone_has_room_for_it(page, n):
    entries = ",".join(["-1.25", "0.55", "3", "-3"] * 3).split(",")[:n]
    for operator in ("two-sided", "debiased"):
        page.open(PHONE, f"#x={','.join(entries)}&k=2.5&lam=0.7&p=1.7&operator={operator}")
        assert page.js("document.documentElement.scrollWidth <= innerWidth")
        assert page.js("innerWidth") == PHONE[0]
        outside = page.js(
            "[...document.querySelectorAll('body *:not(.defs *)')]"
            ".filter((e) => e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML)"
        )
        assert outside == []
        widths = page.js(
            "[...document.querySelectorAll('#x .hit')].map((e) => e.getBoundingClientRect().width)"
        )
        assert min(widths) >= (24 if n <= 6 else 20)


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_it_is_made_of_its_own_files(page, size):
    page.open(size)
    sent = [e for e in page.events if e.get("method") == "Network.requestWillBeSent"]
    urls = {event["params"]["request"]["url"] for event in sent}
    assert {url for url in urls if not url.startswith("data:")} == FILES
    page.open()
    page.js("console.error('seen')")
    assert len(page.complaints()[0]) == 1  # the check that every test ends with sees what it should
    page.events.clear()
