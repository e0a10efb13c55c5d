"""Ranks on this machine: processes forked from a server that has imported torch,
for `launch` and for tests."""
