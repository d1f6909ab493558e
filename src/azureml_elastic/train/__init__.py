"""Inside the training process: sessions, checkpoints and data that survive any change of the world size.

::

    from azureml_elastic import train

    run = train.start()
    model = run.wrap(model)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(dataset, global_batch_size=256)
    for epoch in run.epochs(10):
        for x, y in loader:
            run.backward(loss_fn(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            run.commit()
"""

from azureml_elastic.errors import MissingExtra

try:
    import torch as _torch  # noqa: F401
    import xxhash as _xxhash  # noqa: F401
except ImportError as error:
    raise MissingExtra(error.name or "torch", "node") from error

from azureml_elastic.forks.state_files import saved
from azureml_elastic.ipc.agent_interface import EXIT_AGENT_LOST, EXIT_TERMINATED
from azureml_elastic.train.data.loader import ElasticLoader
from azureml_elastic.train.data.shard_loader import Shards
from azureml_elastic.train.optim.learning_rate import Schedule
from azureml_elastic.train.session.session import Session, start

__all__ = ["EXIT_AGENT_LOST", "EXIT_TERMINATED", "ElasticLoader", "Schedule", "Session", "Shards", "saved", "start"]
