"""zero_fn under the libraries that people train with.

`import zero_fn` imports none of these modules, nor those libraries.

placing          transforms a plain model, and gives its optimizer the new parameters
states           whole values for files that anybody reads; checkpoints to which
                 each rank writes what it owns
window           reduces gradients once for microbatches that a trainer runs one by one
accelerate       `ZeroAccelerator`
pretrained       `placed`: `from_pretrained` straight into shards
trainer_config   a DeepSpeed config beside the arguments of a Trainer
transformers     `ZeroTrainer`, and `ZeroTrainerMixin` for any other Trainer
lightning        `ZeroStrategy`
"""
