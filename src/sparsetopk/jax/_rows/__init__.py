"""Rows of one array: argument checks, the namespace of the maths, its rules as custom derivatives."""
