"""`gfdit bench compare`: what several servers did with the same requests, side by side, with their pictures."""

from __future__ import annotations

import argparse
import functools
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

SIDE = 160  # pixels of a picture in the sheet
LABEL_HEIGHT = 18
DEFAULT_PICTURES = 6
_COLUMNS = (
    ("completed", "num_completed", "d"),
    ("in time", "slo_attainment", ".1%"),
    ("with grace", "slo_attainment_grace", ".1%"),
    ("goodput, 1/s", "goodput_rps", ".3f"),
    ("mean, s", "mean_latency_s", ".2f"),
    ("p50, s", "p50_latency_s", ".2f"),
    ("p95, s", "p95_latency_s", ".2f"),
    ("p99, s", "p99_latency_s", ".2f"),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """The result file of a server, and where its pictures are: PNGs or MP4s by request."""

    label: str
    result: Mapping[str, Any]
    pictures: Path | None = None

    def picture(self, request_id: str) -> Path | None:
        from gfdit.cli.bench_serve import picture_stem

        found = [] if self.pictures is None else self.pictures.glob(f"{picture_stem(request_id)}.[pm][np][g4]")
        return next(iter(sorted(found)), None)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results",
        metavar="R.json",
        type=Path,
        nargs="+",
        help="of `gfdit bench serve`; the first is the reference",
    )
    parser.add_argument("--out", metavar="REPORT.md", type=Path, required=True, help="pictures go beside it")
    parser.add_argument(
        "--pictures",
        metavar="N",
        type=int,
        default=DEFAULT_PICTURES,
        help=f"requests whose pictures are shown, where `--images` kept them; default: {DEFAULT_PICTURES}",
    )


def run(args: argparse.Namespace) -> int:
    from gfdit.sim.plots import completed_latencies, plot_latencies

    if args.pictures < 0:
        raise ValueError(f"--pictures must not be negative, got {args.pictures}")
    servers = [read(path) for path in args.results]
    labels = [server.label for server in servers]
    if len(set(labels)) < len(labels):
        raise ValueError(f"every result needs a --label of its own, got {', '.join(labels)}")
    check_same_requests(servers)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    latencies = args.out.with_name(f"{args.out.stem}_latencies.png")
    plot_latencies({"": {server.label: completed_latencies(server.result) for server in servers}}, latencies)
    lines = [*report(servers), "", f"![share of the requests completed within a time]({latencies.name})"]
    if (shown := common_pictures(servers)) and args.pictures:
        sheet = args.out.with_name(f"{args.out.stem}_pictures.png")
        picture_sheet(servers, shown[: args.pictures], sheet)
        lines += ["", *differences(servers, shown), "", f"![the same requests, a row per server]({sheet.name})"]
    args.out.write_text("\n".join(lines) + "\n")
    print("\n".join(report(servers)[2:]))
    print(args.out)
    return 0


def read(path: Path) -> Compared:
    """Raises ``ValueError`` for a file that is none of ``gfdit bench serve``."""
    try:
        result = json.loads(path.read_text())
        pictures = result["source"].get("images")
        return Compared(result["policy"], result, None if pictures is None else Path(pictures))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is not a result of `gfdit bench serve`") from None


def check_same_requests(servers: Sequence[Compared]) -> None:
    """Raises ``ValueError`` naming what was asked of one server only: such results do not compare."""
    first, *others = servers
    for other in others:
        ours, theirs = _asked(first), _asked(other)
        if odd := sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)):
            raise ValueError(
                f"{first.label} and {other.label} were not asked the same: {odd[0]} and {len(odd) - 1} more"
            )


def _asked(server: Compared) -> dict[str, tuple[Any, ...]]:
    return {r["id"]: (r["class"], r["arrival_s"], r["deadline_s"]) for r in server.result["requests"]}


