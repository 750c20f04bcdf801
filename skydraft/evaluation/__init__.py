"""Measuring: every number is computed from records, never kept beside them."""
