"""`skydraft.verifier.v3`: the messages between edge and cloud, as values and as bytes."""
