"""The edge: the verifier on the other end of a link, and what to do when that link is gone."""
