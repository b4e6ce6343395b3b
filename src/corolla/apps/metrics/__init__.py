"""A server's numbers for Prometheus."""
