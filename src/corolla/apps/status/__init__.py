"""The state of a swarm as facts, for `corolla status` and for the gateway's pages alike."""
