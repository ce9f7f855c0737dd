"""Requests as vLLM-Omni's engine counts them; which of them runs is the control plane's affair."""

from __future__ import annotations

from vllm_omni.diffusion.sched import RequestScheduler
from vllm_omni.diffusion.sched.interface import DiffusionRequestStatus, SchedulerRequestState

from gfdit.observe.metrics import ServerMetrics

_OUTCOMES = {
    DiffusionRequestStatus.FINISHED_COMPLETED: "completed",
    DiffusionRequestStatus.FINISHED_ABORTED: "cancelled",
}


class RequestTable(RequestScheduler):
    """vLLM-Omni's scheduler without its scheduling: the base engine keeps its books in it."""

    def __init__(self, metrics: ServerMetrics) -> None:
        super().__init__()
        self._metrics = metrics
        self._payload_bytes: dict[str, int] = {}

    @property
    def payload_bytes(self) -> int:
        """Of all requests that have not ended; from any thread."""
        return sum(list(self._payload_bytes.values()))

    def count_payload(self, request_id: str, num_bytes: int) -> None:
        """``request_id`` brings so much, until it ends."""
        self._payload_bytes[request_id] = num_bytes

    def pop_request_state(self, request_id: str) -> SchedulerRequestState | None:
        """The request has ended, and its client is answered next."""
        self._payload_bytes.pop(request_id, None)
        if (state := self.get_request_state(request_id)) is not None:
            self._metrics.ended(request_id, _OUTCOMES.get(state.status, "failed"))
        self._finished_req_ids.discard(request_id)  # else only vLLM-Omni's scheduling forgets it
        return super().pop_request_state(request_id)

    def mark_running(self, request_id: str, queue_wait_s: float) -> bool:
        """The request has left the queue. Returns whether it is (still) known."""
        state = self.get_request_state(request_id)
        if state is None or state.is_finished():
            return False
        if request_id in self._waiting:
            self._waiting.remove(request_id)
            self._running.append(request_id)
        state.status = DiffusionRequestStatus.RUNNING
        state.req.scheduler_queue_wait_ms = queue_wait_s * 1000.0
        return True
