"""Collectives between ranks of one host, through shared memory."""
