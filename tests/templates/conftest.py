import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.templates.helpers import Stores


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    """With the host tier in memory, as in production."""
    shared = Path(tempfile.mkdtemp(prefix="gfdit-test-templates-", dir="/dev/shm"))
    made = Stores(tmp_path / "disk", shared)
    yield made
    made.close()
    shutil.rmtree(shared, ignore_errors=True)
