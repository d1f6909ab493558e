"""Horovod: the state of ``hvd.elastic.run``, whose commits are saved as checkpoints.

::

    import horovod.torch as hvd
    from azureml_elastic.train.horovod import TorchState

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = TorchState(model=model, optimizer=optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        while state.batch < 1000:
            train_batch(state)
            state.batch += 1
            state.commit()

    train(state)
"""

from azureml_elastic.errors import MissingExtra

try:
    import horovod.torch as _horovod  # noqa: F401
except ImportError as error:
    raise MissingExtra(error.name or "horovod", "horovod") from error

from azureml_elastic.train.horovod.state import TorchState

__all__ = ["TorchState"]
