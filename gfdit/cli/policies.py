"""`gfdit policies`: what `--policy` and `--policy-arg` can name."""

import argparse

from gfdit.core.policy.loading import (
    REQUIRED,
    PolicyParameter,
    known_policies,
    policy_class,
    policy_parameters,
    summary,
    type_label,
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "policy",
        metavar="POLICY",
        nargs="*",
        help="a name, module:Class or file.py:Class (default: all)",
    )


def run(args: argparse.Namespace) -> int:
    """One policy that cannot be loaded is an error when it was asked for, a remark in the list of all."""
    entries = {spec: _describe(spec) for spec in args.policy}
    if not entries:
        for name, text in known_policies().items():
            entries[name] = text if text.startswith("(") else _describe(name)
    width = max(map(len, entries), default=0)
    for name, text in entries.items():
        print(f"{name:<{width}}  " + text.replace("\n", "\n" + " " * (width + 2)))
    return 0


def _describe(spec: str) -> str:
    cls = policy_class(spec)
    return "\n".join([summary(cls), *map(_argument, policy_parameters(cls))])


def _argument(parameter: PolicyParameter) -> str:
    value = parameter.default
    text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
    default = "required" if value is REQUIRED else f"default {text}"
    return f"  --policy-arg {parameter.name}=...  {type_label(parameter.type)}, {default}"
