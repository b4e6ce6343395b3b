"""Uses a swarm: finds a route, streams activations through it, and looks like a `transformers` model."""
