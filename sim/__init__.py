"""The simulator: the server's control plane and policies under a virtual clock, and workloads to feed it."""
