"""The command line: ``sparsetopk --help``."""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path

import numpy as np

from . import __version__
from .core import native


def _info(_: argparse.Namespace) -> int:
    print(f"sparsetopk {__version__}")
    print(f"python     {platform.python_version()}")
    print(f"numpy      {np.__version__}")
    print(f"kernels    {native.simd_level() if native else 'none: computed in NumPy'}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    try:
        from .experiments import figure1

        picture = arguments.out / "figure1.png"
        figure1.draw(picture)
    except ModuleNotFoundError as error:
        print(
            f"sparsetopk demo: {error.name} is missing; pip install 'sparsetopk[experiments]'",
            file=sys.stderr,
        )
        return 1
    print(
        "A top-2 mask along two paths: how sparse it is, and the largest jump of it and of its slope"
    )
    print()
    print(figure1.table())
    print()
    print(f"Picture: {picture}")
    return 0


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(
        prog="sparsetopk", description="Fast, differentiable and sparse top-k operators."
    )
    main_parser.add_argument("--version", action="version", version=f"sparsetopk {__version__}")
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="command")
    info = commands.add_parser("info", help="print versions and the vector instructions of the CPU")
    info.set_defaults(run=_info)
    demo = commands.add_parser(
        "demo",
        help="draw Fig. 1 of the paper and print a table",
        description="Draw the hard and the relaxed top-2 mask along a path (Fig. 1 of the paper), "
        "and print how smooth and how sparse each of them is.",
    )
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        metavar="DIR",
        help="where the picture goes (default: %(default)s)",
    )
    demo.set_defaults(run=_demo)
    return main_parser


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    result: int = arguments.run(arguments)
    return result


if __name__ == "__main__":
    sys.exit(main())
