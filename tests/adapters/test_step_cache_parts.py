"""What a cache keeps of a request, apart from any model: copied, named anew elsewhere, agreed upon or dropped."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gfdit.omni.plugin import find_accelerator

pytestmark = pytest.mark.skipif(find_accelerator() is not None, reason="runs on the CPU platform")

SINGLE, TWO, BRANCHES = (1, 1, 0, 0), (2, 1, 0, 0), (1, 2, 0, 0)
CPU = torch.device("cpu")


class Rank:
    """cache-dit's manager on a rank of its own, whose contexts are named after the rank's addresses."""

    def __init__(self, address: int, **config: Any) -> None:
        from cache_dit import DBCacheConfig, TaylorSeerCalibratorConfig
        from cache_dit.caching.cache_contexts import CachedContextManager

        from gfdit.adapters.forward.step_caches import StepCaches

        self.manager = CachedContextManager("test", persistent_context=True)
        self.name = f"blocks_{address}"
        model = torch.nn.Module()
        model._context_manager, model._context_names = self.manager, [self.name]  # type: ignore[assignment]
        options = {"max_warmup_steps": 0, "residual_diff_threshold": 0.5, "enable_separate_cfg": False, **config}
        self.manager.new_context(
            name=self.name,
            cache_config=DBCacheConfig(**options),
            calibrator_config=TaylorSeerCalibratorConfig(taylorseer_order=1),
        )
        self.caches = StepCaches([model])

    @property
    def attributes(self) -> list[dict[str, Any]]:
        """As an overlay would take them off."""
        return [{"_cached_context_manager": self.manager._cached_context_manager, "_current_context": None}]

    @property
    def context(self) -> Any:
        return self.manager._cached_context_manager[self.name]

    def step(self, value: float) -> None:
        """One that is computed."""
        self.manager.set_context(self.name)
        self.manager.mark_step_begin()
        self.manager.set_Fn_buffer(torch.full((2, 4), value), prefix="Fn_residual")
        self.manager.set_Bn_buffer(torch.full((2, 4), value), prefix="Bn_residual")

    def can_cache(self, value: float) -> bool:
        return self.manager.can_cache(torch.full((2, 4), value), prefix="Fn_residual")

    def go_on(self, attributes: list[dict[str, Any]]) -> None:
        (own,) = attributes
        self.manager._cached_context_manager = own["_cached_context_manager"]
        self.manager.set_context(self.name)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Where the task runs; ``others`` are what other ranks say, and ``reduce`` what a sum over a group makes."""
    from gfdit.adapters.forward import step_caches

    now = SimpleNamespace(here=SINGLE, others=[], reduce=lambda tensor: tensor)
    monkeypatch.setattr(step_caches.Place, "here", classmethod(lambda cls: cls(*now.here)))

    def gathered(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, *(torch.tensor([other]) for other in now.others)])

    sp = SimpleNamespace(all_gather=gathered, all_reduce=lambda tensor: now.reduce(tensor), world_size=2)
    alone = SimpleNamespace(all_gather=lambda tensor: tensor, world_size=1)
    monkeypatch.setattr(step_caches, "get_sp_group", lambda: sp)
    monkeypatch.setattr(step_caches, "get_cfg_group", lambda: alone)
    return now


def test_a_share_is_not_touched_by_later_steps_and_goes_on_under_another_name(place: SimpleNamespace) -> None:
    one, other = Rank(1), Rank(2)
    one.step(1.0)
    share = one.caches.share_of(one.attributes)
    one.step(5.0)
    one.context.cached_steps.append(1)
    sent = pickle.loads(pickle.dumps(other.caches.kept(share)))
    other.go_on(other.caches.to_go_on_from(sent, other.caches.share_of(other.attributes), CPU))
    assert other.context.name == other.name and other.context.cached_steps == []
    assert other.context.transformer_executed_steps == 1 and one.context.transformer_executed_steps == 2
    assert torch.equal(other.context.buffers["Fn_residual_buffer"], torch.ones(2, 4))
    assert torch.equal(other.context.calibrator.states["Bn_residual"].state["dY_current"][0], torch.ones(2, 4))
    other.step(7.0)  # and the share stays what it was
    assert share.tensors[0].max() == 1 and other.caches.attributes_of(share)[0]["_cached_context_manager"]


