"""The warm-up on real ranks: every kind of task, degree and batch, and migrations."""

from __future__ import annotations

from typing import Any

from tests.support.images import Engine


def request(guidance_scale: float, **prompt: str) -> Any:
    from vllm_omni.diffusion.request import OmniDiffusionRequest
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    sampling = OmniDiffusionSamplingParams(
        height=64, width=64, num_inference_steps=2, guidance_scale=guidance_scale, true_cfg_scale=4.0
    )
    return OmniDiffusionRequest({"prompt": "a red panda", **prompt}, sampling, "warm-up")


def test_every_kind_of_work_runs_the_most_used_first(engine: Engine) -> None:
    from gfdit.omni.warm_up import WarmUp

    what = WarmUp((request(0.0), request(5.0, negative_prompt="")), sequence_parallel=True, limit_s=0.0)
    by_rank = engine.call("gfdit_begin_warm_up", what)
    assert all(items == by_rank[0] for items in by_rank)
    names = [item.name for item in by_rank[0]]
    narrow = ["encode", "sp1", "decode", "encode guided", "sp1 guided"]
    wide = ["sp2", "sp2 guided", "cfg2xsp1 guided", "sp4", "sp4 guided", "cfg2xsp2 guided"]
    assert names[: len(narrow)] == narrow
    assert [name for name in names if name in wide] == wide
    first_batch = names.index("sp1 x2")
    assert names[first_batch - 2 : first_batch] == ["migration to 2", "migration to 4"]
    batches = [f"{spec} x{size}" for spec in ("sp1", "sp2", "sp4") for size in (2, 4, 8, 3, 5, 6, 7)]
    assert [name for name in names if " x" in name and "guided" not in name] == batches
    for item in by_rank[0]:
        if item.num_requests <= 2 or item.name == "sp1 x8":  # others differ in nothing but their number
            assert all(isinstance(seconds, float) for seconds in engine.call("gfdit_warm_up", item)), item
    engine.call("gfdit_end_warm_up")
    assert engine.call("gfdit_artifacts") == [{}, {}, {}, {}] and engine.drained()
