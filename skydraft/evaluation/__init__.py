"""Comparisons of modes: runs, their records, and figures computed from the records alone."""
