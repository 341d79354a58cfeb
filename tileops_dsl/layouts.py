"""The closed set of layouts of row-wise programs: which thread holds which element of a tile, in which register.

Each layout is a value. `place(index)` gives the threads that hold an element and the register in each; the tests
compare it with tables that are written out. Instruction fragments (mma, wgmma) join this set with their kernels.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class VectorisedRows:
    """A tile [rows, cols] whose rows each lie in `threads_per_row` threads, `vector` neighbouring elements at a time.

    With slots = threads / threads_per_row rows at a time: row i is pass i // slots of slot i % slots; column j is
    element j % vector of chunk (j // vector) // threads_per_row, in the row's thread (j // vector) % threads_per_row.
    A row's threads are neighbours: a warp reads along rows.

    With `lanes_on_rows` a warp reads across rows, for tensors whose rows, not columns, have unit stride: neighbouring
    threads hold neighbouring vectors of rows. Row i is element i % vector of slot i // vector; column j is access
    j // threads_per_row of the row's thread j % threads_per_row; a thread has `vector` rows (passes = vector).

    `shifted` rows start anywhere in a vector. The tile then begins at the row's first aligned vector; what lies before
    it and after the row's last vector, at most vector - 1 columns each, is held one column a thread, in one register
    more (the edge register, to which no tile index leads). So each access is aligned whatever the row's address, and
    rows of up to cols + vector - 1 columns fit. Where the vectors begin belongs to the row: a thread has one row.
    """

    rows: int
    cols: int
    threads: int
    threads_per_row: int
    vector: int
    lanes_on_rows: bool = False
    shifted: bool = False

    def __post_init__(self):
        if self.threads % self.threads_per_row or self.rows % self.slots:
            raise ValueError(f"{self!r}: rows must be a multiple of threads / threads_per_row")
        if self.shifted and (self.rows != self.slots or self.lanes_on_rows or self.threads_per_row < 2 * self.vector):
            raise ValueError(f"{self!r}: shifted rows need one row for each thread, along 2 * vector lanes or more")
        if 32 % self.threads_per_row and self.threads_per_row % 32:
            raise ValueError(f"{self!r}: threads_per_row must divide a warp or be whole warps")
        if self.lanes_on_rows and self.rows != self.slots * self.vector:
            raise ValueError(f"{self!r}: lanes on rows need `vector` rows for each thread")
        if self.cols % (self.column_vector * self.threads_per_row):
            raise ValueError(f"{self!r}: cols must be a multiple of vector * threads_per_row")

    shape = property(lambda self: (self.rows, self.cols))
    ragged = property(lambda self: self.shifted)  # whether a thread's last register may hold no element
    slots = cached_property(lambda self: self.threads // self.threads_per_row)
    passes = cached_property(lambda self: self.rows // self.slots)  # rows that one thread takes part in
    column_vector = cached_property(lambda self: 1 if self.lanes_on_rows else self.vector)  # neighbouring columns of one access
    chunks = cached_property(lambda self: self.cols // (self.column_vector * self.threads_per_row))  # of a thread to a row
    row_registers = cached_property(lambda self: self.chunks * self.column_vector + self.shifted)  # columns in one thread
    registers = cached_property(lambda self: self.passes * self.row_registers)
    # Groups of a row's threads that must meet in shared memory to reduce the row.
    warps_per_row = property(lambda self: self.threads_per_row if self.lanes_on_rows else max(1, self.threads_per_row // 32))

    def thread(self, slot: int, member: int) -> int:
        return slot + member * self.slots if self.lanes_on_rows else slot * self.threads_per_row + member

    def row(self, i: int) -> tuple[int, int]:
        """Slot and pass of row i."""
        return divmod(i, self.vector) if self.lanes_on_rows else (i % self.slots, i // self.slots)

    def column(self, j: int) -> tuple[int, int]:
        """Thread of the row that has column j, and which of its columns that is."""
        chunk, member = divmod(j // self.column_vector, self.threads_per_row)
        return member, chunk * self.column_vector + j % self.column_vector

    def place(self, index: tuple[int, int]) -> tuple[set[int], int]:
        (slot, row_pass), (member, column) = self.row(index[0]), self.column(index[1])
        register = column * self.passes + row_pass if self.lanes_on_rows else row_pass * self.row_registers + column
        return {self.thread(slot, member)}, register

    def __str__(self) -> str:
        order = "lanes on rows" if self.lanes_on_rows else "lanes on columns"
        order += ", shifted" * self.shifted
        return f"rows of {self.threads_per_row} threads x {self.chunks} x {self.vector}, {self.passes} passes, {order}"


@dataclass(frozen=True)
class PerRow:
    """A vector [rows]: each element is held by all threads of its row."""

    tile: VectorisedRows
    shape = property(lambda self: (self.tile.rows,))
    threads = property(lambda self: self.tile.threads)
    registers = property(lambda self: self.tile.passes)
    ragged = False

    def place(self, index: tuple[int]) -> tuple[set[int], int]:
        slot, row_pass = self.tile.row(index[0])
        return {self.tile.thread(slot, member) for member in range(self.tile.threads_per_row)}, row_pass

    def __str__(self) -> str:
        return f"one per row of ({self.tile})"


@dataclass(frozen=True)
class PerColumn:
    """A vector [cols]: each element is held by the threads that hold its column."""

    tile: VectorisedRows
    shape = property(lambda self: (self.tile.cols,))
    threads = property(lambda self: self.tile.threads)
    registers = property(lambda self: self.tile.row_registers)
    ragged = property(lambda self: self.tile.shifted)

    def place(self, index: tuple[int]) -> tuple[set[int], int]:
        member, register = self.tile.column(index[0])
        return {self.tile.thread(slot, member) for slot in range(self.tile.slots)}, register

    def __str__(self) -> str:
        return f"one per column of ({self.tile})"


@dataclass(frozen=True)
class Linear:
    """A vector spread over a group, or one in shared memory: element i is the thread's i // threads, of thread i % threads.

    Where the threads do not divide the extent, the last register of some is not used.
    """

    extent: int
    threads: int
    shape = property(lambda self: (self.extent,))
    registers = property(lambda self: -(-self.extent // self.threads))
    ragged = True
    bytes = property(lambda self: 4 * self.extent)  # in shared memory, of float32

    def place(self, index: tuple[int]) -> tuple[set[int], int]:
        return {index[0] % self.threads}, index[0] // self.threads

    def __str__(self) -> str:
        return f"{self.extent} elements over {self.threads} threads"


def tile_of(layout: VectorisedRows | PerRow | PerColumn) -> VectorisedRows:
    """The distribution of rows that a layout belongs to."""
    return layout if isinstance(layout, VectorisedRows) else layout.tile
