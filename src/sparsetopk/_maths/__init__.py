"""The maths of the operators, written once, over arrays of any framework.

Nothing here imports a framework. Every function takes a namespace ``xp`` that a front-end passes in:
``_numpy/namespace.py``, ``torch/_rows/namespace.py`` or ``jax/_rows/namespace.py``. It has what the
standard for array libraries names (``where``, ``abs``, ``sqrt``, ``exp``, ``log``, ``sign``,
``floor``, ``maximum``, ``minimum``, ``clip``, ``hypot``, ``isfinite``, ``isnan``, ``isinf``, ``cumsum``,
``take_along_axis``, ``concat``, ``zeros_like``, ``ones_like``, ``full_like``, ``finfo``, ``iinfo``,
``inf``, ``nan``, ``int32``), and these besides:

=========================  =============================================================================
``astype(x, dtype)``       the same numbers in another dtype; flags become 0 and 1
``total(x)``               the sum over the last axis, which stays with length 1; flags are counted
``largest(x)``             the largest over the last axis, which stays with length 1
``index(x)``               0, ..., n - 1 along the last axis, as integers, where x is
``sort(x)``                rows in decreasing order and that order; the lowest index first among ties
``unsort(order, *v)``      sorted rows in the order that they came in
``block_sum(x, block)``    for every entry the sum over the entries of its row with the same block id
``bits(x)``                the bits of floats as integers, and ``from_bits(i, dtype)`` the way back
``stop_gradient(x)``       the numbers, as constants
``with_derivative(f, df)`` f, whose derivative is ``df(y, at, tangents)`` with y = f(*at)
``still``                  the namespace for arguments of a rule, where they are constants
``while_loop(...)``        ``while_loop(busy, step, state, limit)``: ``state = step(i, state)`` while
                           any of ``busy(state)`` is set, at most ``limit`` times
``repeat(...)``            ``repeat(count, step, state)``: ``state = step(i, state)`` so often
=========================  =============================================================================

Rows are (..., n); what there is one of for a row is (..., 1).
"""
