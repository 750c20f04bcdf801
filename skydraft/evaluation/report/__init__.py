"""The report of a comparison: one page that needs neither a model nor a network."""
