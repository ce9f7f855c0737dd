"""What the page shows is what happens."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "template_store.md"


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    assert names["rows"].shape == (4, 2, 2, 3, 8)  # type: ignore[attr-defined]
    assert names["store"].missing(names["template"], range(2), 1, range(3)) == []  # type: ignore[attr-defined]
