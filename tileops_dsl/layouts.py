"""The closed set of layouts of row-wise programs: which thread holds which element of a tile, in which register.

Each layout is a value. `place(index)` gives the threads that hold an element and the register in each; the tests
compare it with tables that are written out. Instruction fragments (mma, wgmma) join this set with their kernels.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class VectorisedRows:
    """A tile [rows, cols] whose rows each lie in `threads_per_row` threads, `vector` neighbouring elements at a time.

    With slots = threads / threads_per_row rows at a time: row i is pass i // slots of slot i % slots; column j is
    element j % vector of chunk (j // vector) // threads_per_row, in the row's thread (j // vector) % threads_per_row.
    A row's threads are neighbours (a warp reads along rows), unless `lanes_on_rows`: then neighbouring threads
    hold neighbouring rows (a warp reads across rows, for tensors whose rows, not columns, have unit stride).

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
        if self.cols % (self.vector * self.threads_per_row):
            raise ValueError(f"{self!r}: cols must be a multiple of vector * threads_per_row")

    @property
    def slots(self) -> int:
        return self.threads // self.threads_per_row

    @property
    def passes(self) -> int:
        """Rows that one thread takes part in."""
        return self.rows // self.slots

    @property
    def chunks(self) -> int:
        """Vectors of one row that one thread holds."""
        return self.cols // (self.vector * self.threads_per_row)

    @property
    def row_registers(self) -> int:
        return self.chunks * self.vector + self.shifted

    @property
    def registers(self) -> int:
        return self.passes * self.row_registers

    @property
    def warps_per_row(self) -> int:
        """Groups of a row's threads that must meet in shared memory to reduce the row."""
        return self.threads_per_row if self.lanes_on_rows else max(1, self.threads_per_row // 32)

    def thread(self, slot: int, member: int) -> int:
        return slot + member * self.slots if self.lanes_on_rows else slot * self.threads_per_row + member

    def place(self, index: tuple[int, int]) -> tuple[set[int], int]:
        i, j = index
        chunk, member = divmod(j // self.vector, self.threads_per_row)
        register = i // self.slots * self.row_registers + chunk * self.vector + j % self.vector
        return {self.thread(i % self.slots, member)}, register

    def __str__(self) -> str:
        order = "lanes on rows" if self.lanes_on_rows else "lanes on columns"
        order += ", shifted" * self.shifted
        return f"rows of {self.threads_per_row} threads x {self.chunks} x {self.vector}, {self.passes} passes, {order}"


@dataclass(frozen=True)
class PerRow:
    """A vector [rows]: each element is held by all threads of its row."""

    tile: VectorisedRows

    @property
    def registers(self) -> int:
        return self.tile.passes

    def place(self, index: tuple[int]) -> tuple[set[int], int]:
        slot = index[0] % self.tile.slots
        threads = {self.tile.thread(slot, member) for member in range(self.tile.threads_per_row)}
        return threads, index[0] // self.tile.slots

    def __str__(self) -> str:
        return f"one per row of ({self.tile})"


@dataclass(frozen=True)
class PerColumn:
    """A vector [cols]: each element is held by the threads that hold its column."""

    tile: VectorisedRows

    @property
    def registers(self) -> int:
        return self.tile.row_registers

    def place(self, index: tuple[int]) -> tuple[set[int], int]:
        (thread,), register = self.tile.place((0, index[0]))
        member = thread // self.tile.slots if self.tile.lanes_on_rows else thread
        return {self.tile.thread(slot, member) for slot in range(self.tile.slots)}, register

    def __str__(self) -> str:
        return f"one per column of ({self.tile})"


Layout = VectorisedRows | PerRow | PerColumn
