"""The engine's loop: what cannot be handled fails what it belongs to; that the loop has ended is told to all."""

from __future__ import annotations

import asyncio
import errno
import pickle
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from multiprocessing import shared_memory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm

from gfdit.core import commands as cmd
from gfdit.core.events import RequestCancelled
from gfdit.observe.snapshot import RankNumbers, Snapshot
from gfdit.omni.engine import _resolve_ranks
from gfdit.omni.launcher import ElasticExecutor
from gfdit.omni.plugin import find_accelerator
from gfdit.omni.retryable import SEND_AGAIN
from gfdit.omni.settings import Settings
from gfdit.omni.warm_up import OUT_OF_MEMORY, Item, WarmUp
from gfdit.runtime import messages as msg
from gfdit.runtime.client import RuntimeDownError
from tests.support.lone_engine import PATIENCE_S, LoneEngine, image_request, lone_engine
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(find_accelerator() is not None, reason="runs on the CPU platform")

MADE = pickle.dumps(DiffusionOutput(output="an image"))


def lost_result() -> bytes:
    """Of a worker whose shared memory is gone."""
    packed = pack_diffusion_output_shm(DiffusionOutput(output=torch.zeros(2_000_000)))
    with closing(shared_memory.SharedMemory(name=packed.output["name"])) as memory:
        memory.unlink()
    return pickle.dumps(packed)


def with_one_request(engine: LoneEngine, then: Callable[[], Any], request_id: str = "r1") -> DiffusionOutput:
    """What its client hears if ``then`` happens once it is submitted."""

    async def serve() -> DiffusionOutput:
        answer = asyncio.create_task(engine.ask(image_request(request_id)))
        await asyncio.to_thread(engine.executor.client.sent, msg.Submit)
        then()
        return await answer

    return within(serve())


