"""Models for workflows: text encoders, base transformers, ControlNets, VAEs and LoRAs of image families.

``from gfdit.adapters.components.flux import FluxTransformer`` and so on; what passes between them is said in
:mod:`gfdit.adapters.components.base`.
"""
