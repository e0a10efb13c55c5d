"""Ranks on this machine: processes forked from a warm server, for `launch` and for the tests."""
