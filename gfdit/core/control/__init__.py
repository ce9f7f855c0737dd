"""The control plane, its books and what checks them."""

from gfdit.core.control.plane import ControlPlane

__all__ = ["ControlPlane"]
