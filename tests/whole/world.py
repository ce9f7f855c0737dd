"""A whole server under a virtual clock, from one seed, with its faults.

Control process, supervisor, time limits, the lanes of the workers, their claims, what the engine does for its
control process, and the HTTP front are the real ones; processes, sockets, collectives, tasks, endpoints and the
clock are simulated. Everything is in one thread.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gfdit.core import ParallelSpec, Policy, Request, TaskGraph, TaskKind
from gfdit.core import commands as cmd
from gfdit.core import events as ev
from gfdit.core.cost.table import NominalCostModel
from gfdit.core.policy.fallback import FirstComeFirstServed
from gfdit.observe.snapshot import Snapshot, Totals
from gfdit.runtime import messages as msg
from gfdit.runtime.claims import Claims
from gfdit.runtime.client import REPLACED, ControlClient, RuntimeDownError
from gfdit.runtime.config import RuntimeConfig, make_run_dir
from gfdit.runtime.control_process import ControlProcess
from gfdit.runtime.plane import choice_of, plane_of
from gfdit.runtime.policy_guard import HANGING_POLICY_EXIT, PolicyTimeoutError
from gfdit.runtime.sockets import ORPHAN_GRACE_S, Queue
from gfdit.runtime.supervisor import Process, ProcessStarter, Supervisor, WorkerDiedError
from tests.support.cluster import VIEWS
from tests.support.workload import fan_graph, random_graph, random_requests
from tests.whole.books import MAX_RETRIES, Books, ContractError, FollowedPlane, Life, Operation
from tests.whole.comm import Heap
from tests.whole.component_books import ComponentBooks
from tests.whole.front import Entrance
from tests.whole.network import Network, SimulatedLink, SimulatedPort
from tests.whole.strands import Host, Scheduler
from tests.whole.weather import Weather
from tests.whole.workers import SPLIT_VIEWS, Contents, Worker
from tests.whole.workflows import WHOLE_MODEL, Parts, Pool

CLOSED_S = 5.0  # within which all processes end where none has anything to do
ENDED_S = 30.0  # after the end of the server, in which what is left of it ends
FAULTS_END_S = 60.0  # from the first request on; afterwards what is down comes back, and all must end
STARVED_S = 450.0  # without any event; longer than every time limit, and than three starts that come to nothing
MAX_HANDLED = 40_000
MAX_RESTARTS = 3
RESULT_TIMEOUT_S = 10.0


class World:
    """One run. ``run`` raises ``AssertionError``, of which :class:`ContractError` is one, if anything is wrong.

    ``log`` is given every event and command. ``change`` is what is not drawn of the weather. ``digest`` is the
    same for the same run.
    """

    def __init__(
        self, seed: int, log: Callable[[str], None] | None = None, change: Mapping[str, Any] | None = None
    ) -> None:
        self.seed = seed
        draw = self.draw = random.Random(seed)
        self.weather = dataclasses.replace(Weather.draw(draw), **(change or {}))
        self.num_ranks = self.weather.draw_num_ranks(draw)
        self.pool: Pool | None = None
        if self.weather.workflows:
            self.pool = Pool.draw(random.Random(f"{seed} pool"), self.num_ranks)
        self.parts = Parts()
        self.counts: Counter[str] = Counter()  # of what befalls components and streams
        self.contents = Contents(seed, SPLIT_VIEWS if self.weather.split else VIEWS)
        self.scheduler = Scheduler()
        self.heap = Heap()
        self.network = Network(self)
        self.link = SimulatedLink(self)
        self.lives: dict[str, Life] = {}
        self.operations: dict[int, Operation] = {}
        self.endings: Counter[str] = Counter()
        self.endings_by_name: dict[str, msg.RequestEnd] = {}
        self.without_result: set[str] = set()  # done, but what came of it was lost
        self.failing: set[int] = set()  # ranks whose new processes are faulty, too
        self._dead_hosts: set[int] = set()  # ranks that never return
        self._given_up: set[int] = set()  # ranks, by a control plane
        self.num_events = self.num_deaths = self.num_control_deaths = self.digest = 0
        self.control: ControlProcess | None = None  # once it has said its first word
        self._num_handled = 0  # events, and moments at which a policy wanted to be asked
        self._log = log
        self._wrong: ContractError | None = None
        self._workers: dict[tuple[int, int], Worker] = {}  # by rank and incarnation
        self._last: dict[int, Worker] = {}  # by rank
        self._supervisor: Supervisor | None = None
        self._clock_offset_s = 0.0
        self._num_pids = 100
        self._num_planned = 0
        self._news_s = 0.0  # when something has happened last
        self._is_served = False
        self._outbox: list[msg.EngineMessage] = []
        self._to_change: list[dict[str, Any]] = []
        self._num_changes = 0
        self._under_change: dict[str, Any] | None = None
        self._ended: list[str] = []
        self._mood = random.Random(seed)  # of the policy
        self._results: set[str] = set()
        self._counters = Totals()
        self._completed: dict[str, float] = {}
        self._is_over = False
        self.is_closed = False
        run_dir = make_run_dir("simulated-")
        self._config = RuntimeConfig(
            run_dir=str(run_dir),
            num_ranks=self.num_ranks,
            model=WHOLE_MODEL,
            components=[] if self.pool is None else list(self.pool.components.values()),
            component_bytes=None if self.pool is None else self.pool.component_bytes,
            policy=str(seed),
            worker="",
            worker_payload_path="",
            run_ahead=draw.randrange(2),
            max_artifact_bytes=self.weather.max_artifact_bytes,
            max_retries=MAX_RETRIES,
            max_queue_s=self.weather.max_queue_s,
            checkpoint_every_steps=draw.choice([0, 1, 2]),
            max_restarts=MAX_RESTARTS,
            restart_workers=self.weather.restarts,
            heartbeat_timeout_s=10.0,
            task_timeout_s=40.0,
            comm_timeout_s=30.0,
            start_timeout_s=100.0,
            max_control_restarts=1000,
        )
        self.claims = Claims.create(Path(self._config.claims_dir))
        self.entrance = Entrance(self)

    def run(self) -> World:
        server = Host("server")
        self.scheduler.spawn(server, "engine", self._engine)
        self.scheduler.spawn(server, "front", self.entrance.serve)
        log_level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # it logs as a server does that has a very bad day
        try:
            while not self._is_over:
                if not self.scheduler.step():
                    raise ContractError("nothing happens any more")
                if self._wrong is not None:
                    raise self._wrong
                self._check_progress()
        finally:
            self.scheduler.close()
            self.entrance.close()
            logging.disable(log_level)
            shutil.rmtree(self._config.run_dir, ignore_errors=True)
        return self

    def clock(self) -> float:
        return self.scheduler.time_s + self._clock_offset_s

    def up_to(self, most_s: float) -> float:
        return self.draw.random() ** 3 * most_s if most_s else 0.0

    def accuse(self, text: str) -> None:
        """Of a worker, whose lanes would take the error for that of a task."""
        self.note_wrong(ContractError(text))
        assert self._wrong is not None
        raise self._wrong

    def note_wrong(self, error: ContractError) -> None:
        self._wrong = self._wrong or error

    def new_pid(self) -> int:
        self._num_pids += 1
        return self._num_pids

    # The engine: as thin as what it tests allows

    def _engine(self) -> None:
        self.client = ControlClient(self._config, self.link, self.clock)
        try:
            self.client.wait_ready()
            self._is_served = True
            self._plan()
            while not (self._is_at_rest() or self._closes_early()):
                for message in self.client.receive(1.0):
                    self._on_message(message)
                outbox, self._outbox = self._outbox, []
                for submission in outbox:
                    self.client.send(submission)
                if self._to_change and self._under_change is None:
                    self._num_changes += 1
                    self._under_change = self._to_change.pop(0)
                    self.client.change(self._num_changes, self._under_change)
                self._end_without_result()
            living = self._living()
            if in_order := self._is_at_rest():
                self._check_rest()
            self._close()
            if in_order:
                self._check_closed(living)
            self._add_to_digest()
        except RuntimeDownError as error:
            self._say(f"down: {error}")
            self._check_down(str(error))
            self.without_result.update(self._completed)
            self.entrance.go_down(str(error))
            while self.entrance.num_open or self._num_planned:
                self.scheduler.wait(1.0)
            self._close()
        self.entrance.check()
        self._is_over = True

    def _closes_early(self) -> bool:
        """A server that was told to stop ends, whatever its processes are at."""
        return self.entrance.endpoints.server.should_exit and not self.entrance.num_open and self.seed % 2 == 0

    def _close(self) -> None:
        """All processes end, at once or when they find that the server has."""
        started_s = self.scheduler.time_s
        hosts = [*self._living(), self.link.host]
        has_to_do = any(worker.is_ready and not self._is_idle(worker) for worker in self._living())
        is_calm = not (has_to_do or self.num_control_deaths or any(host and host.stopped for host in hosts))
        self.client.close()
        if is_calm and self.scheduler.time_s - started_s > CLOSED_S:
            raise ContractError("the end takes long although nobody has anything to do any more")
        self.is_closed = True
        for worker in self._living():
            worker.note_end_of_server()
        self.scheduler.sleep(ENDED_S)
        if any(not worker.stopped for worker in self._living()):
            self.scheduler.sleep(ORPHAN_GRACE_S + 1.0)  # one that was stopped has gone on just now
        if left := [worker.name for worker in self._living() if not worker.stopped]:
            raise ContractError(f"{left} outlive the server")

    def _on_message(self, message: msg.ControlMessage | msg.Result) -> None:
        match message:
            case Snapshot():
                self._check_counters(message)
            case msg.Reconfigured(_, error):
                self._note_change(error)
            case cmd.StartRequest(request_id):
                if (life := self.lives.get(request_id)) is not None:
                    if life.started:
                        raise ContractError(f"{request_id} leaves the queue twice")
                    life.started = True
            case msg.Result(request_id):
                if request_id in self.lives:
                    self._results.add(request_id)
                elif self._completed.pop(request_id, None) is not None:
                    self.entrance.end(request_id, self.endings_by_name[request_id])
            case cmd.CompleteRequest() | cmd.CancelRequest() | cmd.RejectRequest() | cmd.FailRequest():
                life = self.lives.pop(message.request_id, None)
                if life is None:
                    raise ContractError(f"a second end of one request: {message}")
                name = message.request_id
                self._ended.append(name)
                self.endings[type(message).__name__] += 1
                self.endings_by_name[name] = message
                is_awaited = isinstance(message, cmd.CompleteRequest) and not life.cancelled and life.has_to_tell
                if is_awaited and name not in self._results:
                    self._completed[name] = self.clock()
                else:
                    self.entrance.end(name, message)

    def _note_change(self, error: str) -> None:
        change, self._under_change = self._under_change, None
        assert change is not None
        told = self.client.config
        # A policy that hangs may be done without by now.
        in_force = all(getattr(told, name) == change[name] for name in change.keys() - {"without_policy"})
        if not error and not in_force:
            raise ContractError(f"{change} is to be in force, and is not")
        self.counts["changes refused" if error else "changes"] += 1
        if error.startswith(REPLACED):
            self._to_change.insert(0, change)  # as an operator would

    def _check_counters(self, snapshot: Snapshot) -> None:
        """What operators are shown never goes back, whichever control process tells it."""
        before = self._counters.values()
        self._counters.take(snapshot.epoch, snapshot.sums)
        after = self._counters.values()
        for key, numbers in before.items():
            if any([new < old for old, new in zip(numbers, after[key], strict=True)]):
                raise ContractError(f"{key} was {numbers} and is {after[key]}")

    def _end_without_result(self) -> None:
        for request_id, completed_s in list(self._completed.items()):
            if self.clock() - completed_s > RESULT_TIMEOUT_S:
                del self._completed[request_id]
                if not (self.num_deaths or self._clock_offset_s):  # after a jump it may still come
                    raise ContractError(f"the result of {request_id} is lost, although no worker was")
                self.without_result.add(request_id)
                self.entrance.end(request_id, None)

    # What happens by itself

    def _plan(self) -> None:
        draw, at_s = self.draw, 0.0
        burst = draw.random() < 0.3
        for request, graph in random_requests(draw, draw.randint(1, 16)):
            at_s += 0.0 if burst else draw.expovariate(0.5)
            if self.weather.split:
                degrees = ParallelSpec(1), ParallelSpec(2)
                fan = draw.random() < 0.7
                graph = fan_graph(request.id, degrees, 5) if fan else random_graph(draw, request.id, degrees)
            if draw.random() < 0.3:  # its last task may run on several ranks, too
                widest = max((task.candidates for task in graph.tasks), key=len)
                graph = replace(graph, tasks=(*graph.tasks[:-1], replace(graph.tasks[-1], candidates=widest)))
            if self.pool is not None and draw.random() < 0.8:
                graph = self.pool.graph(draw, request.id, request.num_steps)
            self._plan_one(at_s, self.entrance.arrive, request, graph)
        weather = self.weather
        if draw.random() < weather.terminates:
            at_s = draw.uniform(0.0, FAULTS_END_S)
            self._plan_one(at_s, self.entrance.terminate)
            if draw.random() < 0.3:
                self._plan_one(at_s + draw.uniform(0.0, 5.0), self.entrance.terminate)
        self._plan_one(FAULTS_END_S, self._mend)
        for rate, happen in (
            (weather.deaths_per_s, self._strike),
            (weather.hangs_per_s, self._hang),
            (weather.stops_per_s, self._stop),
            (weather.faulty_ranks_per_s, self._spoil),
            (weather.dead_hosts_per_s, self._lose_host),
            (weather.cancel_storms_per_s, self._storm),
            (weather.clock_jumps_per_s, self._jump),
            (weather.control_deaths_per_s, self._strike_control),
            (weather.control_stops_per_s, self._stop_control),
            (weather.changes_per_s, self._change),
        ):
            at_s = draw.expovariate(rate) if rate else FAULTS_END_S
            while at_s < FAULTS_END_S:
                self._plan_one(at_s, happen)
                at_s += draw.expovariate(rate)
        self._faults_end_s = self.scheduler.time_s + FAULTS_END_S

    def _plan_one(self, at_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        def now() -> None:
            self._num_planned -= 1
            self._news_s = self.scheduler.time_s
            happen(*arguments)

        self._num_planned += 1
        self.scheduler.after(at_s, now)

    def submit(self, request: Request, graph: TaskGraph) -> None:
        """The endpoints hand a request in."""
        draw, now_s = self.draw, self.clock()
        deadline_s = now_s + draw.uniform(0, 20) if draw.random() < 0.5 else None
        request = replace(request, arrival_s=now_s, deadline_s=deadline_s, priority=draw.randrange(3))
        self.lives[request.id] = Life(request, graph)
        self._tell_engine(msg.Submit(request, graph, request.id.encode()))

    def give_up(self, name: str) -> None:
        """The endpoints do not wait for a request any more."""
        if (life := self.lives.get(name)) is not None:
            life.cancelled = True
            self._tell_engine(ev.RequestCancelled(name))

    def _tell_engine(self, message: msg.EngineMessage) -> None:
        self._outbox.append(message)
        self.client.wake()

    def _storm(self) -> None:
        names = [*self.lives, *self._ended[-3:], "nobody"]
        for name in self.draw.sample(names, self.draw.randint(1, len(names))):
            if name in self.lives:
                self.entrance.leave(name)
            else:
                self._tell_engine(ev.RequestCancelled(name))

    def _change(self) -> None:
        """Another rank is drained, or is again to be used, or another policy decides from now on; or both."""
        draw, change = self.draw, dict[str, Any]()
        if draw.random() < 0.7:
            last = self._to_change[-1] if self._to_change else self._under_change or {}
            drained = set(last.get("drained", self.client.config.drained)) ^ {draw.randrange(self.num_ranks)}
            if len(drained) < self.num_ranks:
                change["drained"] = tuple(sorted(drained))
        if not change or draw.random() < 0.3:
            change["policy"] = str(draw.randrange(100))
            change["without_policy"] = False
        self._request_change(change)

    def _request_change(self, change: dict[str, Any]) -> None:
        self._say(f"an operator wants {change}")
        self._to_change.append(change)
        self.client.wake()

    def _jump(self) -> None:
        """Nothing ran for a while."""
        self._clock_offset_s += self.draw.choice([0.5, 3600.0])

    # Workers

    def _living(self) -> list[Worker]:
        return [worker for worker in self._last.values() if worker.alive]

    def _pick(self, what: str) -> Worker | None:
        """One of those that live, and what befalls it."""
        if not (living := self._living()):
            return None
        worker = self.draw.choice(living)
        self._say(f"{worker.name} {what}")
        return worker

    def _strike(self) -> None:
        if worker := self._pick("dies"):
            worker.silenced = self.draw.random() < 0.5
            worker.kill()

    def _hang(self) -> None:
        if worker := self._pick("is stuck in its next task"):
            worker.to_get_stuck = True

    def _stop(self) -> None:
        if worker := self._pick("stops"):
            self._stop_host(worker)

    def _spoil(self) -> None:
        if worker := self._pick("is faulty"):
            worker.is_faulty = True
            if self.draw.random() < self.weather.faulty_for_good:
                self.failing.add(worker.rank)

    def _mend(self) -> None:
        if self.weather.changes_per_s and self.draw.random() < 0.5:
            self._request_change({"drained": ()})
        self.failing.clear()
        for worker in self._living():
            worker.is_faulty = False

    def _lose_host(self) -> None:
        """With all that runs there."""
        rank = self.draw.randrange(self.num_ranks)
        self._dead_hosts.add(rank)
        if rank in self._last and self._last[rank].alive:
            self._say(f"the host of rank {rank} is gone")
            self._last[rank].kill()

    def on_worker_end(self, worker: Worker) -> None:
        self.num_deaths += 1
        if self.network.port is not None:
            self.scheduler.after(self.up_to(self.weather.longest_detection_s), self.network.port.wake)

    def decide_fate(self, operation: Operation) -> None:
        """Drawn once for all members: how long a task takes, and what goes wrong in it."""
        if operation.seconds >= 0:
            return
        draw = self.draw
        operation.seconds = draw.uniform(0.01, 0.5)
        operation.culprit = draw.choice(operation.ranks)
        operation.is_late = draw.random() < 0.3
        if draw.random() < self.weather.task_error:
            operation.fault = "error"
        elif len(operation.ranks) > 1 and draw.random() < self.weather.spurious_echo:
            operation.fault = "echo"

    def is_too_large(self, command: cmd.RunTask) -> bool:
        """For the memory of a rank."""
        limit, (task, *_) = self.weather.tokens_per_rank, command.tasks
        if limit is None or task.kind is not TaskKind.DENOISE or (life := self.lives.get(task.request_id)) is None:
            return False
        return life.request.shape.num_tokens * len(command.tasks) > limit * command.layout.parallel.sp

    def any_ended(self, sentinels: Iterable[int]) -> bool:
        pids = {worker.pid for worker in self._living()}
        return any(pid not in pids for pid in sentinels)

    def put_at_worker(self, rank: int, incarnation: int, queue: Queue, message: Any) -> None:
        if (worker := self._workers.get((rank, incarnation))) is not None and worker.alive:
            worker.lanes[queue].put(message)

    def start_worker(self, rank: int, config: RuntimeConfig) -> Worker:
        place = rank, config.incarnation
        if place in self._workers:
            raise ContractError(f"a second process of rank {rank} has incarnation {config.incarnation}")
        if rank in self._last and self._last[rank].alive:
            raise ContractError(f"rank {rank} has two processes")
        worker = self._workers[place] = self._last[rank] = Worker(self, rank, config)
        failure, delay_s = "", self.up_to(0.1)
        if self._is_served:
            delay_s = self.up_to(self.weather.longest_restart_s)
            if rank in self._dead_hosts:
                failure = "death"
            elif self.scheduler.time_s < self._faults_end_s and self.draw.random() < self.weather.failed_start:
                failure = self.draw.choice(["error", "death", "hang"])
            worker.is_faulty = rank in self.failing
        worker.start(delay_s, failure)
        return worker

    def find_worker(self, rank: int) -> Worker | None:
        return self._last.get(rank)

    # The control process

    def start_control(self, config: RuntimeConfig, port: SimulatedPort) -> Host:
        host = Host(f"control {config.epoch}")
        self.scheduler.spawn(host, "control", lambda: self._control(host, config, port), self.up_to(1.0))
        return host

    def _control(self, host: Host, config: RuntimeConfig, port: SimulatedPort) -> None:
        weather = self.weather
        if config.without_policy and not weather.policy_hang:
            raise ContractError("a policy is done without that never hung")
        policy: Policy = FirstComeFirstServed("it")
        if not config.without_policy:
            policy = self._load_policy(choice_of(config))
            Path(config.policy_mark_path).write_bytes(b"\0")
        plane = plane_of(config, policy, SteadyCosts(), FollowedPlane)
        plane.load_policy = self._load_policy
        books = Books(
            config.epoch,
            self.lives,
            self.operations,
            weather.has_policy_faults,
            config.max_queue_s,
            self._given_up,
            None if self.pool is None else ComponentBooks(self.pool, self.num_ranks),
        )
        books.drain(config.drained)
        plane.follow(books, self._note, None if self._log is None else self._say)
        self._supervisor = Supervisor(config, self.clock, SimulatedStarter(self))
        self.control = ControlProcess(config, port, self._supervisor, self.claims, self.clock, plane)
        self.network.bind(port)
        try:
            self.control.run()
        except WorkerDiedError as error:
            port.tell(msg.Fatal(str(error)))
            self.control.shut_down(failed=True)
        else:
            self.control.shut_down()
        host.end()
        self.network.unbind()
        self.link.ended(0)

    def _load_policy(self, choice: ev.PolicyChoice) -> Policy:
        return self.weather.policy(int(choice.policy), self._hang_in_policy, self.pool)

    def _hang_in_policy(self) -> None:
        """The guard stops it, or ends the process, or cannot, since it hangs outside of Python."""
        config = self.client.config
        how = self._mood.choice(["stopped", "stubborn", "deaf"])
        self._say(f"the policy hangs and is {how}")
        if how == "deaf":
            Path(config.policy_mark_path).write_bytes(b"\1")
            self.scheduler.vanish()
        self.scheduler.sleep(config.policy_timeout_s)
        if how == "stubborn":
            self.end_control(HANGING_POLICY_EXIT)
            self.scheduler.vanish()
        raise PolicyTimeoutError("no decision in time")

    def _note(self, event: ev.Event) -> None:
        self._num_handled += 1
        match event:
            case ev.ComponentLoaded(error=error):
                self.counts["loads that failed" if error else "loads that went well"] += 1
        if isinstance(event, ev.TaskFinished) and self._supervisor and event.rank in self._supervisor.workers:
            self._last[event.rank].has_worked = True
        if not isinstance(event, (ev.LookAhead, ev.WakeUp)):
            self.num_events += 1
            self._news_s = self.scheduler.time_s

    def end_control(self, returncode: int) -> None:
        host, port = self.link.host, self.network.port
        assert host is not None
        if not host.alive:
            return
        self._say(f"{host.name} ends")
        self.num_control_deaths += 1
        host.end()
        self._add_to_digest()
        self.control = None
        if port is not None:
            port.lose()
            self.network.unbind()
        for life in self.lives.values():
            life.disturbed = True
        self.link.ended(returncode)

    def _add_to_digest(self) -> None:
        """What the control plane has said."""
        if self.control is not None:
            assert isinstance(self.control.plane, FollowedPlane)
            self.digest = zlib.crc32(str(self.control.plane.digest).encode(), self.digest)

    def _strike_control(self) -> None:
        self.end_control(-9)

    def _stop_control(self) -> None:
        host = self.link.host
        assert host is not None
        self._say(f"{host.name} stops")
        self._stop_host(host)

    def _stop_host(self, host: Host) -> None:
        """For a while, or until somebody misses it."""
        host.stop()
        if self.draw.random() < 0.7:
            self._plan_one(self.up_to(self.weather.longest_stop_s), host.go_on)

    # The end

    def _check_progress(self) -> None:
        if self._num_handled > MAX_HANDLED:
            raise ContractError("the world does not come to rest")
        if self.scheduler.time_s - self._news_s > STARVED_S:
            self._check_rest()
            raise ContractError("something is not at rest")

    def _is_at_rest(self) -> bool:
        """Nothing will happen any more but heartbeats."""
        if self.lives or self._num_planned or self._outbox or self._completed or self.network.num_on_their_way:
            return False
        if self._to_change or self._under_change is not None:
            return False
        if self.entrance.num_open or (self.entrance.stopping_s is not None and self.entrance.closed_s is None):
            return False
        control, supervisor = self.control, self._supervisor
        if control is None or supervisor is None or not control.plane.idle or supervisor.next_start_s is not None:
            return False
        port = self.network.port
        return (
            port is not None
            and self.link.host is not None
            and not self.link.host.stopped
            and port.is_empty
            and port.strand is not None
            and self.client.config.epoch == control.config.epoch
            and all(self._is_idle(worker) for worker in self._living())
            and all(worker.alive for worker in map(self._last.__getitem__, supervisor.workers))
        )

    @staticmethod
    def _is_idle(worker: Worker) -> bool:
        return worker.is_ready and not worker.stopped and all(inbox.is_idle for inbox in worker.lanes.values())

    def _check_rest(self) -> None:
        stuck = [worker.rank for worker in self._living() if not self._is_idle(worker)]
        if stuck:
            raise ContractError(f"ranks {stuck} wait for each other")
        if self.lives:
            raise ContractError(f"requests {sorted(self.lives)} never end")
        if self.control is None or not self.control.plane.idle:
            raise ContractError("the control plane still waits for something")
        there = {worker.rank for worker in self._living()}
        drained = there.intersection(self.client.config.drained)
        if aside := [rank for rank in drained if not self.control.plane.is_drained(rank)]:
            raise ContractError(f"ranks {aside} were never put aside")
        if self.control.plane.state.ranks.free_in_order != tuple(sorted(there - drained)):
            raise ContractError("a rank was never given back")
        for worker in self._living():
            if worker.executor.store:
                raise ContractError(f"rank {worker.rank} still holds {min(worker.executor.store)}")
            if streams := worker.executor.streams._streams:
                raise ContractError(f"rank {worker.rank} still holds a stream of {min(streams)}")
            if self.pool is not None:
                if worker.rank in drained:
                    continue
                told = self.control.plane.state.ranks.present[worker.rank].resident
                if told != worker.executor.loaded:
                    raise ContractError(f"rank {worker.rank} has {worker.executor.loaded} loaded, not {told}")
        for rank in set(range(self.num_ranks)).difference(there):
            self._check_given_up(rank)

    def _check_given_up(self, rank: int) -> None:
        if rank in self._given_up or not self.weather.restarts:
            return
        last = [worker for worker in self._workers.values() if worker.rank == rank][-MAX_RESTARTS:]
        if len(last) < MAX_RESTARTS or any(worker.has_worked for worker in last):
            raise ContractError(f"rank {rank} was given up too early")

    def _check_down(self, how: str) -> None:
        """Only where no worker is left."""
        if not how.startswith("no worker is left"):
            raise ContractError(f"the runtime is down: {how}")
        for rank in range(self.num_ranks):
            self._check_given_up(rank)
        self.endings["down"] += 1

    def _check_closed(self, living: list[Worker]) -> None:
        if killed := [worker.name for worker in living if worker.exitcode != 0]:
            raise ContractError(f"{killed} did not end by themselves")

    def _say(self, text: str) -> None:
        if self._log is not None:
            self._log(f"{self.scheduler.time_s:10.4f} {text}")


class SteadyCosts(NominalCostModel):
    """Nothing is learned: after a stop in a small task, large ones would be expected to take days."""

    def observe(self, *measured: Any) -> None:
        pass


class SimulatedStarter(ProcessStarter):
    """Starts workers of a world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def start(self, rank: int, config: RuntimeConfig) -> Process:
        return self._world.start_worker(rank, config)

    def find(self, rank: int, config: RuntimeConfig) -> tuple[int, Process | None]:
        worker = self._world.find_worker(rank)
        if worker is None:
            return 0, None
        return worker.incarnation, worker if worker.alive else None
