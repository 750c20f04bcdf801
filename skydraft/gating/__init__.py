"""Which blocks go to the target."""
