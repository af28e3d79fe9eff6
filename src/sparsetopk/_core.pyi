from ._types import Array

def simd_level() -> str: ...
def solve_threshold(
    op: int, exponent: float, rows: int, n: int, x: Array, k: Array, lam: Array, out: Array, /
) -> None: ...
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
    /,
) -> bool: ...
def threshold_forward(
    op: int,
    exponent: float,
    debias: bool,
    dtype: int,
    rows: int,
    n: int,
    x: int,
    k: int,
    k_stride: int,
    lam: int,
    lam_stride: int,
    y: int,
    state: int,
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
    x: int,
    g: int,
    state: int,
    k: int,
    k_stride: int,
    lam: int,
    lam_stride: int,
    dx: int,
    dk: int,
    dlam: int,
    threads: int,
    /,
) -> None: ...
def permutahedron_forward(
    exponent: float,
    itemsize: int,
    rows: int,
    n: int,
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
    /,
) -> bool: ...
def permutahedron_backward(
    exponent: float,
    itemsize: int,
    rows: int,
    n: int,
    order: int,
    first: int,
    w_order: int,
    d: int,
    lam: int,
    dy: int,
    dx: int,
    dw: int,
    single_w: bool,
    dlam: int,
    floor: float,
    /,
) -> None: ...
