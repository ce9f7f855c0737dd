"""Has the weights of a hub model on this machine's disk before ranks start, whose time to start is limited."""

from __future__ import annotations

import time
from pathlib import Path

from vllm.logger import init_logger
from vllm_omni.entrypoints.omni_base import omni_snapshot_download

logger = init_logger(__name__)


def fetch_weights(model: str) -> None:
    """Download ``model`` unless it is a folder, or on the disk already; however long that takes.

    The download is vLLM-Omni's own. Of a repository of components that can be loaded one by one each pipeline
    fetches its parts by itself, in the ranks. Raises ``ValueError`` for a model that the hub lacks or denies.
    """
    if Path(model).expanduser().exists():
        return
    logger.info(
        "looking whether %s is on the disk, and downloading it if not: start_timeout_s begins after", model
    )
    start_s = time.monotonic()
    omni_snapshot_download(model)
    logger.info("%s was ready to be loaded after %.1f s", model, time.monotonic() - start_s)
