"""What streaming of residuals and reading of LoRAs beside steps save, on real servers.

Streaming: a base model with a ControlNet, on one rank, one after the other, and on two, where the net runs beside
the base model, which fetches residual by residual. One thread for each rank, so a machine of two cores is enough.
LoRAs: the first request that asks for one, which is not in the page cache, if it may begin without (``Patch``
without a step) and if it has to wait (``step=0``), against later requests, which find it read. Servers wait for
each other's requests; small random checkpoints. Run as ``python -m benchmarks.workflow_latency``, on a machine
that does nothing else.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from gfdit.adapters.tiny_models import TinyModelSpec, build, loras
from gfdit.cli.provenance import provenance, source_lines, write_report
from gfdit.cli.server_process import ServerProcess, free_port, start_server
from gfdit.omni.plugin import prepare_cpu_process

SIDE, STEPS = 256, 10
NUM_HEADS, HEAD_DIM = 8, 48
NUM_LAYERS = {"flux": 4, "sd3": 6}
NET_LAYERS = {"flux": 2, "sd3": 3}
NAMES = {"flux": "Flux", "sd3": "SD3"}
LORA_RANK = 256
NUM_LORAS = 6
TIMEOUT_S = 600.0
SOURCE = """
from gfdit.adapters.components import flux, sd3
from gfdit.workflow import Image, Patch, Workflow
from gfdit.workflow.passes import Split


def record(label, module, name, base, net=None, patch=None):
    text, noise, control, transformer, decoder = (
        getattr(module, name + part)(base)
        for part in ("TextEncoder", "Noise", "ControlImage", "Transformer", "Decoder")
    )
    if patch is not None:
        transformer.add_patch(patch)
    size = {{"height": {side}, "width": {side}}}
    with Workflow(label, {steps}, passes=(Split(),)) as made:
        embeds = text(prompt=made.add_input("prompt", str), max_sequence_length=32)
        latents = noise(seed=made.add_input("seed", int, 0), **size)
        given = {{}}
        if net is not None:
            canny = getattr(module, name + "ControlNet")(net, name="net")
            condition = control(image=made.add_input("image", Image), **size)
        for step in range({steps}):
            if net is not None:
                given["residuals"] = [canny(step, latents=latents, embeds=embeds, condition=condition)]
            latents = transformer(step, latents=latents, embeds=embeds, **given)
        made.add_output(decoder(latents=latents))
    return made

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="requests of each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    report: dict[str, Any] = provenance(sys.argv)
    prepare_cpu_process()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report["streaming"] = {family: streaming(folder / family, family, args.rounds) for family in NAMES}
        report["lora"] = lora(folder / "lora", args.rounds)
    write_report(args.out, "workflow_latency", report, markdown(report))
    print(markdown(report))


def streaming(folder: Path, family: str, rounds: int) -> dict[str, Any]:
    base, net = checkpoint(folder, family), checkpoint(folder, f"{family}-controlnet", NET_LAYERS[family])
    file = workflows(
        folder,
        f"plain = record('plain', {family}, {NAMES[family]!r}, {base!r})",
        f"controlled = record('controlled', {family}, {NAMES[family]!r}, {base!r}, {net!r})",
    )
    seconds: dict[str, list[float]] = {}
    with ExitStack() as stack:
        servers = {ranks: stack.enter_context(serving(file, ranks)) for ranks in (1, 2)}
        cases = {"base model alone": (1, "plain"), "one rank": (1, "controlled"), "two ranks": (2, "controlled")}
        for number in range(-2, rounds):  # the first load and warm up
            for case, (ranks, workflow) in cases.items():
                taken_s = ask(servers[ranks], workflow, number, image=workflow == "controlled")
                if number >= 0:
                    seconds.setdefault(case, []).append(taken_s)
    return {case: summary(values) for case, values in seconds.items()}


