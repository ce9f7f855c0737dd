"""What steps take at each degree, family by family: `gfdit profile` of a small random checkpoint of each.

How steps scale depends on model, size and machine; this is the same command for all of them on this one. ``--size
small`` is so little that a step is mostly Python, ``large`` so much that it is mostly arithmetic. With
``--checkpoints FAMILY=MODEL ...`` it measures published checkpoints instead, on a machine that has room for them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.core import Shape, TaskKind
from gfdit.core.cost.file import CostTable

IMAGE = {"small": Shape(128, 128), "large": Shape(256, 256), "published": Shape(1024, 1024)}
VIDEO = {"small": Shape(64, 64, 5), "large": Shape(256, 256, 5), "published": Shape(480, 832, 81)}
LONG_VIDEO = {"small": Shape(64, 64, 33), "large": Shape(128, 128, 33), "published": Shape(384, 640, 99)}
FAMILIES = {
    "qwen-image": IMAGE,
    "qwen-image-edit": IMAGE,
    "flux": IMAGE,
    "sd3": IMAGE,
    "z-image": IMAGE,
    "longcat-image": IMAGE,
    "wan2.2-ti2v": VIDEO | {"published": Shape(704, 1280, 121)},
    "wan2.2-t2v-a14b": VIDEO,
    "wan2.2-i2v": VIDEO,
    "helios": LONG_VIDEO,
}
# Of the random checkpoints.
WIDTH = {
    "small": ("--layers", "4", "--heads", "4", "--head-dim", "32"),
    "large": ("--layers", "4", "--heads", "8", "--head-dim", "64"),
}
# Rewriting a prompt generates 512 tokens, whatever the image.
EXTRA_PARAMS = {"longcat-image": {"enable_prompt_rewrite": False}}
NEED_IMAGE = ("qwen-image-edit", "wan2.2-i2v")
GFDIT = str(Path(sys.executable).with_name("gfdit"))


def main() -> int:
    args = parse_args()
    source = provenance(sys.argv)
    checkpoints = ", ".join(args.checkpoints.values()) or f"small random ones ({' '.join(WIDTH[args.size])})"
    report = source | {"ranks": args.ranks, "checkpoints": checkpoints, "families": {}}
    with tempfile.TemporaryDirectory() as scratch:
        picture = Path(scratch) / "picture.png"
        Image.linear_gradient("L").convert("RGB").save(picture)
        for family in args.families:
            out = Path(scratch) / f"{family}.json"
            done = subprocess.run(command(family, Path(scratch), out, picture, args), check=False)
            report["families"][family] = summary(CostTable.load(out)) if done.returncode == 0 else None
            # After each: all of them take long.
            paths = write_report(args.out, f"families_{args.size}", report, markdown(report))
    print(*paths, sep="\n")
    return 0 if all(report["families"].values()) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--checkpoints", nargs="+", type=checkpoint, default=[], metavar="FAMILY=MODEL")
    parser.add_argument("--size", choices=list(WIDTH), default="small", help="of random checkpoints")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--max-reps", type=int, default=16, help="see gfdit profile")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    args.checkpoints = dict(args.checkpoints)
    if args.checkpoints:
        args.families, args.size = list(args.checkpoints), "published"
    return args


def checkpoint(text: str) -> tuple[str, str]:
    family, _, model = text.partition("=")
    if family not in FAMILIES or not model:
        raise argparse.ArgumentTypeError(f"{text!r} is not FAMILY=MODEL with a family of {', '.join(FAMILIES)}")
    return family, model


def command(family: str, folder: Path, out: Path, picture: Path, args: argparse.Namespace) -> list[str]:
    model = args.checkpoints.get(family) or str(folder / family)
    if family not in args.checkpoints:
        subprocess.run([GFDIT, "tiny-model", family, model, *WIDTH[args.size]], check=True)
    argv = [GFDIT, "profile", model, "--ranks", str(args.ranks), "--model-name", family, "--out", str(out)]
    argv += ["--shape", str(FAMILIES[family][args.size])]
    argv += ["--min-reps", "4", "--max-reps", str(args.max_reps)]
    if family in NEED_IMAGE:
        argv += ["--input-image", str(picture)]
    if family in EXTRA_PARAMS:
        argv += ["--extra-params", json.dumps(EXTRA_PARAMS[family])]
    return argv if family in args.checkpoints else [*argv, "--", "--dtype", "float32", "--enforce-eager"]


def summary(table: CostTable) -> dict[str, Any]:
    """Seconds of the tasks on one rank, and of a step by guidance and degree."""
    tasks = {str(e.task): e.seconds for e in table.entries if e.task is not TaskKind.DENOISE and not e.cfg}
    steps = {
        ("guided " if e.cfg else "") + str(e.parallel): e.seconds
        for e in table.entries
        if e.task is TaskKind.DENOISE
    }
    sizes = {f"{a.artifact}{' guided' if a.cfg else ''}": a.num_bytes for a in table.artifacts}
    return {"shape": str(table.entries[0].shape), "tasks_s": tasks, "steps_s": steps, "artifact_bytes": sizes}


def markdown(report: dict[str, Any]) -> str:
    columns = list(dict.fromkeys(name for one in report["families"].values() if one for name in one["steps_s"]))
    lines = [
        "# Steps of every family",
        "",
        *source_lines(report),
        f"- {report['ranks']} ranks, all busy; checkpoints: {report['checkpoints']}",
        "",
        "Milliseconds of a denoising step, and of encoding and decoding on one rank.",
        "",
        f"| family | size | {' | '.join(columns)} | encode | decode |",
        "|---|---|" + "---|" * (len(columns) + 2),
    ]
    for family, one in report["families"].items():
        if one is None:
            lines.append(f"| {family} | failed |" + " |" * (len(columns) + 2))
            continue
        cells = [one["steps_s"].get(name) for name in columns]
        cells += [one["tasks_s"].get("encode"), one["tasks_s"].get("decode")]
        text = " | ".join("" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in cells)
        lines.append(f"| {family} | {one['shape']} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
