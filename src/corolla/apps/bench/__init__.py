"""Benchmarks that print their setup and their figures; `docs/performance.md` quotes them."""
