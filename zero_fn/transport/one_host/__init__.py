"""Collectives between ranks of one host, through memory that they share."""
