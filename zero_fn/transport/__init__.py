"""The collectives of a step. Only this package moves bytes between ranks.

A transport moves bytes along one axis. Every transport has the same four operations:

    all-gather       "n piece -> (n piece)", in place: each rank's piece
                     of a segment reaches all ranks
    reduce-scatter   "src (n piece) -> n piece", mean over src: each rank
                     receives the mean of its piece
    any              "src bits -> bits", or over src: which ranks take part
    exchange         "bytes -> src bytes": short messages, by which ranks agree

line              the collectives along one axis, which do not hang
links             ... of a module over all of its data axes
direct_exchange   a transport: each rank sends each peer its piece, over gloo's sockets
native            a transport: collectives of NCCL, and of other backends
segment           what they move
trip              collectives one after the other
waiting           deadlines, and how a wait fails
agree             bits and texts by which ranks agree
rank0_messages    messages to rank 0 and back, for saves and loads
traffic           counts bytes that are sent
"""