def test_tensors_are_no_fields_of_an_artifact(place: SimpleNamespace) -> None:
    """Fields may come from several ranks, each of which has another share."""
    from gfdit.migration.tensor_fields import tensor_fields

    one = Rank(1)
    one.manager.set_context(one.name)
    one.manager.mark_step_begin()
    one.manager.set_Fn_buffer(torch.zeros(64, 1024), prefix="Fn_residual")
    kept = one.caches.kept(one.caches.share_of(one.attributes))
    assert kept.share.tensors[0].nbytes > 100_000 and not tensor_fields({"caches": kept})


@pytest.mark.parametrize(
    ("kept_at", "goes_on_at", "others", "passes", "buffers"),
    [
        (SINGLE, SINGLE, [], 2, 1),
        (TWO, TWO, [[1.0, 2.0]], 2, 1),
        (TWO, TWO, [[0.0, 2.0]], 2, 0),  # another rank has not its own share
        (TWO, SINGLE, [], 2, 0),
        (SINGLE, TWO, [[0.0, 2.0]], 2, 0),
        (TWO, TWO, [[1.0, 3.0]], 0, 0),  # one that has counted otherwise would go another way later
        (TWO, TWO, [[0.0, -1.0]], 0, 0),
        (BRANCHES, SINGLE, [], 0, 0),  # which counts passes of both branches
    ],
)
def test_ranks_agree_on_what_they_go_on_from(
    place: SimpleNamespace,
    kept_at: tuple[int, ...],
    goes_on_at: tuple[int, ...],
    others: list[list[float]],
    passes: int,
    buffers: int,
) -> None:
    rank = Rank(1)
    at_start = rank.caches.share_of(rank.attributes)
    rank.step(1.0)
    rank.step(2.0)
    place.here = kept_at
    kept = rank.caches.kept(rank.caches.share_of(rank.attributes))
    place.here, place.others = goes_on_at, others
    rank.go_on(rank.caches.to_go_on_from(kept, at_start, CPU))
    assert rank.context.transformer_executed_steps == passes
    assert len(rank.context.buffers) == buffers
    assert rank.can_cache(2.0) == bool(buffers)


def test_the_decision_is_by_the_mean_of_the_ranks(place: SimpleNamespace) -> None:
    """This rank would skip what has changed by 10 %; how much the other one has changed counts as much."""
    rank = Rank(1)
    rank.step(1.0)
    rank.manager.mark_step_begin()
    assert rank.can_cache(1.1)
    place.here = TWO
    for others_change, skips in ((0.1, True), (0.85, True), (0.95, False)):
        place.reduce = lambda means, more=others_change: means + torch.tensor([more, 1.0])
        rank.context.residual_diffs.clear()
        assert rank.can_cache(1.1) is skips, others_change
        (said,) = rank.context.residual_diffs.values()
        assert said == pytest.approx((0.1 + others_change) / 2, abs=1e-6)


def test_a_mask_of_steps_does_not_skip_what_nothing_is_known_of(place: SimpleNamespace) -> None:
    rank = Rank(1, steps_computation_mask=[1, 0, 0], steps_computation_policy="static")
    at_start = rank.caches.share_of(rank.attributes)
    rank.step(1.0)
    rank.manager.mark_step_begin()
    assert rank.can_cache(9.0)
    place.here = TWO
    kept = rank.caches.kept(rank.caches.share_of(rank.attributes))
    place.here = SINGLE
    rank.go_on(rank.caches.to_go_on_from(kept, at_start, CPU))
    assert not rank.can_cache(9.0)


def test_a_cache_that_is_nowhere_to_be_found_is_refused() -> None:
    """Its state would go from request to request, and its ranks would not agree."""
    from gfdit.adapters.forward.adapter import ForwardAdapter

    config: Any = SimpleNamespace(
        model_class_name="Unknown",
        diffusion_load_format="default",
        custom_pipeline_args=None,
        cache_backend="tea_cache",
        tf_model_config={},
    )
    pipeline = torch.nn.Module()
    pipeline.transformer = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="keeps its tea_cache where gfdit does not look for it"):
        ForwardAdapter(config, 1).bind(pipeline, CPU)
    config.cache_backend = "none"
    ForwardAdapter(config, 1).bind(pipeline, CPU)
