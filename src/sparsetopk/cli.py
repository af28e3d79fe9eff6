"""The command line: ``sparsetopk --help``."""

from __future__ import annotations

import argparse
import platform
import sys
from importlib import import_module, metadata
from pathlib import Path

import numpy as np

from . import __version__
from ._core import native
from .experiments import EXPERIMENTS
from .experiments.runs import ExperimentError, Options
from .experiments.tasks import TASKS

_MOST = 10_000  # seeds or threads

_ABOUT = {
    "figures": "what the operators look like (Fig. 1 to 3 and those of the appendix)",
    "timing": "runtime against n (Fig. 4)",
    "pruning": "an MLP with 10 % of its weights, trained (Fig. 5)",
    "finetune": "a ViT fine-tuned with top-k losses (Fig. 6)",
    "moe": "a mixture of experts with a relaxed router (Fig. 7)",
}


def _info(_: argparse.Namespace) -> None:
    print(f"sparsetopk {__version__}")
    print(f"python     {platform.python_version()}")
    print(f"numpy      {np.__version__}")
    for name in ("torch", "triton", "jax", "jaxlib"):
        print(f"{name:10} {_version(name)}")
    print(f"kernels    {native.simd_level() if native else 'none: computed in NumPy'}")
    handlers = native.xla_handlers() if native else {}
    print(f"handlers   {', '.join(sorted(handlers)) or 'none: JAX computes in XLA operations'}")


def _version(name: str) -> str:
    """Of what is installed, which is not imported for it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _demo(arguments: argparse.Namespace) -> None:
    import torch

    from .experiments import demo

    torch.set_num_threads(1)  # for networks so small, a second one only waits
    print(demo.main(arguments.out))


def _reproduce(arguments: argparse.Namespace) -> None:
    import torch

    from .experiments import report

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    options = Options(
        out=arguments.out,
        full=arguments.full,
        data=arguments.data_dir,
        seeds=arguments.seeds,
        device=_device(arguments.device),
    )
    names = EXPERIMENTS if arguments.experiment == "all" else (arguments.experiment,)
    for name in names:
        experiment = import_module(f"sparsetopk.experiments.{name}")
        print(f"{name}: {experiment.TITLE}", file=sys.stderr)
        experiment.run(options)
    print(f"Report: {report.write(arguments.out)}")


def _tasks(arguments: argparse.Namespace) -> None:
    import torch

    from .experiments.tasks import page, training

    torch.set_num_threads(1)  # networks and rows are small, and times compare
    options = Options(
        out=arguments.out, full=arguments.full, data=arguments.data_dir, seeds=arguments.seeds
    )
    for name in TASKS if arguments.task == "all" else (arguments.task,):
        print(f"{name}: {TASKS[name]}", file=sys.stderr)
        print(page.text(training.run(name, options)))


def _bench(arguments: argparse.Namespace) -> None:
    from .torch import _bench as bench

    if not bench.run(_device(arguments.device), arguments.json):
        raise ExperimentError("what was computed is not what it must be: see the first table")


def _device(name: str) -> str:
    import torch

    if name == "meta":
        raise ExperimentError(
            "--device: meta holds no numbers; expected one that computes, e.g. cpu"
        )
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator()
        return "cpu" if accelerator is None else accelerator.type
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ExperimentError(f"--device: {name} cannot be used: {error}") from error
    return name


def _report(arguments: argparse.Namespace) -> None:
    from .experiments import report

    print(f"Report: {report.write(arguments.directory)}")


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if not 1 <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"must be from 1 to {_MOST}, got {value}")
    return value


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(
        prog="sparsetopk", description="Fast, differentiable and sparse top-k operators."
    )
    main_parser.add_argument("--version", action="version", version=f"sparsetopk {__version__}")
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="command")
    info = commands.add_parser(
        "info", help="print versions, and what was compiled: for reports of problems"
    )
    info.set_defaults(run=_info)
    demo = commands.add_parser(
        "demo",
        help="train an indexer, prune a network on handwritten digits, draw Fig. 1 of the paper",
        description="Train an indexer that fetches tokens and a small network with a tenth of its "
        "weights on handwritten digits, draw Fig. 1 of the paper, and print tables: about a minute.",
    )
    _add_out(demo)
    demo.set_defaults(run=_demo)
    bench = commands.add_parser(
        "bench",
        help="check the operators on a device, and time them there",
        description="Compare values and derivatives on a device with those of the compiled core in "
        "float64, then time the operators beside torch.topk, torch.compile and a copy.",
    )
    bench.add_argument(
        "--device", default="auto", help="e.g. cuda, mps, cpu (default: what is there)"
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    bench.set_defaults(run=_bench)
    _add_reproduce(commands)
    _add_tasks(commands)
    report = commands.add_parser(
        "report",
        help="write one HTML page on the experiments in a directory",
        description="Write DIR/report.html: every claim of the paper, what was measured, a verdict, "
        "and the figures. The page needs no other file.",
    )
    report.add_argument("directory", type=Path, metavar="DIR", help="what reproduce wrote")
    report.set_defaults(run=_report)
    return main_parser


def _add_out(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        metavar="DIR",
        help="where results and pictures go (default: %(default)s)",
    )


def _add_reproduce(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "reproduce",
        help="run the experiments of the paper",
        description="Run the experiments of the paper and write their results, their figures and a "
        "report. A run that is interrupted goes on where it was when it is started again.",
        epilog="experiments:\n" + "\n".join(f"  {name:10}{_ABOUT[name]}" for name in EXPERIMENTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "experiment", nargs="?", default="all", choices=(*EXPERIMENTS, "all"), help="default: all"
    )
    _add_form(command, "the form of the paper: hours")
    command.add_argument("--device", default="auto", help="of torch, e.g. cuda (default: auto)")
    command.add_argument("--threads", type=_count, metavar="N", help="of torch on the CPU")
    command.set_defaults(run=_reproduce)


def _add_tasks(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "tasks",
        help="compare differentiable top-k operators on small tasks",
        description="Train with every method on a task, each with the same number of settings, and "
        "print a table. A run that is interrupted goes on where it was when it is started again.",
        epilog="tasks:\n" + "\n".join(f"  {name:13}{about}" for name, about in TASKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "task", nargs="?", default="all", choices=(*TASKS, "all"), help="default: all"
    )
    _add_form(command, "settings chosen on validation data, five seeds: hours")
    command.set_defaults(run=_tasks)


def _add_form(command: argparse.ArgumentParser, full: str) -> None:
    """What all commands that run experiments take."""
    form = command.add_mutually_exclusive_group()
    form.add_argument(
        "--quick",
        action="store_true",
        help="a small form of each, a minute or two, on data that ships with scikit-learn (default)",
    )
    form.add_argument("--full", action="store_true", help=full)
    command.add_argument(
        "--data-dir",
        type=Path,
        metavar="D",
        help="where data and weights are (default: $SPARSETOPK_DATA, else they are downloaded)",
    )
    _add_out(command)
    command.add_argument(
        "--seeds", type=_count, metavar="N", help="how many (default: what the form asks for)"
    )


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("sparsetopk"):
            raise
        print(
            f"sparsetopk: {error.name} is missing; pip install 'sparsetopk[experiments]'",
            file=sys.stderr,
        )
        return 2
    except (ExperimentError, OSError) as error:
        print(f"sparsetopk: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sparsetopk: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
