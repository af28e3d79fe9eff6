from typing import Any

def simd_level() -> str: ...
def entries_read() -> int: ...
def layout() -> dict[str, Any]: ...
def xla_handlers() -> dict[str, object]: ...
def threshold_forward(
    op: int,
    exponent: float,
    debias: bool,
    dtype: int,
    rows: int,
    n: int,
    row_stride: int,
    x: int,
    k: int,
    k_stride: int,
    lam: int,
    lam_stride: int,
    state: int,
    y: int,
    threads: int,
    /,
) -> None: ...
def threshold_backward(
    op: int,
    exponent: float,
    debias: bool,
    dtype: int,
    rows: int,
    n: int,
    row_stride: int,
    x: int,
    k: int,
    k_stride: int,
    lam: int,
    lam_stride: int,
    state: int,
    g: int,
    dx: int,
    dk: int,
    dlam: int,
    threads: int,
    /,
) -> None: ...
def pieces_gather(
    pieces: int,
    count: int,
    threads: int,
    from_: float,
    to: float,
    lo: float,
    hi: float,
    is_long: bool,
    /,
) -> tuple[int, int, int, int]: ...
def pieces_ties(pieces: int, count: int, threads: int, size: float, counts: int, /) -> None: ...
def pieces_histogram(
    pieces: int, count: int, threads: int, first: int, last: int, shift: int, counts: int, /
) -> None: ...
def pieces_neighbours(
    pieces: int, count: int, threads: int, cut: float, /
) -> tuple[float, float]: ...
def pieces_masses(
    pieces: int,
    count: int,
    threads: int,
    exponent: float,
    debias: bool,
    k: float,
    lam: float,
    pivot: float,
    delta: float,
    is_long: bool,
    /,
) -> tuple[float, float, float]: ...
def pieces_apply(
    pieces: int,
    count: int,
    threads: int,
    exponent: float,
    debias: bool,
    k: float,
    lam: float,
    pivot: float,
    delta: float,
    is_long: bool,
    /,
) -> None: ...
def pieces_block_sums(
    pieces: int,
    count: int,
    threads: int,
    exponent: float,
    debias: bool,
    k: float,
    lam: float,
    pivot: float,
    delta: float,
    is_long: bool,
    sums: int,
    /,
) -> None: ...
def pieces_cotangents(
    pieces: int,
    count: int,
    threads: int,
    exponent: float,
    debias: bool,
    k: float,
    lam: float,
    pivot: float,
    delta: float,
    is_long: bool,
    sums: int,
    /,
) -> float: ...
def threshold_loss(
    op: int,
    exponent: float,
    debias: bool,
    dtype: int,
    rows: int,
    n: int,
    row_stride: int,
    x: int,
    k: int,
    k_stride: int,
    lam: int,
    lam_stride: int,
    state: int,
    labels: int,
    ignored: int,
    spread: bool,
    weights: int,
    y: int,
    value: int,
    threads: int,
    /,
) -> tuple[int, float]: ...
def select_slots(dtype: int, rows: int, n: int, y: int, capacity: int, indices: int, /) -> None: ...
def solve_isotonic(
    phi: int, exponent: float, rows: int, n: int, s: int, w: int, lam: int, d: int, block: int, /
) -> None: ...
def argsort_descending(itemsize: int, rows: int, n: int, x: int, order: int, /) -> None: ...
def solve_permutahedron(
    phi: int,
    exponent: float,
    n: int,
    rows: int,
    x_itemsize: int,
    x: int,
    w_rows: int,
    w_itemsize: int,
    w: int,
    lam: int,
    d: int,
    block: int,
    paired: int,
    threads: int,
    /,
) -> bool: ...
def permutahedron_forward(
    exponent: float,
    itemsize: int,
    rows: int,
    n: int,
    x_rows: int,
    x: int,
    w_rows: int,
    w_itemsize: int,
    w: int,
    lam: int,
    y: int,
    order: int,
    first: int,
    w_order: int,
    d: int,
    threads: int,
    /,
) -> bool: ...
def permutahedron_backward(
    exponent: float,
    itemsize: int,
    rows: int,
    n: int,
    x_rows: int,
    w_rows: int,
    w_itemsize: int,
    order: int,
    first: int,
    w_order: int,
    d: int,
    lam: int,
    dy: int,
    dx: int,
    dw: int,
    dlam: int,
    floor: float,
    threads: int,
    /,
) -> None: ...
