"""As in ``tests.comm``: ranks are forked from one process."""

from tests.comm.conftest import ranks_are_forked

__all__ = ["ranks_are_forked"]
