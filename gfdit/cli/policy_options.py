"""`--policy` and `--policy-arg` where there may be several policies."""

import argparse
from collections.abc import Sequence
from typing import Any

from gfdit.sim.compare import PolicyChoice


def add_policy_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Each `--policy-arg` belongs to the `--policy` before it; with a single policy the order is free."""
    parser.add_argument(
        "--policy",
        action=_InOrder,
        required=required,
        help="a name (see `gfdit policies`), module:Class or file.py:Class; repeat to compare",
    )
    parser.add_argument(
        "--policy-arg", action=_InOrder, metavar="KEY=VALUE", help="an argument of the --policy before it; repeat"
    )


def chosen_policies(args: argparse.Namespace) -> tuple[PolicyChoice, ...]:
    """Every choice loads. Raises `ValueError` for one that does not, or that is there twice."""
    given: list[tuple[str, str]] = args.policies
    if sum(option == "--policy" for option, _ in given) == 1:
        given = sorted(given, key=lambda item: item[0] != "--policy")
    choices: list[PolicyChoice] = []
    for option, value in given:
        if option == "--policy":
            choices.append(PolicyChoice(value))
            continue
        key, equals, text = value.partition("=")
        if not (key and equals):
            raise ValueError(f"--policy-arg takes KEY=VALUE, got {value!r}")
        if not choices:
            raise ValueError(f"--policy-arg {value} belongs after the --policy it is for")
        others = tuple(pair for pair in choices[-1].args if pair[0] != key)
        choices[-1] = PolicyChoice(choices[-1].spec, (*others, (key, text)))
    labels = [choice.label for choice in choices]
    for choice in choices:
        if labels.count(choice.label) > 1:
            raise ValueError(f"--policy {choice.label} is there twice")
        choice.load()
    return tuple(choices)


class _InOrder(argparse.Action):
    """Both options in one list, `args.policies`, as they were given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = [*(getattr(namespace, "policies", None) or []), (self.option_strings[0], str(values))]
        namespace.policies = given
