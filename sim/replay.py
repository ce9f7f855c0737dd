"""Give the events of a recording to a fresh control plane and compare what it commands, byte for byte.

``gfdit serve --record FILE`` records and ``python -m gfdit.sim.replay FILE`` repeats. A policy takes its time from
the view alone, so the same events give the same commands wherever they are replayed. What a real clock decided is
not repeated: that a policy was stopped because it thought for too long. A recording that ended before its server
did is compared as far as it goes.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

from gfdit.core import ControlPlane, RankRecord
from gfdit.core.cost.table import cost_model
from gfdit.core.json_fields import one_line
from gfdit.core.policy.loading import load_policy
from gfdit.observe.recording import RecordingHeader, RecordingReader, TimedEvent, command_line, refusal_line


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line at which a replay departs from its recording; empty where one of them has none."""

    line_number: int
    recorded: str
    replayed: str

    def __str__(self) -> str:
        recorded, replayed = self.recorded or "nothing", self.replayed or "nothing"
        return f"line {self.line_number} differs\n  recorded: {recorded}\n  replayed: {replayed}"


@dataclass(frozen=True, slots=True)
class Replay:
    """``difference`` is None if every command was the same; the replay stops at the first one."""

    num_events: int
    num_commands: int
    difference: Difference | None = None


def replay(path: str | Path, policy_args: Mapping[str, str] | None = None) -> Replay:
    """``policy_args`` change arguments of the recorded policy, to see where decisions part.

    Raises ``ValueError`` for a file that is not a recording, for a policy that cannot be loaded, and for an event
    that no control plane gets over: where the server's ended, too, its error is the cause.
    """
    num_events = num_commands = 0
    with RecordingReader(path) as recording:
        if not recording.header.from_start:
            raise ValueError(f"{path}: it was switched on while the server ran, and begins in the midst of it")
        try:
            plane = make_control_plane(recording.header, policy_args or {})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        for step in recording.steps():
            num_events += 1
            try:
                answer = _answer(plane, step.given)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                what = one_line(f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})")
                raise ValueError(
                    f"{path}, line {step.line_number}: this event cannot be taken in: {what}"
                ) from error
            if step.last:  # the recording may have ended within it
                answer = answer[: len(step.answer)]
            lines = zip_longest(step.answer, answer, fillvalue=b"")
            for number, (recorded, again) in enumerate(lines, start=step.line_number + 1):
                if recorded != again:
                    difference = Difference(number, recorded.decode(errors="replace"), again.decode())
                    return Replay(num_events, num_commands, difference)
                num_commands += 1
    return Replay(num_events, num_commands)


def make_control_plane(header: RecordingHeader, policy_args: Mapping[str, str]) -> ControlPlane:
    """The control plane of the server that wrote ``header``, at its start."""
    policy = load_policy(header.policy, {**header.policy_args, **policy_args}, header.admission)
    make_cost = partial(cost_model, skips_steps=header.skips_steps)
    ranks = [RankRecord(rank, frozenset({header.model})) for rank in range(header.num_ranks)]
    plane = ControlPlane(
        policy,
        ranks,
        make_cost(header.costs),
        run_ahead=header.run_ahead,
        max_retries=header.max_retries,
        checkpoint_every_steps=header.checkpoint_every_steps,
        max_artifact_bytes=header.max_artifact_bytes,
        device_memory_bytes=header.device_memory_bytes,
        max_queue_s=header.max_queue_s,
        first_id=header.first_id,
        drained=header.drained,
    )
    plane.make_cost = make_cost
    return plane


def _answer(plane: ControlPlane, given: TimedEvent) -> list[bytes]:
    try:
        return [command_line(command) for command in plane.handle(given.event, given.now_s)]
    except ValueError as error:
        return [refusal_line(error)]


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m gfdit.sim.replay RECORDING", file=sys.stderr)
        return 2
    try:
        done = replay(argv[0])
    except (ValueError, OSError) as error:
        print(f"replay: error: {error}", file=sys.stderr)
        return 2
    verdict = "all as recorded" if done.difference is None else str(done.difference)
    print(f"{done.num_events} events, {done.num_commands} commands: {verdict}")
    return 0 if done.difference is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
