"""The NumPy front-end: the maths on rows in float64, and the public functions over it."""
