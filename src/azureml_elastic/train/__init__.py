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
            run.step()
"""

from azureml_elastic.errors import MissingExtra

try:
    import torch as _torch  # noqa: F401
    import xxhash as _xxhash  # noqa: F401
except ImportError as error:
    raise MissingExtra(error.name or "torch", "node") from error

from azureml_elastic.train.agent import EXIT_AGENT_LOST, EXIT_TERMINATED
from azureml_elastic.train.lanes import Shards
from azureml_elastic.train.loader import ElasticLoader
from azureml_elastic.train.opening import start
from azureml_elastic.train.schedule import Schedule
from azureml_elastic.train.session import Session

__all__ = ["EXIT_AGENT_LOST", "EXIT_TERMINATED", "ElasticLoader", "Schedule", "Session", "Shards", "start"]
