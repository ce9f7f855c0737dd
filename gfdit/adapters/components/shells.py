"""Parts of a pipeline loaded alone, in objects with vLLM-Omni's methods and only the attributes that they need.

A pipeline's constructor loads everything. A shell is an object of the same class that never ran it: its methods
compute what the whole pipeline's compute, on the parts that it was given. Imported where weights are loaded only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.config import LoadConfig
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.forward_context import get_forward_context
from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader


def shell(pipeline_class: type[nn.Module], **attributes: Any) -> Any:
    """An object of ``pipeline_class`` with nothing but ``attributes``."""
    made = pipeline_class.__new__(pipeline_class)
    nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def native_shell(
    pipeline_class: type[nn.Module],
    od_config: OmniDiffusionConfig,
    device: torch.device,
    part: str,
    make: Callable[[OmniDiffusionConfig], nn.Module],
) -> Any:
    """A shell with one part of vLLM-Omni's own, from the folder of that name, loaded as vLLM-Omni loads pipelines.

    ``make`` gives the part without its weights.
    """

    def init(self: Any, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.od_config = od_config
        self.parallel_config = od_config.parallel_config
        self.device = device
        self.weights_sources = [
            DiffusersPipelineLoader.ComponentSource(
                model_or_path=od_config.model, subfolder=part, revision=None, prefix=f"{part}."
            )
        ]
        setattr(self, part, make(od_config))

    holder = type(pipeline_class.__name__, (pipeline_class,), {"__init__": init})
    loader = DiffusersPipelineLoader(LoadConfig(), od_config=od_config)
    return loader.load_model(
        load_device=str(device), load_format="custom_pipeline", custom_pipeline_name=holder, device=device
    )


def config_of(source: str, dtype: torch.dtype) -> OmniDiffusionConfig:
    """vLLM-Omni's configuration of the checkpoint ``source``, whose parallelism is the process's.

    Tasks set the degree of sequence parallelism in one object, so all models of a process must read the same.
    """
    process = get_forward_context().omni_diffusion_config
    assert process is not None, "components are loaded in the context of their worker"
    od_config = OmniDiffusionConfig.from_kwargs(
        model=source, dtype=dtype, enforce_eager=process.enforce_eager, extras={}
    )
    od_config.enrich_config()
    od_config.parallel_config = process.parallel_config
    return od_config


def pretrained(part_class: Any, source: str, folder: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A part that diffusers or transformers load by themselves, for inference; ``folder`` may be empty."""
    part = part_class.from_pretrained(source, subfolder=folder or None, torch_dtype=dtype).to(device).eval()
    # What was not copied to a device is still the file, mapped: read when it is first used, and not aligned, and
    # kernels for CPUs round otherwise where it is not.
    for tensor in (*part.parameters(), *part.buffers()):
        tensor.data = tensor.data.clone()
    return part


def num_bytes(*parts: nn.Module) -> int:
    """Of their weights, shared ones once."""
    tensors = {tensor.data_ptr(): tensor for part in parts for tensor in (*part.parameters(), *part.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())
