"""Runs the self-test of forwards on tiny checkpoints, and writes gfdit/adapters/forward/proven.json.

python -m tools.prove_families                  # all families; an hour on two cores
python -m tools.prove_families flux wan2.2-i2v  # these; what is known of other pipelines stays
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gfdit.adapters.forward.proven import PATH, Proven, load, version
from gfdit.adapters.forward.verdict import Verdict
from gfdit.adapters.testing import AdapterKit, ForkServer
from gfdit.adapters.tiny_models import FAMILIES, TinyModelSpec, build

FORWARD = "gfdit.adapters.forward.adapter:ForwardAdapter"
#: Pixels a side of the requests that are tried, as of a server on a CPU.
SIZE = 128
#: Checkpoints that vLLM-Omni loads only if it is told more, or not by a class of its own.
LEFT_OUT = {"anima", "hidream-image", "lumina2"}


def prove(family: str, server: ForkServer, folder: Path) -> tuple[str, dict[str, Verdict]]:
    """The pipeline class of ``family``, and the verdict of each signature, as of a server that starts."""
    model = folder / family
    server.run(build, family, model, TinyModelSpec())
    pipeline = json.loads((model / "model_index.json").read_text())["_class_name"]
    with AdapterKit(model, 1, adapter=FORWARD, fork_server=server, comm_timeout_s=600.0) as kit:
        found = kit.self_test(size=SIZE)
    return pipeline, {str(signature): of_code_alone(verdict) for signature, verdict in found.items()}


def of_code_alone(verdict: Verdict) -> Verdict:
    """Without what was measured."""
    return msgspec.structs.replace(verdict, seconds=0.0)


def merged(one: dict[str, Verdict], other: dict[str, Verdict]) -> dict[str, Verdict]:
    """Of two checkpoints of a class. What the pipeline of one refuses, that of the other may take."""
    made = dict(one)
    for name, verdict in other.items():
        known = made.setdefault(name, verdict)
        if known.mode is None or (verdict.mode is not None and verdict.mode > known.mode):
            made[name] = verdict
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="of `gfdit tiny-model`")
    asked = parser.parse_args(argv).families
    if unknown := sorted(set(asked) - FAMILIES.keys()):
        parser.error(f"unknown family {unknown[0]!r}; allowed: {', '.join(FAMILIES)}")
    made: dict[str, dict[str, Verdict]] = {}
    with ForkServer() as server, tempfile.TemporaryDirectory() as folder:
        for family in asked or [name for name in FAMILIES if name not in LEFT_OUT]:
            pipeline, verdicts = prove(family, server, Path(folder))
            made[pipeline] = merged(made.get(pipeline, {}), verdicts)
            for name, verdict in verdicts.items():
                print(f"{family}, {name}: {verdict.mode or verdict.reason}", flush=True)
            write(made)
    return 0


def write(made: dict[str, dict[str, Verdict]]) -> None:
    known = load().pipelines if PATH.exists() and load().vllm_omni == version() else {}
    pipelines = {name: dict(sorted(of_one.items())) for name, of_one in sorted({**known, **made}.items())}
    proven = Proven(version(), pipelines)
    PATH.write_bytes(msgspec.json.format(msgspec.json.encode(proven), indent=1) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
