"""The activations of an epilogue, on the emulator, against float64. activation.h is all words, so a GPU runs the same."""

from math import erf

import numpy as np
import pytest

from tileops_dsl.emulate import In, Out, launch_kernel

X = np.concatenate([np.linspace(-12, 12, 4801), [1e4, -1e4, 1e30, -1e30, 0.0]]).astype(np.float32)
V = X.astype(np.float64)
PHI = 0.5 * (1 + np.array([erf(v * 0.5**0.5) for v in V]))
# 1 + erf(v) loses its digits where it is near 0; the tail of Phi by its asymptotic series is exact enough there.
FAR = V.clip(max=-4)
TAIL = np.exp(-(V**2) / 2) / np.sqrt(2 * np.pi) * (1 - FAR**-2 + 3 * FAR**-4 - 15 * FAR**-6) / -FAR
GELU = V * np.where(V < -5, TAIL, PHI)
U = np.sqrt(2 / np.pi) * (V + 0.044715 * V**3)
EXACT = {
    "relu": np.maximum(V, 0),
    "gelu": GELU,
    "gelu_tanh": V * np.exp(-np.logaddexp(0, -2 * U)),
    "silu": V * np.exp(-np.logaddexp(0, -V)),
}
KERNEL = """
struct Params {{ const void* x; void* y; }};
TILEOPS_KERNEL(activation, Params, 32, 1) {{
  Fragment<float, 1> v;
  for (int i = thread_index(); i < {count}; i += 32) {{
    load_global<1>(v, 0, global<float>(p.x), i, site(1));
    v[0] = {word}(v[0]);
    store_global<1>(global<float>(p.y), i, v, 0, site(2));
  }}
}}"""


def run(tmp_path, word, x):
    source, y = tmp_path / f"{word}.cu", np.full_like(x, np.nan)
    head = "#include <tileops/sm_90a.h>\nnamespace tileops {\n"
    source.write_text(head + KERNEL.format(word=word, count=x.size) + "\n}  // namespace tileops\n")
    launch_kernel(source, "activation", [In(x), Out(y)], 1, 32, 16, sites={1: "k.py:1", 2: "k.py:2"})
    return y.astype(np.float64)


@pytest.mark.parametrize("word", EXACT)
def test_error(tmp_path, word):
    exact = EXACT[word]
    error = np.abs(run(tmp_path, word, X) - exact)
    if word == "gelu":
        assert (error <= 1.2e-7 * (1 + np.abs(V))).all()
    else:  # relative, for e^u of a rounded u; below 2^-126 the reciprocal is 0
        assert (error <= 4e-7 * (1 + np.abs(np.log(np.abs(exact) + 1e-38))) * np.abs(exact) + 2.0**-126 * (1 + np.abs(V))).all()


@pytest.mark.parametrize("word", EXACT)
def test_special_values(tmp_path, word):
    """A NaN stays one, +inf stays; -inf is 0, or NaN as in PyTorch where it meets a factor of 0."""
    y = run(tmp_path, word, np.array([np.nan, np.inf, -np.inf], np.float32))
    assert np.isnan(y[0]) and y[1] == np.inf and (y[2] == 0 if word == "relu" else np.isnan(y[2]))
