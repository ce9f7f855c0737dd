"""gfdit: schedulable parallelism for running Diffusion Transformer requests on vLLM-Omni."""

__version__ = "0.1.0"