def within(coroutine: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await asyncio.wait_for(coroutine, PATIENCE_S)

    return asyncio.run(wait())


def assert_serves(engine: LoneEngine, request_id: str = "next") -> None:
    engine.executor.check_health()
    client = engine.executor.client

    def complete() -> None:
        client.tell(msg.Result(request_id, MADE), cmd.CompleteRequest(request_id))

    assert with_one_request(engine, complete, request_id).output == "an image"


@pytest.mark.parametrize("ended_first", [False, True])
def test_a_result_whose_shared_memory_is_gone_fails_its_request_only(ended_first: bool) -> None:
    with lone_engine() as engine:
        messages = [msg.Result("r1", lost_result()), cmd.CompleteRequest("r1")]
        messages = messages[::-1] if ended_first else messages
        answer = with_one_request(engine, lambda: engine.executor.client.tell(*messages))
        assert answer.error == f"the result was lost (the request {SEND_AGAIN})"
        assert answer.error_status_code == 503
        assert_serves(engine)


def test_a_result_that_cannot_be_read_fails_its_request_only() -> None:
    with lone_engine() as engine:
        client = engine.executor.client
        answer = with_one_request(engine, lambda: client.tell(msg.Result("r1", b"no pickle")))
        assert answer.error is not None and answer.error.startswith("the engine failed at this request: ")
        assert client.sent(RequestCancelled).request_id == "r1", "what may still run of it is stopped"
        client.tell(cmd.CancelRequest("r1"))
        assert_serves(engine)


def test_a_request_that_cannot_be_sent_fails_by_itself() -> None:
    """Half of a surrogate pair is no UTF-8."""
    with lone_engine() as engine:
        answer = within(engine.ask(image_request("\ud800")))
        assert answer.error is not None and "UnicodeEncodeError" in answer.error
        assert_serves(engine)


def test_a_result_that_never_comes_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that had made it was killed before it could send it."""
    monkeypatch.setattr("gfdit.omni.engine._RESULT_TIMEOUT_S", 0.0)
    with lone_engine() as engine:
        answer = with_one_request(engine, lambda: engine.executor.client.tell(cmd.CompleteRequest("r1")))
        assert answer.error == f"the result was lost with its worker (the request {SEND_AGAIN})"
        assert answer.error_status_code == 503
        assert not engine._completed


def test_a_result_is_not_kept_if_its_request_fails_after_all() -> None:
    """Another request of that id would get it."""
    with lone_engine() as engine:
        messages = [msg.Result("r1", MADE), cmd.FailRequest("r1", "rank 1 was lost", 503)]
        answer = with_one_request(engine, lambda: engine.executor.client.tell(*messages))
        assert answer.error == f"rank 1 was lost (the request {SEND_AGAIN})"
        assert not engine._results and not engine._completed


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    with lone_engine() as engine:
        for number in range(3):
            assert_serves(engine, f"r{number}")
        table = engine.scheduler
        assert not table._request_states and not table._finished_req_ids and not table.payload_bytes


# The loop ends

BROKEN = [
    (RuntimeDownError("the control process ended with exit code -9"), "ended with exit code -9"),
    (OSError(errno.EBADF, "Bad file descriptor"), "the connection to the control process is broken"),
    (EOFError(), "the connection to the control process is broken"),
    (zmq.ZMQError(errno.ENOTSOCK), "the connection to the control process is broken"),
    (ValueError("a message of another version"), "the engine's loop ended by ValueError"),
    (SystemExit(1), "the engine's loop ended by SystemExit"),
]


@pytest.mark.parametrize(("error", "told"), BROKEN, ids=lambda value: type(value).__name__)
def test_who_waits_for_a_loop_that_ends_is_told(error: BaseException, told: str) -> None:
    with lone_engine() as engine:
        client = engine.executor.client
        failed = threading.Event()
        engine.executor.register_failure_callback(failed.set)
        answer = with_one_request(engine, lambda: client.break_by(error))
        assert answer.error is not None and told in answer.error and answer.error.endswith(f"{SEND_AGAIN})")
        assert "Errno" not in answer.error
        assert failed.is_set()
        with pytest.raises(EngineDeadError, match=told):
            engine.executor.check_health()


def test_a_control_process_that_ends_before_the_first_request_is_seen() -> None:
    with lone_engine() as engine:
        engine.executor.check_health()
        failed = threading.Event()
        engine.executor.register_failure_callback(failed.set)
        engine.executor.client.break_by(RuntimeDownError("the control process ended"))
        assert failed.wait(PATIENCE_S)
        with pytest.raises(EngineDeadError, match="the control process ended"):
            engine.executor.check_health()


def test_who_registers_for_a_failure_after_it_is_told_at_once() -> None:
    with lone_engine() as engine:
        engine.executor.mark_failed("the control process ended")
        failed = threading.Event()
        engine.executor.register_failure_callback(failed.set)
        assert failed.is_set()


def test_who_comes_after_the_end_is_told_in_words() -> None:
    """Nothing of the engine uses files that are closed, and nobody waits for a loop that has ended."""
    with lone_engine() as engine:
        with_one_request(engine, lambda: engine.executor.client.break_by(OSError(errno.EBADF, "Bad file")))
        assert engine.worker_thread is not None
        engine.worker_thread.join(PATIENCE_S)
        assert engine.executor.client.closed
        engine.abort("r1")
        for late in (
            lambda: within(engine.ask(image_request("late"))),
            lambda: engine.collective_rpc("list_loras"),
            lambda: within(engine.async_collective_rpc("list_loras")),
            lambda: engine.executor.collective_rpc("list_loras"),
        ):
            with pytest.raises(RuntimeError, match=SEND_AGAIN):
                late()


# Calls to workers


def test_a_call_that_is_not_answered_ends_in_words(caplog: pytest.LogCaptureFixture) -> None:
    """By ``start_timeout_s``, where the caller has set no limit; an answer after that is no news."""
    with lone_engine(start_timeout_s=0.2) as engine:
        task = engine._submit_rpc("add_lora", None, (), None, None)
        with pytest.raises(TimeoutError, match="add_lora was not answered by every rank in time"):
            task.future.result(PATIENCE_S)
        call = engine.executor.client.sent_call("add_lora")
        engine.executor.client.tell(msg.CallDone(call.call_id, [(True, b"no pickle")] * 2))
        assert_serves(engine)
        assert not [record for record in caplog.records if record.name == "gfdit.guard"]


def test_a_call_whose_time_is_over_is_not_made() -> None:
    with lone_engine() as engine:
        task = engine._submit_rpc("add_lora", -1.0, (), None, None)
        with pytest.raises(TimeoutError, match="the time for add_lora was over"):
            task.future.result(PATIENCE_S)


def test_a_call_that_cannot_be_sent_fails_its_caller_only() -> None:
    with lone_engine() as engine:
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
            engine.collective_rpc("add_lora", args=(lambda: None,), timeout=PATIENCE_S)
        assert_serves(engine)


def test_a_caller_that_waits_when_the_engine_fails_is_told() -> None:
    with lone_engine() as engine:
        task = engine._submit_rpc("add_lora", None, (), None, None)
        engine.executor.client.sent_call("add_lora")
        engine.executor.client.break_by(RuntimeDownError("the control process ended"))
        with pytest.raises(RuntimeDownError, match="the control process ended"):
            task.future.result(PATIENCE_S)


def test_a_warm_up_that_hangs_fails_the_start() -> None:
    told = r"gfdit_begin_warm_up was not answered by every rank within 0\.2 s"
    with pytest.raises(TimeoutError, match=told), lone_engine(warmup_size=64, start_timeout_s=0.2):
        pass


def warmed_up(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, too_large: tuple[str, ...] = ()
) -> tuple[list[str], list[str]]:
    """What two ranks were asked to run of five items, and what was logged."""
    items = [Item("sp1"), Item("sp2"), Item("sp1 x2", 2), Item("sp1 x4", 4), Item("sp1 x3", 3)]
    asked: list[str] = []
    told: list[str] = []

    def call(method: str, args: tuple[Any, ...] = (), unique_reply_rank: int | None = None) -> Any:
        if method == "gfdit_begin_warm_up":
            return items
        if method == "gfdit_warm_up":
            asked.append(args[0].name)
            return [0.1, OUT_OF_MEMORY if args[0].name in too_large else 0.2]
        asked.append("end")
        return None

    with lone_engine() as engine:
        monkeypatch.setattr(engine.executor, "collective_rpc", call)
        monkeypatch.setattr("gfdit.omni.engine.logger.warning", lambda text, *of_it: told.append(text % of_it))
        engine._warm_up(WarmUp((), True, limit_s))
    return asked, told


def test_all_is_warmed_up_if_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, told = warmed_up(monkeypatch, PATIENCE_S)
    assert asked == ["sp1", "sp2", "sp1 x2", "sp1 x4", "sp1 x3", "end"] and not told


def test_what_there_is_no_time_for_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, told = warmed_up(monkeypatch, -1.0)
    assert asked == ["end"]
    assert len(told) == 1 and "without 5 items" in told[0] and "sp1, sp2, sp1 x2, sp1 x4, sp1 x3" in told[0]


def test_larger_batches_than_one_that_does_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, told = warmed_up(monkeypatch, PATIENCE_S, too_large=("sp1 x3",))
    assert asked == ["sp1", "sp2", "sp1 x2", "sp1 x4", "sp1 x3", "end"]
    assert len(told) == 1 and told[0].endswith("sp1 x3 (out of memory)")
    asked, told = warmed_up(monkeypatch, PATIENCE_S, too_large=("sp1 x2",))
    assert asked == ["sp1", "sp2", "sp1 x2", "end"]
    assert told[0].endswith("sp1 x2 (out of memory), sp1 x4, sp1 x3")


def test_a_rank_that_is_gone_is_left_out_of_calls() -> None:
    done = msg.CallDone(1, [(True, msg.GONE), (True, pickle.dumps("one")), (True, pickle.dumps("two"))])
    result = ElasticExecutor.call_result
    assert result(done, "list_loras", None) == ["one", "two"]
    assert result(done, "list_loras", 2) == "two" and result(done, "list_loras", 0) == "one"
    with pytest.raises(RuntimeError, match="list_loras failed on rank 1: rank 1 is being started"):
        result(msg.CallDone(1, [(True, msg.GONE), (False, b"rank 1 is being started")]), "list_loras", None)


def snapshot_of(up: tuple[bool, ...], gone: tuple[bool, ...] = (False, False)) -> Snapshot:
    ranks = [RankNumbers(*each, False, 0, 0.0, 0.0, 0, 0) for each in zip(up, gone, strict=True)]
    return Snapshot(0, 0.0, ranks)


@pytest.mark.parametrize(("min_ranks", "healthy"), [(1, True), (2, False)])
def test_with_fewer_ranks_than_are_wanted_the_engine_is_unhealthy(min_ranks: int, healthy: bool) -> None:
    with lone_engine(min_ranks=min_ranks) as engine:
        engine.executor.client.tell(snapshot_of(up=(True, False)))  # the other one is being started
        assert_serves(engine)
        engine.executor.client.tell(snapshot_of(up=(True, False), gone=(False, True)))
        if healthy:
            assert_serves(engine)
            engine.executor.check_health()
        else:
            wait_until(lambda: engine.executor.is_dead, "the engine is unhealthy")
            with pytest.raises(EngineDeadError, match="1 of 2 ranks are left, min_ranks is 2"):
                engine.executor.check_health()


def test_more_ranks_are_wanted_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2), num_gpus=2)
    with pytest.raises(ValueError, match="'min_ranks' is 3, but there are 2 ranks"):
        _resolve_ranks(config, Settings(min_ranks=3))
