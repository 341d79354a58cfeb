"""The tile DSL: short tile programs in, CUDA C++ out, at build time. `tileops` never imports this package."""
