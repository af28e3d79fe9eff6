"""The report: complete, escaped, and one file."""

import html
import json
import os
import re
import shutil
import subprocess
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from sparsetopk.experiments import EXPERIMENTS, figures, report, runs, timing
from sparsetopk.experiments.runs import Claim, ExperimentError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report on two small experiments; the other three have not been run."""
    out = tmp_path_factory.mktemp("report")
    options = runs.Options(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            timing, "METHODS", tuple(m for m in timing.METHODS if m.framework == "torch")[:4]
        )
        timing.measure_all(options, {"sizes": [16, 32], "seconds": 0.001})
        figures.run(options)
        path = report.write(out)
        text = path.read_text()
    assert path == out / "report.html"
    assert not list(out.glob("*.part"))
    return out, text


def test_every_claim_and_figure_is_there(made):
    out, text = made
    for name, module in (("figures", figures), ("timing", timing)):
        result = json.loads((out / name / "result.json").read_text())
        assert f'<h2 id="{name}">{module.TITLE}</h2>' in text
        for claim in module.claims(result):
            for part in (claim.text, claim.paper, claim.ours, claim.note):
                assert text.count(html.escape(part)) >= 2  # in the summary and in the section
        for caption in module.CAPTIONS.values():
            assert f"<figcaption>{html.escape(caption)}</figcaption>" in text
        for title, rows in module.tables(result).items():
            assert html.escape(title) in text
            assert html.escape(rows[-1][0]) in text
        for version in result["versions"].values():
            assert version in text
    assert text.count("<img ") == len(figures.CAPTIONS) + len(timing.CAPTIONS)


@pytest.mark.parametrize(("name", "module"), [("figures", figures), ("timing", timing)])
def test_every_figure_is_there_as_png_and_svg(made, name, module):
    directory = made[0] / name
    for suffix in ("png", "svg"):
        assert {path.stem for path in directory.glob(f"*.{suffix}")} == set(module.CAPTIONS)
    for figure in module.CAPTIONS:
        png = (directory / f"{figure}.png").read_bytes()
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(png) > 10_000
        root = ElementTree.parse(directory / f"{figure}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_what_was_not_run_is_listed_as_not_measured(made):
    _, text = made
    assert set(report.PAPER) == set(EXPERIMENTS)
    not_run = [claim for name in ("pruning", "finetune", "moe") for claim in report.PAPER[name]]
    for claim in not_run:
        row = re.search(rf"<tr><td>{re.escape(html.escape(claim[0]))}.*", text)
        assert html.escape(claim[1]) in row[0]
        assert "not run" in row[0]
        assert '<span class="verdict not-measured">not measured</span>' in row[0]


def test_it_is_one_file(made):
    _, text = made
    links = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'>\s]+)""", text)
    assert links
    assert all(link.startswith(("data:image/svg+xml;base64,", "#")) for link in links)
    assert not re.search(r"<script|<link|@import|url\(|https?:", text)
    anchors = {link[1:] for link in links if link.startswith("#")}
    assert anchors == set(EXPERIMENTS)
    assert all(f'id="{anchor}"' in text for anchor in anchors)


def test_html_is_escaped(tmp_path, monkeypatch):
    evil = "<script>alert('&')</script>"

    def draw(result, directory):
        (directory / "a_curve.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")

    module = SimpleNamespace(
        TITLE=evil,
        CAPTIONS={"a_curve": evil},
        draw=draw,
        claims=lambda result: [Claim(evil, evil, evil, "partly", evil)],
        tables=lambda result: {evil: [[evil], [evil]]},
    )
    monkeypatch.setattr(report, "import_module", lambda *_: module)
    (tmp_path / "moe").mkdir()
    runs.write_json(
        tmp_path / "moe" / "result.json",
        {
            "form": "quick",
            "settings": {"of": evil, evil: [1]},
            "versions": {"of": evil},
            "results": {},
        },
    )
    text = report.write(tmp_path).read_text()
    assert "<script" not in text
    assert text.count(html.escape(evil)) >= 14
    assert f"<figcaption>{html.escape(evil)}</figcaption>" in text


def test_figures_are_drawn_again_when_the_result_is_newer(tmp_path, monkeypatch):
    drawn = []

    def draw(result, directory):
        drawn.append(result["form"])
        (directory / "a.svg").write_text("<svg/>")

    module = SimpleNamespace(
        TITLE="t",
        CAPTIONS={"a": "a"},
        draw=draw,
        claims=lambda result: [],
        tables=lambda result: {},
    )
    monkeypatch.setattr(report, "import_module", lambda *_: module)
    path = tmp_path / "moe" / "result.json"
    path.parent.mkdir()
    content = {"settings": {}, "versions": {}, "results": {}}
    runs.write_json(path, {"form": "quick", **content})
    report.write(tmp_path)
    report.write(tmp_path)
    assert drawn == ["quick"]
    runs.write_json(path, {"form": "full", **content})
    os.utime(path, (2**31, 2**31))
    report.write(tmp_path)
    assert drawn == ["quick", "full"]


def test_errors(tmp_path):
    with pytest.raises(ExperimentError, match="has no results"):
        report.write(tmp_path)
    with pytest.raises(ExperimentError, match="has no results"):
        report.write(tmp_path / "absent")
    (tmp_path / "timing").mkdir()
    (tmp_path / "timing" / "result.json").write_text("{")
    with pytest.raises(ExperimentError, match=r"result\.json is corrupt"):
        report.write(tmp_path)
    assert not list(tmp_path.glob("report*"))


def test_a_browser_shows_every_image(made, tmp_path):
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not on the path: the report was not opened in a browser")
    _, text = made
    # The page has no script of its own: this one says what the browser made of the images.
    script = (
        "onload = () => document.title = [...document.images].map(i => i.naturalWidth).join(' ')"
    )
    page = tmp_path / "report.html"
    page.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000"]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    widths = [int(w) for w in re.search(r"<title>([\d ]+)</title>", done.stdout)[1].split()]
    assert len(widths) == text.count("<img ")
    assert min(widths) > 0
