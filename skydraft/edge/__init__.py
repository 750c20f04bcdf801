"""The edge: the client of a remote verifier, and the recovery from a lost link."""
