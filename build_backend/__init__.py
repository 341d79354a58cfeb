"""Builds tileops/_C.so: build time only, standard library and setuptools only, never shipped in the wheel.

hooks.py        PEP 517 entry points: what pip must install before this build
mode.py         TILEOPS_BUILD -> which targets, for which GPUs
toolkit.py      where nvcc and the static CUDA runtime are
objects.py      objects named by what is in them, and the build.ninja that makes them
nvcc_object.py  what ninja runs for one .cu: nvcc, plus the report that checks.py reads
checks.py       what fails a build: spills, serialised wgmma, oversized kernels
link.py         one shared library that needs no CUDA library and runs on old glibc
wheel_tag.py    the oldest manylinux platform that the library runs on
operators.py    the operators that tileops/ops declares; writes tileops/ops/__init__.py
measured.py     problems on which kernels were timed
tables.py       text for the binding: the dispatcher's tables of kernels, the operators' schemas
native.py       all of it, in order
"""
