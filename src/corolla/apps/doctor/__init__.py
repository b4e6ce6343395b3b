"""What is wrong with this peer and its place in a swarm, and what to do about it."""
