"""Stock vLLM-Omni on several CPU ranks with pipelines that it cannot run step by step.

Its workers take results off the device on a stream of their own, which a CPU does not have: without this the
thread that does it ends at once, and every request hangs. For comparisons with stock; gfdit's own workers send
their results in another way. ``vllm serve MODEL --omni --worker-extension-cls gfdit.omni.request_mode.OnCpu``
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm_omni.diffusion.ipc import pack_diffusion_output_shm
from vllm_omni.diffusion.worker.diffusion_worker import AsyncDiffusionOutput, AsyncOutputKind, WorkerProc

from gfdit.omni.plugin import find_accelerator

if TYPE_CHECKING:
    from typing import Any

logger = logging.getLogger(__name__)


class OnCpu:
    """Nothing to mix in: this module is loaded with it, by a worker before its threads begin."""


def _send_outputs(self: Any) -> None:
    """``WorkerProc._async_output_loop`` without a stream."""
    while (item := self._async_output_queue.get()) is not None:
        output, output_id, _ = item
        message = AsyncDiffusionOutput(
            kind=AsyncOutputKind.OUTPUT_READY, async_output_id=output_id, error="packing failed"
        )
        try:
            pack_diffusion_output_shm(output)
            message = AsyncDiffusionOutput(
                kind=AsyncOutputKind.OUTPUT_READY, async_output_id=output_id, output=output
            )
        except Exception:
            logger.exception("a result could not be packed")
        self._enqueue_result(message)
        with self._async_output_done:
            self._async_output_pending -= 1
            self._async_output_done.notify_all()


if find_accelerator() is None:
    WorkerProc._async_output_loop = _send_outputs
