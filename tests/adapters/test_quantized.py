"""FP8 weights: gfdit refuses nothing; on a CPU vLLM has no kernel for them, for stock no more than here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gfdit.adapters.testing import AdapterKit, ChildError, ForkServer
from tests.support.waiting import HANG_S

NO_KERNEL = "Failed to find a kernel that can implement the ScaledMM linear layer"


def load_as_stock_does(model: Path) -> str:
    """The error that vLLM-Omni's own worker ends with, and where it is raised; nothing of gfdit's runs."""
    import traceback

    import torch
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.worker.diffusion_worker import WorkerWrapperBase
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()
    config = OmniDiffusionConfig.from_kwargs(
        model=str(model), dtype="bfloat16", enforce_eager=True, quantization_config="fp8"
    )
    config.enrich_config()
    config.num_gpus = 1
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        WorkerWrapperBase(gpu_id=0, od_config=config)
    except Exception:
        return traceback.format_exc()
    return ""


def test_what_has_no_kernel_is_refused_by_vllm_and_not_by_gfdit(
    fork_server: ForkServer, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model("qwen-image", dtype="bfloat16")
    stock = fork_server.run(load_as_stock_does, model)
    assert NO_KERNEL in stock and "gfdit" not in stock.replace(str(Path(__file__).parents[2]), ""), stock
    options = {"quantization_config": "fp8"}
    with (
        pytest.raises(ChildError, match=NO_KERNEL),
        AdapterKit(
            model,
            dtype="bfloat16",
            num_ranks=1,
            od_config=options,
            fork_server=fork_server,
            comm_timeout_s=HANG_S,
        ),
    ):
        pass
