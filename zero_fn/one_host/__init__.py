"""Collectives between ranks of one host, through shared memory.

same_host      sends and receives pieces of tensors
group_memory   the shared memory of a process group: arenas and mailboxes
arena          memory in which one rank writes and its peers read
mailbox        headers of messages between two ranks
futex          sleeps until a word of shared memory changes
"""
