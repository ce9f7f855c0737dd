"""Reports on the policies, by simulation: ``python -m benchmarks.policy_reports``."""

import argparse
import os
import sys
from pathlib import Path

from benchmarks.policy_reports import default_policy, gaps, gfdit_paper, tetriserve
from benchmarks.policy_reports.report import Report
from gfdit.cli.provenance import provenance

REPORTS = {module.NAME: module for module in (gfdit_paper, tetriserve, gaps, default_policy)}
FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reports"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", nargs="*", metavar="REPORT", help=f"{', '.join(REPORTS)} (default: all)")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts of the default_policy report")
    parser.add_argument("--seeds", type=int, default=8, help="traces of every point (default: 8)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the traces (default: 0)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep simulations there, and do not repeat them")
    parser.add_argument("--points", nargs="+", default=[], metavar="WORKLOAD:LOAD", help="only these settings")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to (default: docs/reports)")
    args = parser.parse_args()
    if unknown := [name for name in args.report if name not in REPORTS]:
        parser.error(f"unknown report {unknown[0]!r}, known: {', '.join(REPORTS)}")
    source = provenance(sys.argv)  # first of all: the checkout may move on during the run
    source["command"] = " ".join(["python -m benchmarks.policy_reports", *sys.argv[1:]])
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.report or REPORTS:
        module = REPORTS[name]
        report = Report(
            name,
            module.TITLE,
            args.out,
            source,
            args.seeds,
            args.jobs,
            tuple(args.only),
            args.first_seed,
            args.keep,
            tuple(args.points),
        )
        module.run(report)
        report.write()
        print(args.out / f"{name}.md", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
