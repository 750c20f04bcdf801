"""`skydraft.verifier.v1`: what edge and cloud say to each other, and how it becomes bytes and back."""
