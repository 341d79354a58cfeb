"""Measure the operators beside their peers; `benchmarks/README.md` says which command answers which question."""
