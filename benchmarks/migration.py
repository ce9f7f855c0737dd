"""`gfdit bench migration`, with its report where the others are."""

import sys

from gfdit.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "migration", "--out", "benchmarks/results", *sys.argv[1:]]))
