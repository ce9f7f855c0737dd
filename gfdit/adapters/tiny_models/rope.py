"""How rotary embeddings share out a head."""


def rope_axes(head_dim: int) -> tuple[int, int, int]:
    """Rotary dimensions of frame (or text), height and width: even, and together ``head_dim``."""
    spatial = head_dim * 3 // 8 // 2 * 2
    return head_dim - 2 * spatial, spatial, spatial
