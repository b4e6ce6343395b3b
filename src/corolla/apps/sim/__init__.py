"""A whole swarm in one process, on a virtual clock, without torch: for tests and simulations."""
