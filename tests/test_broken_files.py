"""Files, options and settings that are wrong: a message and exit code 2, and the next run recovers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("tqdm")

from sparsetopk import cli
from sparsetopk.experiments import report
from sparsetopk.experiments.runs import (
    Book,
    Checkpoint,
    ExperimentError,
    Options,
    whole_file,
    write_json,
)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"settings": {}, "results": 3}', "null"])
def test_a_corrupt_run_is_made_again(tmp_path, capsys, content):
    book = Book(Options(tmp_path), "moe")
    path = tmp_path / "moe" / "runs" / "one.json"
    path.write_text(content)
    assert book.run("one", {"a": 1}, lambda _: {"found": 7}) == {"found": 7}
    assert "corrupt" in capsys.readouterr().err
    assert path.with_name("one.json.corrupt").read_text() == content
    assert book.run("one", {"a": 1}, lambda _: {"found": 8}) == {"found": 7}


def test_a_checkpoint_does_not_outlive_its_run(tmp_path):
    """Killed after its results were written, and before the checkpoint was removed."""
    book = Book(Options(tmp_path), "moe")
    book.run("one", {"a": 1}, lambda _: {"found": 7})
    left = tmp_path / "moe" / "runs" / "one.checkpoint"
    left.write_bytes(b"left")
    assert book.run("one", {"a": 1}, lambda _: {"found": 8}) == {"found": 7}
    assert not left.exists()


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04broken", b"\x80\x04K\x03."])
def test_a_corrupt_checkpoint_is_left_out(tmp_path, capsys, content):
    checkpoint = Checkpoint(tmp_path / "one.checkpoint", {"a": 1})
    checkpoint.path.write_bytes(content)
    assert checkpoint.load() is None
    assert "corrupt" in capsys.readouterr().err
    checkpoint.save({"step": 3})
    assert checkpoint.load() == {"step": 3}


def test_an_unfinished_file_leaves_nothing_behind(tmp_path):
    target, other = tmp_path / "a.json", tmp_path / "other"
    other.write_text("untouched")
    (tmp_path / "a.json.part").symlink_to(other)
    write_json(target, {"a": 1})
    assert json.loads(target.read_text()) == {"a": 1}
    assert other.read_text() == "untouched"
    with pytest.raises(FileNotFoundError), whole_file(target):
        (tmp_path / "missing").read_text()
    assert json.loads(target.read_text()) == {"a": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "a.json.part", "other"]


def test_results_of_another_shape(tmp_path):
    (tmp_path / "moe").mkdir()
    for content in ("[]", "3", "{}", '{"results": []}'):
        (tmp_path / "moe" / "result.json").write_text(content)
        with pytest.raises(ExperimentError, match=r"result\.json"):
            report.read(tmp_path, "moe")


def test_threads_out_of_range(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["reproduce", "moe", "--threads", "99999999999"])
    assert stopped.value.code == 2
    assert "from 1 to" in capsys.readouterr().err


def test_a_device_without_numbers(tmp_path, capsys):
    assert cli.main(["reproduce", "moe", "--device", "meta", "--out", str(tmp_path)]) == 2
    assert "--device" in capsys.readouterr().err


def test_demo_where_nothing_can_be_written(tmp_path, capsys, monkeypatch):
    from sparsetopk.experiments import demo

    (tmp_path / "file").touch()
    monkeypatch.setattr(demo, "train_all", lambda: pytest.fail("it was trained for nothing"))
    assert cli.main(["demo", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "sparsetopk: " in capsys.readouterr().err


@pytest.mark.parametrize("threads", ["abc", "0", "-1", "", "99999999999999"])
def test_the_import_survives_a_wrong_number_of_threads(threads):
    code = "from sparsetopk import _core; print(_core.THREADS)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"SPARSETOPK_THREADS": threads, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "1\n"
    assert "SPARSETOPK_THREADS" in found.stderr
