"""``sparsetopk reproduce`` and ``report`` as a user calls them."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from sparsetopk import cli
from sparsetopk.experiments import EXPERIMENTS


def test_figures_and_report(tmp_path, capsys):
    assert cli.main(["reproduce", "figures", "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.strip() == f"Report: {tmp_path / 'report.html'}"
    content = json.loads((tmp_path / "figures" / "result.json").read_text())
    assert content["form"] == "quick"
    assert {"numpy", "sparsetopk"} <= set(content["versions"])
    names = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert len(names) >= 6
    assert names == {path.stem for path in (tmp_path / "figures").glob("*.svg")}
    (tmp_path / "report.html").unlink()
    assert cli.main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_directory_that_cannot_be_written(experiment, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert cli.main(["reproduce", experiment, "--out", str(tmp_path / "file" / "out")]) == 2
    assert "--out: cannot write to" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("experiment", ["pruning", "finetune", "moe"])
def test_data_that_is_not_there(experiment, tmp_path, capsys):
    options = ["--out", str(tmp_path / "out"), "--data-dir", str(tmp_path / "nowhere"), "--full"]
    assert cli.main(["reproduce", experiment, *options]) == 2
    assert f"--data-dir: {tmp_path / 'nowhere'} is not a directory" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))


def test_a_report_on_nothing(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "sparsetopk: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [["reproduce", "nonsense"], ["reproduce", "--quick", "--full"], ["reproduce", "--seeds", "0"]],
)
def test_wrong_command_lines(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: sparsetopk reproduce" in capsys.readouterr().err


def test_a_device_that_is_not_there(tmp_path, capsys):
    assert cli.main(["reproduce", "figures", "--out", str(tmp_path), "--device", "nonsense"]) == 2
    assert "--device: nonsense cannot be used" in capsys.readouterr().err
