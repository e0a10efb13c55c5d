"""Decisions as pure values, which take no memory and communicate nothing.

What transforms ask for
    assignment, home, join_rule   what was asked of a module; where state rests; how requests join
    tiers                         kinds of memory: `cpu`, `nvme`
    units, tiled                  which parameters are gathered together; modules cut into tiles
    wire, rounding_mode           formats on the wire; rounding of parameters in 16 bits

Where elements are
    mesh, grid        one axis; the data and model axes of a module
    layout            where every element of a parameter lives
    box, numbering    which elements a rank holds, as boxes and as numbers of the whole tensor
    strides, chunks   how elements lie in memory; which elements share a buffer
    dtensors          the registered parameter: a DTensor over memory of ours
    dtypes            names of dtypes, and which values of one another has

What happens when
    schedule            a step as a list of events
    chained_optimizer   several optimizers where one is asked for
    watching            what `zf.profile` and `zf.metrics` are told
    digests             digests of values, by which ranks compare them
"""
