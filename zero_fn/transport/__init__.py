"""The collectives a step needs, over one axis. The only package that moves bytes between ranks.

Every transport speaks the same four operations:

    all-gather       "n piece -> (n piece)", in place: each rank's piece of a segment reaches all ranks
    reduce-scatter   "src (n piece) -> n piece", mean over src: each rank receives the mean of its piece
    any              "src bits -> bits", or over src: which ranks take part
    exchange         "bytes -> src bytes": small agreement between ranks
"""