def lora(folder: Path, rounds: int) -> dict[str, Any]:
    base = checkpoint(folder, "flux")
    loras.RANK = LORA_RANK
    kinds = {"beside steps": "None", "before the first step": "0"}
    lines = [f"plain = record('plain', flux, 'Flux', {base!r})"]
    names: dict[str, str] = {}
    paths: dict[str, str] = {}
    for _ in range(NUM_LORAS):
        for kind, step in kinds.items():
            path = checkpoint(folder, "flux-lora", NUM_LAYERS["flux"], seed=len(names))
            label = f"lora{len(names)}"
            names[label], paths[label] = kind, path
            patch = f"Patch({path!r}, step={step})"
            lines.append(f"{label} = record({label!r}, flux, 'Flux', {base!r}, patch={patch})")
    num_bytes = sum(file.stat().st_size for file in Path(path).iterdir())
    seconds: dict[str, list[float]] = {}
    with serving(workflows(folder, *lines), 1) as server:
        for number in range(3):
            ask(server, "plain", number)
        for label, kind in names.items():
            seconds.setdefault("without", []).append(ask(server, "plain", 0))
            forget(Path(paths[label]))
            seconds.setdefault(f"first, read {kind}", []).append(ask(server, label, 0))
            seconds.setdefault("read already", []).append(ask(server, label, 1))
    return {"file_mib": round(num_bytes / 2**20, 1), **{case: summary(found) for case, found in seconds.items()}}


def checkpoint(folder: Path, family: str, num_layers: int | None = None, seed: int = 0) -> str:
    path = folder / f"{family}-{seed}"
    layers = NUM_LAYERS[family] if num_layers is None else num_layers
    build(family, path, TinyModelSpec(seed=seed, num_layers=layers, num_heads=NUM_HEADS, head_dim=HEAD_DIM))
    return str(path)


def workflows(folder: Path, *lines: str) -> Path:
    file = folder / "workflows.py"
    file.write_text(SOURCE.format(side=SIDE, steps=STEPS) + "\n".join(lines) + "\n")
    return file


@contextmanager
def serving(file: Path, num_ranks: int) -> Iterator[ServerProcess]:
    port = free_port()
    command = ["gfdit", "serve", "--workflow", str(file), "--ranks", str(num_ranks)]
    command += ["--port", str(port), "--set", "threads_per_rank=1", "--", "--dtype", "float32", "--enforce-eager"]
    with start_server(command, port, file.with_suffix(f".{num_ranks}.log")) as server:
        server.wait_healthy(TIMEOUT_S)
        yield server


def ask(server: ServerProcess, workflow: str, seed: int, *, image: bool = False) -> float:
    """Seconds of one request over HTTP."""
    inputs = {}
    if image:
        data = io.BytesIO()
        Image.linear_gradient("L").convert("RGB").resize((SIDE, SIDE)).save(data, "PNG")
        inputs["image"] = base64.b64encode(data.getvalue()).decode()
    body = {
        "prompt": "a red panda",
        "size": f"{SIDE}x{SIDE}",
        "seed": max(seed, 0),
        "extra_params": {"gfdit": {"workflow": workflow, "inputs": inputs}},
    }
    started_s = time.perf_counter()
    answer = httpx.post(f"{server.base_url}/v1/images/generations", json=body, timeout=TIMEOUT_S)
    if answer.status_code != 200:
        raise RuntimeError(f"{workflow}: {answer.status_code} {answer.text[:500]}")
    return time.perf_counter() - started_s


def forget(folder: Path) -> None:
    """Drop its files from the page cache: the next to read them reads the disk."""
    for file in folder.iterdir():
        with file.open("rb+") as opened:
            os.fsync(opened)
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def summary(seconds: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4)
    return {
        "median_s": round(median, 4),
        "low_s": round(low, 4),
        "high_s": round(high, 4),
        "requests": len(seconds),
    }


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Latency of workflows: streamed residuals, LoRAs",
        "",
        *source_lines(report, f"Python {report['python']}"),
        f"- {SIDE}x{SIDE}, {STEPS} steps, random weights, one thread for each rank, one request at a time; "
        "medians and quartiles of seconds over HTTP",
        "",
    ]

    def rows(cases: dict[str, Any], against: str) -> None:
        lines.extend(["| | seconds | of that of " + against + " |", "| --- | --- | --- |"])
        for case, found in cases.items():
            share = found["median_s"] / cases[against]["median_s"]
            spread = f"{found['median_s']:.3f} ({found['low_s']:.3f} to {found['high_s']:.3f})"
            lines.append(f"| {case} | {spread} | {share:.2f} |")
        lines.append("")

    for family, cases in report["streaming"].items():
        what = f"{NUM_LAYERS[family]} layers, a ControlNet of {NET_LAYERS[family]}"
        lines.extend([f"## {NAMES[family]}, {what}", ""])
        rows(cases, "one rank")
    cases = {case: found for case, found in report["lora"].items() if isinstance(found, dict)}
    lines.extend([f"## A LoRA of {report['lora']['file_mib']} MiB, FLUX, one rank", ""])
    rows(cases, "read already")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
