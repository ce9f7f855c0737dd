"""The page and the picture of ``benchmarks.edits_report``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gfdit.cli.provenance import source_lines
from gfdit.sim.costs.flux_edits import GAIN_OF_FOUR
from gfdit.sim.estimates import Estimate, estimate

# Paul Tol's bright colours, as in the other pictures.
COLOURS = {
    "static": "#bbbbbb",
    "naive": "#ccbb44",
    "continuous": "#4477aa",
    "count": "#bbbbbb",
    "tokens": "#ccbb44",
    "pipeline": "#4477aa",
    "triage": "#ee6677",
    "triage, no deadlines": "#aa3377",
}
METHOD_COLOURS = {
    "no cache": "#bbbbbb",
    "naive loading": "#ccbb44",
    "block by block": "#aa3377",
    "Algorithm 1": "#4477aa",
    "best of a step": "#66ccee",
    "ours": "#ee6677",
    "ideal": "#228833",
}
BATCHINGS = ("static", "naive", "continuous", "triage")
PLACEMENTS = ("count", "tokens", "pipeline", "triage")


class Rows:
    """Those of a report, by what they have in common."""

    def __init__(self, report: dict[str, Any]) -> None:
        self._rows = report["rows"]

    def where(self, section: str, **given: Any) -> list[dict[str, Any]]:
        return [
            row
            for row in self._rows
            if row["section"] == section and all(row[key] == value for key, value in given.items())
        ]

    def cell(self, section: str, metric: str, **given: Any) -> str:
        (row,) = self.where(section, **given)
        return _shown(Estimate(row[metric]["mean"], row[metric]["ci95"]))

    def ratio(self, metric: str, **given: Any) -> str:
        """Of triage to the paper's placement, trace by trace."""
        (first,) = self.where("placement", system="triage", deadlines=True, **given)
        (second,) = self.where("placement", system="pipeline", **given)
        pairs = zip(first[metric]["values"], second[metric]["values"], strict=True)
        return _shown(estimate([mine / theirs for mine, theirs in pairs]))

    def loads(self, section: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Gains and rates of a section, in words and as fields."""
        pairs = {(row["gain"], row["per_s"]) for row in self.where(section)}
        for gain, per_s in sorted(pairs, key=lambda pair: (-pair[0], pair[1])):
            batches = f"four gain {gain:g}" if gain > 1 else "batches gain nothing"
            yield f"{per_s:g}, {batches}", {"gain": gain, "per_s": per_s}


def _shown(value: Estimate) -> str:
    interval = "" if value.ci95 is None else f" ± {value.ci95:.2f}"
    return f"{value.mean:.2f}{interval}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    return ["", *lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def markdown(report: dict[str, Any]) -> str:
    rows = Rows(report)
    lines = _head(report)
    lines += _images(report["image_s"])
    lines += _queueing(rows)
    lines += _batching(rows)
    lines += _placement(rows)
    lines += ["## Larger masks: 8 ranks, with deadlines", *_both(rows, "heavier", "workload", "edits")]
    lines += [
        "## A host that cannot hold all templates: 8 ranks, 0.25 edits/s each",
        "",
        "A template of 75 GiB that is on disk is read at 3 GB/s. There are 970 of them, asked for by Zipf's law.",
        *_both(rows, "host", "host_gib", "host, GiB"),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _head(report: dict[str, Any]) -> list[str]:
    alone = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in report["mean_alone_s"].items())
    first, last = report["seeds"][0], report["seeds"][-1]
    return [
        "# Edits under masks: loads, batches, placement",
        "",
        *source_lines(report, f"Python {report['python']}"),
        "- Simulated, with derived costs (`gfdit.sim.costs.flux_edits`): FLUX.1-dev, 1024 x 1024, 28 steps, H100; "
        "all templates are in the host's memory unless said otherwise",
        f"- Seeds {first} to {last}, means and halves of 95 % intervals; {report['requests']} edits a trace on 8 "
        f"ranks, a third on one; what a mean edit takes alone: {alone}",
        f"- How much batches of masked steps gain is an assumption: {GAIN_OF_FOUR:g} at four (FlashPS, section 1) "
        f"or nothing; without, {1 / report['mean_alone_s']['edits-own']:.2f} edits/s of `edits-own` fill a rank",
        "- `pipeline`, `tokens`, `count`: placements of `mask-aware`, with continuous batches of up to 8",
        "",
    ]


def _images(images: dict[str, dict[str, float]]) -> list[str]:
    methods = list(METHOD_COLOURS)
    fifth = images["0.2"]
    more = 100 * (fifth["naive loading"] / fifth["ideal"] - 1)
    return [
        "## An image alone, by what is loaded when (figures 4 left, 9 and 15)",
        "",
        "Seconds of all steps. `ours`: the first blocks compute all, the others read keys and values, which are",
        "loaded ahead, also from one step to the next; `ideal`: loads take no time. `Algorithm 1` and `best of a",
        "step` mix both kinds of block at will, which keys and values do not allow.",
        *_table(
            ["mask ratio", *methods],
            [[ratio, *(f"{of[name]:.2f}" for name in methods)] for ratio, of in images.items()],
        ),
        f"At a ratio of 0.2, `ours` is {fifth['no cache'] / fifth['ours']:.1f} times as fast as without a cache",
        f"(the paper, FLUX on H800: 1.9), and naive loading takes {more:.0f} % longer than `ideal` (SDXL: 102 %).",
        "",
    ]


def _queueing(rows: Rows) -> list[str]:
    body = []
    for name, given in rows.loads("queueing"):
        cells = [rows.cell("queueing", "queueing_s", system=system, **given) for system in ("static", "pipeline")]
        body.append([name, *cells])
    return [
        "## Queueing (figure 4 middle): one rank, mean seconds until an edit's first task begins",
        *_table(["edits/s", "static", "continuous"], body),
    ]


def _batching(rows: Rows) -> list[str]:
    body = [
        [name, *(rows.cell("batching", "p95_s", system=system, **given) for system in BATCHINGS)]
        for name, given in rows.loads("batching")
    ]
    return [
        "## Batching (figure 16 left): one rank, p95 in seconds",
        "",
        "Images are read and written for 0.36 s before and behind each edit (section 6.4): `naive` on the rank,",
        "between steps; otherwise elsewhere, where it only adds to the latency.",
        *_table(["edits/s", *BATCHINGS], body),
    ]


def _placement(rows: Rows) -> list[str]:
    lines = [
        "## Placement (figure 16 right): 8 ranks",
        "",
        "The paper's policies do not look at deadlines, which are 2, 4 and 8 times an edit's time alone; `triage`",
        "is there with and without, and once with `patience` 1, for lower latest latencies. The last column:",
        "means of the ratios of each trace, with deadlines. At 0.25 edits/s `triage` gives idle ranks to steps:",
        "several compute one, and what they exchange is taken to shrink with the mask as all else does.",
    ]
    for metric, what in (("p95_s", "p95, s"), ("mean_s", "mean, s"), ("attainment", "in time, %")):
        body = []
        for name, given in rows.loads("placement"):
            cells = [
                rows.cell("placement", metric, system=system, deadlines=True, **given) for system in PLACEMENTS
            ]
            if metric != "attainment":
                free = ("triage", "triage-1")
                cells += [rows.cell("placement", metric, system=s, deadlines=False, **given) for s in free]
            body.append([name, *cells, rows.ratio(metric, **given)])
        more = [] if metric == "attainment" else ["without deadlines", "and patience 1"]
        lines += _table([f"edits/s a rank: {what}", *PLACEMENTS, *more, "triage / pipeline"], body)
    return lines


def _both(rows: Rows, section: str, key: str, head: str) -> list[str]:
    """What the paper's policy and triage make of a section whose rows differ in ``key`` and in the rate."""
    body = []
    for row in rows.where(section, system="pipeline"):
        given = {name: row[name] for name in (key, "per_s")}
        cells = [
            rows.cell(section, metric, system=system, **given)
            for metric in ("p95_s", "attainment")
            for system in ("pipeline", "triage")
        ]
        value = row[key] if isinstance(row[key], str) else f"{row[key]:g}"
        body.append([f"{value} at {row['per_s']:g}/s", *cells])
    columns = [f"{what}: {system}" for what in ("p95, s", "in time, %") for system in ("pipeline", "triage")]
    return _table([head, *columns], body)


def plot(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    rows = Rows(report)
    figure = Figure(figsize=(11, 8), layout="constrained")
    images, queues, batches, places = figure.subplots(2, 2).ravel()
    ratios = [float(ratio) for ratio in report["image_s"]]
    for name, colour in METHOD_COLOURS.items():
        seconds = [of[name] for of in report["image_s"].values()]
        style = "--" if name == "ideal" else "-"
        width = 4.0 if name in ("block by block", "best of a step") else 1.4  # others lie on them
        images.plot(ratios, seconds, style, color=colour, label=name, marker=".", linewidth=width)
    images.set(title="An image alone", xlabel="mask ratio", ylabel="all steps, s", xlim=(0, 0.31), ylim=(0, 7.6))
    for system, label, colour in (("static", "static", "#bbbbbb"), ("pipeline", "continuous", "#4477aa")):
        own = sorted(rows.where("queueing", system=system, gain=GAIN_OF_FOUR), key=lambda row: row["per_s"])
        rates, waits = [row["per_s"] for row in own], [row["queueing_s"] for row in own]
        means, halves = [wait["mean"] for wait in waits], [wait["ci95"] or 0.0 for wait in waits]
        queues.errorbar(rates, means, halves, color=colour, label=label, marker=".", capsize=2)
    queues.set(title="Queueing on one rank", xlabel="edits/s", ylabel="mean wait, s", ylim=(0, None))
    _bars(batches, rows, "batching", {system: {"system": system} for system in BATCHINGS})
    batches.set(title="Batching on one rank, images processed for 0.36 s twice", ylabel="p95, s")
    shown = {system: {"system": system, "deadlines": True} for system in PLACEMENTS}
    shown["triage, no deadlines"] = {"system": "triage", "deadlines": False}
    _bars(places, rows, "placement", shown)
    places.set(title="Placement on 8 ranks", ylabel="p95, s")
    for axes in (images, queues, batches, places):
        between = {"loc": "upper left", "bbox_to_anchor": (0.02, 0.9), "ncols": 2} if axes is images else {}
        axes.legend(frameon=False, fontsize=8, **between)
        axes.title.set_fontsize(10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)


def _bars(axes: Any, rows: Rows, section: str, systems: dict[str, dict[str, Any]]) -> None:
    """A group for each rate, at the paper's gain."""
    rates = sorted({row["per_s"] for row in rows.where(section, gain=GAIN_OF_FOUR)})
    width = 0.8 / len(systems)
    for index, (label, given) in enumerate(systems.items()):
        found = [rows.where(section, gain=GAIN_OF_FOUR, per_s=rate, **given)[0]["p95_s"] for rate in rates]
        places = [group + (index - (len(systems) - 1) / 2) * width for group in range(len(rates))]
        means, halves = [value["mean"] for value in found], [value["ci95"] or 0.0 for value in found]
        axes.bar(places, means, 0.9 * width, yerr=halves, color=COLOURS[label], label=label, capsize=2)
    axes.set_xticks(range(len(rates)), [f"{rate:g} edits/s a rank" for rate in rates])
