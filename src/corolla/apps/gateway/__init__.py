"""The front door: an OpenAI-compatible API over a swarm, and the pages that show how the swarm is."""
