"""KEY=VALUE on a command line."""


def parse_pairs(option: str, items: list[str]) -> dict[str, str]:
    """KEY=VALUE items as a dictionary. Raises ValueError for one that is not of that form."""
    parsed = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not (key and equals):
            raise ValueError(f"{option} takes KEY=VALUE, got {item!r}")
        parsed[key] = value
    return parsed
