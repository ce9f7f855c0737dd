"""gfdit's own settings: ``additional_config={"gfdit": {...}}`` of a vLLM-Omni stage."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from gfdit.adapters.limits import Limits
from gfdit.adapters.options import EditOptions
from gfdit.core.json_fields import LARGEST_INTEGER, shown
from gfdit.core.policy.loading import DEFAULT_POLICY, load_policy
from gfdit.observe.otlp import Endpoint

if TYPE_CHECKING:
    from gfdit.templates.store import TemplateStore

_MIB = 1024 * 1024
# What any process can be told.
Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_INTEGER)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]
# Bounded, because what waits for longer than the operating system can be told to does not wait at all.
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """Where processes find what is kept of templates. ``shared`` is of this server alone if there is no folder."""

    folder: Path | None
    shared: Path
    host_bytes: int
    disk_bytes: int
    full_blocks: int | None

    def open(self) -> TemplateStore:
        from vllm.logger import init_logger

        from gfdit.templates.store import TemplateStore  # of those who read settings, few open it

        return TemplateStore(
            self.folder,
            self.shared,
            host_bytes=self.host_bytes,
            disk_bytes=0 if self.folder is None else self.disk_bytes,
            on_message=init_logger(__name__).warning,
        )

    def close(self) -> None:
        if self.folder is None:
            shutil.rmtree(self.shared, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """``ranks`` defaults to the stage's data-parallel size. Times in seconds, sizes in pixels.

    ``devices`` names the GPU of every rank, separated by commas, by index or UUID (``gfdit.comm.devices``); by
    default rank ``r`` has the device ``r``.

    ``comm_table`` is a file of ``gfdit bench comm --save``, by which kernels choose how to move data.
    ``workflows`` are Python files; then the server's model is not loaded as one, but the components of workflows
    are, each where and when it is needed, and ``component_bytes`` of them fit on a rank (``docs/workflows.md``).
    ``adapter`` is ``module:Class`` of an adapter to use instead of the pipeline's own. ``model_name`` is what cost
    tables and policies call the model. ``record`` is a file for every event and command of the control plane,
    ``otlp_endpoint`` where traces go (:class:`~gfdit.observe.otlp.Endpoint`).

    ``run_ahead`` 1 lets a request's next step be queued behind the running one, where the policy agrees.

    ``ring`` also offers sequence-parallel degrees that do not divide the model's attention heads.

    ``warmup_size`` is the side of the image that every rank, degree and batch is warmed up with; 0 skips it.
    After ``warmup_limit_s`` nothing further is: what is used least is left out, and named in the log.

    A model without an adapter of its own is tried when the server starts (``docs/models.md``): after
    ``self_test_limit_s`` no further kind of request is, and those run whole. ``cache_dir`` is where it is
    remembered for the next start. With ``trust_plans`` such a model runs at sequence-parallel degrees by its
    transformer's own plan, also if nobody has shown that this makes the same images.

    What a request may ask for is bounded (HTTP 400), since one that only exhausts the memory of a rank takes
    others with it: ``max_steps`` denoising steps in all, ``max_outputs`` images or videos, ``max_pixels`` of a
    frame and of all images of a request, ``max_video_pixels`` of all frames of all its videos. Prompt and input
    images take ``max_payload_bytes`` at most (HTTP 413). ``max_requests`` are alive at once at most, with
    ``max_queued_bytes`` of prompts and input images; others are turned away (HTTP 429). One that has waited for
    longer than ``max_queue_s`` without its first task running is given up (HTTP 503). ``max_artifact_bytes`` is
    what the artifacts of a rank may take: requests wait until there is room. ``device_memory_bytes`` is what the
    tasks of a rank may take of its device, weights included, where that is not what the device has: layouts that
    take more are not offered. ``min_sp`` is the least sequence-parallel degree of a step; a request may ask for a
    larger one. With ``graph_bytes`` steps of families that allow it are captured as CUDA graphs, by shape and
    layout, which may hold as much of each rank's device.

    ``edit`` is how edits under a mask are made that do not say so (``docs/editing.md``). Of templates are kept
    ``template_host_bytes`` in shared memory, none by default, and ``template_disk_bytes`` in ``template_folder``,
    which several servers may share; ``template_bytes`` of one template at most. Of the steps that read them
    ``template_full_blocks`` leading blocks compute all tokens, by default as many as they are fastest with.

    A worker that ends, is silent for ``heartbeat_timeout_s`` or is at one task for longer than ``task_timeout_s``
    and than 20 times what it should take is replaced, but not after ``max_restarts`` in a row that never became
    ready. Of each request at most ``max_retries`` steps that were lost with a worker run
    again; then it fails (HTTP 503). When the server is told to stop, what runs has ``shutdown_timeout_s`` to end.
    Every ``checkpoint_every_steps`` steps, unless 0, the state of a request on a
    single rank is copied to another rank.

    Ranks that are lost for good are done without, down to ``min_ranks``: with fewer the server is unhealthy (HTTP
    503), for whatever watches it to start it again.

    A control process that ends, or does not answer for ``control_timeout_s``, is replaced, but not after
    ``max_control_restarts`` in a row. Loading the model from disk, each item of its warm-up and every call to the
    workers without a time limit of its own take ``start_timeout_s`` at most.
    """

    policy: str = DEFAULT_POLICY
    policy_args: dict[str, str] = field(default_factory=dict)
    admission: str = "none"
    ranks: Count | None = None
    devices: str | None = None
    adapter: str | None = None
    workflows: tuple[str, ...] = ()
    component_bytes: Count | None = None
    model_name: str | None = None
    costs: str | None = None
    timeline: str | None = None
    record: str | None = None
    otlp_endpoint: str | None = None
    comm_table: str | None = None
    ring: bool = False
    warmup_size: CountOrZero | None = None
    warmup_limit_s: SecondsOrZero | None = None
    self_test_limit_s: SecondsOrZero = 600.0
    cache_dir: str = "~/.cache/gfdit"
    trust_plans: bool = False
    max_steps: Count = 1000
    max_outputs: Count = 10
    max_pixels: Count = 4096 * 4096
    max_video_pixels: Count = 1280 * 720 * 161
    max_payload_bytes: Count = 256 * _MIB
    max_queued_bytes: Count = 4096 * _MIB
    max_requests: Count = 1024
    max_queue_s: Seconds | None = None
    run_ahead: Annotated[int, msgspec.Meta(ge=0, le=1)] = 1
    max_artifact_bytes: Count | None = None
    device_memory_bytes: Count | None = None
    min_sp: Count = 1
    graph_bytes: CountOrZero = 0
    edit: dict[str, Any] = field(default_factory=dict)
    template_folder: str | None = None
    template_host_bytes: CountOrZero = 0
    template_disk_bytes: CountOrZero = 1 << 40
    template_bytes: Count | None = None
    template_full_blocks: CountOrZero | None = None
    max_retries: CountOrZero = 3
    checkpoint_every_steps: CountOrZero = 0
    max_restarts: CountOrZero = 3
    max_control_restarts: CountOrZero = 3
    min_ranks: Count = 1
    control_timeout_s: Seconds = 5.0
    heartbeat_timeout_s: Seconds = 10.0
    task_timeout_s: Seconds = 60.0
    policy_timeout_s: Seconds = 2.0
    comm_timeout_s: Seconds = 60.0
    start_timeout_s: Seconds = 600.0
    shutdown_timeout_s: SecondsOrZero = 20.0
    threads_per_rank: Count | None = None

    @classmethod
    def parse(cls, additional_config: Mapping[str, Any] | None) -> Settings:
        """Raises ``ValueError`` naming a setting, policy or policy argument that is unknown or wrong."""
        given = (additional_config or {}).get("gfdit") or {}
        if not isinstance(given, Mapping):
            raise ValueError(f'additional_config["gfdit"] must be an object, got {shown(given)}')
        known = [spec.name for spec in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(f"gfdit has no setting {shown(unknown[0])}, known: {', '.join(known)}")
        policy_args = given.get("policy_args") or {}
        if isinstance(policy_args, Mapping):
            policy_args = {name: str(value) for name, value in policy_args.items()}
        values = {**given, "policy_args": policy_args}
        try:
            settings = msgspec.convert(values, cls)
        except UnicodeEncodeError as error:
            raise ValueError("a gfdit setting has half of a surrogate pair, which is no character") from error
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at `$.")
            name = place.rstrip("`")
            wanted = what.replace("`", "").replace("Expected", "expected", 1)
            raise ValueError(f"gfdit setting {name!r} is {shown(values.get(name))}: {wanted}") from error
        load_policy(settings.policy, settings.policy_args, settings.admission)
        if settings.otlp_endpoint is not None:
            try:
                Endpoint.parse(settings.otlp_endpoint)
            except ValueError as error:
                raise ValueError(
                    f"gfdit setting 'otlp_endpoint' is {settings.otlp_endpoint!r}: {error}"
                ) from error
        try:
            EditOptions.parse(settings.edit)
        except ValueError as error:
            raise ValueError(f"gfdit setting 'edit': {error}") from error
        return settings

    @property
    def device_names(self) -> tuple[str, ...]:
        """By rank; none for the default."""
        return tuple(name.strip() for name in self.devices.split(",")) if self.devices else ()

    @property
    def limits(self) -> Limits:
        """Of what one request may ask for."""
        return Limits(self.max_steps, self.max_outputs, self.max_pixels, self.max_video_pixels)

    def make_templates(self) -> TemplateSettings | None:
        """Servers with the same folder share what is in memory, too, and it stays for those that come later."""
        if not self.template_host_bytes:
            return None
        memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        folder = None
        if self.template_folder is None:
            shared = Path(tempfile.mkdtemp(prefix="gfdit-templates-", dir=memory))
        else:
            folder = Path(self.template_folder).expanduser().resolve()
            name = hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest()
            shared = memory / f"gfdit-templates-{os.getuid()}-{name}"
        limits = self.template_host_bytes, self.template_disk_bytes
        return TemplateSettings(folder, shared, *limits, self.template_full_blocks)

    def name_of(self, model: str) -> str:
        """What to call ``model``: a checkpoint folder by its own name, a hub name as it is."""
        if self.model_name:
            return self.model_name
        folder = Path(model).expanduser()
        return folder.resolve().name if folder.is_dir() else model
