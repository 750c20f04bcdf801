"""`skydraft.verifier.v4`: the messages between edge and cloud, as values and as bytes."""

import os

# Else gRPC tells on stderr of each connection that was idle and is closed. What is set already stays.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
