"""python -m amem: see what amem does here, and whether it would work."""

from __future__ import annotations

import argparse
import sys

from . import __version__


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m amem", description=__doc__)
    parser.add_argument("--version", action="version", version=f"amem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="ranks pause and resume NCCL's memory, with contents verified")
    demo.add_argument("--ranks", type=int, help="number of processes (default: 4, or the number of GPUs if fewer)")
    demo.add_argument("--communicators", type=int, default=4, help="number of communicators (default: 4)")
    demo.add_argument("--cycles", type=int, default=3, help="number of pauses and resumes (default: 3)")
    demo.add_argument("--simulate", action="store_true", help="simulated GPUs and NCCL, also where there are real ones")

    commands.add_parser("info", help="versions, libraries, and what would keep amem from working here")

    options = parser.parse_args()
    if options.command == "info":
        from . import info

        return info.main()
    from . import demo as demonstration

    for name in ("ranks", "communicators", "cycles"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be at least 1")
    return demonstration.main(options.ranks, options.communicators, options.cycles, options.simulate)


if __name__ == "__main__":
    sys.exit(main())
