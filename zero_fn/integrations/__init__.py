"""zero_fn under the libraries that people train with.

`import zero_fn` imports none of these modules, nor those libraries.

transformers         `ZeroTrainer`, and `ZeroTrainerMixin` for any other Trainer
accelerate           `ZeroAccelerator`
from_pretrained      `placed`: `from_pretrained` straight into shards
model_placement      transforms a plain model, and gives its optimizer the new parameters
adapters             what adapters and prompts of PEFT need
model_files          the model in a Trainer's folder, which `from_pretrained` reads
trainer_checkpoints  what each rank owns of models and optimizers, and whole values
trainer_config       a DeepSpeed config beside the arguments of a Trainer
accelerator_config   a DeepSpeed config in a ZeroAccelerator
metrics              numbers of `zf.metrics`, and reports of a config, in a Trainer's log
"""
