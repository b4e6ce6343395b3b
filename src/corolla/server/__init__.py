"""Hosts a span of blocks: sessions, their KV caches, and one device thread that computes."""
