"""`--policy`, `--policy-arg` and `--admission` where there may be several policies."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from gfdit.core.policy.admission import AdmissionMode
from gfdit.core.policy.loading import DEFAULT_POLICY
from gfdit.sim.compare import PolicyChoice

BOTH = "both"


def add_policy_options(parser: argparse.ArgumentParser, *, default: str = f"default: {DEFAULT_POLICY}") -> None:
    """What is said of a policy belongs after it; with a single policy the order is free."""
    parser.add_argument(
        "--policy",
        action=_InOrder,
        help=f"a name (see `gfdit policies`), module:Class or file.py:Class; repeat to compare ({default})",
    )
    parser.add_argument(
        "--policy-arg", action=_InOrder, metavar="KEY=VALUE", help="an argument of the --policy before it; repeat"
    )
    parser.add_argument(
        "--admission",
        action=_InOrder,
        choices=(*get_args(AdmissionMode), BOTH),
        help="deadline: the --policy before it rejects what would be late; promise: and what makes others late; "
        "both: with and without deadline",
    )


def chosen_policies(args: argparse.Namespace) -> tuple[PolicyChoice, ...]:
    """Every choice loads; without any it is the default. `ValueError` for one that does not, or is there twice."""
    given: list[tuple[str, str]] = getattr(args, "policies", None) or []
    if not any(option == "--policy" for option, _ in given):
        given = [("--policy", DEFAULT_POLICY), *given]
    if sum(option == "--policy" for option, _ in given) == 1:
        given = sorted(given, key=lambda item: item[0] != "--policy")
    choices: list[PolicyChoice] = []
    for option, value in given:
        if option == "--policy":
            choices.append(PolicyChoice(value))
            continue
        if not choices:
            raise ValueError(f"{option} {value} belongs after the --policy it is for")
        if option == "--admission":
            choices[-1] = replace(choices[-1], admission=value)
            continue
        key, equals, text = value.partition("=")
        if not (key and equals):
            raise ValueError(f"--policy-arg takes KEY=VALUE, got {value!r}")
        others = tuple(pair for pair in choices[-1].args if pair[0] != key)
        choices[-1] = replace(choices[-1], args=(*others, (key, text)))
    choices = [
        replace(choice, admission=mode)
        for choice in choices
        for mode in (("none", "deadline") if choice.admission == BOTH else (choice.admission,))
    ]
    labels = [choice.label for choice in choices]
    for choice in choices:
        if labels.count(choice.label) > 1:
            raise ValueError(f"--policy {choice.label} is there twice")
        choice.load()
    return tuple(choices)


class _InOrder(argparse.Action):
    """All these options in one list, `args.policies`, as they were given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = [*(getattr(namespace, "policies", None) or []), (self.option_strings[0], str(values))]
        namespace.policies = given
