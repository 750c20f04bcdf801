"""`skydraft.verifier.v4`: the messages between edge and cloud, as values and as bytes."""

import os

# Otherwise gRPC writes a line to stderr for each idle connection that it closes. The user's own setting stays.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
