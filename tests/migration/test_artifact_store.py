"""What a rank holds says of itself which part it is."""

from __future__ import annotations

import torch

from gfdit.core.layouts import ExecutionLayout, ParallelSpec
from gfdit.migration.codec import FieldCodec
from gfdit.omni.artifact_store import ArtifactStore

ONE, OTHER = ExecutionLayout((0, 1), ParallelSpec(2)), ExecutionLayout((1, 0), ParallelSpec(2))


def test_a_part_keeps_the_layout_it_was_got_under() -> None:
    store, codec = ArtifactStore(), FieldCodec()
    rows = torch.arange(3)
    store.put("r/x", {"rows": rows}, ONE)
    assert store.pack("r/x", codec).layout == ONE
    store.put("r/x", {"rows": rows + 1}, OTHER, codec.view({"rows": rows}))
    parts = store.pack("r/x", codec)
    assert parts.layout == OTHER and torch.equal(parts.tensors["rows"], rows + 1)
