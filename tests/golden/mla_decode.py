"""Launches mla_decode.cu and mla_combine.cu: MLA decode over a paged cache of bfloat16, pages of 64 tokens.

In the place of the text by hand, Generated() launches what the compiler writes from the tile program.

The schedule is made here, on the host: cache_seqlens is read once and remembered as long as it is not written to, so that a
second call can be captured into a graph. (In the product each CTA finds its own part.)
"""

import math
from pathlib import Path

import launch as driver
import torch

from tileops_dsl import output
from tileops_dsl.kernels import configs_of

HERE = Path(__file__).parent
PAGE, ROWS, DIM, DIM_V = 64, 64, 576, 512
SHARED_BYTES = 231320
OVERHEAD = 5  # what starting and storing a piece costs, in pages
schedules = {}


def load():
    return driver.load(HERE / "mla_decode.cu", "mla_decode"), driver.load(HERE / "mla_combine.cu", "mla_combine")


def schedule(lengths, num_parts):
    """Parts of nearly equal cost: [parts, 8] and the place of each request's pieces among the splits, [requests + 1].

    A part is (first request, its first page, last request, the end of its pages, the number of its first piece, 0, 0, 0). It
    takes whole requests while they fit, then an even number of pages of the next. A request that exceeds what is left by a
    thirty-second of a part, and by no more than a split costs, is taken whole.
    """
    pages = [max(1, -(-length // PAGE)) for length in lengths]
    payload = -(-sum(n + OVERHEAD for n in pages) // num_parts) + OVERHEAD + 1
    parts, pieces = [], [0] * len(pages)
    request = done = 0
    for _ in range(num_parts):
        part, left = [request, done, request - 1, 0, pieces[request] if request < len(pages) else 0, 0, 0, 0], payload
        while request < len(pages) and left > OVERHEAD + 1:
            rest = pages[request] - done
            whole = rest + OVERHEAD <= left + min(payload // 32, OVERHEAD)
            taken = rest if whole else (left - OVERHEAD) // 2 * 2
            left -= taken + OVERHEAD
            part[2:4] = request, done + taken
            pieces[request] += 1
            request, done = (request + 1, 0) if whole else (request, done + taken)
            if not whole:
                break
        parts.append(part)
    if request < len(pages):
        raise AssertionError(f"{num_parts} parts of {payload} do not hold {pages}")
    first_split = [0]
    for count in pieces:
        first_split.append(first_split[-1] + (count if count > 1 else 0))
    return parts, first_split


def device_schedule(cache_seqlens, num_parts):
    key = (cache_seqlens.data_ptr(), cache_seqlens._version, len(cache_seqlens), num_parts)
    if key not in schedules:
        parts, first_split = schedule(cache_seqlens.tolist(), num_parts)
        tensors = (torch.tensor(t, dtype=torch.int32, device=cache_seqlens.device) for t in (parts, first_split))
        schedules[key] = (cache_seqlens, *tensors, first_split[-1])  # the key stays valid while its tensor lives
    return schedules[key][1:]


class Generated:
    """The compiler's kernel of a configuration, which is written into `folder`; that of mla_decode has its merge."""

    def __init__(self, row=None, folder: Path = driver.CACHE / "generated"):
        self.row = row or configs_of("mla_decode")[0]
        self.merge = Generated(configs_of("mla_combine")[0], folder) if self.row.op == "mla_decode" else None
        made = output.compile_config(self.row)
        self.entry, self.path = made.entry, folder / f"{self.row.file}.cu"
        folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text(output.source_text([made]))
        (folder / f"{made.params}.h").write_text(output.params_header(made.params, made.fields))
        self.kernel = driver.load(self.path, self.row.name)

    def __call__(self, tensors, sizes, scalars, grid):
        """The struct's fields by their names."""
        values = []
        for name, ctype, _ in self.entry["params"]:
            if ctype == "tensor_map":
                entry, (columns, rows) = self.entry["maps"][name], self.entry["maps"][name]["box"]
                rows = scalars[entry["rows"]].value if "rows" in entry else rows
                values.append(driver.tensor_map(tensors[name], (columns, rows, 1), entry["swizzle"]))
            elif name.endswith("_stride"):
                values += map(driver.I64, tensors[name.removesuffix("_stride")].stride())
            else:
                number = driver.I64 if ctype == "int64_t" else driver.I32
                values.append(number(sizes[name]) if name in sizes else {**tensors, **scalars}[name])
        self.kernel(driver.pack(*values), grid, self.entry["threads"], self.entry["shared_bytes"])


def launch(kernels, q, kv_cache, block_table, cache_seqlens, scale, causal=True, num_parts=None):
    """out [B, Sq, H, 512] and lse [B, H, Sq] (natural logarithm) of q [B, Sq, H, 576] and kv_cache [pages, page, 576]."""
    decode, combine = kernels
    batch, queries, heads, _ = q.shape
    rows = queries * heads
    tiles = -(-rows // ROWS)
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
    num_parts = num_parts or max(1, multiprocessors // tiles)
    out = q.new_empty(batch, queries, heads, DIM_V)
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    tensors = {"q": q.view(batch, rows, DIM), "kv_cache": kv_cache, "out": out.view(batch, rows, DIM_V), "lse": lse}
    scalars = {"causal": driver.I32(int(causal)), "scale_log2": driver.F32(scale * math.log2(math.e))}
    page = kv_cache.shape[1]  # PAGE, unless the compiler's kernel has another unit
    of_page = {"unit": driver.I32(min(page & -page, PAGE)), "inverse": driver.I64(-(-(2**32) // page))}
    if isinstance(decode, Generated):
        partial = q.new_empty(2, num_parts, rows, DIM_V, dtype=torch.float32)
        partial_lse = q.new_empty(2, num_parts, rows, dtype=torch.float32)
        pieces = cache_seqlens.new_empty(num_parts, 4)
        tensors |= {"partial": partial, "partial_lse": partial_lse, "block_table": block_table, "cache_seqlens": cache_seqlens}
        tensors |= {"pieces": pieces}
        sizes = {"n": batch, "rows": rows, "pages": len(kv_cache), "page": page, "table": block_table.shape[1]}
        sizes |= {"parts": num_parts, "heads": heads, "sq": queries, "most_pieces": 0}
        decode(tensors, sizes, scalars | of_page, (tiles, num_parts))
        of_rows, entries = (2, num_parts, queries, heads), min(batch, num_parts)
        tensors = {"partial": partial.view(*of_rows, DIM_V), "partial_lse": partial_lse.view(of_rows), "pieces": pieces}
        sizes = {"parts": num_parts, "requests": batch, "batch": entries, "outer": queries, "inner": heads, "cols": DIM_V}
        grid = -(-heads // decode.merge.row.rows_per_block), queries, entries
        decode.merge(tensors | {"out": out, "lse": lse.transpose(1, 2)}, sizes, {}, grid)
    else:
        parts, first_split, splits = device_schedule(cache_seqlens, num_parts)
        partial = q.new_empty(max(1, splits), rows, DIM_V, dtype=torch.float32)
        partial_lse = q.new_empty(max(1, splits), rows, dtype=torch.float32)
        tensors |= {"partial": partial, "partial_lse": partial_lse, "block_table": block_table, "cache_seqlens": cache_seqlens}
        tensors |= {"schedule": parts, "first_split": first_split}
        maps = [driver.tensor_map(tensors.pop(name), (64, 64, 1), 128) for name in ("q", "kv_cache", "out")]
        sizes = driver.I64(block_table.stride(0)), *map(driver.I32, (rows, heads, queries))
        params = driver.pack(*maps, *tensors.values(), *sizes, *scalars.values())
        decode(params, (tiles, num_parts), 256, SHARED_BYTES)
        if splits:
            sizes = (driver.I32(v) for v in (rows, heads, queries))
            combine(driver.pack(out, lse, partial, partial_lse, first_split, *sizes), (-(-rows // 8), batch), 256)
    return out, lse
