"""The command line: parse, build, call, print. It decides nothing."""
