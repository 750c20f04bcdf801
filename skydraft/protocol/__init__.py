"""`skydraft.verifier.v2`: the messages between edge and cloud, as values and as bytes."""
