"""psd under other people's training loops: one module for each, which alone imports its framework.

    transformers    transformers.Trainer, and what is built on it, such as TRL's trainers
    accelerate      loops written for accelerate.Accelerator
    lightning       lightning.Trainer

Each gives this worker its share of the data, the job's step, and what else such a loop decides by the number of processes,
which it believes to be one. The optimizer is psd_client.torch's.
"""
