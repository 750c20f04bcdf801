"""The command line: parse, build, call, print. All logic is elsewhere."""
