"""What happens while a transformed module runs: gathers, frees and reductions around each unit.

What is there
    run, registry                one transformed module; all of a model, and where units are entered
    unit, group, slot            what is gathered together; its parameters of a kind; one parameter
    parameter_kind, path, leg    what decides about a parameter; its cuts over axes; one move of it
    memory, rooms                what rests, and where it lies on its way up
    holding                      which elements of a tensor this rank holds
    attributes, extension,       what users set on parameters; subclasses of tensors,
      fsdp_extensions            and those with FSDP2's hooks
    replaced_parameters          which parameter a transform has put in place of another

A call
    entry_point, call_hooks      two hooks of ours at a module enter and leave its unit
    call, call_context           calls that run; those that are no plain forward
    module_tree, moved_memory    whether the model is still as it was; parameters that were moved
    module_edits, resting_edits  edits of modules in a forward; of parameters at rest
    unit_agreement               what ranks compare before their first gather
    uncompiled                   functions that torch.compile runs as they are
    blocks, whole_leaves         `accumulate` and `unsharded`

The way up
    gather, moves                how far a unit has come; what its legs do
    whole_buffers                memory of gathered parameters
    visible_parameters           what modules see under their names
    on_model_axes, wire_gather   DTensors on model axes again; parameters in a format
    weight_reads                 weights that another unit reads
    module_buffers               BatchNorm and the like: of rank 0, or each rank's own
    unwritten_memory             warns of memory that nobody has written

Forward and backward
    forward, backward            the forwards and the backwards of a module
    open_pass, passes            what both share; where each is in its schedule
    autograd_node                one node of autograd a unit
    saved_tensor_hooks           what autograd remembers in place of gathered tensors
    ending                       how a backward has ended

The way down
    gradients, sums              local sums of a unit, over the axes one after the other
    wire_reduce                  gradients in a format
    settling, gradient_hooks     which parameters get a gradient; hooks of users on them
    pending_gradient             what `.grad` shows inside `accumulate`

A step
    optimizers, elementwise      hooks of each step; which optimizers may step over shards
    bfloat16_step                a parameter in bfloat16 without a master
"""
