"""A whole network in one process, on virtual time: for tests and simulations."""