def report(servers: Sequence[Compared]) -> list[str]:
    """Markdown: what was asked, a table of the servers, one of their classes, what went wrong."""
    first = servers[0].result
    lines = [
        "# Servers side by side",
        "",
        f"{first['num_requests']} requests, the last of which arrived after "
        f"{max(request['arrival_s'] for request in first['requests']):.1f} s.",
        "",
        f"| server | {' | '.join(title for title, _, _ in _COLUMNS)} | requests/s |",
        "|---|" + "---|" * (len(_COLUMNS) + 1),
    ]
    for server in servers:
        lines.append(f"| {server.label} | {_cells(server.result)} | {server.result['throughput_rps']:.3f} |")
    classes = list(first["per_class"])
    if len(classes) > 1:
        lines += ["", f"| class | server | {' | '.join(title for title, _, _ in _COLUMNS)} |"]
        lines += ["|---|---|" + "---|" * len(_COLUMNS)]
        lines += [
            f"| {name} | {server.label} | {_cells(server.result['per_class'][name])} |"
            for name in classes
            for server in servers
        ]
    wrong = [
        f"- {server.label}: {kind['count']} x HTTP {kind['http_status']}: {kind['error']}"
        for server in servers
        for kind in server.result["errors"]
    ]
    wrong += [
        f"- {server.label}: the client was the bottleneck, latencies are its own"
        for server in servers
        if server.result["client"]["was_bottleneck"]
    ]
    return [*lines, "", *wrong] if wrong else lines


def _cells(numbers: Mapping[str, Any]) -> str:
    values = [(numbers[field], form) for _, field, form in _COLUMNS]
    return " | ".join("-" if value is None else format(value, form) for value, form in values)


def common_pictures(servers: Sequence[Compared]) -> list[str]:
    """Requests of which every server has a picture."""
    ids = [request["id"] for request in servers[0].result["requests"]]
    return [name for name in ids if all(server.picture(name) for server in servers)]


def differences(servers: Sequence[Compared], request_ids: Sequence[str]) -> list[str]:
    """A line per server but the first: how its pictures differ from that one's."""
    first, *others = servers
    lines = []
    for other in others:
        found = [largest_difference(first.picture(name), other.picture(name)) for name in request_ids]
        same = [value for value in found if value is not None]
        sizes = f"; {len(found) - len(same)} differ in size" if len(same) < len(found) else ""
        lines.append(
            f"- {other.label}: {same.count(0)} of {len(found)} pictures have the same values as {first.label}'s, "
            f"the largest difference of a value is {max(same, default=0)} of 255{sizes}"
        )
    return lines


def largest_difference(one: Path | None, other: Path | None) -> int | None:
    """Of a value of all pixels (of all frames), from 0 to 255; None for pictures that differ in size."""
    import numpy as np

    frames = [frames_of(path) for path in (one, other) if path is not None]
    if len(frames) < 2 or frames[0].shape != frames[1].shape:
        return None
    return int(np.abs(frames[0].astype(np.int16) - frames[1]).max())


@functools.lru_cache(maxsize=64)
def frames_of(path: Path) -> np.ndarray:
    """(frames, height, width, 3) in 8 bits, of a PNG or an MP4."""
    import numpy as np
    from PIL import Image

    if path.suffix == ".png":
        with Image.open(io.BytesIO(path.read_bytes())) as image:
            return np.asarray(image.convert("RGB"))[None]
    import av

    with av.open(io.BytesIO(path.read_bytes()), "r") as video:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])


def picture_sheet(servers: Sequence[Compared], request_ids: Sequence[str], path: Path) -> None:
    """Write a PNG: a row per server, a column per request; of a video the frame in its middle."""
    from PIL import Image, ImageDraw

    height = LABEL_HEIGHT + SIDE
    sheet = Image.new("RGB", (len(request_ids) * SIDE, len(servers) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for row, server in enumerate(servers):
        draw.text((4, row * height + 3), server.label, fill="black")
        for column, name in enumerate(request_ids):
            picture = server.picture(name)
            if picture is not None:
                frames = frames_of(picture)
                image = Image.fromarray(frames[len(frames) // 2])
                image.thumbnail((SIDE, SIDE))
                sheet.paste(image, (column * SIDE, row * height + LABEL_HEIGHT))
    sheet.save(path)
