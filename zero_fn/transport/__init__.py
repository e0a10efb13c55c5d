"""The collectives of a step. Only this package moves bytes between ranks.

A transport moves bytes along one axis. Every transport has the same four operations:

    all-gather       "n piece -> (n piece)", in place: each rank's piece
                     of a segment reaches all ranks
    reduce-scatter   "src (n piece) -> n piece", mean over src: each rank
                     receives the mean of its piece
    any              "src bits -> bits", or over src: which ranks take part
    exchange         "bytes -> src bytes": short messages, by which ranks agree
"""
