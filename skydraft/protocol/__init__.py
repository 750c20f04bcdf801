"""`skydraft.verifier.v4`: the messages between edge and cloud, as values and as bytes."""
